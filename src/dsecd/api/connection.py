"""One client connection: frames in, frames out, many calls at once.

Memory is bounded on every side. A stream has at most `INITIAL_CREDIT` items under way. When the
client does not read, `pause_writing` stops us from reading its requests and credits, so nothing new
is started; what streams opened before may still send is cut off at `MAX_BUFFER`, where the
connection is dropped (commands go on and can be attached to again).
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol, cast

import msgspec

from dsecd.model import Principal
from libdsec import wire
from libdsec.errors import DSecError, Exhausted, InvalidArgument, PermissionDenied, to_wire

logger = logging.getLogger("dsecd.api")
HIGH_WATER = 1 << 20  # bytes unsent before reading stops
MAX_BUFFER = 64 << 20  # bytes unsent before the client counts as gone
HELLO_TIMEOUT_S = 10.0
MAX_OP = 64


class OpenCall(Protocol):
    """A call of this connection, answered here or in a sandbox."""

    def item(self, data: msgspec.Raw) -> None: ...
    def end(self) -> None: ...
    def cancel(self) -> None: ...
    def credit(self, n: int) -> None: ...
    def lost(self) -> None: ...
    def writable(self) -> None: ...


class Router(Protocol):
    """What a connection asks for; implemented by the server."""

    calls_per_connection: int

    def greet(self, connection: ClientConnection, args: msgspec.Raw) -> msgspec.Raw: ...
    def open(self, connection: ClientConnection, request: wire.Request) -> OpenCall | None: ...
    def opened(self, connection: ClientConnection) -> None: ...
    def closed(self, connection: ClientConnection) -> None: ...


class ClientConnection(asyncio.Protocol):
    """The server side of one transport."""

    def __init__(self, router: Router, admit: Callable[[socket.socket], Principal] | None) -> None:
        self.principal: Principal | None = None
        self.greeted = False
        self.lost = False
        self.reset = False  # the peer went without reading all that was sent
        self.paused = False
        self.fresh: set[str] = set()  # sandboxes whose create was answered here, not used since
        self.calls: dict[int, OpenCall] = {}
        self._router, self._admit = router, admit
        self._splitter = wire.Splitter()
        self._transport: asyncio.Transport | None = None
        self._hello_timer: asyncio.TimerHandle | None = None

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self._router.opened(self)
        self._transport.set_write_buffer_limits(high=HIGH_WATER)
        self._hello_timer = asyncio.get_running_loop().call_later(HELLO_TIMEOUT_S, self.abort)
        if self._admit is not None:
            try:
                self.principal = self._admit(transport.get_extra_info("socket"))
            except PermissionDenied as error:
                self._refuse(0, error)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.feed(data):
                if self.lost:
                    return
                self._dispatch(frame)
        except wire.FrameError as error:
            logger.warning("connection dropped: %s", error)
            self.abort()

    def eof_received(self) -> bool:
        return False  # close: half-open clients are of no use

    def pause_writing(self) -> None:
        self.paused = True
        if self._transport is not None:
            self._transport.pause_reading()

    def resume_writing(self) -> None:
        self.paused = False
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()
        for call in tuple(self.calls.values()):
            call.writable()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        self.reset = isinstance(error, ConnectionError)
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        calls, self.calls = self.calls, {}
        for call in calls.values():
            call.lost()
        self._router.closed(self)

    # --- answers

    def write(self, frame: wire.Frame) -> None:
        """Send `frame`; nothing happens once the connection is lost."""
        if self.lost or self._transport is None:
            return
        self._transport.write(wire.encode(frame))
        if self.paused and self._transport.get_write_buffer_size() > MAX_BUFFER:
            logger.warning("connection dropped: the client does not read")
            self.abort()

    def reply(self, call_id: int, result: msgspec.Raw) -> None:
        """Answer and close a call. A result too large for a frame becomes a failure."""
        self.calls.pop(call_id, None)
        try:
            self.write(wire.Reply(call_id, result))
        except wire.FrameError as error:
            self.fail(call_id, Exhausted(f"the answer is too large: {error}"))

    def fail(self, call_id: int, error: DSecError) -> None:
        self.calls.pop(call_id, None)
        self.write(wire.Failure(call_id, to_wire(error)))

    def violation(self, why: str) -> None:
        """The client broke the rules of the protocol."""
        logger.warning("connection dropped: %s", why)
        self.abort()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def close(self) -> None:
        """Close after what was written is sent."""
        if self._transport is not None:
            self._transport.close()

    # --- requests

    def _dispatch(self, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Request):
            self._request(frame)
            return
        if isinstance(frame, (wire.Reply, wire.Failure)):
            raise wire.FrameError(f"a client does not send {type(frame).__name__}")
        call = self.calls.get(frame.id)
        if call is None:
            return  # crossed our answer
        if isinstance(frame, wire.Item):
            call.item(frame.data)
        elif isinstance(frame, wire.Credit):
            if frame.n <= 0:
                raise wire.FrameError("credit must be positive")
            call.credit(frame.n)
        elif isinstance(frame, wire.End):
            call.end()
        else:
            call.cancel()

    def _request(self, request: wire.Request) -> None:
        if not self.greeted:
            self._greet(request)
            return
        if request.id in self.calls:
            raise wire.FrameError(f"call id {request.id} is already open")
        if len(request.op) > MAX_OP:
            raise wire.FrameError("the operation's name is too long")
        if len(self.calls) >= self._router.calls_per_connection:
            most = self._router.calls_per_connection
            self.fail(request.id, Exhausted(f"{most} calls are open on this connection"))
            return
        try:
            call = self._router.open(self, request)
        except DSecError as error:
            self.fail(request.id, error)
            return
        if call is not None and not self.lost:
            self.calls[request.id] = call

    def _greet(self, request: wire.Request) -> None:
        if request.op != "hello":
            self._refuse(request.id, InvalidArgument("the first call must be hello", field="op"))
            return
        try:
            welcome = self._router.greet(self, request.args)
        except DSecError as error:
            self._refuse(request.id, error)
            return
        self.greeted = True
        if self._hello_timer is not None:
            self._hello_timer.cancel()
        self.reply(request.id, welcome)

    def _refuse(self, call_id: int, error: DSecError) -> None:
        self.fail(call_id, error)
        self.close()
