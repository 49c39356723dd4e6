"""Part (b): how much of the environment do different kinds of work fetch?

Each kind runs on a host of its own, without a trace. What counts is what left the store, in the
pieces in which it is asked for: more than what was read, and what a slow store is burdened with.
"""

from __future__ import annotations

import time

from dsec_bench.images.bed import MIB, PLAIN, Bed, first, work
from dsec_bench.images.hosts import Host
from dsec_bench.images.workload import WORKLOADS, Workload


def shares(bed: Bed) -> None:
    """Measure each workload; those without their tools replay what such tools read."""
    steps = bed.context.steps
    steps.expect(len(WORKLOADS))
    for workload in WORKLOADS:
        steps.now(f"share read: {workload.name}")
        with bed.remote(PLAIN, 0) as host:
            before = bed.server.counters()
            seconds = host.sdk.run(_once(host, workload))
            sent = bed.server.counters()
        blobs, images = (
            sum(sent.get(kind, 0) - before.get(kind, 0) for kind in kinds)
            for kinds in (("blobs",), ("images", "indexes"))
        )
        content = bed.environment.facts.content_bytes
        share = blobs / content
        real = workload.is_real(bed.environment.has)
        bed.context.report.run(
            "share",
            name=workload.name,
            real=real,
            share=share,
            fetched_mib=blobs / MIB,
            metadata_mib=images / MIB,
            of_mib=content / MIB,
            seconds=seconds,
        )
        how = "" if real else " (replayed: the host has no such tools)"
        steps.note(f"{workload.name}{how}: {share:.1%} of {content / MIB:,.0f} MiB fetched")
        steps.done()


async def _once(host: Host, workload: Workload) -> float:
    begin = time.perf_counter()
    sandbox, _ = await first(host, host.arguments())
    await work(sandbox, f"sh {workload.path}")
    seconds = time.perf_counter() - begin
    await sandbox.stop()
    return seconds
