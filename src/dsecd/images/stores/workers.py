"""A few threads for calls that may block for ever, as those into a dead network mount do.

A stuck call keeps its thread, which nothing can end; it is left behind. So the threads are daemons
(an executor's are joined at exit), few, and whoever waits for one gives up after a time without
progress. A call that comes to life again later finds that nobody waits, and stops at its next
`beat`.
"""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

from libdsec.errors import Unavailable

T = TypeVar("T")


class Abandoned(Exception):
    """Nobody waits for this call any more."""


class Call:
    """One call in a thread, as its function sees it."""

    def __init__(self, function: Callable[[Call], Any], future: asyncio.Future[Any]) -> None:
        self.function, self.future = function, future
        self.last = time.monotonic()
        self.started = self.abandoned = False

    def beat(self) -> None:
        """Say that there is progress. Raises `Abandoned`: call it before each lasting step."""
        if self.abandoned:
            raise Abandoned
        self.last = time.monotonic()


class Workers:
    """At most `count` threads; a call without progress for `limit_s` is given up."""

    def __init__(self, count: int, limit_s: float, what: str) -> None:
        self._count, self._limit_s, self._what = count, limit_s, what
        self._queue: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._open = 0  # calls queued or in a thread; a stuck one stays
        self._last = time.monotonic()  # progress of any call: a busy pool is not a stalled one
        self._closed = False

    async def run(self, function: Callable[[Call], T]) -> T:
        """Return `function(call)`, executed in a thread. Raises `Unavailable` when it stalls."""
        if self._closed:
            raise Unavailable(f"{self._what} is closed")
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        call = Call(function, future)
        with self._lock:
            self._open += 1
            more = len(self._threads) < min(self._open, self._count)
        if more:
            self._start()
        self._queue.put(call)
        try:
            while not future.done():
                last = call.last if call.started else max(call.last, self._last)
                left = last + self._limit_s - time.monotonic()
                if left <= 0:
                    raise self._stalled()
                await asyncio.wait({future}, timeout=left)
            return future.result()
        finally:
            call.abandoned = True
            future.cancel()

    def close(self) -> None:
        """End the threads that can be ended."""
        self._closed = True
        for _ in self._threads:
            self._queue.put(None)

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name="dsec-store", daemon=True)
        self._threads.append(thread)
        thread.start()

    def _stalled(self) -> Unavailable:
        return Unavailable(
            f"{self._what} does not answer for {self._limit_s:g} s; is its server or mount alive?"
        )

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            result, error = None, None
            try:
                call.beat()
                call.started = True  # from now on its last beat counts
                result = call.function(call)
            except BaseException as raised:  # is the waiter's, whatever it is
                error = raised
            self._last = time.monotonic()
            with self._lock:
                self._open -= 1
            with contextlib.suppress(RuntimeError):  # its loop is closed
                call.future.get_loop().call_soon_threadsafe(_settle, call.future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if error is not None:
        future.set_exception(error)
    else:
        future.set_result(result)
