"""Part (c): a burst of images that have nothing in common, on a host that has none of them."""

from __future__ import annotations

import asyncio
import statistics
import time
from concurrent.futures import ThreadPoolExecutor

from dsec_bench.images import disk, whole
from dsec_bench.images.bed import MIB, PLAIN, Bed, first, work
from dsec_bench.images.hosts import Host
from dsec_bench.report import Row
from dsec_bench.stats import Operation, Round, Summary

LATENCY_MS = 1
PARALLEL = 4  # extractions at once: more only fight for the disk
QUICK_ROUNDS = 1


def burst(bed: Bed) -> None:
    """Time until a sandbox of every image has read its part, on demand and by extraction."""
    steps = bed.context.steps
    names = bed.environment.facts.slices
    rounds = QUICK_ROUNDS if bed.quick else bed.rounds
    steps.expect(2 * rounds)
    taken: dict[str, list[Round]] = {"on demand, 1 ms": [], "tar.gz extraction": []}
    for number in range(rounds):
        steps.now(f"{len(names)} distinct images: on demand")
        taken["on demand, 1 ms"].append(_on_demand(bed, names, number))
        steps.done()
        steps.now(f"{len(names)} distinct images: extraction")
        taken["tar.gz extraction"].append(_extracted(bed, len(names), number))
        steps.done()
    for name, found in taken.items():
        row = Row("burst of distinct images", name, Summary.of(found), len(names))
        bed.context.report.row(row)


def _on_demand(bed: Bed, names: list[str], number: int) -> Round:
    with bed.remote(PLAIN, LATENCY_MS) as host:
        written, sent = host.written(), bed.server.counters()
        begin = time.perf_counter()
        operations = host.sdk.run(_all(host, names))
        seconds = time.perf_counter() - begin
        grown = disk.growth(written, host.written())
        fetched = bed.server.sent_since(sent)
    _tell(bed, "on demand", number, seconds, grown, fetched, operations)
    return Round.of(operations)


async def _all(host: Host, names: list[str]) -> list[Operation]:
    origin = time.perf_counter()

    async def one(worker: int, name: str) -> Operation:
        sandbox, _ = await first(host, host.arguments(name, memory_limit_mb=256, disk_limit_mb=64))
        await work(sandbox, "cat $(cat /etc/read) > /dev/null")
        end = time.perf_counter()
        return Operation(worker, 0.0, (end - origin) * 1e6)

    return list(await asyncio.gather(*(one(*pair) for pair in enumerate(names))))


def _extracted(bed: Bed, count: int, number: int) -> Round:
    origin = time.perf_counter()
    written = disk.own_written()

    def one(worker: int) -> Operation:
        root = bed.folder / f"slice-{worker}"
        whole.extract(bed.environment.slice_archive(worker), root)
        whole.inside(root, "-c", "true")
        whole.inside(root, "-c", "cat $(cat /etc/read) > /dev/null")
        return Operation(worker, 0.0, (time.perf_counter() - origin) * 1e6)

    try:
        with ThreadPoolExecutor(PARALLEL) as pool:
            operations = list(pool.map(one, range(count)))
        seconds = time.perf_counter() - origin
        grown = disk.own_written() - written
    finally:
        for worker in range(count):
            whole.remove(bed.folder / f"slice-{worker}")
    fetched = sum(bed.environment.slice_archive(n).stat().st_size for n in range(count))
    _tell(bed, "extraction", number, seconds, grown, fetched, operations)
    return Round.of(operations)


def _tell(
    bed: Bed,
    way: str,
    number: int,
    seconds: float,
    written: int,
    fetched: int,
    operations: list[Operation],
) -> None:
    bed.context.report.run(
        "distinct images",
        way=way,
        round=number,
        images=len(operations),
        seconds=seconds,
        median_s=statistics.median(operation.micros for operation in operations) / 1e6,
        written_mib=written / MIB,
        fetched_mib=fetched / MIB,
    )
