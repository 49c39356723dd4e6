"""The daemon's end of the stream to a keeper of calls: messages in any pieces, in one order."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, cast

import pytest

from dsecd.backends.fncall_stream import Answer, Asked, Lost, Stream
from libdsec.errors import Unsupported

READY = struct.pack("=B3xI", 16, 5)
ASKED = Asked(b"body", ["a", "b"], 2.0, 1024, 4096)
ASK_SIZE = 24


def done(status: int = 0, files: bytes = b"", dirty: bool = False) -> bytes:
    head = struct.pack(
        "=B???iIIIIIII", 17, False, True, dirty, status, 1, 2, 3, 1, 2, 3, len(files)
    )
    return head + b"v" + b"oo" + b"eee" + files


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.closed = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def close(self) -> None:
        self.closed = True

    def kinds(self) -> list[int]:
        return [struct.unpack_from("=I", data)[0] for data in self.written]


class Told:
    """A stream on a stand-in for its transport, and what it tells."""

    def __init__(self) -> None:
        self.transport, self.ready, self.lost = Transport(), 0, list[str]()
        self.stream = Stream()
        self.stream.on_lost = self.lost.append
        self.stream.on_ready = self._ready
        self.stream.connection_made(cast(Any, self.transport))

    def _ready(self) -> None:
        self.ready += 1

    def begin(self) -> asyncio.Task[Answer]:
        return asyncio.create_task(self.stream.call(ASKED))


async def started() -> Told:
    told = Told()
    told.stream.data_received(READY)
    await told.stream._started
    return told


async def test_messages_may_come_in_any_pieces() -> None:
    files = struct.pack("=II", 1, 4) + b"four"
    told = await started()
    call = told.begin()
    await asyncio.sleep(0)
    for byte in done(256, files) + READY:
        told.stream.data_received(bytes([byte]))
    answer = await call
    assert (answer.status, answer.truncated, answer.timed_out) == (256, True, False)
    assert (answer.value, answer.stdout, answer.stderr) == (b"v", b"oo", b"eee")
    assert answer.files == {"b": b"four"}
    assert (told.ready, told.lost) == (1, [])
    (asked,) = told.transport.written
    assert asked[ASK_SIZE:] == b"a\0b\0body"


async def test_a_call_given_up_is_killed_and_the_stream_stays() -> None:
    told = await started()
    call = told.begin()
    await asyncio.sleep(0)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert told.transport.kinds() == [1, 2]
    told.stream.data_received(done(9) + READY)
    assert (told.ready, told.lost) == (1, [])


@pytest.mark.parametrize("cancelled_first", [False, True])
async def test_giving_up_a_call_that_has_ended_kills_no_later_one(cancelled_first: bool) -> None:
    told = await started()
    call = told.begin()
    await asyncio.sleep(0)
    if cancelled_first:
        call.cancel()
    told.stream.data_received(done() + READY)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert told.transport.kinds() == [1]
    again = told.begin()
    await asyncio.sleep(0)
    told.stream.data_received(done() + READY)
    assert (await again).value == b"v"
    assert (told.ready, told.lost) == (2, [])


@pytest.mark.parametrize("given_up", [False, True])
async def test_no_call_comes_after_one_whose_connections_live_on(given_up: bool) -> None:
    told = await started()
    call = told.begin()
    await asyncio.sleep(0)
    if given_up:
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)
    told.stream.data_received(done(dirty=True) + READY)
    assert (told.ready, told.lost) == (0, ["connections of its last call live on"])
    assert told.transport.closed
    if not given_up:
        assert (await call).value == b"v"


@pytest.mark.parametrize(
    "sent",
    [
        READY, done(), b"\xff", done() + READY + READY, done(files=b"\0" * 7),
        done(files=b"\xff" * 8),
    ],
    ids=["ready without an answer", "an answer to nothing", "no such kind", "ready twice",
         "half a file", "a file that was not asked for"],
)  # fmt: skip
async def test_what_breaks_the_protocol_loses_the_stream(sent: bytes) -> None:
    told = await started()
    if sent != done():
        call = told.begin()
        await asyncio.sleep(0)
    told.stream.data_received(sent)
    assert len(told.lost) == 1
    assert told.transport.closed
    if sent != done():
        await asyncio.gather(call, return_exceptions=True)
    with pytest.raises(Lost):
        await told.stream.call(ASKED)


async def test_a_failure_at_the_start_is_the_keepers_own() -> None:
    told = Told()
    message = b"the pool's Python ended: no module"
    told.stream.data_received(struct.pack("=BBBB224s", 1, 5, 0, len(message), message))
    with pytest.raises(Unsupported, match="no module"):
        await told.stream._started


async def test_the_end_of_the_stream_loses_the_call() -> None:
    told = await started()
    call = told.begin()
    await asyncio.sleep(0)
    told.stream.connection_lost(None)
    with pytest.raises(Lost, match="ended"):
        await call
    assert len(told.lost) == 1
