"""A client of QEMU's monitor protocol, QMP (docs/interop/qmp-spec.txt of QEMU).

One JSON value a line. The server greets, the client negotiates, then every command has one answer,
with its id; events come in between. The other side is a process that may have been taken over by
its guest: a line that is too long or is no QMP ends the connection.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, cast

import msgspec

from libdsec.errors import DSecError, Internal, Timeout, Unavailable, Unsupported, WrongState

LINE_MOST = 1 << 20  # bytes: a console of 64 KiB in base64, a list of hundreds of devices
ANSWER_S = 10.0

OnQmpEvent = Callable[[str, Mapping[str, Any]], None]
OnLost = Callable[[], None]
T = TypeVar("T")

# qapi/error.json; "GenericError" is all the rest
_ERRORS: dict[str, type[DSecError]] = {
    "CommandNotFound": Unsupported,
    "DeviceNotActive": WrongState,
    "DeviceNotFound": Unsupported,
    "KVMMissingCap": Unsupported,
}


class _Error(msgspec.Struct):
    kind: str = msgspec.field(name="class")
    desc: str


class _Line(msgspec.Struct):
    greeting: dict[str, Any] | None = msgspec.field(name="QMP", default=None)
    result: msgspec.Raw | msgspec.UnsetType = msgspec.field(name="return", default=msgspec.UNSET)
    error: _Error | None = None
    id: int | None = None
    event: str | None = None
    data: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Line)
_encoder = msgspec.json.Encoder()


class Qmp(asyncio.Protocol):
    """A connection to one monitor. QEMU serves one at a time: a second one waits for its turn."""

    def __init__(self, handle: socket.socket) -> None:
        self._handle = handle  # the same socket, to pass descriptors by
        self._on_event: OnQmpEvent = _ignored
        self._on_lost: OnLost = _nothing
        self._transport: asyncio.Transport | None = None
        self._rest = b""
        self._ids = itertools.count(1)
        self._last_id = 0
        self._pending: dict[int, tuple[str, asyncio.Future[msgspec.Raw]]] = {}
        self._greeting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._why = "QEMU closed its monitor"

    @classmethod
    async def connect(
        cls,
        connection: socket.socket,
        on_event: OnQmpEvent,
        on_lost: OnLost,
        timeout_s: float = ANSWER_S,
    ) -> Qmp:
        """Negotiate on a connected socket, which is this object's from now on.

        `on_lost` is called once when the connection is lost: not after `close`, nor instead of an
        exception from here. Raises `Timeout` when nobody greets, `Unavailable`.
        """
        loop = asyncio.get_running_loop()
        handle = connection.dup()
        try:
            _, qmp = await loop.create_unix_connection(lambda: cls(handle), sock=connection)
        except BaseException:
            handle.close()
            connection.close()
            raise
        try:
            async with asyncio.timeout(timeout_s):
                await qmp._greeting
            qmp._on_event = on_event  # sent once capabilities are negotiated
            await qmp.execute("qmp_capabilities", timeout_s=timeout_s)
            if qmp._transport is None:
                raise Unavailable(qmp._why)
            qmp._on_lost = on_lost
        except TimeoutError:
            qmp.close()
            raise Timeout(
                f"QEMU's monitor does not greet within {timeout_s:g} s: another process may be "
                "connected to it"
            ) from None
        except BaseException:
            qmp.close()
            raise
        return qmp

    # --- commands -------------------------------------------------------------------------------

    async def execute(
        self,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        descriptor: int = -1,
        timeout_s: float = ANSWER_S,
    ) -> msgspec.Raw:
        """Run a command and return its result, as JSON; `descriptor` is passed beside it.

        Raises the `DSecError` for QEMU's error class, with its words and `qmp_class`; `Timeout`
        when no answer comes, though the command may still be carried out; `Unavailable`.
        """
        if self._transport is None:
            raise Unavailable(f"{command}: {self._why}")
        number = self._last_id = next(self._ids)
        request = {"execute": command, "arguments": arguments or {}, "id": number}
        line = _encoder.encode(request) + b"\n"
        result: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()
        self._pending[number] = command, result
        try:
            if descriptor >= 0:
                self._pass(line, descriptor)
            else:
                self._transport.write(line)
            async with asyncio.timeout(timeout_s):
                return await result
        except TimeoutError:
            raise Timeout(f"QEMU does not answer {command} within {timeout_s:g} s") from None
        finally:
            self._pending.pop(number, None)

    async def ask(
        self,
        command: str,
        answer: type[T],
        arguments: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> T:
        """Run a command whose result is an `answer`. Raises as `execute`, `Internal`."""
        result = await self.execute(command, arguments, timeout_s=timeout_s)
        try:
            return msgspec.json.decode(result, type=answer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Internal(f"QEMU answers {command} with something else: {error}") from error

    def _pass(self, line: bytes, descriptor: int) -> None:
        """Send a line with a descriptor, past the transport: nothing of it may still be waiting."""
        assert self._transport is not None
        try:
            if self._transport.get_write_buffer_size():
                raise BlockingIOError
            sent = socket.send_fds(self._handle, [line], [descriptor])
        except OSError as error:
            raise Unavailable("QEMU's monitor takes no descriptor now") from error
        if sent < len(line):
            self._transport.write(line[sent:])

    def close(self) -> None:
        """End the connection; commands without an answer fail with `Unavailable`."""
        self._on_lost = _nothing
        self._on_event = _ignored
        if self._transport is not None:
            self._transport.abort()
        self._lose("the connection was closed")

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        lines = (self._rest + data if self._rest else data).split(b"\n")
        self._rest = lines.pop()
        for line in lines:
            if self._transport is None:
                return  # a line before ended it
            if line.strip():
                self._take(line)
        if len(self._rest) > LINE_MOST:
            self._reject(f"QEMU sent a line of more than {LINE_MOST} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(self._why)

    def _take(self, line: bytes) -> None:
        try:
            message = _decoder.decode(line)
        except (msgspec.MsgspecError, RecursionError):
            self._reject("QEMU sent a line that is not QMP")
            return
        if message.event is not None:
            self._on_event(message.event, message.data)
        elif message.greeting is not None:
            if not self._greeting.done():
                self._greeting.set_result(None)
        else:
            self._answer(message)

    def _answer(self, message: _Line) -> None:
        number = message.id
        if number is None or not 0 < number <= self._last_id:
            self._reject("QEMU answered what it was not asked")
            return
        command, result = self._pending.pop(number, ("", None))
        if result is None or result.done():
            return  # given up
        if message.error is not None:
            kind = _ERRORS.get(message.error.kind, Internal)
            text = f"QEMU refuses {command}: {message.error.desc}"
            result.set_exception(
                kind(text, reason=message.error.desc, qmp_class=message.error.kind)
            )
        elif isinstance(message.result, msgspec.Raw):
            result.set_result(message.result.copy())
        else:
            result.set_exception(Internal(f"QEMU answers {command} with neither result nor error"))

    def _reject(self, why: str) -> None:
        transport = self._transport
        self._lose(why)
        if transport is not None:
            transport.abort()

    def _lose(self, why: str) -> None:
        if self._transport is None:
            return
        self._transport, self._why, self._rest = None, why, b""
        self._handle.close()
        pending, self._pending = self._pending, {}
        for command, result in pending.values():
            if not result.done():
                result.set_exception(Unavailable(f"{command}: {why}"))
        if not self._greeting.done():
            self._greeting.set_exception(Unavailable(why))
        on_lost, self._on_lost = self._on_lost, _nothing
        on_lost()


def _nothing() -> None:
    """Nobody listens any more."""


def _ignored(event: str, data: Mapping[str, Any]) -> None:
    """Nobody listens any more."""
