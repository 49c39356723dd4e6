"""Waiting for work in a thread that must not be left half-way."""

from __future__ import annotations

import asyncio
import functools
from typing import Any


async def settle(future: asyncio.Future[Any]) -> bool:
    """Wait until `future` is done, cancelled caller or not; return whether one was asked to stop.

    Work in a thread cannot be interrupted, and what it makes (a descriptor, an interface) has no
    owner until it returns: a caller that left early would leak it. Only for work that the kernel
    bounds to milliseconds. The caller looks at the result, undoes it if it must, and then
    raises `CancelledError`.
    """
    cancelled = False
    while not future.done():
        waiter = asyncio.get_running_loop().create_future()  # a cancelled await cancels only this
        wake = functools.partial(_wake, waiter)
        future.add_done_callback(wake)
        try:
            await waiter
        except asyncio.CancelledError:
            future.remove_done_callback(wake)
            cancelled = True
    return cancelled


def _wake(waiter: asyncio.Future[None], _: asyncio.Future[Any]) -> None:
    if not waiter.done():
        waiter.set_result(None)
