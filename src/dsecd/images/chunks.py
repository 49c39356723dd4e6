"""Content of layers: blobs of chunks, the index that proves a blob, and the writer of a new one.

A blob is chunks one after the other, each on a block of its own start, padded with zeros. Its index
lists them; the index's SHA-256 is the blob's id, so the id proves the index and the index proves
every chunk. Both never change. Little-endian, without gaps:

    b"DSECIDX1", u32 count, u32 zero, count x {32 bytes digest, u32 first block, u32 size in bytes}
"""

from __future__ import annotations

import errno
import hashlib
import os
import struct
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Protocol

import msgspec

from dsecd import fastpath
from dsecd.images import disk
from dsecd.images.blobchoice import MAX_BLOBS, BlobChoice
from dsecd.images.manifest import BlobRef
from dsecd.images.model import BLOCK, CHUNK, MAX_CHUNKS, Chunk
from libdsec.errors import Exhausted, Internal, InvalidArgument

_MAGIC = b"DSECIDX1"
_HEADER = struct.Struct("<8sII")
_ENTRY = struct.Struct("<32sII")
_MAX_BLOCKS = 0xFFFFFFFE  # EROFS keeps the last number for holes
_BUFFER = 1 << 20
_IOV_MAX = 1024
_ZEROS = bytes(CHUNK)

Place = tuple[str, int]  # a blob's id and the chunk's first block in it


class Index(msgspec.Struct, frozen=True):
    """What a blob holds: its chunks, the first block of each, and its length in bytes."""

    chunks: list[Chunk]
    blocks: list[int]
    size: int


class NewBlob(msgspec.Struct, frozen=True):
    """A blob that was written: its file, not yet synced to disk, and its index."""

    path: Path
    id: str
    size: int
    index: bytes


class Placement(msgspec.Struct, frozen=True):
    """Where every chunk of a tree is. `new` is None when all of them were known."""

    blobs: list[BlobRef]
    where: dict[bytes, Place]
    new: NewBlob | None = None


class Known(Protocol):
    """Chunks that lie in blobs already: `dsecd.images.known.KnownChunks`."""

    def find(self, digests: Collection[bytes]) -> dict[bytes, Place]: ...

    def size(self, blob: str) -> int:
        """Return the blob's length in bytes. Raises `KeyError` when it is known no longer."""

    def __len__(self) -> int:
        """Return the number of blobs."""


# --- index --------------------------------------------------------------------------------------


def padded(size: int) -> int:
    """Return the bytes that a chunk of `size` takes in a blob."""
    return size + -size % BLOCK


def encode_index(chunks: Sequence[Chunk]) -> bytes:
    """Return the index of a blob that holds `chunks` in this order."""
    parts = [_HEADER.pack(_MAGIC, len(chunks), 0)]
    block = 0
    for chunk in chunks:
        parts.append(_ENTRY.pack(chunk.digest, block, chunk.size))
        block += padded(chunk.size) // BLOCK
    return b"".join(parts)


def blob_id(index: bytes) -> str:
    """Return the id of the blob with this index."""
    return hashlib.sha256(index).hexdigest()


def index_most(size: int) -> int:
    """Return how many bytes the index of a blob of `size` bytes has at most."""
    return _HEADER.size + -(-size // BLOCK) * _ENTRY.size


def decode_index(data: bytes, blob: str) -> Index:
    """Return the index of blob `blob`. Raises `Internal` when `data` is not it, or not one."""
    found = blob_id(data)
    if found != blob:
        raise _damaged(blob, f"its digest is {found}")
    if len(data) < _HEADER.size or not data.startswith(_MAGIC):
        raise _damaged(blob, "it is no chunk index")
    _, count, zero = _HEADER.unpack_from(data)
    if zero or not count or len(data) != _HEADER.size + count * _ENTRY.size:
        raise _damaged(blob, f"{len(data)} bytes do not make {count} chunks")
    chunks: list[Chunk] = []
    blocks: list[int] = []
    expected = 0
    for digest, block, size in _ENTRY.iter_unpack(memoryview(data)[_HEADER.size :]):
        if not 0 < size <= CHUNK or block != expected:
            raise _damaged(blob, f"chunk {len(chunks)}: {size} bytes at block {block}")
        chunks.append(Chunk(digest, size))
        blocks.append(block)
        expected += (size + BLOCK - 1) // BLOCK
    if expected > _MAX_BLOCKS:
        raise _damaged(blob, f"{expected} blocks are too many")
    return Index(chunks, blocks, expected * BLOCK)


def verify_blob(index: Index, blob: str, read: Callable[[int], bytes]) -> None:
    """Read the whole blob, `read(n)` giving n bytes, fewer at the end, and compare every byte.

    Raises `Internal`, naming the first chunk that differs.
    """
    for number, chunk in enumerate(index.chunks):
        wanted = padded(chunk.size)
        data = memoryview(read(wanted))
        if len(data) != wanted:
            raise _damaged(blob, f"chunk {number} is cut off", "the blob")
        if hashlib.sha256(data[: chunk.size]).digest() != chunk.digest:
            raise _damaged(blob, f"chunk {number} is not {chunk.digest.hex()}", "the blob")
        if data[chunk.size :] != _ZEROS[: wanted - chunk.size]:
            raise _damaged(blob, f"there is something behind chunk {number}", "the blob")
    if read(1):
        raise _damaged(blob, "it is too long", "the blob")


def _damaged(blob: str, why: str, what: str = "the chunk index of blob") -> Internal:
    return Internal(f"{what} {blob} is damaged: {why}; fetch it again or import the layer again")


# --- writing ------------------------------------------------------------------------------------


class ChunkWriter:
    """Takes the content of files and writes what no blob has yet into one new blob at `path`.

    For a blob of more than `room` bytes there is `Exhausted`, as for a full disk.
    The sink of `dsecd.images.sources`. A context manager: without `finish` nothing is left. Not for
    several threads at a time. A chunk of zeros, of any length, is a hole, so the same content has
    the same chunks whether or not its source knew holes.
    """

    def __init__(self, path: Path, known: Known | None = None, room: int | None = None) -> None:
        self._path = path
        self._known = known
        self._room = room
        self._choice = BlobChoice(
            path.with_name(path.name + ".spool"), 0 if known is None else len(known)
        )
        self._fd = -1
        self._buffer = memoryview(bytearray(_BUFFER))
        self._used = 0
        self._pending: dict[bytes, tuple[int, int]] = {}  # digest: place in the buffer, size
        self._reused: dict[bytes, Place] = {}
        self._written: dict[bytes, int] = {}  # digest: block of the new blob
        self._chunks: list[Chunk] = []  # of the new blob
        self._blocks = 0
        self._count = 0
        self._finished = False

    def __enter__(self) -> ChunkWriter:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._choice.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if not self._finished:
                self._path.unlink(missing_ok=True)

    def add(self, read: Callable[[int], bytes], size: int) -> list[Chunk | None]:
        """Consume `size` bytes from `read(n)`, which is short only at the end; return the chunks.

        Raises `InvalidArgument` when it ends early, `Exhausted` when the disk is full.
        """
        self._charge(size)
        chunks: list[Chunk | None] = []
        for at in range(0, size, CHUNK):
            wanted = min(CHUNK, size - at)
            data = read(wanted)
            if len(data) != wanted:
                raise _truncated(size, at + len(data))
            if not data[0] and data == _ZEROS[:wanted]:
                chunks.append(None)
                continue
            chunk = Chunk(hashlib.sha256(data).digest(), wanted)
            chunks.append(chunk)
            if not self._has(chunk.digest):
                self._reserve(wanted)
                end = self._used + wanted
                self._buffer[self._used : end] = data
                self._buffer[end : self._used + padded(wanted)] = bytes(-wanted % BLOCK)
                self._pending[chunk.digest] = (self._used, wanted)
                self._used += padded(wanted)
        return chunks

    def add_fd(self, fd: int, size: int) -> list[Chunk | None]:
        """The same for the first `size` bytes of an open file, holes found by SEEK_HOLE.

        Moves the descriptor's offset.
        """
        self._charge(size)
        chunks: list[Chunk | None] = []
        at = 0
        while at < size:
            self._reserve(min(CHUNK, size - at))
            offset = self._used
            try:
                at, self._used, found = fastpath.read_chunks(fd, at, size, self._buffer, offset)
            except fastpath.StepError as error:
                if error.errno == errno.ENODATA:
                    raise _truncated(size, os.fstat(fd).st_size) from error
                raise
            for digest in found:
                if digest is None:
                    chunks.append(None)
                    continue
                length = min(CHUNK, size - len(chunks) * CHUNK)
                chunks.append(Chunk(digest, length))
                if not self._has(digest):
                    self._pending[digest] = (offset, length)
                offset += padded(length)
        return chunks

    def finish(self) -> Placement:
        """Write what is left and return where every chunk is. The new blob's file is the caller's.

        Raises `Exhausted` when the disk is full.
        """
        self._flush()
        with self._full_named():
            dropped = self._choice.drop(bool(self._chunks))
            for digest, data, size in dropped:
                del self._reused[digest]
                self._append(digest, size)
                self._write([data])
        blobs = self._choice.blobs()
        where = dict(self._reused)
        new = None
        if self._chunks:
            index = encode_index(self._chunks)
            new = NewBlob(self._path, blob_id(index), self._blocks * BLOCK, index)
            blobs.append(BlobRef(new.id, new.size))
            where.update((digest, (new.id, block)) for digest, block in self._written.items())
        self._finished = True
        return Placement(blobs, where, new)

    def _full_named(self) -> AbstractContextManager[None]:
        return disk.full_named(f"writing the blob {self._path}")

    def _charge(self, size: int) -> None:
        """A file that is one hole costs nothing to make, but its indexes cost memory."""
        self._count += (size + CHUNK - 1) // CHUNK
        if size < 0 or self._count > MAX_CHUNKS:
            raise InvalidArgument(
                f"the files of a layer, holes counted, may have {MAX_CHUNKS * CHUNK >> 40} TiB"
            )

    def _has(self, digest: bytes) -> bool:
        return digest in self._written or digest in self._reused or digest in self._pending

    def _reserve(self, size: int) -> None:
        if padded(size) > len(self._buffer) - self._used:
            self._flush()

    def _flush(self) -> None:
        """Look up what is in the buffer and write what is new, with as few calls as possible."""
        pending, self._pending, self._used = self._pending, {}, 0
        known = {} if self._known is None else self._known.find(pending)
        runs: list[list[int]] = []  # parts of the buffer: start, end
        with self._full_named():
            for digest, (offset, size) in pending.items():
                end = offset + padded(size)
                if digest in known and self._reuse(digest, known[digest], offset, size):
                    continue
                self._append(digest, size)
                if runs and runs[-1][1] == offset:
                    runs[-1][1] = end
                else:
                    runs.append([offset, end])
            self._write([self._buffer[start:end] for start, end in runs])

    def _reuse(self, digest: bytes, place: Place, offset: int, size: int) -> bool:
        """Take the chunk from the known blob, unless that one went away or is one too many."""
        assert self._known is not None
        blob, _ = place
        if not self._choice.has(blob):
            try:
                size_of_blob = self._known.size(blob)
            except KeyError:
                return False
            if not self._choice.offer(BlobRef(blob, size_of_blob)):
                return False
        self._choice.use(blob, digest, self._buffer[offset : offset + padded(size)], size)
        self._reused[digest] = place
        return True

    def _append(self, digest: bytes, size: int) -> None:
        self._written[digest] = self._blocks
        self._chunks.append(Chunk(digest, size))
        self._blocks += padded(size) // BLOCK
        if self._blocks > _MAX_BLOCKS:
            raise InvalidArgument("the new content of a layer may have 16 TiB")
        if self._room is not None and self._blocks * BLOCK > self._room:
            raise Exhausted(
                f"the layer has more new content than its disk has room for: {self._room} bytes "
                f"in {self._path.parent}; remove layers or free space"
            )

    def _write(self, parts: list[memoryview]) -> None:
        if parts and self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        while parts:
            done = os.writev(self._fd, parts[:_IOV_MAX])
            while parts and done >= len(parts[0]):
                done -= len(parts.pop(0))
            if done:
                parts[0] = parts[0][done:]


def _truncated(size: int, found: int) -> InvalidArgument:
    return InvalidArgument(f"truncated: {found} of {size} bytes", field="source")


__all__ = [
    "MAX_BLOBS",
    "ChunkWriter",
    "Index",
    "Known",
    "NewBlob",
    "Place",
    "Placement",
    "blob_id",
    "decode_index",
    "encode_index",
    "padded",
    "verify_blob",
]
