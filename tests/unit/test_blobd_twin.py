"""The twin of dsec-blobd without a kernel: indexes, maps, and the control channel's client."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.images.blobd import twin_source
from dsecd.images.blobd.channel import FRAME_MAX, Channel
from dsecd.images.blobd.twin_blob import ABSENT, BLOCK, PRESENT, SUSPECT, Blob, parse_index
from dsecd.images.blobd.twin_fetch import Fetch
from dsecd.images.stores.abc import Source
from libdsec.errors import Internal, InvalidArgument, NotFound, Unavailable, WrongState

SOURCE = Source(kind="file", path="/nowhere")


def make_index(sizes: list[int], contents: list[bytes] | None = None) -> tuple[str, bytes]:
    entries, block = b"", 0
    for number, size in enumerate(sizes):
        content = contents[number] if contents else bytes([number % 256]) * size
        entries += hashlib.sha256(content).digest() + struct.pack("<II", block, size)
        block += -(-size // BLOCK)
    index = b"DSECIDX1" + struct.pack("<II", len(sizes), 0) + entries
    return hashlib.sha256(index).hexdigest(), index


# --- indexes ----------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 65536), min_size=1, max_size=50))
def test_chunks_lie_one_after_the_other(sizes: list[int]) -> None:
    name, index = make_index(sizes)
    chunks = parse_index(name, index)
    assert [chunk.size for chunk in chunks] == sizes
    assert chunks[0].offset == 0
    for before, after in itertools.pairwise(chunks):
        assert after.offset == before.end
        assert 0 <= before.end - before.offset - before.size < BLOCK


@given(st.binary(max_size=300), st.booleans())
def test_what_is_not_an_index_is_refused(data: bytes, prefixed: bool) -> None:
    data = b"DSECIDX1" + data if prefixed else data
    with pytest.raises(InvalidArgument):  # even when the id is right
        parse_index(hashlib.sha256(data).hexdigest(), data)


@given(st.integers(0, 10**6), st.integers(1, 255))
def test_a_changed_byte_is_not_the_id_s(position: int, change: int) -> None:
    name, index = make_index([65536, 1, 4096])
    damaged = bytearray(index)
    damaged[position % len(index)] ^= change
    with pytest.raises(InvalidArgument):
        parse_index(name, bytes(damaged))


# --- the cache of one blob ----------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    for name in ("blobs", "maps", "indexes"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture
def contents() -> list[bytes]:
    return [os.urandom(size) for size in (65536, 5000, 4096, 1)]


@pytest.fixture
def name(cache: Path, contents: list[bytes]) -> str:
    name, index = make_index([len(content) for content in contents], contents)
    (cache / "indexes" / name).write_bytes(index)
    return name


@pytest.fixture
def blob(cache: Path, name: str) -> Iterator[Blob]:
    blob = Blob(cache, name, SOURCE, "boot-1")
    yield blob
    blob.close()


def fill(blob: Blob, contents: list[bytes], chunk: int) -> None:
    os.pwrite(
        blob.data, contents[chunk].ljust(BLOCK * -(-len(contents[chunk]) // BLOCK), b"\0"),
        blob.chunks[chunk].offset,
    )  # fmt: skip
    blob.set_present(chunk)


def test_a_new_cache_holds_nothing(blob: Blob, cache: Path, name: str) -> None:
    assert [blob.state(i) for i in range(4)] == [ABSENT] * 4
    assert (cache / "blobs" / name).stat().st_size == blob.length == 65536 + 8192 + 4096 + 4096
    assert [blob.find(at) for at in (0, 65535, 65536, 73727, 73728, 77824)] == [0, 0, 1, 1, 2, 3]
    assert not blob.describe()["whole"]


@pytest.mark.parametrize(
    ("boot", "state"), [("boot-1", PRESENT), ("boot-2", SUSPECT), ("", SUSPECT)]
)
def test_presence_is_believed_within_one_boot(
    cache: Path, name: str, contents: list[bytes], boot: str, state: int
) -> None:
    first = Blob(cache, name, SOURCE, "boot-1")
    fill(first, contents, 0)
    fill(first, contents, 3)
    first.close()
    again = Blob(cache, name, SOURCE, boot)
    assert [again.state(i) for i in range(4)] == [state, ABSENT, ABSENT, state]
    assert again.bytes == 65536 + 4096
    assert again.prove(0)
    os.pwrite(again.data, bytes([contents[0][100] ^ 1]), 100)
    assert not again.prove(0)
    again.close()


def test_data_without_a_mark_is_suspect(cache: Path, name: str, contents: list[bytes]) -> None:
    first = Blob(cache, name, SOURCE, "boot-1")
    os.pwrite(first.data, contents[1].ljust(8192, b"\0"), 65536)
    first.close()  # killed between the write and the mark
    again = Blob(cache, name, SOURCE, "boot-1")
    assert [again.state(i) for i in range(4)] == [ABSENT, SUSPECT, ABSENT, ABSENT]
    again.close()


def test_one_process_serves_a_cache(blob: Blob, cache: Path, name: str) -> None:
    with pytest.raises(WrongState):
        Blob(cache, name, SOURCE, "boot-1")
    assert blob.state(0) == ABSENT


def test_eviction_frees_the_disk(blob: Blob, contents: list[bytes], cache: Path, name: str) -> None:
    for chunk in range(4):
        fill(blob, contents, chunk)
    assert blob.describe()["whole"]
    before = (cache / "blobs" / name).stat().st_blocks
    blob.busy[3] = Fetch(3, 4, True, 0.0)
    assert blob.evict(0) == 65536 + 8192 + 4096
    assert [blob.state(i) for i in range(4)] == [ABSENT, ABSENT, ABSENT, PRESENT]
    assert (cache / "blobs" / name).stat().st_blocks < before


def test_without_an_index_there_is_no_blob(cache: Path) -> None:
    with pytest.raises(NotFound):
        Blob(cache, "0" * 64, SOURCE, "boot-1")
    assert not list((cache / "blobs").iterdir())


def test_a_file_is_read_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "object"
    path.write_bytes(b"0123456789")
    source = Source(kind="file", path=str(path))
    assert twin_source.read(source, 2, 5, 1.0)[0] == b"23456"
    with pytest.raises(twin_source.LastingFault):
        twin_source.read(source, 8, 5, 1.0)
    with pytest.raises(twin_source.LastingFault):
        twin_source.read(SOURCE, 0, 1, 1.0)


# --- the client's channel -----------------------------------------------------------------------


class Peer:
    """The other end of a channel."""

    def __init__(self) -> None:
        ours, self.socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self.channel = Channel(ours)

    async def answer(self, frame: bytes, ancillary: list[tuple[int, int, bytes]]) -> None:
        await asyncio.sleep(0.01)
        self.socket.recv(FRAME_MAX)
        self.socket.sendmsg([frame], ancillary)

    async def ask(self, frame: bytes, fds: tuple[int, ...] = ()) -> tuple[object, list[int]]:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", fd)) for fd in fds]
        answer = asyncio.create_task(self.answer(frame, rights))
        try:
            return await self.channel.call("stat", {})
        finally:
            await answer

    def close(self) -> None:
        self.channel.close()
        self.socket.close()


async def test_answers_and_errors_come_back() -> None:
    peer = Peer()
    encode = msgspec.msgpack.encode
    with open(os.devnull) as file:  # noqa: PTH123
        result, fds = await peer.ask(encode((1, None, {"a": 1})), (file.fileno(),))
    assert result == {"a": 1}
    assert len(fds) == 1
    os.close(fds[0])
    with pytest.raises(NotFound, match="gone"):
        await peer.ask(encode((2, {"code": "not_found", "message": "gone"}, None)))
    with pytest.raises(Internal):
        await peer.ask(encode((99, None, {})))
    with pytest.raises(Internal):
        await peer.ask(b"\xc1")
    with pytest.raises(InvalidArgument):
        await peer.channel.call("add", {"id": "x" * FRAME_MAX})
    peer.close()


async def test_a_dead_peer_is_unavailable() -> None:
    peer = Peer()
    call = asyncio.create_task(peer.channel.call("stat", {}))
    await asyncio.sleep(0.01)
    peer.socket.close()
    with pytest.raises(Unavailable):
        await call
    assert peer.channel.lost.is_set()
    with pytest.raises(Unavailable):
        await peer.channel.call("stat", {})
    with pytest.raises(Unavailable):
        Channel.connect(Path("/nowhere/blobd.sock"))


async def test_a_call_that_was_given_up_does_not_spoil_the_next() -> None:
    peer = Peer()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await peer.channel.call("stat", {})
    assert peer.channel.lost.is_set()
    peer.close()
