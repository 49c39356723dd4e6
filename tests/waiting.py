"""Waiting in tests, also for what takes long, that takes no chance with a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import ModuleType, SimpleNamespace

import pytest


async def until(condition: Callable[[], object], timeout_s: float = 10.0) -> None:
    """Wait until `condition()` is true."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.005)


def let_pass(seconds: float) -> None:
    """Have the loop's clock leap ahead: what is due within that time is due now.

    So a test of a timeout takes one that no stall of a busy machine comes near.
    """
    loop = asyncio.get_running_loop()
    before = loop.time
    loop.time = lambda: before() + seconds  # type: ignore[method-assign]


def on_the_loops_clock(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """Have modules that read the host's clock read that of `let_pass`."""
    loop = asyncio.get_running_loop()
    clock = SimpleNamespace(monotonic=lambda: loop.time(), time=time.time)
    for module in modules:
        monkeypatch.setattr(module, "time", clock)
