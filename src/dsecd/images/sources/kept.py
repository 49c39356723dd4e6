"""What a sandbox shows at some paths becomes a tree: what an agent hands in, and nothing else.

The source is the merged view, so that what the agent deleted is gone, what it renamed is found, and
what it left alone is there. Only content counts: what could act by itself (set-user-id bits,
capabilities, device nodes, FIFOs, sockets, attributes of overlayfs) is left out.
"""

from __future__ import annotations

import collections
import os
import stat
from collections.abc import Collection

from dsecd.images.model import Node
from dsecd.images.sources.paths import Parts, show, split
from dsecd.images.sources.report import Check, unchecked
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.upper import RANGE
from dsecd.images.sources.walker import KEEP, OMIT, Walker
from libdsec.errors import InvalidArgument

NOBODY = 65534
_MODE = 0o1777  # without set-user-id and set-group-id
_USER, _OVERLAY = b"user.", b"user.overlay."


def parse(paths: Collection[bytes]) -> list[Parts]:
    """Return absolute paths as components, without those below another one, sorted.

    Raises `InvalidArgument` for one that is no path of a file or directory below the root.
    """
    found = set()
    for path in paths:
        shown = path.decode("utf-8", "replace")
        parts = split(path) if path.startswith(b"/") else ()
        if not parts:
            raise InvalidArgument(
                f"keep: {shown!r} is not an absolute path below the root; name what is handed in, "
                "such as /workspace/src",
                field="keep",
            )
        found.add(parts)
    if not found:
        raise InvalidArgument("keep: at least one path is required", field="keep")
    return sorted(one for one in found if not any(one[:n] in found for n in range(1, len(one))))


def read_kept(
    root: int, uid_base: int, keep: Collection[Parts], sink: Sink, check: Check = unchecked
) -> tuple[Node, collections.Counter[str]]:
    """Return the tree of the open directory `root` with only what is at or below `keep`, and how
    much of what kind was left out.

    Directories on the way to a kept path are in it, too. Nothing may write meanwhile: the sandbox
    is frozen. No symbolic link is followed, and no mount point crossed.
    """
    rules = _Rules(uid_base, keep)
    walker = Walker(rules, sink, check)
    node = walker.read(root)
    dropped = rules.dropped
    dropped["device"], dropped["socket"] = walker.report.devices, walker.report.sockets
    dropped["mount"] = len(walker.report.mounts)
    return node, +dropped


def find(tree: Node, parts: Parts) -> Node | None:
    """Return the node at `parts`, None when there is none."""
    node: Node | None = tree
    for name in parts:
        node = node.children.get(name) if node is not None else None
    return node


class _Rules:
    """Keeps what is asked for, with ids as inside, and without what could act by itself."""

    tells_omitted = False

    def __init__(self, uid_base: int, keep: Collection[Parts]) -> None:
        self._base = uid_base
        self._keep = frozenset(keep)
        self._above = {parts[:n] for parts in keep for n in range(len(parts))}
        self.dropped: collections.Counter[str] = collections.Counter()

    def _kept(self, parts: Parts) -> bool:
        return any(parts[:n] in self._keep for n in range(1, len(parts) + 1))

    def action(self, parts: Parts, status: os.stat_result) -> str:
        if not self._kept(parts):
            on_the_way = parts in self._above and stat.S_ISDIR(status.st_mode)
            return KEEP if on_the_way else OMIT
        if stat.S_ISFIFO(status.st_mode):  # who opens it would wait for ever
            self.dropped["fifo"] += 1
            return OMIT
        return KEEP

    def omitted(self, node: Node) -> Node | None:
        return None

    def make(self, parts: Parts, status: os.stat_result, xattrs: dict[bytes, bytes]) -> Node:
        kept = {
            name: value
            for name, value in xattrs.items()
            if name.startswith(_USER) and not name.startswith(_OVERLAY)
        }
        if self._kept(parts):
            self.dropped["attribute"] += len(xattrs) - len(kept)
            self.dropped["setuid"] += bool(status.st_mode & (stat.S_ISUID | stat.S_ISGID))
        return Node(
            mode=stat.S_IFMT(status.st_mode) | (status.st_mode & _MODE),
            uid=self._inside(status.st_uid),
            gid=self._inside(status.st_gid),
            mtime_ns=status.st_mtime_ns,
            rdev=(os.major(status.st_rdev), os.minor(status.st_rdev)),
            xattrs=kept,
        )

    def _inside(self, number: int) -> int:
        number -= self._base
        return number if 0 <= number < RANGE - 1 else NOBODY


def shown(parts: Parts) -> str:
    """Return the absolute path as text."""
    return "/" + show(parts)
