"""Commits in git's object files: loose objects and packs, read without git. Pure.

Everything comes from a sandbox: sizes and offsets are checked, inflation is bounded, and a chain of
deltas that does not end is refused. Formats: gitformat-pack(5).
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_COMMIT = 1 << 20  # bytes of one commit or tag
MAX_INFLATED = 1 << 30  # bytes of all commits of a pack: those of Linux have half of that
MAX_OBJECTS = 1_000_000  # of one pack; a million take 150 MB here
_PIECE = 4096  # bytes of a compressed object; few commits have more
_MAX_DEPTH = 4096  # git's own limit of a chain of deltas
_COMMIT, _TAG, _OFS_DELTA, _REF_DELTA = 1, 4, 6, 7
_HEADER = re.compile(rb"(commit|tag) \d{1,10}\0")


class Malformed(Exception):
    """An object file that git would not take either."""


@dataclass(frozen=True, slots=True)
class Commit:
    """A commit: names are hexadecimal, `time` is the committer's, in seconds since the epoch."""

    name: str
    parents: tuple[str, ...]
    time: int
    subject: str


@dataclass(slots=True)
class Objects:
    """What was found in a repository's object store; `tags` name what an annotated tag is of."""

    commits: dict[str, Commit] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    def add(self, name: str, kind: int, body: bytes) -> None:
        """Take one object; what is no commit or tag of the usual form is left out."""
        if kind == _COMMIT:
            self.commits[name] = commit(name, body)
        elif kind == _TAG:
            target = re.match(rb"object ([0-9a-f]{40,64})\n", body)
            if target is not None:
                self.tags[name] = target[1].decode()


def commit(name: str, body: bytes) -> Commit:
    """Return a commit from its content, whose end may be missing."""
    head, _, message = body.partition(b"\n\n")
    parents = re.findall(rb"^parent ([0-9a-f]{40,64})$", head, re.MULTILINE)
    time = re.search(rb"^committer .*> (\d{1,12})", head, re.MULTILINE)
    subject = message.lstrip().partition(b"\n")[0][:72].decode(errors="replace")
    return Commit(name, tuple(p.decode() for p in parents), int(time[1]) if time else 0, subject)


def add_loose(objects: Objects, name: str, data: bytes) -> None:
    """Take the object in the first bytes of a loose object file."""
    body = _inflated(data, 0, MAX_COMMIT, partial=True)
    header = _HEADER.match(body)
    if header is not None:
        kind = _COMMIT if header[1] == b"commit" else _TAG
        objects.add(name, kind, body[header.end() :])


def add_pack(objects: Objects, index: bytes, pack: memoryview) -> None:
    """Take every commit and tag of a pack. Raises `Malformed`."""
    reader = _Pack(index, pack)
    for name, offset in reader.offsets.items():
        kind = reader.kind(offset)
        if kind in (_COMMIT, _TAG):
            objects.add(name.hex(), kind, reader.content(offset))


def _inflated(data: bytes | memoryview, start: int, limit: int, *, partial: bool = False) -> bytes:
    """Return at most `limit` bytes of the zlib stream at `start`."""
    stream, body = zlib.decompressobj(), b""
    try:
        # in pieces, because zlib copies what it was given beyond the stream's end
        while not stream.eof and start < len(data) and len(body) < limit:
            body += stream.decompress(data[start : start + _PIECE], limit - len(body))
            start += _PIECE
    except zlib.error as error:
        raise Malformed(f"not a zlib stream: {error}") from error
    if not stream.eof and not partial:
        raise Malformed(f"an object of more than {limit} bytes, or cut off")
    return body


class _Pack:
    """One pack and its index, version 2."""

    def __init__(self, index: bytes, pack: memoryview) -> None:
        self._pack = pack
        self._kinds: dict[int, int] = {}
        self._left = MAX_INFLATED
        if bytes(pack[:4]) != b"PACK" or len(pack) < 32:
            raise Malformed("not a pack")
        self.offsets = dict(_index(index))

    def kind(self, offset: int) -> int:
        """Return the type of the object at `offset`, that of its base when it is a delta."""
        chain: list[int] = []
        while offset not in self._kinds:
            kind, _, body = self._header(offset)
            if kind not in (_OFS_DELTA, _REF_DELTA):
                self._kinds[offset] = kind
                break
            chain.append(offset)
            if len(chain) > _MAX_DEPTH:
                raise Malformed("a chain of deltas without an end")
            base, _ = self._base(kind, offset, body)
            offset = base
        found = self._kinds[offset]
        for each in chain:
            self._kinds[each] = found
        return found

    def content(self, offset: int) -> bytes:
        """Return the content of a commit or tag."""
        deltas: list[bytes] = []
        while True:
            kind, size, body = self._header(offset)
            if size > MAX_COMMIT:
                raise Malformed(f"a commit of {size} bytes")
            if kind not in (_OFS_DELTA, _REF_DELTA):
                content = self._inflated(body)
                break
            offset, body = self._base(kind, offset, body)
            deltas.append(self._inflated(body))
            if len(deltas) > _MAX_DEPTH:
                raise Malformed("a chain of deltas without an end")
        for delta in reversed(deltas):
            content = applied(delta, content)
        return content

    def _inflated(self, place: int) -> bytes:
        content = _inflated(self._pack, place, MAX_COMMIT)
        self._left -= len(content)
        if self._left < 0:
            raise Malformed(f"more than {MAX_INFLATED} bytes of commits")
        return content

    def _header(self, offset: int) -> tuple[int, int, int]:
        """Return type, size and the place after the header of the object at `offset`."""
        byte, place = self._byte(offset), offset + 1
        kind, size, shift = byte >> 4 & 7, byte & 15, 4
        while byte & 0x80:
            byte = self._byte(place)
            size |= (byte & 0x7F) << shift
            shift, place = shift + 7, place + 1
            if shift > 64:
                raise Malformed("a size of more than 64 bits")
        return kind, size, place

    def _base(self, kind: int, offset: int, place: int) -> tuple[int, int]:
        """Return the offset of a delta's base, and the place of the delta itself."""
        if kind == _REF_DELTA:
            width = len(next(iter(self.offsets)))
            base = self.offsets.get(bytes(self._pack[place : place + width]))
            if base is None:
                raise Malformed("a delta whose base is not in the pack")
            return base, place + width
        byte, place = self._byte(place), place + 1
        back = byte & 0x7F
        while byte & 0x80:
            byte = self._byte(place)
            back, place = (back + 1) << 7 | byte & 0x7F, place + 1
            if back > offset:
                break
        if not 0 < back <= offset - 12:
            raise Malformed("a delta whose base lies outside of the pack")
        return offset - back, place

    def _byte(self, place: int) -> int:
        if not 12 <= place < len(self._pack):
            raise Malformed("an offset outside of the pack")
        return self._pack[place]


def _index(data: bytes) -> Iterator[tuple[bytes, int]]:
    """Yield the name and offset of each object of a version 2 index."""
    if data[:8] != b"\xfftOc\0\0\0\2" or len(data) < 1032 + 40:
        raise Malformed("not an index of version 2")
    (count,) = struct.unpack_from(">I", data, 8 + 255 * 4)
    if not count <= MAX_OBJECTS:
        raise Malformed(f"{count} objects, at most {MAX_OBJECTS} are read")
    for width in (20, 32):  # SHA-1, SHA-256; then crc32, offset, large offsets, two checksums
        large = len(data) - 1032 - count * (width + 8) - 2 * width
        if 0 <= large <= count * 8 and large % 8 == 0:
            break
    else:
        raise Malformed("an index of a wrong size")
    offsets = struct.unpack_from(f">{count}I", data, 1032 + count * (width + 4))
    after = 1032 + count * (width + 8)
    for at, offset in enumerate(offsets):
        if offset & 0x80000000:
            place = after + (offset & 0x7FFFFFFF) * 8
            if place + 8 > len(data):
                raise Malformed("an offset outside of the index")
            (offset,) = struct.unpack_from(">Q", data, place)
        yield data[1032 + at * width : 1032 + (at + 1) * width], offset


def applied(delta: bytes, base: bytes) -> bytes:
    """Return `base` changed by a git delta. Raises `Malformed`."""
    _, place = _varint(delta, 0)
    size, place = _varint(delta, place)
    if size > MAX_COMMIT:
        raise Malformed(f"a delta to {size} bytes")
    made = bytearray()
    while place < len(delta) and len(made) <= size:
        code, place = delta[place], place + 1
        if code & 0x80:
            start = length = 0
            for bit in range(7):
                if code >> bit & 1:
                    if place >= len(delta):
                        raise Malformed("a delta that is cut off")
                    value, place = delta[place], place + 1
                    if bit < 4:
                        start |= value << 8 * bit
                    else:
                        length |= value << 8 * (bit - 4)
            made += base[start : start + (length or 0x10000)]
        elif code:
            made += delta[place : place + code]
            place += code
        else:
            raise Malformed("a delta with a reserved code")
    if len(made) != size:
        raise Malformed("a delta that does not give what it says")
    return bytes(made)


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while place < len(data) and shift < 64:
        byte, place = data[place], place + 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if not byte & 0x80:
            return value, place
    raise Malformed("a number that is cut off")
