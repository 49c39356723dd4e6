"""`dsec-bench images`: what environments cost, from the first sandbox to snapshots."""

from dsec_bench.bench import Bench
from dsec_bench.images.parts import FIGURES, PARTS, run
from dsec_bench.images.plot import plot

IMAGES = Bench(
    name="images",
    summary=(
        "An environment of 1 GB on a host that has never seen it: extraction, copy, on demand "
        "with and without prefetch, at several latencies of the store; the share that is read; "
        "bursts of distinct images; builds of changed versions; pack_diff, checkpoints, branches."
    ),
    figures=FIGURES,
    parts=tuple(PARTS),
    run=run,
    plot=plot,
)
