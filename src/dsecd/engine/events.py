"""What happened to sandboxes, to whoever subscribed.

A subscriber that does not read loses events, never the daemon's memory: its queue is bounded, and
the first event after a gap is a marker of kind `dropped` that says how many are missing.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable

from libdsec.model import Event

QUEUE = 1024  # events a subscriber may lag behind


class Subscription:
    """An async iterator of events, of one sandbox or ("" ) of all."""

    def __init__(self, sandbox: str, limit: int) -> None:
        self.sandbox = sandbox
        self.dropped = 0
        self._limit = limit
        self._queue: deque[Event] = deque()
        self._wake = asyncio.Event()
        self._closed = False

    def push(self, event: Event) -> bool:
        """Queue `event`; False when it had to be dropped."""
        if self.sandbox and event.sandbox != self.sandbox:
            return True
        if len(self._queue) >= self._limit:
            self.dropped += 1
            return False
        if self.dropped:
            detail = {"count": str(self.dropped)}
            self._queue.append(Event(time=event.time, sandbox="", kind="dropped", detail=detail))
            self.dropped = 0
        self._queue.append(event)
        self._wake.set()
        return True

    def close(self) -> None:
        self._closed = True
        self._wake.set()

    def __aiter__(self) -> Subscription:
        return self

    async def __anext__(self) -> Event:
        while not self._queue:
            if self._closed:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        return self._queue.popleft()


class Bus:
    """Fan-out of events to the present subscriptions."""

    def __init__(self, limit: int = QUEUE, on_drop: Callable[[], None] = lambda: None) -> None:
        self._limit = limit
        self._subscriptions: set[Subscription] = set()
        self._on_drop = on_drop

    def subscribe(self, sandbox: str = "") -> Subscription:
        subscription = Subscription(sandbox, self._limit)
        self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        self._subscriptions.discard(subscription)
        subscription.close()

    def emit(self, sandbox: str, kind: str, **detail: str) -> None:
        """Tell everybody; costs nothing when nobody listens."""
        if not self._subscriptions:
            return
        event = Event(time=time.time(), sandbox=sandbox, kind=kind, detail=detail)  # type: ignore[arg-type]
        for subscription in self._subscriptions:
            if not subscription.push(event):
                self._on_drop()

    def close(self) -> None:
        for subscription in list(self._subscriptions):
            self.unsubscribe(subscription)
