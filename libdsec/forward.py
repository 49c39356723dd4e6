"""TCP connections to ports on a sandbox's loopback, as ordinary asyncio streams."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Iterable
from types import TracebackType
from typing import Any, cast

import msgspec

from libdsec import model, wire
from libdsec.connection import Call
from libdsec.errors import DSecError
from libdsec.link import Link, pack, unpack

_HIGH_WATER = 1 << 20
_LOW_WATER = 256 << 10
_LINGER_S = 30.0  # a closed stream's wait for the service to close too


class ForwardTransport(asyncio.Transport):
    """A duplex byte stream over one `net.forward` call, with flow control in both directions."""

    def __init__(self, call: Call, protocol: asyncio.Protocol) -> None:
        super().__init__({"peername": ("sandbox", call.id)})
        self._call = call
        self._protocol = protocol
        self._loop = asyncio.get_running_loop()
        self._out: deque[bytes] = deque()
        self._out_size = 0
        self._eof = self._eof_sent = False
        self._closing = False
        self._ended = False  # the peer closed and the protocol knows
        self._lost = False
        self._reading = True
        self._protocol_paused = False
        self._unread: deque[msgspec.Raw] = deque()
        call.on_item = self._on_item
        call.on_change = self._on_change
        protocol.connection_made(self)

    # --- reading

    def is_reading(self) -> bool:
        return self._reading and not self._closing

    def pause_reading(self) -> None:
        self._reading = False

    def resume_reading(self) -> None:
        self._reading = True
        while self._unread and self._reading:
            self._deliver(self._unread.popleft())
        if self._call.closed and not self._unread:
            self._finish()

    def _on_item(self, raw: msgspec.Raw) -> None:
        if self._reading:
            self._deliver(raw)
        else:
            self._unread.append(raw)  # at most a window: credit is granted on delivery

    def _deliver(self, raw: msgspec.Raw) -> None:
        self._call.grant(1)
        if not self._closing:
            self._protocol.data_received(unpack(raw, bytes))

    # --- writing

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        if self._eof:
            raise RuntimeError("cannot write after write_eof()")
        if self._closing or not data:
            return
        if self._ended:  # nobody is there to read it: the next `drain` says so
            self._give_up(None)
            return
        view = memoryview(data)
        for start in range(0, len(view), wire.MAX_ITEM):
            self._out.append(bytes(view[start : start + wire.MAX_ITEM]))
        self._out_size += len(view)
        self._flush()
        if self._out_size > _HIGH_WATER and not self._protocol_paused:
            self._protocol_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview[Any]]) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self._eof = True
        self._flush()

    def get_write_buffer_size(self) -> int:
        return self._out_size

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return (_LOW_WATER, _HIGH_WATER)

    def _flush(self) -> None:
        while self._out and self._call.may_send:
            chunk = self._out.popleft()
            self._out_size -= len(chunk)
            self._call.send_now(chunk)
        if self._protocol_paused and self._out_size <= _LOW_WATER:
            self._protocol_paused = False
            self._protocol.resume_writing()
        if not self._out and self._eof and not self._eof_sent:
            self._eof_sent = True
            self._call.end()
        if not self._out and self._closing:
            self._give_up(None, graceful=True)

    # --- ending

    def _on_change(self) -> None:
        if not self._call.closed:
            self._flush()
        elif not self._unread or self._call.error is not None:
            self._finish()

    def _finish(self) -> None:
        """The peer closed: a clean end is an EOF, a failure a reset connection.

        After an EOF the transport stays open until its owner closes it or writes, as a socket does:
        what was written before has arrived, and a `drain` that comes late must not fail.
        """
        error = self._call.error
        if error is not None:
            self._give_up(ConnectionResetError(error.message))
            return
        if self._lost or self._ended:
            return
        self._ended = True
        stays = not self._closing and self._protocol.eof_received()
        if self._out or not stays:
            self._give_up(None)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        """Close after what was written is sent."""
        if not self._closing:
            self._closing = True
            self._flush()

    def abort(self) -> None:
        self._out.clear()
        self._out_size = 0
        self._give_up(None)

    def _give_up(self, error: Exception | None, *, graceful: bool = False) -> None:
        if self._lost:
            return
        self._lost = self._closing = True
        self._unread.clear()
        if not self._call.closed:
            self._part(graceful)
        self._loop.call_soon(self._protocol.connection_lost, error)

    def _part(self, graceful: bool) -> None:
        """Leave the call as close(2) leaves a socket: what was sent arrives, what comes resets."""
        call = self._call
        if not graceful:
            call.cancel()
            return
        if not self._eof_sent:
            call.end()
        call.on_item = lambda raw: call.cancel()
        call.on_change = None
        self._loop.call_later(_LINGER_S, _cancel_open, call)

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        raise NotImplementedError("the limits of a forwarded connection are fixed")

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = cast(asyncio.Protocol, protocol)


def _cancel_open(call: Call) -> None:
    if not call.closed:
        call.cancel()


async def connect(
    link: Link, sandbox_id: str, port: int
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """Open a connection to `port` on the sandbox's loopback."""
    call = await link.start("net.forward", pack(model.ForwardArgs(port=port)), sandbox_id)
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(limit=wire.MAX_ITEM, loop=loop)
    protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
    transport = ForwardTransport(call, protocol)
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


class ForwardServer:
    """A local TCP server whose connections go to a port in the sandbox."""

    def __init__(self, link: Link, sandbox_id: str, port: int) -> None:
        self._link = link
        self._sandbox_id = sandbox_id
        self._port = port
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    @property
    def local_port(self) -> int:
        """The port that the server listens on."""
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    async def start(self, host: str, local_port: int) -> None:
        self._server = await asyncio.start_server(self._accept, host, local_port)

    async def close(self) -> None:
        """Stop listening and drop the open connections."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        for task in self._connections:
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def __aenter__(self) -> ForwardServer:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = self._link.spawn(self._serve(reader, writer), "libdsec-forward")
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far: asyncio.StreamWriter | None = None
        try:
            far_reader, far = await connect(self._link, self._sandbox_id, self._port)
            async with asyncio.TaskGroup() as both:
                both.create_task(_pump(reader, far))
                both.create_task(_pump(far_reader, writer))
        except* (OSError, DSecError):
            writer.transport.abort()  # the sandbox refused or reset: so do we
        finally:
            for end in (writer, far):
                if end is not None:
                    end.close()
                    with contextlib.suppress(OSError):
                        await end.wait_closed()


async def _pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    while data := await source.read(wire.MAX_ITEM):
        sink.write(data)
        await sink.drain()
    if sink.can_write_eof():
        with contextlib.suppress(OSError):
            sink.write_eof()
