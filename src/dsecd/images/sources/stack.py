"""OCI layers on top of each other: collapsed into one tree, or stacked as overlayfs stacks them.

Whiteouts (OCI image specification, "Image Layer Filesystem Changeset") hide only what comes from
layers below theirs, wherever in their own layer they stand. So a layer's whiteouts are applied
first, its members then in their order, a later one over an earlier one.

Members are placed as container runtimes place them: a symbolic link in the place of a parent
directory is followed, inside the root, whichever layer it is from. A whiteout never acts through
one: no runtime writes such a whiteout, and a layer that replaces a link by a directory has an
opaque one there, which must not empty what the link pointed to.
"""

from __future__ import annotations

import copy
import stat
from collections import deque

import msgspec

from dsecd.images.model import OPAQUE, Node, directory, walk, whiteout
from dsecd.images.sources.paths import MAX_COMPONENTS, MAX_NAME, Parts, show
from dsecd.images.sources.report import MAX_ENTRIES, too_many
from dsecd.images.sources.tar import Entry, dangling, not_a_directory, renew
from libdsec.errors import InvalidArgument

PREFIX = b".wh."
_RESERVED = b".wh..wh."
_OPAQUE = b".wh..wh..opq"
MAX_STEPS = 50_000_000  # components looked up for all members; links could multiply them
MAX_LINKS = 40  # symbolic links on the way to one member, as the kernel's MAXSYMLINKS


class Change(msgspec.Struct):
    """What one layer says: what to hide first, then what to place."""

    whiteouts: list[Parts] = []
    opaque: list[Parts] = []  # directories
    entries: list[Entry] = []

    def add(self, entry: Entry) -> None:
        """Sort one member in. Raises `InvalidArgument` for a whiteout of nothing."""
        parts = entry.parts
        if any(part.startswith(PREFIX) for part in parts):
            if any(part.startswith(_RESERVED) for part in parts):
                if parts[-1] == _OPAQUE and not _marked(parts[:-1]):
                    self.opaque.append(parts[:-1])
                return  # else bookkeeping of aufs
            name = parts[-1][len(PREFIX) :]
            if _marked(parts[:-1]) or name in (b"", b".", b".."):
                raise InvalidArgument(
                    f"{show(parts)} is neither a file nor a whiteout of one", member=show(parts)
                )
            self.whiteouts.append((*parts[:-1], name))
            return
        self.entries.append(entry)


def _marked(parts: Parts) -> bool:
    return any(part.startswith(PREFIX) for part in parts)


class _Place(msgspec.Struct):
    """One path: the top tree's node there, and what the trees below show there, top first.

    `below` holds more than one only when all are directories that overlayfs would merge.
    """

    top: Node | None
    below: list[Node]

    def visible(self) -> Node | None:
        if self.top is not None:
            return None if self.top.is_whiteout() else self.top
        return self.below[0] if self.below else None

    def step(self, name: bytes) -> _Place:
        """Return the place `name` in this directory."""
        merges = self.top is None or (self.top.is_dir() and OPAQUE not in self.top.xattrs)
        return _Place(
            top=self.top.children.get(name) if self.top is not None else None,
            below=_children(self.below, name) if merges else [],
        )


def _children(directories: list[Node], name: bytes) -> list[Node]:
    found: list[Node] = []
    for node in directories:
        child = node.children.get(name)
        if child is None:
            continue
        if child.is_whiteout() or (found and not child.is_dir()):
            break
        found.append(child)
        if not child.is_dir() or OPAQUE in child.xattrs:
            break
    return found


class Stack:
    """The trees so far, bottom first; layers go into the last one."""

    def __init__(self) -> None:
        self.trees = [directory()]
        self._steps = 0
        self._implied = 0  # directories without a member of their own, copies included

    def push(self) -> None:
        """Start a new tree on top; those below stay as they are."""
        if not self._idle():
            self.trees.append(_bare(self.trees[-1]))

    def finish(self) -> list[Node]:
        """Return the trees, without a last one that changes nothing."""
        return self.trees[:-1] if self._idle() else self.trees

    def _idle(self) -> bool:
        """Whether the last tree shows nothing but what is below it."""
        if len(self.trees) == 1 or self.trees[-1].children:
            return False
        last, below = (
            (tree.mode, tree.uid, tree.gid, tree.mtime_ns, tree.xattrs) for tree in self.trees[-2:]
        )
        return last == below

    def content_bytes(self) -> int:
        """Return the size of the last tree's regular files, each counted once."""
        files = {id(node): node.size for _, node in walk(self.trees[-1])}
        return sum(files.values())

    def apply(self, change: Change) -> None:
        """Apply one layer. Raises `InvalidArgument` naming the member that cannot be placed."""
        for parts in change.opaque:
            self._clear(parts)
        for parts in change.whiteouts:
            self._hide(parts)
        left_out: set[Parts] = set()
        for entry in change.entries:
            if entry.node is None and (entry.target is None or entry.target in left_out):
                left_out.add(entry.parts)
                continue
            left_out.discard(entry.parts)
            self._add(entry)

    # --- whiteouts --------------------------------------------------------------------------

    def _root(self) -> _Place:
        return _Place(self.trees[-1], self.trees[-2::-1] if len(self.trees) > 1 else [])

    def _find(self, parts: Parts) -> list[_Place] | None:
        """Return the places from the root to the visible directory `parts`, None if it is none."""
        places = [self._root()]
        for name in parts:
            places.append(places[-1].step(name))
            node = places[-1].visible()
            if node is None or not node.is_dir():
                return None
        return places

    def _copy_up(self, places: list[_Place], parts: Parts) -> Node:
        """Make the visible directories on the way exist in the top tree; return the last."""
        for above, name, place in zip(places, parts, places[1:], strict=False):
            if place.top is None:
                assert above.top is not None
                place.top = above.top.children[name] = _bare(place.below[0])
        assert places[-1].top is not None
        return places[-1].top

    def _hide(self, parts: Parts) -> None:
        places = self._find(parts[:-1])
        if places is None:
            return
        above, name = places[-1], parts[-1]
        if above.step(name).below:
            self._copy_up(places, parts).children[name] = whiteout()
        elif above.top is not None:
            above.top.children.pop(name, None)

    def _clear(self, parts: Parts) -> None:
        places = self._find(parts)
        if places is None:
            return
        place = places[-1]
        if parts or not place.below:
            node = self._copy_up(places, parts)
            node.children.clear()
            if any(below.is_dir() for below in place.below):
                node.xattrs[OPAQUE] = b"y"
            return
        # overlayfs does not look at the attribute on the root of a layer
        assert place.top is not None
        place.top.children.clear()
        for name in {name for tree in place.below for name in tree.children}:
            self._hide((name,))

    # --- members ----------------------------------------------------------------------------

    def _add(self, entry: Entry) -> None:
        parts, node = entry.parts, entry.node
        if not parts:
            assert node is not None  # only a directory stands for the root
            renew(self.trees[-1], node)
            return
        if entry.target is not None:
            node = self._linked(parts, entry.target)
        assert node is not None
        above = self._enter(parts)
        name = parts[-1]
        place = above.step(name)
        assert above.top is not None
        if not node.is_dir():
            above.top.children[name] = node
        elif place.top is not None and place.top.is_dir():
            opaque = place.top.xattrs.get(OPAQUE)
            renew(place.top, node)
            if opaque is not None:
                place.top.xattrs[OPAQUE] = opaque
        else:
            _insert(above.top, name, node, place)

    def _enter(self, parts: Parts) -> _Place:
        """Return the directory that holds the last of `parts`, made where it is missing.

        Symbolic links are followed; none leads out of the root.
        """
        levels = [self._root()]
        ahead = deque(parts[:-1])
        links = 0
        while ahead:
            name = ahead.popleft()
            self._steps += 1
            if self._steps > MAX_STEPS:
                raise InvalidArgument(f"{show(parts)}: the layers' paths are too long to follow")
            if name == b"..":
                del levels[max(1, len(levels) - 1) :]
                continue
            place = levels[-1].step(name)
            node = place.visible()
            if node is not None and stat.S_ISLNK(node.mode):
                links += 1
                if links > MAX_LINKS:
                    raise InvalidArgument(
                        f"{show(parts)} is below a loop of symbolic links", member=show(parts)
                    )
                ahead.extendleft(reversed(_components(node.target, parts)))
                if node.target.startswith(b"/"):
                    levels = levels[:1]
                continue
            levels.append(self._enter_directory(levels[-1], name, place, parts))
            if len(levels) > MAX_COMPONENTS:
                raise InvalidArgument(f"{show(parts)} is too deep", member=show(parts))
        return levels[-1]

    def _enter_directory(self, above: _Place, name: bytes, place: _Place, parts: Parts) -> _Place:
        node = place.visible()
        if node is not None and not node.is_dir():
            raise not_a_directory(parts, name)
        assert above.top is not None
        if place.top is None or node is None:
            self._implied += 1
            if self._implied > MAX_ENTRIES:
                raise too_many("image")
        if place.top is None and node is not None:
            place.top = above.top.children[name] = _bare(node)
        elif node is None:
            place.top = _insert(above.top, name, directory(), place)
        return place

    def _linked(self, parts: Parts, target: Parts) -> Node:
        """Return the file that `target` names; one from below is copied up, as link(2) does it."""
        above = self._enter(target)
        place = above.step(target[-1])
        node = place.visible()
        if node is None or parts == target:
            raise dangling(parts, target)
        if node.is_dir():
            raise InvalidArgument(
                f"{show(parts)} is a hard link to a directory", member=show(parts)
            )
        if place.top is None:
            assert above.top is not None
            node = above.top.children[target[-1]] = copy.copy(node)
        return node


def _insert(above: Node, name: bytes, node: Node, place: _Place) -> Node:
    """Put a new directory in place of something else: it does not merge with one below that."""
    if place.top is not None and place.below and place.below[0].is_dir():
        node.xattrs[OPAQUE] = b"y"
    above.children[name] = node
    return node


def _bare(node: Node) -> Node:
    """Return a directory with the attributes of `node` and nothing in it."""
    made = directory()
    renew(made, node)
    made.xattrs = {name: value for name, value in node.xattrs.items() if name != OPAQUE}
    return made


def _components(target: bytes, parts: Parts) -> list[bytes]:
    names = [name for name in target.split(b"/") if name not in (b"", b".")]
    if any(len(name) > MAX_NAME for name in names):
        raise InvalidArgument(
            f"{show(parts)} is below a symbolic link that leads nowhere", member=show(parts)
        )
    return names
