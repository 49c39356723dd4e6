"""Ctrl-C at any time: it becomes KeyboardInterrupt once, also out of a running event loop."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
import uvloop
from dsec_bench import interrupts


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_outside_a_loop() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with interrupts.installed(), pytest.raises(KeyboardInterrupt):
        interrupt()
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.leaky("libuv keeps one signal pipe per process")
def test_inside_uvloop_the_task_is_cancelled_and_may_clean_up() -> None:
    """uvloop swallows what a handler raises: the run went on as if nothing had been pressed."""
    cleaned = []

    async def work() -> None:
        asyncio.get_running_loop().call_later(0.01, interrupt)
        try:
            await asyncio.sleep(5)
        finally:
            await asyncio.sleep(0)
            cleaned.append("task")

    async def clean_up() -> None:
        interrupt()  # the second one
        await asyncio.sleep(0.01)
        cleaned.append("stack")

    with (
        interrupts.installed(),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        with pytest.raises(KeyboardInterrupt):
            interrupts.run(runner, work())
        interrupts.run(runner, clean_up())
    assert cleaned == ["task", "stack"]


def test_a_cancellation_of_its_own_stays_one() -> None:
    async def work() -> None:
        raise asyncio.CancelledError

    with (
        interrupts.installed(),
        asyncio.Runner() as runner,
        pytest.raises(asyncio.CancelledError),
    ):
        interrupts.run(runner, work())
