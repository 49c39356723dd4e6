"""The upper of a microVM becomes the tree of a layer, from the tar stream its agent makes of it.

What comes of it is what `upper.read_upper` makes of a container's. But nobody whom the host trusts
has looked at an attribute or a name before: the stream is the guest's to forge.
"""

from __future__ import annotations

import os
import stat
import urllib.parse
from collections.abc import Sequence

import msgspec

from dsecd.images.model import OPAQUE, REDIRECT, Node
from dsecd.images.sources import archive, attributes
from dsecd.images.sources.archive import Archive, Member
from dsecd.images.sources.compression import PIECE, Damage, Readable, Stream
from dsecd.images.sources.paths import Parts, show, split
from dsecd.images.sources.report import MAX_ENTRIES, Check, Report, too_many, unchecked
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.tar import (
    MAX_OVERHEAD,
    Counted,
    dangling,
    link_text,
    not_a_directory,
    take_content,
)
from dsecd.images.sources.upper import RESIDUE, Rule, UpperRules
from dsecd.images.sources.walker import KEEP, OMIT
from libdsec.errors import InvalidArgument

LINKS = b"DSEC.nlink"  # record of what has several names; its size counts
_XATTR = b"SCHILY.xattr."  # "=" and "%" of a name as %3D and %25, as GNU tar has it
_MAX_DEVICE = 1 << 12
_KINDS = {
    archive.REGULAR: stat.S_IFREG, archive.DIRECTORY: stat.S_IFDIR, archive.FIFO: stat.S_IFIFO,
    archive.SYMLINK: stat.S_IFLNK, archive.CHARACTER: stat.S_IFCHR, archive.BLOCKDEV: stat.S_IFBLK,
}  # fmt: skip


class _Inode(msgspec.Struct):
    """Something that may get more names."""

    status: os.stat_result
    xattrs: dict[bytes, bytes]
    node: Node | None  # None: left out under every name


def read_upper_tar(
    source: Readable,
    sink: Sink,
    *,
    limit_bytes: int,
    residue: Sequence[Rule] = RESIDUE,
    check: Check = unchecked,
) -> tuple[Node, Report]:
    """Return the tree in the stream of `vm.pack`, and what was left out: as `read_upper` does.

    A directory comes before what is in it, the upper itself first; nothing comes twice. Raises
    `InvalidArgument` for a stream that is none of ours or has ids that a container cannot have,
    `Exhausted` above `limit_bytes` of content, `Unsupported` as `read_upper`.
    """
    counted = Counted(source, check)
    pieces = iter(lambda: counted.read(PIECE), b"")
    members = Archive(Stream(pieces, limit_bytes + MAX_OVERHEAD))
    tree = _Tree(UpperRules(0, residue), members, sink, limit_bytes)
    try:
        for member in members:
            tree.take(member)
    except Damage as error:
        raise InvalidArgument(f"the machine's changes are no readable archive: {error}") from error
    return tree.finish()


class _Tree:
    """Places members in the order of the stream."""

    def __init__(self, rules: UpperRules, members: Archive, sink: Sink, limit_bytes: int) -> None:
        self._rules, self._archive, self._sink, self._limit = rules, members, sink, limit_bytes
        self._report = Report()
        self._directories: dict[Parts, Node] = {}  # those left out, too: what is below is told
        self._inodes: dict[Parts, _Inode] = {}  # by their first names
        self._left_out: set[Parts] = set()

    def finish(self) -> tuple[Node, Report]:
        if () not in self._directories:
            raise InvalidArgument("the machine's changes are an empty archive")
        self._report.residue = self._rules.found
        self._report.xattrs += self._rules.dropped
        return self._directories[()], self._report

    def take(self, member: Member) -> None:
        self._report.entries += 1
        if self._report.entries > MAX_ENTRIES:
            raise too_many("upper")
        parts = split(member.name)
        above = self._above(parts, member)
        if member.kind == archive.LINK:
            node = self._again(parts, split(member.link))
        elif member.kind not in _KINDS:
            raise InvalidArgument(f"{show(parts)} is of the unknown kind {member.kind!r}")
        else:
            status = _status(member, parts)
            xattrs = self._xattrs(member, status.st_mode)
            if stat.S_ISDIR(status.st_mode):
                node = self._directory(parts, status, xattrs)
            else:
                node = self._leaf(parts, status, xattrs, member)
        if node is None:
            self._left_out.add(parts)
        elif above is not None:
            above.children[parts[-1]] = node

    def _above(self, parts: Parts, member: Member) -> Node | None:
        """Return the directory that `parts` goes into, None for that of the upper itself."""
        if not parts:
            if member.kind != archive.DIRECTORY or self._directories:
                raise InvalidArgument("a member beside the first stands for the upper itself")
            return None
        above = self._directories.get(parts[:-1])
        if above is None:
            raise not_a_directory(parts, parts[-2] if len(parts) > 1 else b".")
        if parts[-1] in above.children or parts in self._left_out:
            raise InvalidArgument(f"{show(parts)} is in the archive twice", member=show(parts))
        return above

    def _directory(
        self, parts: Parts, status: os.stat_result, xattrs: dict[bytes, bytes]
    ) -> Node | None:
        node = self._rules.make(parts, status, xattrs)
        self._directories[parts] = node
        if parts and self._rules.action(parts, status) == OMIT:
            return self._rules.omitted(node)
        return node

    def _leaf(
        self, parts: Parts, status: os.stat_result, xattrs: dict[bytes, bytes], member: Member
    ) -> Node | None:
        action = self._rules.action(parts, status)
        node: Node | None = self._rules.make(parts, status, xattrs)
        assert node is not None
        if stat.S_ISLNK(status.st_mode):
            node.target = link_text(member.link, parts)
        elif stat.S_ISREG(status.st_mode) and (action == KEEP or status.st_nlink > 1):
            node.size = member.size
            node.chunks = take_content(
                self._archive, member, parts, self._sink, self._report, self._limit
            )
        elif _is_device(status.st_mode) and not node.is_whiteout():
            self._report.devices += 1
            node = None
        if status.st_nlink > 1:
            self._inodes[parts] = _Inode(status, xattrs, node)
        return self._placed(parts, status, xattrs, node, action)

    def _again(self, parts: Parts, target: Parts) -> Node | None:
        inode = self._inodes.get(target)
        if inode is None:
            raise dangling(parts, target)
        action = self._rules.action(parts, inode.status)
        return self._placed(parts, inode.status, inode.xattrs, inode.node, action)

    def _placed(
        self, parts: Parts, status: os.stat_result, xattrs: dict[bytes, bytes],
        node: Node | None, action: str,
    ) -> Node | None:  # fmt: skip
        """Return what stands at one name of an inode."""
        if node is None or action == OMIT:
            return None
        return node if action == KEEP else self._rules.make(parts, status, xattrs)

    def _xattrs(self, member: Member, mode: int) -> dict[bytes, bytes]:
        """Return what the kernel would have let an overlay's upper have."""
        found = {}
        for key, value in member.records:
            if not key.startswith(_XATTR):
                continue
            name = urllib.parse.unquote_to_bytes(key.removeprefix(_XATTR))
            if _possible(name, value, mode):
                found[name] = value
            else:
                self._report.xattrs += 1
        return found


def _possible(name: bytes, value: bytes, mode: int) -> bool:
    if name in (OPAQUE, REDIRECT) and not stat.S_ISDIR(mode):
        return False
    if name == REDIRECT and not _leads_inside(value):
        return False
    return bool(name) and attributes.fits(name, value, mode)


def _leads_inside(redirect: bytes) -> bool:
    """Whether it is one name, or an absolute path of names: what the kernel writes and takes."""
    names = redirect.removeprefix(b"/").split(b"/")
    if not redirect.startswith(b"/") and len(names) > 1:
        return False
    return not any(name in (b"", b".", b"..") or b"\0" in name for name in names)


def _status(member: Member, parts: Parts) -> os.stat_result:
    """Return what lstat(2) would have said."""
    mode = _KINDS[member.kind] | (0o777 if member.kind == archive.SYMLINK else member.mode)
    major, minor = member.device
    if not (0 <= major < _MAX_DEVICE and 0 <= minor < 1 << 20):
        raise InvalidArgument(f"{show(parts)} is an impossible device", member=show(parts))
    links = 2 if any(key == LINKS for key, _ in member.records) else 1
    return os.stat_result(
        (mode, 0, 0, links, member.uid, member.gid, member.size, 0, member.mtime_ns // 10**9, 0),
        {"st_mtime_ns": member.mtime_ns, "st_rdev": os.makedev(major, minor)},
    )


def _is_device(mode: int) -> bool:
    return stat.S_ISCHR(mode) or stat.S_ISBLK(mode)
