"""`dsec-bench policy`: what network and file policies cost, and whether they are what they say."""

from dsec_bench.bench import Bench
from dsec_bench.policy.parts import FIGURES, PARTS, run
from dsec_bench.policy.plot import plot

POLICY = Bench(
    name="policy",
    summary=(
        "Binding, changing and unbinding policies, in the daemon and through the client; what "
        "connect(2), packets and open(2) cost with 1, 1,000 and 10,000 policies, against none "
        "and against sets of nftables; the reference model against the kernel."
    ),
    figures=FIGURES,
    parts=tuple(PARTS),
    run=run,
    plot=plot,
)
