"""A job of 20 ms each 100 ms beside processes that want CPU time: who yields to whom?

All are in sandboxes, two with a hog for each CPU. At a load of 25, 50 and 75% all hogs together
take so much of the host's CPU time if they get it; at 100% none of them ever stops.
"""

from __future__ import annotations

import os
import signal
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from dsec_bench.create.sdk import Sdk, Wrong
from dsec_bench.stats import interleave, percentile
from dsec_bench.toolchain import compile_c

from libdsec import CommandHandle, CpuClass
from libdsec.sandbox import Sandbox

PROGRAM = "/burst"
HOGS = 2  # per CPU
FULL = 100
LOADS, QUICK_LOADS = (25, 50, 75, FULL), (50, FULL)
Case = Literal["unloaded", "standard", "SCHED_IDLE", "best_effort", "latency_sensitive"]


@dataclass(frozen=True, slots=True)
class Setting:
    """The job's class; the load's, and whether its processes have SCHED_IDLE."""

    case: Case
    job: CpuClass
    load: CpuClass
    idle: bool = False


# The last is how the classes are meant: it adds weight, and core scheduling where there is any.
SETTINGS = (
    Setting("standard", "standard", "standard"),
    Setting("SCHED_IDLE", "standard", "standard", idle=True),
    Setting("best_effort", "standard", "best_effort"),
    Setting("latency_sensitive", "latency_sensitive", "best_effort"),
)
UNLOADED = Setting("unloaded", "latency_sensitive", "best_effort")


@dataclass(frozen=True, slots=True)
class Step:
    """A setting, and how much of the host's CPU time the load wants."""

    setting: Setting
    percent: int

    @property
    def share(self) -> int:
        """How much of a CPU each hog takes, in thousandths."""
        return 1000 if self.percent == FULL else self.percent * 10 // HOGS


def steps(loads: Sequence[int]) -> tuple[Step, ...]:
    """Return what one round measures."""
    loaded = (Step(setting, percent) for percent in loads for setting in SETTINGS)
    return (Step(UNLOADED, 0), *loaded)


@dataclass(slots=True)
class Result:
    """Milliseconds of each burst by case and load, a list per round; what the host lacks of the
    classes."""

    bursts_ms: dict[tuple[Case, int], list[list[float]]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def ratio(self, case: Case, percent: int, share: float) -> float:
        """Return the percentile of a case over that without load, the median of the rounds'."""
        pairs = zip(self.bursts_ms[case, percent], self.bursts_ms["unloaded", 0], strict=True)
        return statistics.median(percentile(a, share) / percentile(b, share) for a, b in pairs)


def measure(
    sdk: Sdk, loads: Sequence[int], rounds: int, bursts: int, on_done: Callable[[int], None]
) -> Result:
    """Measure each step once per round. `on_done` takes how many more steps are done."""
    program = compile_c("burst.c", "-static").read_bytes()
    try:
        return sdk.run(_measure(sdk, program, steps(loads), rounds, bursts, on_done))
    finally:
        sdk.stop_all()


async def _measure(
    sdk: Sdk,
    program: bytes,
    steps: Sequence[Step],
    rounds: int,
    bursts: int,
    on_done: Callable[[int], None],
) -> Result:
    result = Result()
    job = await _place(sdk, program)
    loads = [await _place(sdk, program) for _ in range(HOGS * (os.cpu_count() or 1))]
    length = (await _run(job, "calibrate")).strip()
    for _, step in interleave(steps, rounds):
        setting = step.setting
        info = await job.set_cpu_class(setting.job)
        if setting.job == "latency_sensitive":
            result.notes = [note for note in info.notes if note.startswith("latency_sensitive")]
        hogs = [await _hog(sandbox, step) for sandbox in loads] if step.percent else []
        printed = await _run(job, "job", length, str(bursts))
        for hog in hogs:
            await _end(hog)
        times = [int(line) / 1e3 for line in printed.split()]
        result.bursts_ms.setdefault((setting.case, step.percent), []).append(times)
        on_done(1)
    return result


async def _hog(sandbox: Sandbox, step: Step) -> CommandHandle:
    """Start a process that takes its part of the load."""
    await sandbox.set_cpu_class(step.setting.load)
    words = [PROGRAM, "hog", str(step.share), *(["idle"] if step.setting.idle else [])]
    return await sandbox.commands.run(words, background=True)


async def _end(hog: CommandHandle) -> None:
    """End it. One that ended by itself was no load."""
    if not await hog.kill() or (await hog.wait()).signal != signal.SIGKILL:
        raise Wrong("a hog ended before it was told to")


async def _place(sdk: Sdk, program: bytes) -> Sandbox:
    """Return a new sandbox with the program."""
    sandbox = await sdk.client.run_container(sdk.args)
    await sandbox.files.write(PROGRAM, program, mode=0o755)
    return sandbox


async def _run(sandbox: Sandbox, *words: str) -> str:
    done = await sandbox.run(PROGRAM, *words)
    if done.exit_code != 0:
        raise Wrong(f"burst {words[0]} ended with {done}")
    return done.stdout
