"""`dsec-bench density`: how many mostly idle sandboxes a host takes."""

from dsec_bench.bench import Bench
from dsec_bench.density.parts import FIGURES, PARTS, run
from dsec_bench.density.plot import plot

DENSITY = Bench(
    name="density",
    summary="Live idle sandboxes and what they hold; paused ones; who yields when CPUs are short.",
    figures=FIGURES,
    parts=tuple(PARTS),
    run=run,
    plot=plot,
)
