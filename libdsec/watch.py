"""A running watch of a directory in a sandbox."""

from __future__ import annotations

import asyncio
import inspect
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Literal, TypeAlias

from libdsec import model
from libdsec.connection import Call
from libdsec.errors import WrongState
from libdsec.link import Link, unpack


@dataclass(frozen=True, slots=True)
class FileEvent:
    """Something happened to `name`, relative to the watched directory.

    ``overflow`` says that events were lost because they came faster than they were read.
    """

    kind: Literal["create", "modify", "remove", "rename_from", "rename_to", "attrib", "overflow"]
    name: str


EventCallback: TypeAlias = Callable[[FileEvent], Awaitable[None] | None]


class WatchHandle:
    """Iterate to get `FileEvent`s; `stop` it, or use it as a context manager.

    The iteration ends when the watch is stopped, and raises `Unavailable` when the connection is
    lost: events of the time between would be missing.
    """

    def __init__(self, link: Link, call: Call, on_event: EventCallback | None) -> None:
        self._call = call
        self._stopped = False
        self._reader: asyncio.Task[None] | None = None
        if on_event is not None:
            self._reader = link.spawn(self._pump(on_event), "libdsec-watch")

    def __aiter__(self) -> WatchHandle:
        return self

    async def __anext__(self) -> FileEvent:
        if self._reader is not None:
            raise WrongState("the events go to the callback of this handle")
        event = await self._next()
        if event is None:
            raise StopAsyncIteration
        return event

    async def stop(self) -> None:
        """End the watch. Stopping twice is no error."""
        self._stopped = True
        if not self._call.closed:
            self._call.cancel()
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def __aenter__(self) -> WatchHandle:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.stop()

    async def _next(self) -> FileEvent | None:
        if self._stopped:
            return None
        raw = await self._call.next_item()
        if raw is None:
            return None
        event = unpack(raw, model.WatchEvent)
        return FileEvent(event.kind, os.fsdecode(event.name))

    async def _pump(self, on_event: EventCallback) -> None:
        while (event := await self._next()) is not None:
            answer = on_event(event)
            if inspect.isawaitable(answer):
                await answer
