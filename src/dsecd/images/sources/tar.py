"""A tar of unknown origin becomes a tree; nothing is unpacked, content goes straight to the sink.

What cannot be part of a layer is an error that names the member (paths with ``..``, hard links to
nothing, members below something that is no directory, a member given twice) or is left out and
counted in the report: device nodes (a sandbox has its own ``/dev``, and a 0/0 device would be an
overlay whiteout) and attributes that steer overlayfs.
"""

from __future__ import annotations

import contextlib
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsecd.images.model import CHUNK, Chunk, Node, directory
from dsecd.images.sources import archive, attributes
from dsecd.images.sources.archive import Archive, Member, Segments
from dsecd.images.sources.compression import Damage, Digest, Readable, unpacked
from dsecd.images.sources.paths import Parts, show, split
from dsecd.images.sources.report import (
    MAX_ENTRIES,
    MAX_ID,
    MAX_SIZE,
    Check,
    Report,
    too_large,
    too_many,
    unchecked,
)
from dsecd.images.sources.sink import Sink
from libdsec.errors import DSecError, Exhausted, InvalidArgument

MAX_OVERHEAD = 4 << 30  # bytes of headers, padding and what follows the end marker
DEFAULT_LIMIT = 1 << 40
_TYPES = {
    archive.REGULAR: stat.S_IFREG, archive.DIRECTORY: stat.S_IFDIR,
    archive.SYMLINK: stat.S_IFLNK, archive.FIFO: stat.S_IFIFO,
}  # fmt: skip


class Entry(msgspec.Struct):
    """One member, checked: a node, a hard link to `target`, or (neither) something left out."""

    parts: Parts
    node: Node | None = None
    target: Parts | None = None


def read_tar(
    source: Path | Readable,
    sink: Sink,
    *,
    limit_bytes: int = DEFAULT_LIMIT,
    check: Check = unchecked,
) -> tuple[Node, Report]:
    """Return the tree in a tar file or stream (plain, gz, bz2, xz, zst), and what was left out.

    Holds the tree in memory (about 600 bytes per entry), never content. Raises `InvalidArgument`
    for what is no tar, damaged or hostile, `Exhausted` above `limit_bytes` of content,
    `Unsupported` without a program for zstd; whatever `check` raises passes through.
    """
    report = Report()
    builder = _Builder()
    with contextlib.ExitStack() as stack:
        if isinstance(source, Path):
            name = source.name
            raw: Readable = stack.enter_context(source.open("rb", buffering=0))
        else:
            name, raw = "the stream", source
        for entry in read_entries(name, Counted(raw, check), sink, report, limit_bytes):
            builder.place(entry)
    return builder.root, report


class Counted:
    """A file that tells `check` how far it has been read."""

    def __init__(self, raw: Readable, check: Check, done: int = 0) -> None:
        self._raw, self._check, self._done = raw, check, done

    def read(self, size: int, /) -> bytes:
        data = self._raw.read(size)
        self._done += len(data)
        self._check(self._done)
        return data


def read_entries(
    name: str,
    raw: Readable,
    sink: Sink,
    report: Report,
    limit_bytes: int,
    open_end: bool = False,
    digest: Digest | None = None,
) -> Iterator[Entry]:
    """Yield the members of the archive `raw`, called `name` in messages, content already taken.

    Reads `raw` to its end and updates `digest` with all that it unpacks to. Counts into `report`,
    which may hold the sums of archives before it. `open_end` as `Archive` has it.
    """
    first = report.entries
    with unpacked(raw, limit_bytes + MAX_OVERHEAD, digest) as stream:
        reader = _Reader(Archive(stream, open_end), sink, report, limit_bytes)
        try:
            yield from reader
            while stream.skip(1 << 20):  # a compressed file's checksum is at its end
                pass
        except Damage as error:
            count = report.entries - first
            where = f"after {count} members" if count else "at its start"
            raise InvalidArgument(
                f"{name} is not a readable tar archive, {where}: {error}", field="source"
            ) from error


class _Reader:
    """Turns members into entries: checks names, takes content, clamps ids."""

    def __init__(self, members: Archive, sink: Sink, report: Report, limit_bytes: int) -> None:
        self._archive, self._sink, self._report = members, sink, report
        self._limit = limit_bytes

    def __iter__(self) -> Iterator[Entry]:
        for member in self._archive:
            self._report.entries += 1
            if self._report.entries > MAX_ENTRIES:
                raise too_many("archive")
            yield self._entry(member)

    def _entry(self, member: Member) -> Entry:
        parts = split(member.name)
        if not parts and member.kind != archive.DIRECTORY:
            raise InvalidArgument("a member that is no directory stands for the tree itself")
        if member.kind in (archive.CHARACTER, archive.BLOCKDEV):
            self._report.devices += 1
            return Entry(parts)
        if member.kind == archive.LINK:
            target = split(member.link)
            if not target:
                raise InvalidArgument(f"{show(parts)} is a hard link to the tree itself")
            return Entry(parts, target=target)  # owner, mode and times are those of the target
        if member.kind not in _TYPES:
            raise InvalidArgument(
                f"{show(parts)} is of the unknown kind {member.kind!r}", member=show(parts)
            )
        return Entry(parts, self._node(member, parts))

    def _node(self, member: Member, parts: Parts) -> Node:
        mode = _TYPES[member.kind] | (0o777 if member.kind == archive.SYMLINK else member.mode)
        xattrs, dropped = attributes.of_records(member.records, mode)
        self._report.xattrs += dropped
        if member.uid > MAX_ID or member.gid > MAX_ID:
            self._report.clamped_ids += 1
        node = Node(
            mode=mode,
            uid=min(max(member.uid, 0), MAX_ID),
            gid=min(max(member.gid, 0), MAX_ID),
            mtime_ns=member.mtime_ns,
            xattrs=xattrs,
        )
        if member.kind == archive.SYMLINK:
            node.target = link_text(member.link, parts)
        elif member.kind == archive.REGULAR:
            node.size = member.size
            node.chunks = take_content(
                self._archive, member, parts, self._sink, self._report, self._limit
            )
        return node


def take_content(
    members: Archive, member: Member, parts: Parts, sink: Sink, report: Report, limit_bytes: int
) -> list[Chunk | None]:
    """Give the content of the present member to the sink. Raises `Exhausted`, `InvalidArgument`."""
    report.stored_bytes += member.stored
    if report.stored_bytes > limit_bytes:
        raise Exhausted(
            f"the archive's content passes {limit_bytes} bytes, what this disk can take; "
            "free space or raise the limit",
            limit_bytes=limit_bytes,
        )
    report.size_bytes += member.size
    if report.size_bytes > MAX_SIZE:
        raise too_large(parts)
    if member.segments is None:
        return sink.add(members.read, member.size)
    return _add_sparse(sink, members, member.segments, member.size)


def link_text(text: bytes, parts: Parts) -> bytes:
    if not 0 < len(text) < 4096 or b"\0" in text:  # PATH_MAX counts the end
        raise InvalidArgument(
            f"{show(parts)} is a symbolic link to a target of {len(text)} bytes", member=show(parts)
        )
    return text


# --- sparse files ---------------------------------------------------------------------------


class _Expanded:
    """The bytes of a sparse file from `position` on, zeros where its map has a hole."""

    def __init__(self, members: Archive, segments: Segments) -> None:
        self._archive = members
        self._segments = segments[::-1]
        self.position = 0

    def read(self, size: int) -> bytes:
        found = []
        end = self.position + size
        while self.position < end:
            while self._segments and sum(self._segments[-1]) <= self.position:
                self._segments.pop()
            start, length = self._segments[-1] if self._segments else (end, 0)
            if start > self.position:
                found.append(bytes(min(start, end) - self.position))
            else:
                found.append(self._archive.read(min(start + length, end) - self.position))
            self.position += len(found[-1])
        return b"".join(found)


def _add_sparse(sink: Sink, members: Archive, segments: Segments, size: int) -> list[Chunk | None]:
    """Give the sink the chunks that hold data, in runs; what lies between are holes."""
    content = _Expanded(members, segments)
    chunks: list[Chunk | None] = []
    for first, last in _runs(segments):
        chunks += [None] * (first - len(chunks))
        content.position = first * CHUNK
        chunks += sink.add(content.read, min(last * CHUNK, size) - content.position)
    chunks += [None] * (-(-size // CHUNK) - len(chunks))
    return chunks


def _runs(segments: Segments) -> Iterator[tuple[int, int]]:
    """Yield the ranges of chunk numbers that hold data, neighbours joined."""
    first = last = 0
    for offset, length in segments:
        if offset // CHUNK > last:
            if last > first:
                yield first, last
            first = offset // CHUNK
        last = -(-(offset + length) // CHUNK)
    if last > first:
        yield first, last


# --- the tree -------------------------------------------------------------------------------


def renew(node: Node, newer: Node) -> None:
    """Give the directory `node` the attributes of `newer`; what is in it stays."""
    node.mode, node.uid, node.gid = newer.mode, newer.uid, newer.gid
    node.mtime_ns, node.xattrs = newer.mtime_ns, newer.xattrs


class _Builder:
    """Places entries in the order of the archive; nothing may be there already but a directory."""

    def __init__(self) -> None:
        self.root = directory()
        self._implied = 0  # directories without a member of their own
        self._left_out: set[Parts] = set()

    def place(self, entry: Entry) -> None:
        parts, node = entry.parts, entry.node
        if not parts:
            assert node is not None  # the reader lets only a directory stand for the root
            renew(self.root, node)
            return
        siblings = self._parent(parts).children
        there = siblings.get(parts[-1])
        if node is not None and node.is_dir():
            self._place_directory(siblings, parts, there, node)
            return
        if there is not None and there.is_dir():
            raise InvalidArgument(
                f"{show(parts)} is a directory and another kind of member", member=show(parts)
            )
        if there is not None or parts in self._left_out:
            raise InvalidArgument(f"{show(parts)} is in the archive twice", member=show(parts))
        if entry.target is not None and entry.target not in self._left_out:
            node = self._linked(parts, entry.target)
        if node is None:
            self._left_out.add(parts)
        else:
            siblings[parts[-1]] = node

    def _place_directory(
        self, siblings: dict[bytes, Node], parts: Parts, there: Node | None, node: Node
    ) -> None:
        if there is None:
            siblings[parts[-1]] = node
        elif there.is_dir():
            renew(there, node)
        else:
            raise not_a_directory(parts, parts[-1])

    def _parent(self, parts: Parts) -> Node:
        node = self.root
        for name in parts[:-1]:
            child = node.children.get(name)
            if child is None:
                self._implied += 1
                if self._implied > MAX_ENTRIES:
                    raise too_many("archive")
                child = node.children[name] = directory()
            elif not child.is_dir():
                raise not_a_directory(parts, name)
            node = child
        return node

    def _linked(self, parts: Parts, target: Parts) -> Node:
        node: Node | None = self.root
        for name in target:
            node = node.children.get(name) if node is not None else None
        if node is None:
            raise dangling(parts, target)
        if node.is_dir():
            raise InvalidArgument(
                f"{show(parts)} is a hard link to a directory", member=show(parts)
            )
        return node


def not_a_directory(parts: Parts, name: bytes) -> DSecError:
    return InvalidArgument(
        f"{show(parts)}: {name.decode('utf-8', 'replace')!r} on the way is not a directory",
        member=show(parts),
    )


def dangling(parts: Parts, target: Parts) -> DSecError:
    return InvalidArgument(
        f"{show(parts)} is a hard link to {show(target)}, which does not come before it",
        member=show(parts),
    )
