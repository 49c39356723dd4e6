"""`dsec-bench vm`: microVMs, what they take to start, and of the host's memory."""

from dsec_bench.bench import Bench
from dsec_bench.vm.parts import FIGURES, PARTS, run
from dsec_bench.vm.plot import plot

VM = Bench(
    name="vm",
    summary="MicroVMs: starts, round trips, memory of guests that share a layer, snapshots.",
    figures=FIGURES,
    parts=tuple(PARTS),
    run=run,
    plot=plot,
)
