"""`dsec-bench create`: how fast sandboxes come and go, beside others, and what they hold."""

from dsec_bench.bench import Bench
from dsec_bench.create.parts import FIGURES, PARTS, run
from dsec_bench.create.plot import plot

CREATE = Bench(
    name="create",
    summary=(
        "Create, first command, destroy: rates and latencies through the SDK, without RPC, as a "
        "bare C loop, and with crun, bubblewrap, docker and others on the same root; bursts, "
        "growth, memory, round trips and re-adoption."
    ),
    figures=FIGURES,
    parts=tuple(PARTS),
    run=run,
    plot=plot,
)
