"""Checkpoints of machines: how long the guest stands still, and what branches take."""

from __future__ import annotations

import contextlib
import statistics
import time

from dsec_bench.create.image import python_root
from dsec_bench.create.sdk import answer
from dsec_bench.density.pausing import read_line
from dsec_bench.report import Row
from dsec_bench.rootfs import PYTHON
from dsec_bench.stats import Round, Summary
from dsec_bench.vm.bed import MIB, Bed, Host
from dsec_bench.vm.monitors import monitors, private_bytes

from libdsec import CommandHandle

CHECKPOINTS, BRANCHING = "a guest stands still for a checkpoint", "branches of a machine"
BRANCHES = 4
# Looks at the wall clock a thousand times a second; a guest that stood still is told the time.
# A line has it say the largest step since the line before.
CLOCK = """\
import select, sys, time
last, most = time.time(), 0.0
while True:
    ready, _, _ = select.select([sys.stdin], [], [], 0.001)
    now = time.time()
    last, most = now, max(most, now - last)
    if ready:
        if not sys.stdin.readline():
            break
        print(most * 1e3, flush=True)
        last, most = time.time(), 0.0
"""


def measure(bed: Bed) -> None:
    with contextlib.ExitStack() as stack:
        root = python_root(stack)
        with bed.host(root) as host:
            bed.context.steps.now("checkpoints of a machine")
            host.sdk.run(_checkpoints(bed, host))
            host.sdk.stop_all()
            bed.context.steps.now(f"{BRANCHES} branches of a machine")
            host.sdk.run(_branches(bed, host))


async def _checkpoints(bed: Bed, host: Host) -> None:
    sandbox = await host.create()
    words = [str(PYTHON), "-I", "-c", CLOCK]
    clock = await sandbox.commands.run(words, background=True, stdin=True)
    await _step_ms(clock)
    still: list[float] = []
    for _ in range(bed.rounds):
        await sandbox.checkpoint()
        still.append(await _step_ms(clock))
    await sandbox.stop()
    _row(bed, CHECKPOINTS, "256 MiB", still)
    bed.report.figure("checkpoint_pause_ms", statistics.median(still))


async def _step_ms(clock: CommandHandle) -> float:
    await clock.send_stdin("\n")
    return float(await read_line(clock))


async def _branches(bed: Bed, host: Host) -> None:
    sandbox = await host.create()
    checkpoint = await sandbox.checkpoint()
    times: list[float] = []
    private: list[float] = []
    for _ in range(bed.rounds):
        begin = time.perf_counter()
        branches = await sandbox.branch(BRANCHES, checkpoint)
        times.append((time.perf_counter() - begin) * 1e3)
        for branch in branches:
            await answer(branch)
            (pid,) = monitors(f"{host.daemon.name}/{branch.id}")
            private.append(private_bytes(pid) / MIB)
        for branch in branches:
            await branch.stop()
    await sandbox.stop()
    _row(bed, BRANCHING, f"{BRANCHES} at once", times)
    bed.tell("branches", private_mib=private)
    bed.report.figure("branch4_s", statistics.median(times) / 1e3)
    bed.report.figure("branch_private_mib", statistics.median(private))


def _row(bed: Bed, series: str, name: str, times_ms: list[float]) -> None:
    summary = Summary.of([Round(1e3 * len(times_ms) / sum(times_ms), times_ms)])
    bed.report.row(Row(series, name, summary, 1, bed.accel))
