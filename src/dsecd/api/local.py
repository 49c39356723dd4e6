"""A call that the daemon answers itself, as a task with an optional stream to the client."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import msgspec

from dsecd.metrics import Registry
from libdsec import wire
from libdsec.errors import DSecError, Internal, Timeout

if TYPE_CHECKING:
    from dsecd.api.connection import ClientConnection

logger = logging.getLogger("dsecd.api")
Handler = Callable[["LocalCall", Any], Awaitable[Any]]


class LocalCall:
    """An `OpenCall`: runs `handler(call, args)` and answers with what it returns or raises."""

    __slots__ = (
        "_begun", "_credit", "_given_up", "_handler", "_registry", "_task", "_wake", "client_lost",
        "connection", "id",
    )  # fmt: skip

    def __init__(
        self, connection: ClientConnection, call_id: int, handler: Handler, registry: Registry
    ) -> None:
        self.connection, self.id = connection, call_id
        self.client_lost = False
        self._handler, self._registry = handler, registry
        self._credit = wire.INITIAL_CREDIT
        self._wake: asyncio.Future[None] | None = None
        self._task: asyncio.Task[None] | None = None
        self._begun = self._given_up = False

    def begin(self, args: Any) -> None:
        self._task = asyncio.get_running_loop().create_task(self._run(args))

    async def _run(self, args: Any) -> None:
        self._begun = True
        try:
            if self._given_up:
                raise asyncio.CancelledError
            result = msgspec.Raw(msgspec.msgpack.encode(await self._handler(self, args)))
        except asyncio.CancelledError:
            self._fail(Timeout("the call was cancelled by its caller"))
        except DSecError as error:
            self._fail(error)
        except Exception as error:
            logger.exception("an operation failed unexpectedly")
            self._fail(Internal(f"unexpected: {error!r}; see the daemon's log"))
        else:
            self.connection.reply(self.id, result)

    def _fail(self, error: DSecError) -> None:
        self._registry.errors.add(error.code)
        self.connection.fail(self.id, error)

    async def send(self, value: Any) -> None:
        """Send one item of the stream, when the client has room for it."""
        while self._credit <= 0 or self.connection.paused:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        self._credit -= 1
        self.connection.write(wire.Item(self.id, wire.pack(value)))

    # --- OpenCall

    def item(self, data: msgspec.Raw) -> None:
        self.connection.violation("an item was sent to an operation that takes none")

    def end(self) -> None:
        """No operation of the daemon takes a stream; its end is no news."""

    def cancel(self) -> None:
        if self._begun and self._task is not None:
            self._task.cancel()
        # a task cancelled before its first step never runs, and the call would stay unanswered
        self._given_up = True

    def credit(self, n: int) -> None:
        self._credit += n
        self.writable()

    def writable(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)

    def lost(self) -> None:
        self.client_lost = True
        self.cancel()
