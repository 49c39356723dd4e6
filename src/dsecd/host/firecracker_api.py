"""A client of Firecracker's API: HTTP over a unix socket, one request at a time.

The one connection stays open, so that its end tells when Firecracker ends. Shapes are those of
src/firecracker/swagger/firecracker.yaml of Firecracker.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar, cast

import h11
import msgspec

from libdsec.errors import DSecError, Internal, Timeout, Unavailable, Unsupported

Method = Literal["GET", "PUT", "PATCH"]
ANSWER_S = 10.0
BODY_MOST = 1 << 20  # bytes
_HEAD_MOST = 16 << 10
_UNKNOWN = ("Invalid request method and/or path", "unknown field")  # of an older Firecracker
T = TypeVar("T")


class _Fault(msgspec.Struct):
    fault_message: str = ""


class FirecrackerApi(asyncio.Protocol):
    """A connection to the API of one Firecracker."""

    def __init__(self) -> None:
        self._on_lost: Callable[[], None] = _nothing
        self._http = h11.Connection(h11.CLIENT, max_incomplete_event_size=_HEAD_MOST)
        self._transport: asyncio.Transport | None = None
        self._turn = asyncio.Lock()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._status, self._body = 0, b""
        self._why = "Firecracker closed its API"

    @classmethod
    async def connect(
        cls, connection: socket.socket, on_lost: Callable[[], None]
    ) -> FirecrackerApi:
        """Take a connected socket. `on_lost` is called once when it is lost, not after `close`."""
        loop = asyncio.get_running_loop()
        _, api = await loop.create_unix_connection(cls, sock=connection)
        if api._transport is None:
            raise Unavailable(api._why)
        api._on_lost = on_lost
        return api

    async def call(
        self,
        method: Method,
        path: str,
        body: Mapping[str, Any] | None = None,
        timeout_s: float = ANSWER_S,
    ) -> bytes:
        """Make a request and return what came with its answer.

        Raises `Unsupported` for what this Firecracker does not know, `Internal` with its words for
        what it refuses, `Timeout` (the connection is then given up), `Unavailable`.
        """
        async with self._turn:
            status, content = await self._exchange(method, path, body, timeout_s)
        if status >= 400:
            raise _refusal(method, path, content)
        return content

    async def ask(self, path: str, answer: type[T]) -> T:
        """Return what is at `path`, which is an `answer`. Raises as `call`."""
        content = await self.call("GET", path)
        try:
            return msgspec.json.decode(content, type=answer)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise Internal(
                f"Firecracker answers GET {path} with something else: {error}"
            ) from error

    async def _exchange(
        self, method: Method, path: str, body: Mapping[str, Any] | None, timeout_s: float
    ) -> tuple[int, bytes]:
        if self._transport is None:
            raise Unavailable(f"{method} {path}: {self._why}")
        content = b"" if body is None else msgspec.json.encode(body)
        headers = [("Host", "localhost"), ("Accept", "application/json")]
        if content:
            headers += [
                ("Content-Type", "application/json"),
                ("Content-Length", str(len(content))),
            ]
        request = h11.Request(method=method, target=path, headers=headers)
        events = (request, h11.Data(data=content), h11.EndOfMessage())
        self._answer = asyncio.get_running_loop().create_future()
        self._status, self._body = 0, b""
        self._transport.write(b"".join(self._http.send(event) or b"" for event in events))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._answer
        except TimeoutError:
            self._reject(f"Firecracker did not answer {method} {path}")
            raise Timeout(
                f"Firecracker does not answer {method} {path} within {timeout_s:g} s"
            ) from None
        except asyncio.CancelledError:
            self._reject(f"{method} {path} was given up")  # its answer would be taken for another's
            raise
        finally:
            self._answer = None

    def close(self) -> None:
        """End the connection; a request without an answer fails with `Unavailable`."""
        self._on_lost = _nothing
        self._reject("the connection was closed")

    # --- asyncio.Protocol -----------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._http.receive_data(data)
            self._read()
        except h11.RemoteProtocolError as error:
            self._reject(f"Firecracker does not speak HTTP: {error}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(self._why)

    def _read(self) -> None:
        while self._transport is not None:
            event = self._http.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                return
            if self._answer is None or isinstance(event, h11.ConnectionClosed):
                self._reject("Firecracker answered what it was not asked")
            elif isinstance(event, h11.Response):
                self._status = event.status_code
            elif isinstance(event, h11.Data):
                self._body += event.data
                if len(self._body) > BODY_MOST:
                    self._reject(f"Firecracker answered with more than {BODY_MOST} bytes")
            elif isinstance(event, h11.EndOfMessage):
                self._finish()

    def _finish(self) -> None:
        assert self._answer is not None
        if not self._answer.done():
            self._answer.set_result((self._status, self._body))
        if self._http.our_state is h11.DONE and self._http.their_state is h11.DONE:
            self._http.start_next_cycle()
        else:
            self._reject(self._why)  # it said that it closes

    def _reject(self, why: str) -> None:
        transport = self._transport
        self._lose(why)
        if transport is not None:
            transport.abort()

    def _lose(self, why: str) -> None:
        if self._transport is None:
            return
        self._transport, self._why = None, why
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Unavailable(why))
        on_lost, self._on_lost = self._on_lost, _nothing
        on_lost()


def _refusal(method: str, path: str, content: bytes) -> DSecError:
    try:
        words = msgspec.json.decode(content, type=_Fault).fault_message
    except (msgspec.MsgspecError, RecursionError):
        words = content[:200].decode("utf-8", "replace")
    if any(mark in words for mark in _UNKNOWN):
        return Unsupported(
            f"this Firecracker does not know {method} {path} in this form: {words}", reason=words
        )
    return Internal(f"Firecracker refuses {method} {path}: {words}", reason=words)


def _nothing() -> None:
    """Nobody listens any more."""
