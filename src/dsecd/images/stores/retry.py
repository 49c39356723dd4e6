"""Trying again within a deadline."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

from libdsec.errors import Unavailable

FIRST_S = 0.05
LONGEST_S = 5.0
T = TypeVar("T")


class Transient(Exception):
    """A fault that may pass. The text is the reason, for the message of the final error."""


async def retry(attempt: Callable[[], Awaitable[T]], what: str, limit_s: float) -> T:
    """Return what `attempt` returns; call it again while it raises `Transient`, for `limit_s`.

    The pauses double, each a random part of its bound, so that hosts which failed together do not
    come back together. Raises `Unavailable` with `what` and the last reason.
    """
    began, tries, bound = time.monotonic(), 0, FIRST_S
    while True:
        try:
            return await attempt()
        except Transient as error:
            tries += 1
            pause = random.uniform(bound / 4, bound)
            spent = time.monotonic() - began
            if spent + pause > limit_s:
                raise Unavailable(
                    f"{what}: {error}; tried {tries} times in {spent:.1f} s", tries=tries
                ) from error
            await asyncio.sleep(pause)
            bound = min(bound * 2, LONGEST_S)
