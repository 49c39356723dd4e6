"""Ctrl-C, SIGTERM and SIGHUP end a bench in order, also inside an event loop.

uvloop swallows an exception that a signal handler raises while its loop runs, so there the running
task is cancelled instead. Only the first signal counts: later ones must not interrupt the cleaning
up.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any, TypeVar

T = TypeVar("T")
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupt:
    """A signal handler that raises KeyboardInterrupt, once."""

    def __init__(self) -> None:
        self.seen = False
        self._task: tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]] | None = None

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if self.seen:
            sys.stderr.write("dsec-bench: cleaning up, please wait\n")
            return
        self.seen = True
        if self._task is None:
            raise KeyboardInterrupt
        loop, task = self._task
        loop.call_soon_threadsafe(task.cancel)

    def run(self, runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
        """Run `work`; a signal cancels it and becomes KeyboardInterrupt."""

        async def main() -> T:
            task = asyncio.current_task()
            assert task is not None
            if not self.seen:  # else this is a part of the cleaning up
                self._task = (asyncio.get_running_loop(), task)
            try:
                return await work
            finally:
                self._task = None

        seen = self.seen
        try:
            return runner.run(main())
        except asyncio.CancelledError:
            if self.seen and not seen:
                raise KeyboardInterrupt from None
            raise


@contextlib.contextmanager
def installed() -> Iterator[Interrupt]:
    """Handle the signals with one `Interrupt`, and give them back to whoever had them."""
    interrupt = Interrupt()
    before = {number: signal.signal(number, interrupt) for number in SIGNALS}
    try:
        yield interrupt
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(runner: asyncio.Runner, work: Coroutine[Any, Any, T]) -> T:
    """Run `work` in `runner` under the `Interrupt` that is installed, if one is."""
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, Interrupt):
        return handler.run(runner, work)
    return runner.run(work)
