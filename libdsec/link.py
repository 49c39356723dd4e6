"""A client's way to its daemon: one connection at a time, made anew when it is lost.

Calls that may be repeated are repeated by `Link.call`; streams decide for themselves what a loss
means to them (see `execution`, which re-attaches, and `files`, which fails).
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import time
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, TypeVar, cast

import msgspec

from libdsec import endpoint as endpoints
from libdsec import model, wire
from libdsec.connection import Call, Connection, ConnectionLost
from libdsec.endpoint import Endpoint
from libdsec.errors import (
    DSecError,
    Internal,
    InvalidArgument,
    PermissionDenied,
    Timeout,
    Unavailable,
    Unsupported,
    WrongState,
)
from libdsec.version import __version__

T = TypeVar("T")

_BACKOFF_FIRST_S = 0.02
_BACKOFF_MAX_S = 1.0
_HELLO_TIMEOUT_S = 10.0
_LATE_S = 5.0  # how long close() waits for cancelled creates to be answered and undone


@functools.cache
def _decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def unpack(raw: msgspec.Raw, kind: type[T]) -> T:
    """Decode a result or item. Raises `Internal` when it is not a `kind`."""
    try:
        return cast(T, _decoder(cast(Hashable, kind)).decode(raw))
    except msgspec.DecodeError as error:
        raise Internal(f"the daemon's answer is not understood: {error}") from error


def pack(args: Any) -> msgspec.Raw:
    """Encode arguments. Raises `InvalidArgument` when a value has no wire form."""
    try:
        return wire.pack(args)
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument(f"argument cannot be sent: {error}") from error


class Link:
    """The connection of a client, kept alive. One event loop; not thread-safe."""

    def __init__(
        self, endpoint: Endpoint, token: str, *, reconnect_s: float, request_timeout_s: float
    ) -> None:
        self.endpoint = endpoint
        self.request_timeout_s = request_timeout_s
        self.welcome: model.Welcome | None = None
        self._token = token
        self._reconnect_s = reconnect_s
        self._live: Connection | None = None
        self._lost_at: float | None = None
        self._dialing: asyncio.Task[Connection | DSecError] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._posts: list[tuple[str, msgspec.Raw, str]] = []
        self._closed = False

    # --- life

    async def connection(self) -> Connection:
        """Return the live connection, making it when there is none.

        The first connection is tried once. After a loss, attempts go on with backoff until
        `reconnect_s` after it. Raises `Unavailable`, `PermissionDenied` or `WrongState`.
        """
        if self._live is not None:
            return self._live
        if self._closed:
            raise WrongState("the client is closed", state="closed")
        if self._dialing is None:
            self._dialing = asyncio.create_task(self._dial(), name="libdsec-dial")
        outcome = await asyncio.shield(self._dialing)
        if isinstance(outcome, DSecError):
            raise type(outcome)(outcome.message, **outcome.detail)
        return outcome

    async def close(self) -> None:
        """End every task and the connection. Idempotent."""
        if self._live is not None:
            await self._settle(self._live)
        self._closed = True
        tasks = list(self._tasks)
        if self._dialing is not None:
            tasks.append(self._dialing)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        live, self._live = self._live, None
        if live is not None:
            await live.close()

    async def _settle(self, live: Connection) -> None:
        """Give cancelled creates a moment, so that what they made is stopped."""
        deadline = time.monotonic() + _LATE_S
        while live.late and time.monotonic() < deadline:
            await live.closed_call(deadline - time.monotonic())

    def spawn(self, work: Coroutine[Any, Any, T], name: str) -> asyncio.Task[T]:
        """Run `work` as a task that ends with the client."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- dialing

    async def _dial(self) -> Connection | DSecError:
        try:
            return await self._dial_until()
        except DSecError as error:
            return error
        finally:
            self._dialing = None

    async def _dial_until(self) -> Connection:
        pause = _BACKOFF_FIRST_S
        deadline = (self._lost_at or -self._reconnect_s) + self._reconnect_s
        while True:
            try:
                return await self._dial_once()
            except Unavailable:
                if time.monotonic() + pause > deadline:
                    raise
            await asyncio.sleep(pause)
            pause = min(pause * 2, _BACKOFF_MAX_S)

    async def _dial_once(self) -> Connection:
        connection = await endpoints.dial(self.endpoint, lambda: Connection(self._on_lost))
        try:
            async with asyncio.timeout(_HELLO_TIMEOUT_S):
                await self._greet(connection)
        except TimeoutError as error:
            connection.abort("no answer to hello")
            raise Unavailable(f"{self.endpoint} accepts connections but does not answer") from error
        except BaseException:
            connection.abort("hello failed")
            raise
        self._live, self._lost_at = connection, None
        self._flush_posts(connection)
        return connection

    async def _greet(self, connection: Connection) -> None:
        hello = model.Hello(
            protocol=wire.PROTOCOL, client=f"libdsec/{__version__}", token=self._token
        )
        try:
            raw = await connection.start("hello", pack(hello)).result()
        except PermissionDenied as error:
            raise PermissionDenied(
                f"{error.message}; set DSEC_TOKEN to a token of this daemon", **error.detail
            ) from error
        welcome = unpack(raw, model.Welcome)
        if welcome.protocol != wire.PROTOCOL:
            raise Unsupported(
                f"daemon speaks protocol {welcome.protocol}, this libdsec {wire.PROTOCOL}: "
                "install matching versions"
            )
        self.welcome = welcome

    def _on_lost(self, connection: Connection) -> None:
        if self._live is connection:
            self._live = None
            self._lost_at = time.monotonic()

    # --- calls

    async def start(self, op: str, args: msgspec.Raw, target: str = "") -> Call:
        """Open a call on the live connection; for streams. A loss fails it."""
        while True:
            connection = await self.connection()
            if not connection.lost:
                return connection.start(op, args, target)

    async def call(
        self,
        op: str,
        args: Any,
        kind: type[T],
        *,
        target: str = "",
        retry: bool = False,
        timeout_s: float | None = None,
        on_item: Callable[[msgspec.Raw], None] | None = None,
        on_late_result: Callable[[msgspec.Raw], None] | None = None,
    ) -> T:
        """Make a call that sends no stream and return its decoded result.

        `retry` repeats it on a new connection after a loss (calls that may run twice). `timeout_s`
        None takes the client's `request_timeout_s`; 0 waits for ever. `on_item` is told what comes
        before the answer; what it raises ends the call. `on_late_result` undoes an answer that
        arrives after the call was given up.
        """
        limit = self.request_timeout_s if timeout_s is None else timeout_s
        work = self._repeat(op, pack(args), target, retry, on_item, on_late_result)
        if not limit:
            return unpack(await work, kind)
        try:
            async with asyncio.timeout(limit):
                raw = await work
        except TimeoutError as error:
            raise Timeout(f"{op} was not answered within {limit:g} s", timeout_s=limit) from error
        return unpack(raw, kind)

    async def _repeat(
        self,
        op: str,
        args: msgspec.Raw,
        target: str,
        retry: bool,
        on_item: Callable[[msgspec.Raw], None] | None,
        on_late_result: Callable[[msgspec.Raw], None] | None,
    ) -> msgspec.Raw:
        while True:
            call = await self.start(op, args, target)
            try:
                if on_item is not None:
                    while (item := await call.next_item()) is not None:
                        on_item(item)
                return await call.result()
            except BaseException as error:
                if error is not call.error:  # cancelled, or not wanted any more by `on_item`
                    call.cancel(on_late_result)
                    raise
                if not retry or not isinstance(error, ConnectionLost):
                    raise

    def post(self, op: str, args: Any, target: str = "") -> None:
        """Send a request whose answer does not matter; after a loss, on the next connection.

        Used to undo: it must not wait, since its caller is being cancelled.
        """
        packed = pack(args)
        if self._live is not None:
            self._live.start(op, packed, target).ignore()
        elif not self._closed:
            self._posts.append((op, packed, target))
            if self._dialing is None and self._lost_at is not None:
                self._dialing = asyncio.create_task(self._dial(), name="libdsec-dial")

    def _flush_posts(self, connection: Connection) -> None:
        posts, self._posts = self._posts, []
        for op, packed, target in posts:
            with contextlib.suppress(ConnectionLost):
                connection.start(op, packed, target).ignore()
