"""The daemon's side of the channel to one `dsec-init` (docs/protocol.md).

`AgentChannel` is a `dsecd.backends.abc.Channel`: `open` starts a call whose items, credits and
answer go to a receiver as they come, so that a client's call can be relayed frame by frame, with
its back-pressure end to end. `call` is the short form for the daemon's own calls. Payloads are
never decoded on the way.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import msgspec

from dsecd.backends.abc import Call, Channel, Receiver
from libdsec.errors import Unavailable, from_wire, to_wire
from libdsec.wire import (
    INITIAL_CREDIT,
    Cancel,
    Credit,
    End,
    Failure,
    Frame,
    FrameError,
    Item,
    Reply,
    Request,
    Splitter,
    encode,
    pack,
)  # fmt: skip

# Calls that may change files while they are open.
_CHANGING = ("exec.run", "exec.start", "exec.stdin", "files.", "session.")


class AgentCall:
    """One open call. After its answer every method does nothing."""

    __slots__ = ("_channel", "id", "op", "receiver")

    def __init__(self, channel: AgentChannel, call_id: int, op: str, receiver: Receiver) -> None:
        self._channel, self.id, self.op, self.receiver = channel, call_id, op, receiver

    def send_item(self, data: msgspec.Raw) -> None:
        """Send one item; the caller counts its credits (`INITIAL_CREDIT` at the start)."""
        self._channel._send(self.id, Item(self.id, data))

    def end(self) -> None:
        """The stream of items is complete."""
        self._channel._send(self.id, End(self.id))

    def cancel(self) -> None:
        """Give the call up; its answer still comes."""
        self._channel._send(self.id, Cancel(self.id))

    def grant(self, n: int) -> None:
        """Let the agent send `n` more items."""
        self._channel._send(self.id, Credit(self.id, n))


class _Awaited:
    """The receiver of `AgentChannel.call`: a future, and items for a callback."""

    __slots__ = ("_credit", "_on_item", "_owed", "call", "result")

    def __init__(self, on_item: Callable[[msgspec.Raw], None] | None, credit: int) -> None:
        self.result: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self.call: Call | None = None
        self._on_item, self._credit, self._owed = on_item, credit, 0

    def on_item(self, data: msgspec.Raw) -> None:
        if self._on_item is not None:
            self._on_item(data)
        self._owed += 1
        if self.call is not None and self._owed * 2 >= self._credit:
            self.call.grant(self._owed)
            self._owed = 0

    def on_credit(self, n: int) -> None:
        """The call sends no items."""

    def on_reply(self, result: msgspec.Raw) -> None:
        if not self.result.done():
            self.result.set_result(result)

    def on_failure(self, error: dict[str, object]) -> None:
        if not self.result.done():
            self.result.set_exception(from_wire(error))


class AgentChannel(asyncio.Protocol):
    """A connection to one agent, with any number of calls open on it."""

    def __init__(self, on_closed: Callable[[], None] | None = None) -> None:
        self._on_closed = on_closed
        self._transport: asyncio.Transport | None = None
        self._splitter = Splitter()
        self._calls: dict[int, AgentCall] = {}
        self._next_id = 1
        self._kept: list[bytes] | None = None  # what `held` keeps back, or a detached one
        self._detaching: asyncio.Future[None] | None = None

    @classmethod
    async def connect(cls, path: str, on_closed: Callable[[], None] | None = None) -> AgentChannel:
        """Connect to the agent's unix socket. Raises `OSError` when it cannot be reached.

        `on_closed` is called once when the connection is lost, not after `close`.
        """
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_closed), path)
        return channel

    @classmethod
    async def adopt(
        cls, stream: socket.socket, on_closed: Callable[[], None] | None = None
    ) -> AgentChannel:
        """Return a channel over a connected unix socket, which is the channel's from now on.

        On a port of a VM answers to an earlier connection may still come: no id is used twice.
        """
        loop = asyncio.get_running_loop()
        _, channel = await loop.create_unix_connection(lambda: cls(on_closed), sock=stream)
        channel._next_id = 1 + int.from_bytes(os.urandom(4), "big")
        return channel

    # --- calls ----------------------------------------------------------------------------------

    def open(self, op: str, args: msgspec.Raw, receiver: Receiver) -> AgentCall:
        """Start a call; what comes back goes to `receiver`. Raises `Unavailable` when closed."""
        if self._transport is None and self._kept is None:
            raise Unavailable("the sandbox's agent cannot be reached")
        call = AgentCall(self, self._next_id, op, receiver)
        self._next_id += 1
        frame = encode(Request(call.id, op, args))  # may raise FrameError: nothing is open yet
        self._calls[call.id] = call
        self._write(frame)
        return call

    async def call(
        self,
        op: str,
        args: msgspec.Raw,
        on_item: Callable[[msgspec.Raw], None] | None = None,
        initial_credit: int = INITIAL_CREDIT,
    ) -> msgspec.Raw:
        """See the function of this name."""
        return await call(self, op, args, on_item, initial_credit)

    def _send(self, call_id: int, frame: Frame) -> None:
        if call_id in self._calls:
            self._write(encode(frame))

    def _write(self, frame: bytes) -> None:
        if self._kept is not None:
            self._kept.append(frame)
        elif self._transport is not None:
            self._transport.write(frame)

    @contextlib.contextmanager
    def held(self) -> Iterator[bool]:
        """Keep back whatever is to be sent, until the end.

        Yields whether the agent does nothing to files for anybody: then it begins nothing
        meanwhile. What commands do that run by themselves is another matter.
        """
        assert self._kept is None
        self._kept = []
        try:
            yield not any(call.op.startswith(_CHANGING) for call in self._calls.values())
        finally:
            self._send_kept()

    def _send_kept(self) -> None:
        kept, self._kept = self._kept or [], None
        for frame in kept:
            self._write(frame)

    # --- another connection to the same agent: of a machine that is saved and taken up ----------

    @classmethod
    def detached(cls, on_closed: Callable[[], None] | None = None) -> AgentChannel:
        """Return a channel that has no connection yet: calls wait for `take_over`."""
        channel = cls(on_closed)
        channel._kept = []
        channel._next_id = 1 + int.from_bytes(os.urandom(4), "big")
        return channel

    @contextlib.asynccontextmanager
    async def quiet(self) -> AsyncIterator[None]:
        """Keep back what is to be sent, and have all that was sent have arrived.

        Unless it was detached meanwhile, what was kept is sent in the end.
        """
        assert self._kept is None
        self._kept = []
        try:
            await self.call_ahead("sys.ping", pack({}))
            yield
        finally:
            if self._transport is not None:
                self._send_kept()

    async def call_ahead(self, op: str, args: msgspec.Raw) -> msgspec.Raw:
        """`call`, ahead of what is kept back."""
        awaited = _Awaited(None, INITIAL_CREDIT)
        kept, self._kept = self._kept, None
        try:
            self.open(op, args, awaited)
        finally:
            self._kept = kept
        return await awaited.result

    def detach(self) -> asyncio.Future[None]:
        """Expect the other end to close; calls stay open, and what is to be sent is kept.

        Returns what is done when all that the other end had sent has come. See `attach`.
        """
        self._kept = self._kept or []
        self._detaching = asyncio.get_running_loop().create_future()
        if self._transport is None:
            self._detaching.set_result(None)
        return self._detaching

    async def attach(self, stream: socket.socket) -> None:
        """Go on where it was detached: the agent saw nothing of that. What is kept stays so."""
        self._detaching = None
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=stream)

    def go_on(self) -> None:
        """Send what is kept."""
        self._send_kept()

    def take_over(self, other: AgentChannel) -> None:
        """Go on with the connection of `other`, which has no calls, and send what is kept."""
        transport, other._transport = other._transport, None
        if transport is None:
            raise Unavailable("the connection to the sandbox's agent was lost")
        self._detaching, self._splitter = None, Splitter()
        self._transport = transport
        transport.set_protocol(self)
        self._send_kept()

    def drop_calls(self, reason: str) -> None:
        """Have every open call fail with `Unavailable`; later ones are kept until `take_over`."""
        self._kept = []
        self._fail_calls(reason)

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # not isinstance: uvloop has transports of its own, outside the class tree
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            for frame in self._splitter.feed(data):
                self._receive(frame)
        except FrameError as error:
            self._lose(f"the sandbox's agent broke the protocol: {error}")

    def _receive(self, frame: Frame) -> None:
        if isinstance(frame, Reply):
            call = self._calls.pop(frame.id, None)
            if call is not None:
                call.receiver.on_reply(frame.result)
        elif isinstance(frame, Failure):
            call = self._calls.pop(frame.id, None)
            if call is not None:
                call.receiver.on_failure(frame.error)
        elif isinstance(frame, Item):
            call = self._calls.get(frame.id)
            if call is not None:
                call.receiver.on_item(frame.data)
        elif isinstance(frame, Credit):
            call = self._calls.get(frame.id)
            if call is not None:
                call.receiver.on_credit(frame.n)
        else:
            raise FrameError(f"unexpected {type(frame).__name__}")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._detaching is not None:
            self._transport = None
            if not self._detaching.done():
                self._detaching.set_result(None)
            return
        self._lose(f"the connection to the sandbox's agent was lost: {exc or 'closed'}")

    # --- ends -----------------------------------------------------------------------------------

    def close(self) -> None:
        """Close the connection. Open calls fail with `Unavailable`; commands run on."""
        self._on_closed = None
        self._lose("the channel to the sandbox's agent was closed")

    def _lose(self, reason: str) -> None:
        transport, self._transport = self._transport, None
        self._kept = None
        if transport is not None:
            transport.close()
        self._fail_calls(reason)
        on_closed, self._on_closed = self._on_closed, None
        if on_closed is not None:
            on_closed()

    def _fail_calls(self, reason: str) -> None:
        calls, self._calls = self._calls, {}
        if calls:
            error: dict[str, Any] = to_wire(Unavailable(reason))
            for call in calls.values():
                call.receiver.on_failure(error)


async def call(
    channel: Channel,
    op: str,
    args: msgspec.Raw,
    on_item: Callable[[msgspec.Raw], None] | None = None,
    initial_credit: int = INITIAL_CREDIT,
) -> msgspec.Raw:
    """Make a call and return its result. Raises the `DSecError` it failed with.

    Items go to `on_item` as they come; more are asked for by themselves. `initial_credit`
    above the protocol's 16 is granted at once. A cancelled task cancels the call.
    """
    awaited = _Awaited(on_item, initial_credit)
    opened = awaited.call = channel.open(op, args, awaited)
    if initial_credit > INITIAL_CREDIT:
        opened.grant(initial_credit - INITIAL_CREDIT)
    try:
        return await awaited.result
    except asyncio.CancelledError:
        opened.cancel()
        raise


async def swap_root(path: str, mount_ns: int, upper: int) -> None:
    """Have the agent at `path` send whoever enters the sandbox into another root.

    `mount_ns` and `upper` are those of `host.spawner.Rerooted`; they stay the caller's. Raises
    `WrongState` naming who lives in the old root, which is kept then; `OSError` or `Unavailable`
    when the agent cannot be reached. After a cancelled call it is unknown which root is in use:
    ``/proc/<pid>/fd/8`` of the agent tells.
    """
    await _call_with_fds(path, "root.swap", pack({}), [mount_ns, upper])


async def open_stream(path: str, op: str, args: msgspec.Raw) -> socket.socket:
    """Have the agent at `path` begin `op`, which talks on a stream of its own; return our end.

    Raises what the call is answered with; `OSError` or `Unavailable` when the agent is not reached.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with theirs:
        try:
            await _call_with_fds(path, op, args, [theirs.fileno()])
        except BaseException:
            ours.close()
            raise
    return ours


async def _call_with_fds(path: str, op: str, args: msgspec.Raw, fds: list[int]) -> None:
    """On a connection of its own, because a transport of asyncio carries no descriptors."""
    loop = asyncio.get_running_loop()
    with socket.socket(socket.AF_UNIX) as peer:
        peer.setblocking(False)
        peer.connect(path)  # a unix socket: done or refused at once
        frame = encode(Request(1, op, args))
        sent = socket.send_fds(peer, [frame], fds)
        await loop.sock_sendall(peer, frame[sent:])
        splitter = Splitter()
        while data := await loop.sock_recv(peer, 4096):
            for answer in splitter.feed(data):
                if isinstance(answer, Failure):
                    raise from_wire(answer.error)
                return
    raise Unavailable("the sandbox's agent closed the connection")
