"""Chunk indexes, the writer of blobs (over C and its twin), the choice of blobs."""

from __future__ import annotations

import errno
import hashlib
import importlib
import io
import os
import random
import struct
from collections.abc import Collection
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from _fastpath import _core, twin
from dsecd import fastpath
from dsecd.images import blobchoice, chunks
from dsecd.images.chunks import (
    ChunkWriter,
    Index,
    Known,
    Place,
    Placement,
    blob_id,
    decode_index,
    encode_index,
    verify_blob,
)
from dsecd.images.known import KnownChunks
from dsecd.images.model import CHUNK, Chunk
from libdsec.errors import Exhausted, Internal, InvalidArgument


@pytest.fixture(params=["c", "python"], autouse=True)
def layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {"c": "_fastpath._core", "python": "_fastpath.twin"}
    module = importlib.import_module(names[request.param])
    monkeypatch.setattr(fastpath, "read_chunks", module.read_chunks)


class Memory(dict[bytes, Place]):
    """Known chunks in a dictionary; counts as many blobs as it is told to."""

    def __init__(self, blobs: int = 1) -> None:
        super().__init__()
        self.blobs = blobs

    def find(self, digests: Collection[bytes]) -> dict[bytes, Place]:
        return {digest: self[digest] for digest in digests if digest in self}

    def size(self, blob: str) -> int:
        return 1 << 30

    def __len__(self) -> int:
        return self.blobs


def noise(seed: int, size: int) -> bytes:
    return random.Random(seed).randbytes(size)


def write(path: Path, *contents: bytes, known: Known | None = None) -> Placement:
    with ChunkWriter(path, known) as sink:
        for content in contents:
            sink.add(io.BytesIO(content).read, len(content))
        return sink.finish()


def read_back(placement: Placement, found: list[Chunk | None], size: int) -> bytes:
    assert placement.new is not None
    blob = placement.new.path.read_bytes()
    parts = []
    for number, chunk in enumerate(found):
        length = min(CHUNK, size - number * CHUNK)
        if chunk is None:
            parts.append(bytes(length))
        else:
            assert chunk.size == length
            start = placement.where[chunk.digest][1] * 4096
            parts.append(blob[start : start + length])
    return b"".join(parts)


# --- index --------------------------------------------------------------------------------------


def test_the_index_is_as_documented() -> None:
    found = [Chunk(b"a" * 32, 65536), Chunk(b"b" * 32, 1), Chunk(b"c" * 32, 4097)]
    data = encode_index(found)
    assert data[:16] == b"DSECIDX1" + struct.pack("<II", 3, 0)
    assert data[16:56] == b"a" * 32 + struct.pack("<II", 0, 65536)
    assert data[56:96] == b"b" * 32 + struct.pack("<II", 16, 1)
    assert data[96:] == b"c" * 32 + struct.pack("<II", 17, 4097)
    assert blob_id(data) == hashlib.sha256(data).hexdigest()
    assert decode_index(data, blob_id(data)) == Index(found, [0, 16, 17], 19 * 4096)


def entry(block: int, size: int) -> bytes:
    return b"d" * 32 + struct.pack("<II", block, size)


def head(count: int, zero: int = 0) -> bytes:
    return b"DSECIDX1" + struct.pack("<II", count, zero)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"DSECIDX1",
        b"DSECIDX2" + struct.pack("<II", 1, 0) + entry(0, 1),
        head(0),
        head(1),
        head(0xFFFFFFFF),
        head(1, zero=1) + entry(0, 1),
        head(1) + entry(0, 1)[:-1],
        head(1) + entry(0, 1) + b"\0",
        head(2) + entry(0, 1),
        head(1) + entry(0, 0),
        head(1) + entry(0, 65537),
        head(1) + entry(1, 1),
        head(2) + entry(0, 1) + entry(0, 1),
        head(2) + entry(0, 4097) + entry(1, 1),
        head(2) + entry(0, 4096) + entry(2, 1),
        head(2) + entry(0, 1) + entry(0xFFFFFFFF, 1),
    ],
)
def test_a_hostile_index_is_refused_even_when_its_digest_is_right(data: bytes) -> None:
    with pytest.raises(Internal, match=r"chunk index of blob .* is damaged"):
        decode_index(data, blob_id(data))


def test_an_index_of_another_blob_is_refused() -> None:
    data = encode_index([Chunk(b"a" * 32, 1)])
    with pytest.raises(Internal, match=f"its digest is {blob_id(data)}"):
        decode_index(data, "0" * 64)


@given(data=st.binary(max_size=200), whole=st.booleans())
@settings(max_examples=300, suppress_health_check=list(HealthCheck))
def test_garbage_is_never_more_than_an_error(data: bytes, whole: bool) -> None:
    data = b"DSECIDX1" + data if whole else data
    try:
        index = decode_index(data, blob_id(data))
    except Internal:
        return
    assert encode_index(index.chunks) == data


def test_a_blob_is_proved_by_its_index(tmp_path: Path) -> None:
    placement = write(tmp_path / "blob", noise(1, 65536), noise(2, 5000), noise(3, 3))
    assert placement.new is not None
    index = decode_index(placement.new.index, placement.new.id)
    blob = placement.new.path.read_bytes()
    assert len(blob) == index.size == placement.new.size
    verify_blob(index, placement.new.id, io.BytesIO(blob).read)
    for at in (0, 65535, 65536, 70535, 70536, 73727, 73728, 73731, len(blob) - 1):
        bad = bytearray(blob)
        bad[at] ^= 1
        with pytest.raises(Internal, match=r"the blob .* is damaged"):
            verify_blob(index, placement.new.id, io.BytesIO(bad).read)
    for bad_length in (blob[:-1], blob[:4096], b"", blob + b"\0"):
        with pytest.raises(Internal, match=r"cut off|too long"):
            verify_blob(index, placement.new.id, io.BytesIO(bad_length).read)


# --- writer -------------------------------------------------------------------------------------


def test_a_chunk_is_written_once_and_zeros_never(tmp_path: Path) -> None:
    content = noise(1, CHUNK) + bytes(CHUNK) + noise(1, CHUNK) + bytes(9)
    with ChunkWriter(tmp_path / "blob") as sink:
        found = sink.add(io.BytesIO(content).read, len(content))
        again = sink.add(io.BytesIO(content).read, len(content))
        placement = sink.finish()
    assert found == again
    assert [chunk is None for chunk in found] == [False, True, False, True]
    assert placement.new is not None
    assert placement.new.size == CHUNK
    assert read_back(placement, found, len(content)) == content


def test_nothing_new_makes_no_file(tmp_path: Path) -> None:
    first = write(tmp_path / "one", noise(1, 100_000))
    known = Memory()
    known.update(first.where)
    placement = write(tmp_path / "two", noise(1, 100_000), bytes(5), b"", known=known)
    assert placement.new is None
    assert placement.where == first.where
    assert [blob.id for blob in placement.blobs] == [first.blobs[0].id]
    assert write(tmp_path / "three") == Placement([], {}, None)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one"]


def test_a_change_of_one_byte_costs_one_chunk(tmp_path: Path) -> None:
    files = [noise(number, 300_000) for number in range(20)]
    first = write(tmp_path / "one", *files)
    known = Memory()
    known.update(first.where)
    files[7] = files[7][:150_000] + b"!" + files[7][150_001:]
    second = write(tmp_path / "two", *files, known=known)
    assert second.new is not None
    assert second.new.size == CHUNK
    assert [blob.id for blob in second.blobs] == [first.blobs[0].id, second.new.id]


def test_without_finish_nothing_is_left(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "blob") as sink:
        sink.add(io.BytesIO(noise(1, 9 << 20)).read, 9 << 20)
        assert (tmp_path / "blob").exists()
    assert not list(tmp_path.iterdir())


def test_a_file_of_the_same_name_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "blob").write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        write(tmp_path / "blob", b"content")
    assert (tmp_path / "blob").read_bytes() == b"mine"


@pytest.mark.parametrize("size", [1, 4096, 65536, 65537, 300_000, 400_000])
def test_a_source_that_ends_early_is_an_error(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(bytes(size - 1))
    with ChunkWriter(tmp_path / "blob") as sink, (tmp_path / "file").open("rb") as file:
        with pytest.raises(InvalidArgument, match=f"truncated: {size - 1} of {size} bytes"):
            sink.add(file.read, size)
        with pytest.raises(InvalidArgument, match=f"truncated: {size - 1} of {size} bytes"):
            sink.add_fd(file.fileno(), size)


@pytest.mark.parametrize("size", [-1, 1 << 62])
def test_an_absurd_size_is_refused_before_any_memory_is_taken(tmp_path: Path, size: int) -> None:
    with (
        ChunkWriter(tmp_path / "blob") as sink,
        pytest.raises(InvalidArgument, match="1 TiB"),
    ):
        sink.add_fd(0, size)


def test_a_full_disk_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(fd: int, parts: object) -> int:
        raise OSError(errno.ENOSPC, "full")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(Exhausted, match="disk full while writing the blob"):
        write(tmp_path / "blob", b"content")
    assert not list(tmp_path.iterdir())


def test_short_writes_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(fd: int, parts: list[memoryview]) -> int:
        return os.write(fd, parts[0][:1000])

    monkeypatch.setattr(os, "writev", short)
    content = noise(5, 200_000)
    placement = write(tmp_path / "blob", content)
    assert placement.new is not None
    assert placement.new.path.read_bytes()[: len(content)] == content


def test_a_sparse_file_is_not_read_where_it_has_holes(tmp_path: Path) -> None:
    size = 20 << 30
    with (tmp_path / "file").open("w+b") as file, ChunkWriter(tmp_path / "blob") as sink:
        file.truncate(size)
        for at in (0, 5 << 30, (9 << 30) + 70_000, size - 3):
            os.pwrite(file.fileno(), b"end", at)
        found = sink.add_fd(file.fileno(), size)
        placement = sink.finish()
    assert len(found) == size // CHUNK
    filled = [number for number, chunk in enumerate(found) if chunk]
    assert filled == [0, (5 << 30) >> 16, ((9 << 30) + 70_000) >> 16, len(found) - 1]
    assert placement.new is not None


segments = st.lists(
    st.tuples(
        st.sampled_from(["hole", "zeros", "noise", "same"]),
        st.sampled_from([1, 4096, 60_000, 65536, 70_000, 131_072, 400_000]),
    ),
    max_size=8,
)


@given(parts=segments, capacity=st.sampled_from([65536, 69632, 200_704, 4 << 20]))
@settings(max_examples=60, suppress_health_check=list(HealthCheck))
def test_a_file_and_a_stream_give_the_same_from_c_and_python(
    tmp_path_factory: pytest.TempPathFactory, parts: list[tuple[str, int]], capacity: int
) -> None:
    folder = tmp_path_factory.mktemp("chunks")
    with (folder / "file").open("w+b") as file:
        at = 0
        for number, (kind, length) in enumerate(parts):
            if kind != "hole":
                data = (
                    bytes(length) if kind == "zeros" else noise(number * (kind == "noise"), length)
                )
                os.pwrite(file.fileno(), data, at)
            at += length
        file.truncate(at)
        content = os.pread(file.fileno(), at, 0)
        one, two = bytearray(capacity), bytearray(capacity)
        where = used = 0
        while where < at:
            found = _core.read_chunks(file.fileno(), where, at, one, used)
            assert found == twin.read_chunks(file.fileno(), where, at, two, used)
            assert found[0] > where or used
            where, used = found[0], 0
            if found[2] and found[2][-1]:  # what is behind the last chunk is of no interest
                assert one[: found[1]] == two[: found[1]]
        with ChunkWriter(folder / "blob") as sink:
            streamed = sink.add(io.BytesIO(content).read, at)
            assert sink.add_fd(file.fileno(), at) == streamed
            placement = sink.finish()
    if placement.new:
        assert read_back(placement, streamed, at) == content
        index = decode_index(placement.new.index, placement.new.id)
        verify_blob(index, placement.new.id, io.BytesIO(placement.new.path.read_bytes()).read)
    else:
        assert not any(content)


@pytest.mark.parametrize("module", [_core, twin], ids=["c", "python"])
def test_the_fast_path_refuses_places_that_are_not_aligned(module: object, tmp_path: Path) -> None:
    read = module.read_chunks  # type: ignore[attr-defined]
    with (tmp_path / "file").open("w+b") as file:
        for at, used in ((1, 0), (-65536, 0), (0, 1), (0, 131072)):
            with pytest.raises(ValueError, match="start of a chunk"):
                read(file.fileno(), at, 10, bytearray(65536), used)
        with pytest.raises((TypeError, BufferError)):
            read(file.fileno(), 0, 10, bytes(65536), 0)
        with pytest.raises(fastpath.StepError, match="read: Bad file descriptor"):
            read(10_000, 0, 10, bytearray(65536), 0)
    assert read(0, 0, 0, bytearray(), 0) == (0, 0, [])


# --- too many blobs -----------------------------------------------------------------------------


def many_blobs(per_blob: list[int]) -> tuple[Memory, list[bytes]]:
    """Return known chunks, `per_blob[n]` of blob n, and their contents in the order of blobs."""
    known = Memory(len(per_blob))
    contents = []
    for number, count in enumerate(per_blob):
        for chunk in range(count):
            content = struct.pack("<II", number, chunk) + b"!" * (CHUNK - 8)
            known[hashlib.sha256(content).digest()] = (f"{number:064x}", chunk * 16)
            contents.append(content)
    return known, contents


def test_the_blobs_that_contribute_least_are_written_anew(tmp_path: Path) -> None:
    per_blob = [1] * 30 + [3] * 250 + [40]
    known, contents = many_blobs(per_blob)
    placement = write(tmp_path / "blob", *contents, known=known)
    assert placement.new is not None
    assert len(placement.blobs) == blobchoice.MAX_BLOBS
    kept = {blob.id for blob in placement.blobs[:-1]}
    assert f"{280:064x}" in kept
    assert kept == {f"{number:064x}" for number in range(30, 228)} | {f"{280:064x}"}
    assert placement.new.size == (30 + 3 * 52) * CHUNK
    index = decode_index(placement.new.index, placement.new.id)
    verify_blob(index, placement.new.id, io.BytesIO(placement.new.path.read_bytes()).read)
    for content in contents:
        blob, block = placement.where[hashlib.sha256(content).digest()]
        if blob == placement.new.id:
            with placement.new.path.open("rb") as file:
                assert os.pread(file.fileno(), CHUNK, block * 4096) == content
        else:
            assert known[hashlib.sha256(content).digest()] == (blob, block)
    assert [path.name for path in tmp_path.iterdir()] == ["blob"]
    again = write(tmp_path / "again", *contents, known=known)
    assert again.new is not None
    assert (again.blobs, again.where) == (placement.blobs, placement.where)


def test_exactly_as_many_blobs_as_may_be(tmp_path: Path) -> None:
    known, contents = many_blobs([2] * 200)
    placement = write(tmp_path / "blob", *contents, known=known)
    assert placement.new is None
    assert len(placement.blobs) == 200
    placement = write(tmp_path / "blob", *contents, b"new", known=known)
    assert placement.new is not None
    assert len(placement.blobs) == 200
    assert placement.new.size == 4096 + 2 * CHUNK


def test_what_is_kept_aside_has_a_bound(tmp_path: Path) -> None:
    """A blob that has given much will be used: nothing more of it is kept."""
    known, contents = many_blobs([1000] + [1] * 200)
    spooled = []
    with ChunkWriter(tmp_path / "blob", known) as sink:
        for content in contents[:1000]:
            sink.add(io.BytesIO(content).read, len(content))
        sink._flush()
        spooled.append(sink._choice._end)
        sink.finish()
    assert 0 < spooled[0] <= blobchoice.SETTLED_BYTES
    assert not list(tmp_path.iterdir())


def test_blobs_that_become_known_meanwhile_are_not_one_too_many(tmp_path: Path) -> None:
    known, contents = many_blobs([1] * 300)
    known.blobs = 3
    placement = write(tmp_path / "blob", *contents, known=known)
    assert len(placement.blobs) == 200
    assert placement.new is not None
    assert placement.new.size == 101 * CHUNK


def test_a_blob_that_goes_away_meanwhile_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(self: Memory, blob: str) -> int:
        raise KeyError(blob)

    monkeypatch.setattr(Memory, "size", gone)
    known, contents = many_blobs([2])
    placement = write(tmp_path / "blob", *contents, known=known)
    assert placement.new is not None
    assert len(placement.blobs) == 1
    assert placement.new.size == 2 * CHUNK


def test_the_limit_is_that_of_a_layer() -> None:
    assert chunks.MAX_BLOBS == 200


def test_known_chunks_serve_the_writer(tmp_path: Path) -> None:
    with KnownChunks(tmp_path / "known.db") as known:
        first = write(tmp_path / "one", noise(1, 1 << 20), known=known)
        assert first.new is not None
        known.add(first.new.id, decode_index(first.new.index, first.new.id))
        second = write(tmp_path / "two", noise(1, 1 << 20), noise(2, 10), known=known)
        assert second.new is not None
        assert second.new.size == 4096
        assert [blob.size for blob in second.blobs] == [1 << 20, 4096]
