"""Thousands of live sandboxes that do nothing: do all of them answer, and what do they hold?

Each has one process of its own that waits: one that sleeps, or a Python. The host's memory is
watched on the way: a host that runs short ends the filling, and what was reached until then is the
result.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dsec_bench.create.daemon import own_resident_bytes, resident_bytes
from dsec_bench.create.memory import settled_bytes
from dsec_bench.create.sdk import PARALLEL, Sdk, Wrong, answer
from dsec_bench.machine import meminfo

from libdsec.errors import DSecError
from libdsec.sandbox import Sandbox

SLEEP = ("/bin/sleep", "1000000")
LayDown = Callable[[Sandbox], Awaitable[object]]  # have it wait; returns when it does
STEP_BYTES = 1 << 30  # of memory, at most, between two looks at the host's
LEAST_AVAILABLE_BYTES = 6 << 30  # below which others on the host would suffer


@dataclass(slots=True)
class Level:
    """The host with `live` sandboxes; `daemon_bytes` is what dsecd itself has resident."""

    live: int
    used_bytes: int
    daemon_bytes: int


@dataclass(slots=True)
class Result:
    """How far it went. `answers_ms` has the answers of all sandboxes, asked when all were live."""

    levels: list[Level] = field(default_factory=list)
    answers_ms: list[float] = field(default_factory=list)
    errors: dict[str, int] = field(default_factory=dict)
    fill_s: float = 0.0
    why: str = ""  # it ended early

    @property
    def live(self) -> int:
        return self.levels[-1].live if self.levels else 0

    @property
    def mib_per_sandbox(self) -> float:
        """Memory of the host per sandbox, its sleeping process included."""
        first, last = self.levels[0], self.levels[-1]
        return (last.used_bytes - first.used_bytes) / max(1, last.live - first.live) / (1 << 20)

    def failed(self, error: Exception) -> None:
        text = str(error)[:200]
        self.errors[text] = self.errors.get(text, 0) + 1


def measure(
    sdk: Sdk,
    daemon: int,
    wanted: int,
    lay_down: LayDown,
    each_bytes: int,
    on_done: Callable[[int], None],
) -> Result:
    """Fill up to `wanted` live sandboxes, or as many as there can be, and ask each of them.

    `daemon` is the pid of dsecd; `each_bytes` is more than a sandbox takes; `on_done` takes how
    many more are live. All are stopped.
    """
    result, sandboxes = Result(), list[Sandbox]()
    try:
        begin = time.perf_counter()
        while True:
            result.levels.append(_level(len(sandboxes), daemon))
            missing = min(STEP_BYTES // each_bytes, wanted - len(sandboxes))
            if missing and not result.why:
                result.why = short(meminfo())
            if not missing or result.why:
                break
            made = sdk.run(_fill(sdk, missing, lay_down, result))
            sandboxes += made
            on_done(len(made))
            if len(made) < missing:
                result.why = f"{missing - len(made)} of {missing} more could not be made"
        result.fill_s = time.perf_counter() - begin
        sdk.run(_ask(sandboxes, result))
    finally:
        sdk.stop_all()
    return result


async def sleep(sandbox: Sandbox) -> None:
    """Start a process that sleeps."""
    await sandbox.commands.run(list(SLEEP), background=True)


def short(table: dict[str, int]) -> str:
    """Say that the host of a `meminfo` table has too little memory left to go on, or "". Pure."""
    available = table["MemAvailable"]
    if available >= LEAST_AVAILABLE_BYTES:
        return ""
    return f"only {available / (1 << 30):.1f} GiB of memory are available"


def _level(live: int, daemon: int) -> Level:
    return Level(live, settled_bytes() - own_resident_bytes(), resident_bytes(daemon))


async def _fill(sdk: Sdk, count: int, lay_down: LayDown, result: Result) -> list[Sandbox]:
    """Return `count` new sandboxes that wait, or fewer."""
    gate, waiting = asyncio.Semaphore(PARALLEL), list[Sandbox]()

    async def one(sandbox: Sandbox) -> None:
        async with gate:
            try:
                await lay_down(sandbox)
            except (DSecError, Wrong) as error:
                result.failed(error)
            else:
                waiting.append(sandbox)

    async with asyncio.TaskGroup() as group:
        async for outcome in sdk.client.run_containers(sdk.args, count=count):
            if isinstance(outcome, DSecError):
                result.failed(outcome)
            else:
                group.create_task(one(outcome))
    return waiting


async def _ask(sandboxes: list[Sandbox], result: Result) -> None:
    """Have each answer a command, one after the other: how long says how a host so full feels."""
    for sandbox in sandboxes:
        begin = time.perf_counter()
        try:
            await answer(sandbox)
        except (DSecError, Wrong) as error:
            result.failed(error)
        else:
            result.answers_ms.append((time.perf_counter() - begin) * 1e3)
