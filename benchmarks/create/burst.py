"""Bursts: all sandboxes are asked for at once, all must answer a command, then all are stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dsec_bench.create.sdk import Sdk, Wrong, answer, in_parallel, stop
from dsec_bench.stats import percentile

from libdsec.errors import DSecError
from libdsec.sandbox import Sandbox

ANSWERS_PARALLEL = 64  # first commands in flight while the burst still goes on


@dataclass(slots=True)
class Burst:
    """What came out: times in ms since the burst began, one per sandbox that answered."""

    asked: int
    answered_ms: list[float] = field(default_factory=list)
    seconds: float = 0.0  # until the last answer
    stop_s: float = 0.0
    errors: dict[str, int] = field(default_factory=dict)

    @property
    def succeeded(self) -> int:
        return len(self.answered_ms)

    def facts(self) -> dict[str, object]:
        """Return the burst as a run of the report."""
        points = {}
        if self.answered_ms:
            points = {
                f"p{int(share * 100)}_ms": percentile(self.answered_ms, share)
                for share in (0.5, 0.95, 0.99)
            }
        return {
            "asked": self.asked,
            "succeeded": self.succeeded,
            "seconds": self.seconds,
            "rate": self.succeeded / self.seconds if self.seconds else 0.0,
            "stop_s": self.stop_s,
            "errors": self.errors,
            **points,
        }


def burst(sdk: Sdk, count: int, on_answer: Callable[[], None]) -> Burst:
    """Make `count` sandboxes with one call, and run `true` in each as soon as it is there."""
    result = Burst(count)
    sandboxes: list[Sandbox] = []

    def failed(error: Exception) -> None:
        text = str(error)[:200]
        result.errors[text] = result.errors.get(text, 0) + 1

    async def first(sandbox: Sandbox, gate: asyncio.Semaphore, begin: float) -> None:
        async with gate:
            try:
                await answer(sandbox)
            except (DSecError, Wrong) as error:
                failed(error)
                return
        result.answered_ms.append((time.perf_counter() - begin) * 1e3)
        on_answer()

    async def go() -> None:
        gate = asyncio.Semaphore(ANSWERS_PARALLEL)
        begin = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            async for outcome in sdk.client.run_containers(sdk.args, count=count):
                if isinstance(outcome, DSecError):
                    failed(outcome)
                    continue
                sandboxes.append(outcome)
                group.create_task(first(outcome, gate, begin))
        result.seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        await in_parallel(sandboxes, stop)
        result.stop_s = time.perf_counter() - begin

    sdk.run(go())
    return result
