"""One TLS connection through the relay: its hello is read, then bytes pass in both directions.

A server may ask for a second ClientHello (HelloRetryRequest), which comes in the open, too, and may
name somebody else: servers differ in which of the two they obey. So records are looked at until the
server has answered, and a second hello must have the first one's name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

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

FINISH_S = 60.0  # for what is left when both sides have ended
# a fatal alert "unrecognized_name" (RFC 6066 section 3)
UNRECOGNIZED = bytes([ALERT, 3, 3, 0, 2, 2, 112])


class Record:
    """What was read as one record: `kind` is None for anything else, and for the end."""

    __slots__ = ("data", "kind")

    def __init__(self, kind: int | None, data: bytes) -> None:
        self.kind, self.data = kind, data

    @property
    def body(self) -> bytes:
        return self.data[HEADER_BYTES:]


async def read_record(reader: asyncio.StreamReader) -> Record:
    """Return the next record, with its header. Raises OSError."""
    header = b""
    try:
        header = await reader.readexactly(HEADER_BYTES)
        length = int.from_bytes(header[3:], "big")
        if header[0] not in RECORD_KINDS or length > RECORD_MOST:
            return Record(None, header)
        return Record(header[0], header + await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        return Record(None, header + error.partial)


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
        if record.kind is None:
            raise BadHello("it is no TLS ClientHello")
        name = hello.feed(record.kind, record.body)
        data += record.data
    return name, data


class Crossing:
    """The two directions of a connection whose first hello was sent on."""

    def __init__(self, client: Link, server: Link, name: str) -> None:
        self._client, self._server, self._name = client, server, name
        self._again: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

    async def serve(self) -> None:
        """Pass bytes until both sides have ended. Raises `BadHello` and OSError.

        Who calls it aborts both links.
        """
        await _both(self._up(), self._down())
        await _both(self._client.finish(FINISH_S), self._server.finish(FINISH_S))

    async def _up(self) -> None:
        while not (self._again.done() and not self._again.result()):
            record = await read_record(self._client.reader)
            if record.kind is None and record.data:
                raise BadHello("what follows its TLS ClientHello is no TLS")
            data = record.data
            if record.kind == HANDSHAKE and await self._again:
                name, data = await read_hello(self._client.reader, record)
                if name != self._name:
                    raise BadHello(f"its second TLS ClientHello names another host, {name}")
            await self._server.send(data)
            if record.kind in (HANDSHAKE, None):
                break
        await _copy(self._client, self._server)

    async def _down(self) -> None:
        kind: int | None = ALERT
        while kind == ALERT:  # a warning may come first
            record = await read_record(self._server.reader)
            kind = record.kind
            if not self._again.done() and kind != ALERT:
                self._again.set_result(kind == HANDSHAKE and asks_again(record.body))
            await self._client.send(record.data)
        await _copy(self._server, self._client)


async def _copy(source: Link, target: Link) -> None:
    """Pass on what comes, and its end."""
    while data := await source.reader.read(PIECE_BYTES):
        await target.send(data)
    target.writer.write_eof()


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
