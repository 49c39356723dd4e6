"""One live connection: frames in, frames out, many calls at once.

A `Call` is driven by the connection's callbacks and awaited by exactly one receiver and at most
one sender. It keeps at most `wire.INITIAL_CREDIT` unread items; the peer waits beyond that.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from typing import Any, cast

import msgspec

from libdsec import wire
from libdsec.errors import DSecError, Unavailable, WrongState, from_wire

_GRANT_AFTER = wire.INITIAL_CREDIT // 2  # one Credit frame per this many items read


class ConnectionLost(Unavailable):
    """The connection ended while the call was open; whether the call had effect is unknown."""


class Call:
    """An open call. Made by `Connection.start`."""

    __slots__ = (
        "_connection", "_consumed", "_credit", "_error", "_items", "_receiver", "_result",
        "_sender", "abandoned", "closed", "id", "on_change", "on_item", "on_late_item",
        "on_late_result",
    )  # fmt: skip

    def __init__(self, connection: Connection, call_id: int) -> None:
        self.id = call_id
        self.closed = False
        self.abandoned = False
        self.on_item: Callable[[msgspec.Raw], None] | None = None
        self.on_change: Callable[[], None] | None = None
        self.on_late_item: Callable[[msgspec.Raw], None] | None = None
        self.on_late_result: Callable[[msgspec.Raw], None] | None = None
        self._connection = connection
        self._items: deque[msgspec.Raw] = deque()
        self._consumed = 0
        self._credit = wire.INITIAL_CREDIT
        self._receiver: asyncio.Future[None] | None = None
        self._sender: asyncio.Future[None] | None = None
        self._result: msgspec.Raw | None = None
        self._error: DSecError | None = None

    @property
    def error(self) -> DSecError | None:
        """Why the call failed, once it is closed."""
        return self._error

    @property
    def may_send(self) -> bool:
        """Whether an item can be sent now without waiting."""
        return self._credit > 0 and not self.closed and not self._connection.paused

    # --- receiving

    async def next_item(self) -> msgspec.Raw | None:
        """Return the next item, or None once the peer answered. Raises the call's failure."""
        while not self._items:
            if self.closed:
                if self._error is not None:
                    raise self._error
                return None
            await self._wait_received()
        item = self._items.popleft()
        self._consumed += 1
        if self._consumed >= _GRANT_AFTER:
            self.grant(self._consumed)
            self._consumed = 0
        return item

    async def result(self) -> msgspec.Raw:
        """Return the peer's answer; unread items stay. Raises the call's failure."""
        while not self.closed:
            await self._wait_received()
        if self._error is not None:
            raise self._error
        return cast(msgspec.Raw, self._result)

    def take_unread(self) -> list[msgspec.Raw]:
        """Return and forget the items that were received and not read."""
        unread = list(self._items)
        self._items.clear()
        return unread

    def grant(self, items: int) -> None:
        """Let the peer send `items` more."""
        if not self.closed:
            self._connection.write(wire.Credit(self.id, items))

    async def _wait_received(self) -> None:
        if self._receiver is not None:
            raise WrongState("another task already reads this stream")
        self._receiver = asyncio.get_running_loop().create_future()
        try:
            await self._receiver
        finally:
            self._receiver = None

    # --- sending

    async def send(self, data: Any) -> None:
        """Send one item of at most `wire.MAX_ITEM` bytes; wait for the peer's credit.

        Raises the call's failure, or `WrongState` when the peer answered before the stream's end.
        """
        while not self.may_send:
            if self.closed:
                raise self._error or WrongState("the call ended before its stream was complete")
            if self._sender is not None:
                raise WrongState("another task already writes this stream")
            self._sender = asyncio.get_running_loop().create_future()
            try:
                await self._sender
            finally:
                self._sender = None
        self.send_now(data)

    def send_now(self, data: Any) -> None:
        """Send one item; only when `may_send`."""
        self._credit -= 1
        self._connection.write(wire.Item(self.id, wire.pack(data)))

    def end(self) -> None:
        """Tell the peer that our stream is complete."""
        if not self.closed:
            self._connection.write(wire.End(self.id))

    def cancel(self, on_late_result: Callable[[msgspec.Raw], None] | None = None) -> None:
        """Give the call up. Unread and later items are dropped.

        The peer may have answered already: `on_late_result` then gets that answer, so that what
        it made can be undone.
        """
        self.abandoned = True
        self._items.clear()
        self.on_late_result = on_late_result
        if not self.closed:
            self._connection.write(wire.Cancel(self.id))
        elif self._result is not None and on_late_result is not None:
            on_late_result(self._result)

    def ignore(self) -> None:
        """Stop listening without asking the peer to give up."""
        self.abandoned = True

    # --- called by the connection

    def receive(self, data: msgspec.Raw) -> None:
        if self.abandoned:
            if self.on_late_item is not None:
                self.on_late_item(data)
            return
        if self.on_item is not None:
            self.on_item(data)
            return
        self._items.append(data)
        _wake(self._receiver)

    def credited(self, items: int) -> None:
        self._credit += items
        self.writable()

    def writable(self) -> None:
        _wake(self._sender)
        if self.on_change is not None:
            self.on_change()

    def finish(self, result: msgspec.Raw | None, error: DSecError | None) -> None:
        self.closed = True
        self._result, self._error = result, error
        _wake(self._receiver)
        _wake(self._sender)
        if self.on_change is not None:
            self.on_change()
        if self.abandoned and result is not None and self.on_late_result is not None:
            self.on_late_result(result)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)


class Connection(asyncio.Protocol):
    """The protocol of one transport. `on_lost` is called once, when it is gone."""

    def __init__(self, on_lost: Callable[[Connection], None]) -> None:
        self.paused = False
        self.lost = False
        self._on_lost = on_lost
        self._transport: asyncio.Transport | None = None
        self._splitter = wire.Splitter()
        self._calls: dict[int, Call] = {}
        self._next_id = 0
        self._reason = "the daemon closed the connection"
        self._answered: asyncio.Event | None = None
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.feed(data):
                self._dispatch(frame)
        except wire.FrameError as error:
            self.abort(f"the daemon broke the protocol: {error}")

    def pause_writing(self) -> None:
        self.paused = True

    def resume_writing(self) -> None:
        self.paused = False
        for call in tuple(self._calls.values()):
            call.writable()

    def connection_lost(self, error: Exception | None) -> None:
        self.lost = True
        reason = f"{self._reason}: {error}" if error else self._reason
        calls, self._calls = self._calls, {}
        self._on_lost(self)
        for call in calls.values():
            call.finish(None, ConnectionLost(f"connection lost: {reason}"))
        self._note_answer()
        if not self._gone.done():
            self._gone.set_result(None)

    # --- calls

    def start(self, op: str, args: msgspec.Raw, target: str = "") -> Call:
        """Send a request and return its call. Raises `ConnectionLost` on a dead connection."""
        if self.lost:
            raise ConnectionLost(f"connection lost: {self._reason}")
        self._next_id += 1
        call = Call(self, self._next_id)
        frame = wire.encode(wire.Request(call.id, op, args, target))
        self._calls[call.id] = call
        cast(asyncio.Transport, self._transport).write(frame)
        return call

    def write(self, frame: wire.Frame) -> None:
        if not self.lost:
            cast(asyncio.Transport, self._transport).write(wire.encode(frame))

    @property
    def late(self) -> list[Call]:
        """Cancelled calls whose answer has yet to arrive and will need undoing."""
        return [c for c in self._calls.values() if c.abandoned and c.on_late_result is not None]

    async def closed_call(self, timeout_s: float) -> None:
        """Return when a call is answered, the connection is lost, or `timeout_s` has passed."""
        self._answered = asyncio.Event()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._answered.wait()

    def abort(self, reason: str) -> None:
        """Drop the connection at once."""
        self._reason = reason
        if self._transport is not None:
            self._transport.abort()

    async def close(self) -> None:
        """Close after what was written is sent; return when the transport is gone."""
        self._reason = "the client was closed"
        if self._transport is None or self.lost:
            return
        self._transport.close()
        try:
            async with asyncio.timeout(2):  # TLS waits for the peer's close_notify
                await asyncio.shield(self._gone)
        except TimeoutError:
            self._transport.abort()
            await self._gone

    def _dispatch(self, frame: wire.Frame) -> None:
        call = self._calls.get(frame.id)
        if call is None:
            return  # an item or credit that crossed our own end of the call
        if isinstance(frame, wire.Item):
            call.receive(frame.data)
        elif isinstance(frame, wire.Reply):
            self._finish(call, frame.result, None)
        elif isinstance(frame, wire.Failure):
            self._finish(call, None, from_wire(frame.error))
        elif isinstance(frame, wire.Credit):
            call.credited(frame.n)
        else:
            raise wire.FrameError(f"a daemon does not send {type(frame).__name__}")

    def _finish(self, call: Call, result: msgspec.Raw | None, error: DSecError | None) -> None:
        del self._calls[call.id]
        call.finish(result, error)
        self._note_answer()

    def _note_answer(self) -> None:
        if self._answered is not None:
            self._answered.set()
