"""Waiting for what belongs to the engine, on behalf of callers that come and go."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, TypeVar

from libdsec.errors import DSecError, Internal

T = TypeVar("T")
R = TypeVar("R")


async def completed(future: asyncio.Future[Any], timeout_s: float | None = None) -> bool:
    """Return whether `future` is done, at the latest after `timeout_s` seconds.

    Neither the time's end nor the cancellation of this wait touches `future`: `asyncio.shield` and
    `asyncio.timeout` in one, at half their cost, which every create and stop pays.
    """
    if future.done():
        return True
    loop = asyncio.get_running_loop()
    waiter = loop.create_future()
    wake = functools.partial(_wake, waiter)
    future.add_done_callback(wake)
    timer = None if timeout_s is None else loop.call_later(timeout_s, wake)
    try:
        await waiter
    finally:
        if timer is not None:
            timer.cancel()
        if not future.done():
            future.remove_done_callback(wake)
    return future.done()


async def each(items: Iterable[T], work: Callable[[T], Awaitable[R]], at_once: int) -> list[R]:
    """Return what `work` returns for every item, `at_once` of them under way."""
    gate = asyncio.Semaphore(at_once)

    async def one(item: T) -> R:
        async with gate:
            return await work(item)

    return await asyncio.gather(*(one(item) for item in items))


def _wake(waiter: asyncio.Future[None], *_: object) -> None:
    if not waiter.done():
        waiter.set_result(None)


def report_to(
    done: asyncio.Queue[tuple[str, T | DSecError]], key: str, value: T
) -> Callable[[asyncio.Future[None]], None]:
    """Return a callback for a future: it puts `value`, or the future's error, into `done`."""

    def report(ready: asyncio.Future[None]) -> None:
        error = ready.exception()
        if error is None:
            done.put_nowait((key, value))
        else:
            done.put_nowait((key, error if isinstance(error, DSecError) else Internal(repr(error))))

    return report
