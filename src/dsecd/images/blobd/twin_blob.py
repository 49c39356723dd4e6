"""Twin: a blob's index, its sparse cache file and the map of what is there (blob.h of the C code).

The same files in the same format, so that either implementation can go on with the other's cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec

from dsecd.host import sparse
from dsecd.images.blobd.twin_fetch import Fetch
from dsecd.images.stores.abc import Source
from libdsec.errors import InvalidArgument, NotFound, WrongState

BLOCK, CHUNK = 4096, 65536
GROUP = 1 << 20  # what eviction frees at once
ABSENT, PRESENT, SUSPECT = 0x00, 0x5A, 0xA5
_INDEX_HEADER, _ENTRY = struct.Struct("<8sII"), struct.Struct("<32sII")
_MAP_HEADER = struct.Struct("<8s40s72sQI")


class Chunk(NamedTuple):
    """Where a chunk lies in its blob, in bytes; `end` includes the padding."""

    digest: bytes
    offset: int
    size: int
    end: int


def parse_index(name: str, data: bytes) -> list[Chunk]:
    """Return the chunks of the index of blob `name`. Raises `InvalidArgument`."""
    bad = InvalidArgument(f"the index of {name} is not that of the id", field="id")
    if hashlib.sha256(data).hexdigest() != name or len(data) < _INDEX_HEADER.size + _ENTRY.size:
        raise bad
    magic, count, zero = _INDEX_HEADER.unpack_from(data)
    if magic != b"DSECIDX1" or zero or len(data) != _INDEX_HEADER.size + count * _ENTRY.size:
        raise bad
    chunks, offset = [], 0
    for digest, block, size in _ENTRY.iter_unpack(data[_INDEX_HEADER.size :]):
        if block * BLOCK != offset or not 0 < size <= CHUNK:
            raise bad
        end = offset + -(-size // BLOCK) * BLOCK
        chunks.append(Chunk(digest, offset, size, end))
        offset = end
    return chunks


def _extents(fd: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of a sparse file that hold data."""
    end = 0
    with contextlib.suppress(OSError):  # ENXIO: nothing further
        while end < length:
            start = os.lseek(fd, end, os.SEEK_DATA)
            end = os.lseek(fd, start, os.SEEK_HOLE)
            yield start, end


class Blob:
    """An open blob. Every method runs on the event loop and does not yield."""

    def __init__(self, cache: Path, name: str, source: Source, boot: str) -> None:
        """Raises `NotFound` without an index, `InvalidArgument`, `WrongState` when in use."""
        try:
            index = (cache / "indexes" / name).read_bytes()
        except FileNotFoundError as error:
            raise NotFound(f"no index of {name} is in the cache") from error
        self.id, self.source, self.pinned = name, source, False
        self.chunks = parse_index(name, index)
        self.length = self.chunks[-1].end
        self.nodeid = int(name[:16], 16) | 1 << 63
        self.busy: dict[int, Fetch] = {}  # chunk: the fetch that brings it
        self.referenced: set[int] = set()  # groups
        self.data = os.open(
            cache / "blobs" / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(self.data, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(self.data).st_size != self.length:
                os.ftruncate(self.data, self.length)
            trusted = self._open_map(cache / "maps" / name, boot)
        except BlockingIOError as error:
            os.close(self.data)
            raise WrongState(f"another process serves the cache of {name}", state="busy") from error
        self._compare_with_file(trusted)

    def _open_map(self, path: Path, boot: str) -> bool:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            size = BLOCK + len(self.chunks)
            sized = os.fstat(fd).st_size == size
            if not sized:
                os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, size)
            self.map = mmap.mmap(fd, size)
        finally:
            os.close(fd)
        inode = os.fstat(self.data).st_ino
        header = _MAP_HEADER.pack(
            b"DSECMAP1", boot.encode(), self.id.encode(), inode, len(self.chunks)
        ).ljust(BLOCK, b"\0")
        trusted = sized and bool(boot) and self.map[:BLOCK] == header
        trusted = trusted and set(self.map[BLOCK:]) <= {ABSENT, PRESENT, SUSPECT}
        if not trusted:
            self.map[BLOCK:] = bytes(SUSPECT if state else ABSENT for state in self.map[BLOCK:])
        self.map[:BLOCK] = header
        return trusted

    def _compare_with_file(self, trusted: bool) -> None:
        """What is a hole is absent; what has data and is not known to be checked is suspect."""
        self.present, self.bytes = 0, 0
        extents = _extents(self.data, self.length)
        start, end = next(extents, (self.length, self.length))
        for i, chunk in enumerate(self.chunks):
            while end < chunk.end and start <= chunk.offset:
                start, end = next(extents, (self.length, self.length))
                if start >= self.length:
                    break
            covered = start <= chunk.offset and chunk.end <= end
            known = trusted and self.state(i) == PRESENT
            state = (PRESENT if known else SUSPECT) if covered else ABSENT
            self.map[BLOCK + i] = state
            self.present += state == PRESENT
            self.bytes += (chunk.end - chunk.offset) * (state != ABSENT)

    def close(self) -> None:
        self.map.close()
        os.close(self.data)

    def state(self, chunk: int) -> int:
        return self.map[BLOCK + chunk]

    def find(self, offset: int) -> int:
        """Return the chunk that holds byte `offset`."""
        low, high = 0, len(self.chunks) - 1
        while low < high:
            middle = (low + high + 1) // 2
            if self.chunks[middle].offset <= offset:
                low = middle
            else:
                high = middle - 1
        return low

    def set_present(self, chunk: int) -> None:
        """The chunk was checked and is in the file."""
        before, place = self.state(chunk), self.chunks[chunk]
        self.bytes += (place.end - place.offset) * (before == ABSENT)
        self.present += before != PRESENT
        self.referenced.add(place.offset // GROUP)
        self.map[BLOCK + chunk] = PRESENT

    def set_absent(self, chunk: int) -> None:
        before, place = self.state(chunk), self.chunks[chunk]
        self.bytes -= (place.end - place.offset) * (before != ABSENT)
        self.present -= before == PRESENT
        self.map[BLOCK + chunk] = ABSENT

    def prove(self, chunk: int) -> bool:
        """Check a suspect chunk where it lies."""
        place = self.chunks[chunk]
        if hashlib.sha256(os.pread(self.data, place.size, place.offset)).digest() != place.digest:
            return False
        os.pwrite(
            self.data, bytes(place.end - place.offset - place.size), place.offset + place.size
        )
        return True

    def evict(self, group: int) -> int:
        """Free the chunks that begin in `group`; return the bytes freed."""
        before = self.bytes
        for i in range(self.find(group * GROUP), len(self.chunks)):
            place = self.chunks[i]
            if place.offset // GROUP > group:
                break
            if place.offset // GROUP < group or i in self.busy or self.state(i) == ABSENT:
                continue
            self.set_absent(i)
            sparse.punch(self.data, place.offset, place.end - place.offset)
        return before - self.bytes

    def describe(self) -> dict[str, object]:
        return {
            "length": self.length,
            "chunks": len(self.chunks),
            "present": self.present,
            "bytes": self.bytes,
            "pinned": self.pinned,
            "whole": self.present == len(self.chunks),
        }


def read_source(fields: dict[str, object]) -> Source:
    """Return the source a request describes. Raises `InvalidArgument`."""
    try:
        source = msgspec.convert(fields, Source)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"source: {error}", field="source") from error
    place = source.path if source.kind == "file" else source.url
    if not place.startswith(("/", "http://", "https://")):
        raise InvalidArgument("source: neither a path nor a url", field="source")
    return source
