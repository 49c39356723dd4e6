"""Part (a): a sandbox of the environment on a host that has nothing of it, in every way there is.

All ways take turns, so that a slower moment of the machine is slow for all. The slow ones, which
copy everything, take part in fewer rounds of a quick run; a ratio uses their median.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

from dsec_bench.images import whole
from dsec_bench.images.bed import (
    PLAIN,
    TRACED,
    Bed,
    Timed,
    first,
    note,
    record,
    summary,
    task,
)
from dsec_bench.images.hosts import Host
from dsec_bench.report import Row
from dsec_bench.stats import interleave

TAR, COPY, LOCAL = "tar.gz extraction", "full copy", "layer on the local disk"
LATENCIES = (0, 1, 5)
QUICK_ROUNDS = 1  # of what no figure is made of, or takes very long
SECONDS = 20  # sandboxes, of each host


def on_demand(latency: int) -> str:
    return f"on demand, {latency} ms"


def prefetched(latency: int) -> str:
    return f"on demand + prefetch, {latency} ms"


UNCACHED, AHEAD = on_demand(1), prefetched(5)
EVERY_ROUND = (LOCAL, UNCACHED, AHEAD)  # a figure is made of each


@dataclass(frozen=True, slots=True)
class Way:
    """A way to get a sandbox."""

    name: str
    take: Callable[[], Timed]


def compare(bed: Bed) -> None:
    """Let all ways take turns, and derive the figures."""
    record(bed)
    taken: dict[str, list[Timed]] = {COPY: []}
    ways = [
        Way(LOCAL, lambda: _local(bed)),
        *_remote_ways(bed),
        Way(TAR, lambda: _whole(bed, taken[COPY])),
    ]
    taken |= {way.name: [] for way in ways}
    few = QUICK_ROUNDS if bed.quick else bed.rounds
    steps = bed.context.steps
    steps.expect(sum(bed.rounds if way.name in EVERY_ROUND else few for way in ways))
    for number, way in interleave(ways, bed.rounds):
        if number >= few and way.name not in EVERY_ROUND:
            continue
        steps.now(f"round {number + 1} of {bed.rounds}: {way.name}")
        timed = way.take()
        taken[way.name].append(timed)
        bed.context.report.run("environment run", way=way.name, round=number, **timed.facts())
        steps.done()
    _tell(bed, taken)


def _remote_ways(bed: Bed) -> list[Way]:
    ways = []
    for latency in LATENCIES:
        for bucket, name in ((PLAIN, on_demand(latency)), (TRACED, prefetched(latency))):

            def take(bucket: str = bucket, latency: int = latency) -> Timed:
                with bed.remote(bucket, latency) as host:
                    return task(bed, host)

            ways.append(Way(name, take))
    return ways


def _local(bed: Bed) -> Timed:
    with bed.local() as host:
        return task(bed, host)


def _whole(bed: Bed, copies: list[Timed]) -> Timed:
    """Time the extraction, and the copy of what it made."""
    tree = bed.folder / "tree"
    try:
        timed = whole.extraction(bed, tree)
        copied = whole.full_copy(bed, tree)
        facts = copied.facts()
        bed.context.report.run("environment run", way=COPY, round=len(copies), **facts)
        copies.append(copied)
    finally:
        whole.remove(tree)
    return timed


def _tell(bed: Bed, taken: dict[str, list[Timed]]) -> None:
    report = bed.context.report
    for name, runs in taken.items():
        report.row(Row("ready and task", name, summary(runs), 1, note(runs)))
    figures = derive(taken)
    for name, value in figures.items():
        report.figure(name, value)


def derive(taken: dict[str, list[Timed]]) -> dict[str, float]:
    """Return the figures of the rounds. Pure.

    What is written is that of `UNCACHED`: the same host and latency that the time to ready is of.
    The prefetch is judged from the call that makes the sandbox to the end of the task, in pairs.
    """
    written = {name: statistics.median(run.written for run in runs) for name, runs in taken.items()}
    pairs = zip(taken[AHEAD], taken[LOCAL], strict=True)
    return {
        "first_uncached_ready_ms": statistics.median(run.ready_s for run in taken[UNCACHED]) * 1e3,
        "disk_writes_vs_tar": written[UNCACHED] / written[TAR],
        "disk_writes_vs_copy": written[UNCACHED] / written[COPY],
        "prefetch_5ms_vs_local": statistics.median(
            ahead.total_s / local.total_s for ahead, local in pairs
        ),
    }


# --- the second sandbox ---------------------------------------------------------------------------


def second(bed: Bed) -> None:
    """Compare further sandboxes on a host that reads on demand with those of a local layer."""
    bed.context.steps.expect(1)
    bed.context.steps.now("second sandboxes")
    times: dict[str, list[float]] = {UNCACHED: [], LOCAL: []}
    with bed.remote(PLAIN, 1, 0) as remote, bed.local(1) as local:
        before = task(bed, remote)
        task(bed, local)
        again = task(bed, remote)
        for _ in range(SECONDS):
            times[UNCACHED].append(_ready_ms(remote))
            times[LOCAL].append(_ready_ms(local))
    extra = paired_extra(times[UNCACHED], times[LOCAL])
    report = bed.context.report
    report.run("second sandbox", ready_ms=times, first=before.facts(), second=again.facts())
    report.figure("second_sandbox_extra_ms", max(extra, 0.0))
    bed.context.steps.done()


def _ready_ms(host: Host) -> float:
    async def once() -> float:
        sandbox, seconds = await first(host, host.arguments())
        await sandbox.stop()
        return seconds * 1e3

    return host.sdk.run(once())


def paired_extra(ours: list[float], theirs: list[float]) -> float:
    """Return the median over the pairs of what ours takes more. Pure."""
    return statistics.median(a - b for a, b in zip(ours, theirs, strict=True))
