"""The same lives of agents with and without reclaim: what memory they hold, and for how long.

Each sandbox has a Python that holds some memory and works in turns: it touches a part of that,
takes a copy, computes, and then a new process is run beside it. Between turns it waits for its
model. What one turn computes is a number of steps and not a time, so that nothing that reclaim adds
is hidden in it.

A third of each page is random, the rest is not: zram makes 3 of it to 1, as of the heap of an idle
Python.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsec_bench.create.daemon import NO_SWAP, zram
from dsec_bench.create.sdk import Sdk, Wrong, answer
from dsec_bench.density.footprint import Footprint
from dsec_bench.density.pausing import read_line
from dsec_bench.density.workload import Life, Turn
from dsec_bench.rootfs import PYTHON

from libdsec import CommandHandle
from libdsec.sandbox import Sandbox

Mode = Literal["off", "on"]
MODES: tuple[Mode, ...] = ("off", "on")
# A host with memory to spare asks nobody: here every sandbox is asked after each turn. `rest_s` is
# short, since a part of what was given comes back with every turn.
RECLAIM: dict[Mode, str] = {
    "off": f'when = "off"\n{NO_SWAP}',
    "on": (
        f'when = "always"\n{zram(4096)}\nperiod_s = 0.2\n'
        "trim_after_s = 1.5\npause_after_s = 5\nrest_s = 0.1"
    ),
}
LOOK_S = 0.25
MIB = 1 << 20
TRIALS, TRIAL_STEPS = 20, 100_000

WORK = """\
import json, os, re, subprocess, sys, time
def work(steps):
    for _ in range(steps):
        pass
"""
CALIBRATE = f"""\
{WORK}
def took():
    begin = time.process_time()
    work({TRIAL_STEPS})
    return time.process_time() - begin
print(int({TRIAL_STEPS} / min(took() for _ in range({TRIALS}))))
"""
AGENT = f"""\
{WORK}
block = b"".join(os.urandom(1365) + bytes(2731) for _ in range(256))
held = bytearray(block) * int(sys.argv[1])
print("ready", flush=True)
for line in sys.stdin:
    begin, end, steps = map(int, line.split())
    part = held[begin:end]
    work(steps)
    held[begin:end] = part
    del part
    print("done", flush=True)
"""


@dataclass(slots=True)
class Run:
    """One replay: what was held by when (seconds from its begin), what turns and lives took, and
    which share of a CPU each sandbox used."""

    seen: list[tuple[float, Footprint]] = field(default_factory=list)
    turns_ms: list[float] = field(default_factory=list)
    lives_s: list[float] = field(default_factory=list)
    shares: list[float] = field(default_factory=list)
    makespan_s: float = 0.0

    def integral(self, of: Callable[[Footprint], int]) -> float:
        """Return the integral of `of` over the run, in byte seconds, by the trapezoidal rule."""
        total = 0.0
        for (start_s, before), (end_s, after) in itertools.pairwise(self.seen):
            total += (end_s - start_s) * (of(before) + of(after)) / 2
        return total

    def peak(self, of: Callable[[Footprint], int]) -> int:
        """Return the largest of `of`."""
        return max(of(now) for _, now in self.seen)


@dataclass(slots=True)
class Result:
    """The runs of each mode, one per round."""

    runs: dict[Mode, list[Run]] = field(default_factory=lambda: {mode: [] for mode in MODES})

    def saving(self, of: Callable[[Footprint], int]) -> float:
        """Return by which share reclaim lowers the integral of `of`, the median of the rounds."""
        return -self.more(lambda run: run.integral(of))

    def more(self, of: Callable[[Run], float]) -> float:
        """Return by which share reclaim raises `of`, the median of the rounds."""
        pairs = zip(self.runs["off"], self.runs["on"], strict=True)
        return statistics.median(of(on) / of(off) - 1 for off, on in pairs)


@dataclass(frozen=True, slots=True)
class Kind:
    """What lives are lived in, and the program of the agent."""

    create: Callable[[Sdk], Awaitable[Sandbox]]
    agent: str = AGENT


async def _container(sdk: Sdk) -> Sandbox:
    return await sdk.client.run_container(sdk.args)


CONTAINERS = Kind(_container)


def calibrate(sdk: Sdk, kind: Kind = CONTAINERS) -> float:
    """Return how many steps are a second of CPU time, in a sandbox that nobody disturbs."""
    try:
        return sdk.run(_calibrate(sdk, kind))
    finally:
        sdk.stop_all()


async def _calibrate(sdk: Sdk, kind: Kind) -> float:
    sandbox = await kind.create(sdk)
    done = await sandbox.run(str(PYTHON), "-I", "-c", CALIBRATE)
    if done.exit_code != 0:
        raise Wrong(f"the calibration ended with {done}")
    return float(done.stdout)


def measure(
    sdk: Sdk,
    lives: Sequence[Life],
    steps_per_s: float,
    look: Callable[[], Footprint],
    on_done: Callable[[], None],
    kind: Kind = CONTAINERS,
) -> Run:
    """Have `lives` lived, and `look` at what they hold. `on_done` is called after each life.

    Raises `DSecError`, Wrong, OSError.
    """
    run = Run()
    try:
        sdk.run(_replay(sdk, lives, steps_per_s, look, run, on_done, kind))
    finally:
        sdk.stop_all()
    return run


async def _replay(
    sdk: Sdk,
    lives: Sequence[Life],
    steps_per_s: float,
    look: Callable[[], Footprint],
    run: Run,
    on_done: Callable[[], None],
    kind: Kind,
) -> None:
    begin = time.perf_counter()
    async with asyncio.TaskGroup() as whole:
        watching = whole.create_task(_watch(look, begin, run))
        async with asyncio.TaskGroup() as living:
            for life in lives:
                living.create_task(_live(sdk, life, steps_per_s, begin, run, on_done, kind))
        watching.cancel()
    run.makespan_s = time.perf_counter() - begin
    run.seen.append((run.makespan_s, look()))


async def _watch(look: Callable[[], Footprint], begin: float, run: Run) -> None:
    while True:
        run.seen.append((time.perf_counter() - begin, look()))
        await asyncio.sleep(LOOK_S)


async def _live(
    sdk: Sdk, life: Life, steps_per_s: float, begin: float, run: Run, on_done: Callable[[], None],
    kind: Kind,
) -> None:  # fmt: skip
    """One sandbox, from its create to its end."""
    await asyncio.sleep(begin + life.start_s - time.perf_counter())
    born = time.perf_counter()
    sandbox = await kind.create(sdk)
    words = [str(PYTHON), "-I", "-c", kind.agent, str(life.held_mib)]
    agent = await sandbox.commands.run(words, background=True, stdin=True)
    await _hear(agent, "ready")
    for turn in life.turns:
        asked = time.perf_counter()
        await _work(sandbox, agent, turn, life.held_mib * MIB, steps_per_s)
        run.turns_ms.append((time.perf_counter() - asked) * 1e3)
        await asyncio.sleep(turn.think_s)
    used = await sandbox.get_metrics()
    await sandbox.stop()
    run.lives_s.append(time.perf_counter() - born)
    run.shares.append(used.cpu_usage_s / used.uptime_s)
    on_done()


async def _work(
    sandbox: Sandbox, agent: CommandHandle, turn: Turn, size: int, steps_per_s: float
) -> None:
    begin, end = round(turn.begin * size), round(turn.end * size)
    await agent.send_stdin(f"{begin} {end} {round(turn.work_s * steps_per_s)}\n")
    await _hear(agent, "done")
    await answer(sandbox)


async def _hear(agent: CommandHandle, word: str) -> None:
    said = await read_line(agent)
    if said != word:
        raise Wrong(f"an agent said {said!r}, not {word!r}")
    await agent.disconnect()  # an open call would count as use: it would never be idle
