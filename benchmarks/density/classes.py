"""A job of 20 ms each 100 ms beside processes that want every CPU: who yields to whom?

All are in sandboxes. The load is always there and paused for what is measured without it, so that
the cases of one round differ in nothing else.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import msgspec
from dsec_bench.create.sdk import Sdk, Wrong
from dsec_bench.stats import interleave, percentile
from dsec_bench.toolchain import compile_c

from libdsec import CpuClass
from libdsec.sandbox import Sandbox

PROGRAM = "/burst"
KEEP_ALL = 1 << 60  # pausing is not to page anything out
Case = Literal["unloaded", "standard", "SCHED_IDLE", "best_effort"]


@dataclass(frozen=True, slots=True)
class Setting:
    """The job's class; the load's, and whether its processes have SCHED_IDLE. None: no load."""

    case: Case
    job: CpuClass
    load: CpuClass | None
    idle: bool = False


SETTINGS = (
    Setting("unloaded", "latency_sensitive", None),
    Setting("standard", "standard", "standard"),
    Setting("SCHED_IDLE", "standard", "standard", idle=True),
    Setting("best_effort", "latency_sensitive", "best_effort"),
)


@dataclass(slots=True)
class Result:
    """Milliseconds of each burst by case, a list per round; what the host lacks of the classes."""

    bursts_ms: dict[Case, list[list[float]]] = field(
        default_factory=lambda: {setting.case: [] for setting in SETTINGS}
    )
    notes: list[str] = field(default_factory=list)

    def ratio(self, case: Case, share: float) -> float:
        """Return the percentile of `case` over that without load, the median of the rounds'."""
        pairs = zip(self.bursts_ms[case], self.bursts_ms["unloaded"], strict=True)
        return statistics.median(percentile(a, share) / percentile(b, share) for a, b in pairs)


def measure(sdk: Sdk, rounds: int, bursts: int, on_done: Callable[[int], None]) -> Result:
    """Measure each case once per round. `on_done` takes how many more cases are done."""
    program = compile_c("burst.c", "-static").read_bytes()
    try:
        return sdk.run(_measure(sdk, program, rounds, bursts, on_done))
    finally:
        sdk.stop_all()


async def _measure(
    sdk: Sdk, program: bytes, rounds: int, bursts: int, on_done: Callable[[int], None]
) -> Result:
    result = Result()
    job = await _place(sdk, program, {})
    loads = {idle: await _load(sdk, program, idle) for idle in (False, True)}
    steps = (await _run(job, "calibrate")).strip()
    for _, setting in interleave(SETTINGS, rounds):
        await job.set_cpu_class(setting.job)
        if setting.load is not None:
            for hog in loads[setting.idle]:
                await hog.set_cpu_class(setting.load)
                await hog.resume()
        printed = await _run(job, "job", steps, str(bursts))
        if setting.load is not None:
            await sdk.client.pause_sandboxes(_labels(setting.idle), KEEP_ALL)
        result.bursts_ms[setting.case].append([int(line) / 1e3 for line in printed.split()])
        on_done(1)
    info = await job.set_cpu_class("latency_sensitive")
    result.notes = [note for note in info.notes if note.startswith("latency_sensitive")]
    return result


def _labels(idle: bool) -> dict[str, str]:
    return {"load": "SCHED_IDLE" if idle else "normal"}


async def _load(sdk: Sdk, program: bytes, idle: bool) -> list[Sandbox]:
    """Return two paused sandboxes per CPU; in each a process that never stops."""
    hogs = [await _place(sdk, program, _labels(idle)) for _ in range(2 * (os.cpu_count() or 1))]
    for hog in hogs:
        words = [PROGRAM, "hog", *(["idle"] if idle else [])]
        await hog.commands.run(words, background=True)
    await sdk.client.pause_sandboxes(_labels(idle), KEEP_ALL)
    return hogs


async def _place(sdk: Sdk, program: bytes, labels: dict[str, str]) -> Sandbox:
    """Return a new sandbox with the program."""
    args = msgspec.structs.replace(sdk.args, labels=sdk.args.labels | labels)
    sandbox = await sdk.client.run_container(args)
    await sandbox.files.write(PROGRAM, program, mode=0o755)
    return sandbox


async def _run(sandbox: Sandbox, *words: str) -> str:
    done = await sandbox.run(PROGRAM, *words)
    if done.exit_code != 0:
        raise Wrong(f"burst {words[0]} ended with {done}")
    return done.stdout
