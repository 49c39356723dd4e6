"""How soon a machine answers, booted or from a template, and what a command takes in a live one."""

from __future__ import annotations

import contextlib
import statistics
import time
from pathlib import Path

from dsec_bench.create.image import python_root
from dsec_bench.create.sdk import COMMAND, Wrong
from dsec_bench.peers.stage import Stage, StageError
from dsec_bench.report import Row
from dsec_bench.stats import Round, Summary
from dsec_bench.vm.bed import Bed, Host

from libdsec.sandbox import Sandbox

STARTS, TRIPS = "start of a machine until it answers", "`true` in a live machine"
COMMANDS = 40
HOW = {"boot": {"templates": 0}, "template": {"templates": 16}}
FIGURES = {"boot": "cold_start_s", "template": "template_start_s"}


def measure(bed: Bed) -> None:
    with contextlib.ExitStack() as stack:
        root = python_root(stack)
        for how, vm in HOW.items():
            bed.context.steps.now(f"starts: {how}")
            with bed.host(root, **vm) as host:
                times = host.sdk.run(_starts(host, bed.rounds))
                _row(bed, STARTS, how, times)
                bed.report.figure(FIGURES[how], statistics.median(times) / 1e3)
                if how == "template":
                    bed.context.steps.now("commands")
                    whole, extra = host.sdk.run(_commands(host))
                    _row(bed, TRIPS, "whole", whole)
                    _row(bed, TRIPS, "beyond the process", extra)
                    bed.report.figure("roundtrip_extra_ms", statistics.median(extra))
        bed.context.steps.now("starts: runsc")
        _runsc(bed, root.tree)


def _row(bed: Bed, series: str, name: str, times_ms: list[float]) -> None:
    summary = Summary.of([Round(1e3 * len(times_ms) / sum(times_ms), times_ms)])
    bed.report.row(Row(series, name, summary, 1, bed.accel))


async def _starts(host: Host, rounds: int) -> list[float]:
    """Return the milliseconds of each; the first makes jail, files of layers, and template."""
    times: list[float] = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        sandbox = await host.create()
        times.append((time.perf_counter() - begin) * 1e3)
        await sandbox.stop()
    return times[1:]


async def _commands(host: Host) -> tuple[list[float], list[float]]:
    """Return the milliseconds of round trips, and of them those beyond the process in the guest."""
    sandbox = await host.create()
    for _ in range(COMMANDS // 10):
        await _command(sandbox)
    pairs = [await _command(sandbox) for _ in range(COMMANDS)]
    await sandbox.stop()
    return [whole for whole, _ in pairs], [whole - process for whole, process in pairs]


async def _command(sandbox: Sandbox) -> tuple[float, float]:
    begin = time.perf_counter()
    done = await sandbox.run(*COMMAND)
    whole_ms = (time.perf_counter() - begin) * 1e3
    if done.exit_code != 0:
        raise Wrong(f"true ended with {done}")
    return whole_ms, done.duration_s * 1e3


def _runsc(bed: Bed, tree: Path) -> None:
    """gVisor's start, `true` and end, which a user could take instead of a machine."""
    try:
        with Stage("runsc", tree) as stage:
            found = stage.round(1, 0.0, bed.rounds)
    except StageError as error:
        bed.report.absent("runsc", f"not available: {error}")
        return
    bed.report.row(Row(STARTS, "runsc, with its end", Summary.of([found]), 1, stage.version))
