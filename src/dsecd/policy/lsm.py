"""Rules on files, mounts, unix sockets and vsock as a table for the programs of bpf/lsm. Pure.

A place is a file system and a path from its root, as the names of directory entries: not an inode.
Overlayfs decided that. It shows a number of its own for a file, but `i_ino` comes from the layer,
so that two layers give one number to two files; it gives a copied-up file without a recorded origin
another number once the inode was dropped from memory; and a file that was removed and made again
under a path that a rule names is another inode and still denied. What names cannot do, follow a
file that is carried away, is denied instead: nothing above or at a denied path can be renamed,
removed or mounted on, nothing that cannot be read can be renamed, and no link can open more than
the name before.

So a literal pattern holds for paths that do not exist yet, and so does one that ends in ``/**``;
other wildcards hold for the paths that exist when the table is made. Symbolic links in a pattern
are followed then, and the rule holds for both paths. A file system in several places is judged as
at the first of them. One that the sandbox has mounted itself is its own work: open when paths are
allowed by default, and closed when they are denied. Execution is denied by execve(2) and by mapping
with PROT_EXEC, which a dynamic loader needs too; who can read a program can still copy it to where
execution is allowed, and an interpreter only reads.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence

from dsecd.host import lsmtable
from dsecd.host.lsmtable import (
    CONNECT,
    EVERY_TYPE,
    EXECUTE,
    MAX_PEERS,
    MAX_TYPES,
    NAME_BYTES,
    READ,
    REPLACE,
    SEE,
    WRITE,
    Denial,
    Node,
    Peer,
    Place,
    Table,
)
from dsecd.policy import globs
from dsecd.policy.rules import FilePolicy, SystemPolicy, Verdict, VsockRule
from libdsec.errors import Unsupported

_BITS = {"read": READ, "write": WRITE, "execute": EXECUTE}
_ACCESS = READ | WRITE | EXECUTE
_HIDDEN = _ACCESS | SEE | CONNECT
_SHIFT = 8  # in a mask, types of file systems lie above the accesses
Found = Mapping[str, Collection[str]]  # by pattern: paths that it names in a sandbox


def concerns(files: FilePolicy, system: SystemPolicy) -> bool:
    """Say whether there is anything to enforce."""
    return files != FilePolicy() or bool(
        system.mounts or system.unix or system.vsock
        or (system.mount_default, system.unix_default) != ("allow", "allow")
    )  # fmt: skip


def patterns(files: FilePolicy, system: SystemPolicy) -> tuple[str, ...]:
    """Return the path patterns to look for in a sandbox."""
    every = (
        *files.hidden,
        *(rule.pattern for rule in files.rules),
        *(rule.pattern for rule in system.mounts),
        *(rule.pattern for rule in system.unix if not rule.pattern.startswith("@")),
    )
    return tuple(dict.fromkeys(pattern for pattern in every if pattern not in ("/", "/**")))


class _Place:
    """A node of the tree while it is made: masks of rules at the path, and below it only."""

    __slots__ = ("allow", "allow_below", "deny", "deny_below", "held", "places")

    def __init__(self) -> None:
        self.places: dict[bytes, _Place] = {}
        self.deny = self.allow = self.deny_below = self.allow_below = 0
        self.held = False


class _Tree:
    """Paths as a sandbox sees them."""

    def __init__(self, found: Found) -> None:
        self.root = _Place()
        self._found = found

    def add(self, pattern: str, verdict: Verdict, mask: int, *, hold: bool) -> None:
        """Enter a rule for all paths that its pattern names; `hold` those that it denies."""
        below = globs.is_subtree(pattern) and pattern.endswith("/**") and pattern != "/**"
        if globs.is_subtree(pattern):
            self._enter(pattern.removesuffix("/**"), verdict, mask, below, hold)
        elif hold and verdict == "deny":
            self._enter(globs.head(pattern), "deny", 0, False, True)
        for path in self._found.get(pattern, ()):
            self._enter(path, verdict, mask, below, hold)

    def _enter(self, path: str, verdict: Verdict, mask: int, below: bool, hold: bool) -> None:
        names = [os.fsencode(name) for name in path.split("/") if name]
        if any(len(name) > NAME_BYTES for name in names):
            return  # no such path can be
        place = self.root
        hold = hold and verdict == "deny"
        place.held |= hold
        for name in names:
            place = place.places.setdefault(name, _Place())
            place.held |= hold
        if below:
            place.deny_below |= mask if verdict == "deny" else 0
            place.allow_below |= mask if verdict == "allow" else 0
        else:
            place.deny |= mask if verdict == "deny" else 0
            place.allow |= mask if verdict == "allow" else 0


class _Numbering:
    """Gives the places of trees their numbers, and what holds at each."""

    def __init__(self, default: int) -> None:
        self._default = default
        self._numbers = itertools.count(1)
        self.names: dict[tuple[int, bytes], Node] = {}

    def node(self, here: Denial, below: Denial, has_places: bool) -> Node:
        return Node(here, below, next(self._numbers) if has_places else 0, has_places)

    def settle(self, place: _Place, deny: int = 0, allow: int = 0) -> Node:
        """Return the node of a place beneath rules of `deny` and `allow`, and name those below."""
        deny, allow = deny | place.deny, allow | place.allow
        here = self._denied(deny, allow, place.held)
        deny, allow = deny | place.deny_below, allow | place.allow_below
        node = self.node(here, self._denied(deny, allow, False), bool(place.places))
        for name, lower in place.places.items():
            self.names[node.number, name] = self.settle(lower, deny, allow)
        return node

    def _denied(self, deny: int, allow: int, held: bool) -> Denial:
        denied = deny | self._default & ~allow
        access = denied & lsmtable.EVERYTHING
        return Denial(access | (REPLACE if held else 0), denied >> _SHIFT)


def compile_table(
    files: FilePolicy, system: SystemPolicy, places: Sequence[Place], found: Found
) -> Table:
    """Return what is entered for a sandbox with mounts `places`, in the order of mounting.

    `found` has the paths that patterns name in it, of `patterns`. Raises `Unsupported` for more
    types of file systems, or rules on vsock, than the programs can hold.
    """
    types = _types(system)
    tree = _Tree(found)
    for pattern in files.hidden:
        tree.add(pattern, "deny", _HIDDEN, hold=True)
    for rule in files.rules:
        mask = sum(_BITS[access] for access in rule.access)
        tree.add(rule.pattern, rule.verdict, mask, hold=True)
    for unix in system.unix:
        if not unix.pattern.startswith("@"):
            tree.add(unix.pattern, unix.verdict, CONNECT, hold=True)
    for mount in system.mounts:
        mask = EVERY_TYPE if mount.fstype == "*" else 1 << types[mount.fstype]
        tree.add(mount.pattern, mount.verdict, mask << _SHIFT, hold=False)
    closed = files.default == "deny"
    default = (_ACCESS if closed else 0) | (CONNECT if system.unix_default == "deny" else 0)
    mounts = EVERY_TYPE if system.mount_default == "deny" else 0
    numbering = _Numbering(default | mounts << _SHIFT)
    root = numbering.settle(tree.root)
    for mount in system.mounts:  # where a mount of its own lies is not known
        if mount.verdict == "deny":
            mounts |= EVERY_TYPE if mount.fstype == "*" else 1 << types[mount.fstype]
    holds = tree.root.held or closed
    return Table(
        roots=_roots(numbering, root, places),
        names=numbering.names,
        own=Denial(default, mounts),
        foreign=Denial(default & ~(READ | WRITE), mounts),
        flags=_flags(system) | (lsmtable.HOLDS if holds else 0),
        peers=_peers(system),
        types=types,
        abstracts=_abstracts(system),
    )


# --- file systems ---------------------------------------------------------------------------------


def _roots(numbering: _Numbering, root: Node, places: Sequence[Place]) -> dict[int, Node]:
    """Return the node of the root of each file system; of a part, only that part is a place."""
    by_device: dict[int, list[Place]] = {}
    for place in sorted(places, key=lambda place: len(_names(place.root))):
        shown = by_device.setdefault(place.device, [])
        if not any(_begins(_names(place.root), _names(other.root)) for other in shown):
            shown.append(place)
    return {
        device: _parts(
            numbering,
            [(_names(place.root), _at(numbering, root, place.point)) for place in shown],
        )
        for device, shown in by_device.items()
    }


def _parts(numbering: _Numbering, parts: list[tuple[list[bytes], Node]]) -> Node:
    """Return a node for a directory of which only `parts` are seen: paths beneath, and nodes."""
    if not parts[0][0]:
        return parts[0][1]
    node = numbering.node(lsmtable.ALL, lsmtable.ALL, has_places=True)
    by_name: dict[bytes, list[tuple[list[bytes], Node]]] = {}
    for (name, *rest), seen in parts:
        by_name.setdefault(name, []).append((rest, seen))
    for name, lower in by_name.items():
        numbering.names[node.number, name] = _parts(numbering, lower)
    return node


def _at(numbering: _Numbering, node: Node, path: str) -> Node:
    """Return the node of a path as the sandbox sees it."""
    for name in _names(path):
        lower = numbering.names.get((node.number, name)) if node.has_places else None
        if lower is None:
            return Node(node.below, node.below)
        node = lower
    return node


def _names(path: str) -> list[bytes]:
    return [os.fsencode(name) for name in path.split("/") if name]


def _begins(path: list[bytes], start: list[bytes]) -> bool:
    return path[: len(start)] == start


# --- the rest -------------------------------------------------------------------------------------


def _types(system: SystemPolicy) -> dict[str, int]:
    names = sorted({rule.fstype for rule in system.mounts} - {"*"})
    if len(names) > MAX_TYPES:
        raise Unsupported(
            f"mounts: rules name {len(names)} types of file systems, at most {MAX_TYPES} can be"
            " told apart; use fewer, or *",
            reason="too many types of file systems",
        )
    return {name: bit for bit, name in enumerate(names, 1)}


def _flags(system: SystemPolicy) -> int:
    everything = {rule.verdict for rule in system.unix if rule.pattern == "@**"}
    closed = "deny" in everything or (system.unix_default == "deny" and not everything)
    vsock = lsmtable.VSOCK_DENY if system.vsock_default == "deny" else 0
    return vsock | (lsmtable.ABSTRACT_DENY if closed else 0)


def _abstracts(system: SystemPolicy) -> dict[bytes, bool]:
    """Return the verdicts on single names; a rule for all of them is a flag."""
    rules = [rule for rule in system.unix if rule.pattern.startswith("@")]
    everything = any(rule.pattern == "@**" and rule.verdict == "deny" for rule in rules)
    found: dict[bytes, bool] = {}
    for rule in rules:
        name = os.fsencode(rule.pattern[1:])
        if globs.is_literal(rule.pattern) and len(name) <= lsmtable.ABSTRACT_BYTES:
            found[name] = found.get(name, everything) or rule.verdict == "deny"
    return found


def _peers(system: SystemPolicy) -> tuple[Peer, ...]:
    """Return the rules on vsock, those that deny first: the first that fits decides."""
    rules: Iterator[VsockRule] = iter(sorted(system.vsock, key=lambda r: r.verdict != "deny"))
    peers = tuple(Peer(r.cid, r.first_port, r.last_port, r.verdict == "deny") for r in rules)
    if len(peers) > MAX_PEERS:
        raise Unsupported(
            f"vsock: {len(peers)} rules, at most {MAX_PEERS} can be held; join some of them",
            reason="too many rules on vsock",
        )
    return peers
