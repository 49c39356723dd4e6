"""One TLS connection through the relay: its hello is read, then bytes pass in both directions.

A server may ask for a second ClientHello (HelloRetryRequest), which comes in the open, too, and may
name somebody else: servers differ in which of the two they obey. So records are looked at until the
server has answered, and a second hello must have the first one's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, NamedTuple

from dsecd.doors.link import PIECE_BYTES, Link
from dsecd.relay.hello import (
    ALERT,
    HANDSHAKE,
    HEADER_BYTES,
    RECORD_KINDS,
    RECORD_MOST,
    BadHello,
    Hello,
    asks_again,
)

IDLE_S = 3600.0  # without a byte in either direction
HALF_S = 300.0  # the same when one side has ended: most often its process is gone
FINISH_S = 60.0  # for what is left when both sides have ended
VERSION_MAJOR = 3  # of all records since SSL 3
# a fatal alert "unrecognized_name" (RFC 6066 section 3)
UNRECOGNIZED = bytes([ALERT, 3, 3, 0, 2, 2, 112])


class Record(NamedTuple):
    """What was read as one record, with its header; `kind` is None when it is none.

    It is `ended` when the other side said no more: `data` is what came of it, often nothing.
    """

    kind: int | None
    data: bytes
    ended: bool = False

    @property
    def body(self) -> bytes:
        return self.data[HEADER_BYTES:]


async def read_record(reader: asyncio.StreamReader) -> Record:
    """Return the next record. Raises OSError."""
    header = b""
    try:
        header = await reader.readexactly(HEADER_BYTES)
        kind, major, length = header[0], header[1], int.from_bytes(header[3:], "big")
        if kind not in RECORD_KINDS or major != VERSION_MAJOR or length > RECORD_MOST:
            return Record(None, header)
        return Record(kind, header + await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        return Record(None, header + error.partial, ended=True)


async def read_hello(
    reader: asyncio.StreamReader, first: Record | None = None
) -> tuple[str, bytes]:
    """Return whom a ClientHello names, and its records as they came; `first` was read already.

    Raises `BadHello`, OSError.
    """
    hello, name, data = Hello(), None, b""
    while name is None:
        record = first or await read_record(reader)
        first = None
        if record.ended:  # nothing was asked for: connections are opened ahead, or in a race
            raise ConnectionAbortedError("the client left before its ClientHello was whole")
        if record.kind is None:
            raise BadHello("it is no TLS ClientHello")
        name = hello.feed(record.kind, record.body)
        data += record.data
    return name, data


class Crossing:
    """The two directions of a connection whose first hello was sent on."""

    def __init__(self, client: Link, server: Link, name: str) -> None:
        self._client, self._server, self._name = client, server, name
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Future[bool] = self._loop.create_future()
        self._idle_s = IDLE_S

    async def serve(self) -> None:
        """Pass bytes until both sides have ended. Raises `BadHello` and OSError.

        Silence for too long is a TimeoutError. Who calls it aborts both links.
        """
        async with asyncio.timeout(self._idle_s) as self._idle:
            await _both(self._up(), self._down())
        await _both(self._client.finish(FINISH_S), self._server.finish(FINISH_S))

    async def _up(self) -> None:
        while not (self._again.done() and not self._again.result()):
            record = await read_record(self._client.reader)
            if record.kind is None and not record.ended:
                raise BadHello("what follows its TLS ClientHello is no TLS")
            data = record.data
            if record.kind == HANDSHAKE and await self._again:
                name, data = await read_hello(self._client.reader, record)
                if name != self._name:
                    raise BadHello(f"its second TLS ClientHello names another host, {name}")
            await self._send(self._server, data)
            if record.kind == HANDSHAKE or record.ended:
                break
        await self._copy(self._client, self._server)

    async def _down(self) -> None:
        kind: int | None = ALERT
        while kind == ALERT:  # a warning may come first
            record = await read_record(self._server.reader)
            kind = record.kind
            if not self._again.done() and kind != ALERT:
                self._again.set_result(kind == HANDSHAKE and asks_again(record.body))
            await self._send(self._client, record.data)
        await self._copy(self._server, self._client)

    async def _copy(self, source: Link, target: Link) -> None:
        """Pass on what comes, and its end."""
        while data := await source.reader.read(PIECE_BYTES):
            await self._send(target, data)
        target.end()
        self._idle_s = HALF_S
        self._moved()

    async def _send(self, target: Link, data: bytes) -> None:
        await target.send(data)
        self._moved()

    def _moved(self) -> None:
        self._idle.reschedule(self._loop.time() + self._idle_s)


async def _both(one: Coroutine[Any, Any, None], other: Coroutine[Any, Any, None]) -> None:
    """Await both; when one fails the other is cancelled."""
    tasks = (asyncio.ensure_future(one), asyncio.ensure_future(other))
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
