"""Part (e): what saving and going back costs, against the number of files and of dirty bytes.

Checkpoint, rollback and branch are asked for only when the client has them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Any

from dsec_bench.images.bed import MIB, Bed, first, work
from dsec_bench.images.hosts import Host
from dsec_bench.report import Row
from dsec_bench.stats import Round, Summary

from libdsec.sandbox import Sandbox

BRANCHES = 100
FILL = """\
import os
for number in range({files}):
    if number % 500 == 0:
        folder = "/root/dirty/%d" % number
        os.makedirs(folder, exist_ok=True)
    with open("%s/%d" % (folder, number), "wb") as file:
        file.write(os.urandom({size}))
"""


@dataclass(frozen=True, slots=True)
class Dirty:
    """What a sandbox has written: `files` files, `size` bytes in all."""

    files: int
    size: int

    @property
    def text(self) -> str:
        return f"{self.files:,} files, {self.size / MIB:,.0f} MiB"

    def command(self) -> str:
        """Return the shell command that writes them, each time with other content."""
        source = FILL.format(files=self.files, size=max(1, self.size // self.files))
        return f"python3 - <<'END'\n{source}END\n"


EXTENT = Dirty(20_000, 10 * MIB)  # that of the figures for checkpoint and rollback
SMALL = Dirty(100, MIB)  # that of the figure for pack_diff
OTHERS = (Dirty(1_000, 10 * MIB), EXTENT)
LARGE = Dirty(10_000, 100 * MIB)


def snapshots(bed: Bed) -> None:
    """Measure whatever the client has."""
    with bed.local(0) as host:
        sizes = (SMALL, *OTHERS) if bed.quick else (SMALL, *OTHERS, LARGE)
        bed.context.steps.expect(len(sizes) * 2 + 1)
        for dirty in sizes:
            bed.context.steps.now(f"pack_diff: {dirty.text}")
            _packs(bed, host, dirty)
            bed.context.steps.done()
        for dirty in sizes:
            bed.context.steps.now(f"checkpoint: {dirty.text}")
            _checkpoints(bed, host, dirty)
            bed.context.steps.done()
        bed.context.steps.now(f"{BRANCHES} branches")
        _branches(bed, host)
        bed.context.steps.done()


def _row(bed: Bed, series: str, name: str, times_ms: list[float], note: str = "") -> float:
    median = statistics.median(times_ms)
    summary = Summary.of([Round(1e3 / median, times_ms)])
    bed.context.report.row(Row(series, name, summary, 1, note))
    return median


# --- pack_diff ------------------------------------------------------------------------------------


def _packs(bed: Bed, host: Host, dirty: Dirty) -> None:
    """Pack the changes of new sandboxes, since what is known already is not written again."""
    times, frozen = [], []
    for number in range(bed.rounds):
        ms, stood_ms = host.sdk.run(_pack(host, dirty, f"snapshot/{dirty.files}:{number}"))
        times.append(ms)
        frozen.append(stood_ms)
    note = f"stood still for {statistics.median(frozen):.1f} ms"
    median = _row(bed, "pack_diff", dirty.text, times, note)
    if dirty == SMALL:
        bed.context.report.figure("pack_diff_1mb_ms", median)


async def _pack(host: Host, dirty: Dirty, name: str) -> tuple[float, float]:
    sandbox, _ = await first(host, host.arguments())
    await work(sandbox, dirty.command())
    begin = time.perf_counter()
    packed = await sandbox.pack_diff(name)
    ms = (time.perf_counter() - begin) * 1e3
    await sandbox.stop()
    return ms, packed.frozen_ms


# --- checkpoint, rollback, branch -----------------------------------------------------------------


def lacks(method: str) -> str:
    """Return why `method` of a sandbox cannot be measured, "" when it can."""
    if callable(getattr(Sandbox, method, None)):
        return ""
    return f"libdsec's Sandbox has no {method}() yet"


async def ask(sandbox: Sandbox, method: str, *arguments: Any) -> tuple[Any, float]:
    """Return the answer of a method that this client may not have, and the milliseconds."""
    begin = time.perf_counter()
    pending: Awaitable[Any] = getattr(sandbox, method)(*arguments)
    answer = await pending
    return answer, (time.perf_counter() - begin) * 1e3


def _checkpoints(bed: Bed, host: Host, dirty: Dirty) -> None:
    report = bed.context.report
    reason = lacks("checkpoint")
    if reason:
        report.absent("checkpoint_ms", reason)
        report.absent("rollback_ms", reason)
        return
    saved, returned = host.sdk.run(_saves(host, dirty, bed.rounds))
    median = _row(bed, "checkpoint", dirty.text, saved)
    if dirty == EXTENT:
        report.figure("checkpoint_ms", median)
    reason = lacks("rollback")
    if reason:
        report.absent("rollback_ms", reason)
        return
    median = _row(bed, "rollback", dirty.text, returned)
    if dirty == EXTENT:
        report.figure("rollback_ms", median)


async def _saves(host: Host, dirty: Dirty, rounds: int) -> tuple[list[float], list[float]]:
    """Return the times of checkpoints and rollbacks, with as much dirty each time."""
    saved: list[float] = []
    returned: list[float] = []
    for _ in range(rounds):
        sandbox, _ = await first(host, host.arguments())
        await work(sandbox, dirty.command())
        checkpoint, ms = await ask(sandbox, "checkpoint")
        saved.append(ms)
        if not lacks("rollback"):
            await work(sandbox, "rm -r /root/dirty && echo later > /root/later")
            _, ms = await ask(sandbox, "rollback", getattr(checkpoint, "id", checkpoint))
            returned.append(ms)
            await work(sandbox, "test -d /root/dirty && ! test -e /root/later")
        await sandbox.stop()
    return saved, returned


def _branches(bed: Bed, host: Host) -> None:
    reason = lacks("branch")
    if reason:
        bed.context.report.absent("branch100_s", reason)
        return
    times = [host.sdk.run(_branch(host)) for _ in range(bed.rounds)]
    median = _row(bed, "branch", f"{BRANCHES} at once", times)
    bed.context.report.figure("branch100_s", median / 1e3)


async def _branch(host: Host) -> float:
    """Return the ms until all branches are there; each answers before it is stopped."""
    args = host.arguments(memory_limit_mb=256, disk_limit_mb=64)
    sandbox, _ = await first(host, args)
    await work(sandbox, SMALL.command())
    branches, ms = await ask(sandbox, "branch", BRANCHES)
    for branch in branches:
        await work(branch, "test -d /root/dirty")
        await branch.stop()
    await sandbox.stop()
    return ms
