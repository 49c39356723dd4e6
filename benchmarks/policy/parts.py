"""The parts of `dsec-bench policy`, in the order they run."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable

from dsec_bench.bench import Context
from dsec_bench.cgroups import CgroupError
from dsec_bench.create.daemon import DaemonError
from dsec_bench.create.image import ImageError
from dsec_bench.policy import agreement, binding, costs, live
from dsec_bench.policy.world import WorldError
from dsec_bench.rootfs import RootfsError
from dsec_bench.running import run_parts
from dsec_bench.toolchain import ToolchainError

from libdsec.errors import DSecError

EXPECTED = (
    CgroupError, DSecError, DaemonError, ImageError, RootfsError, ToolchainError, WorldError,
    ExceptionGroup, OSError, ValueError, TimeoutError, subprocess.SubprocessError,
)  # fmt: skip
PARTS: dict[str, tuple[tuple[str, ...], Callable[[Context], None]]] = {
    "bind": (("bind_us",), binding.measure),
    "update": (("update_ms",), live.measure),
    "cost": (("connect_overhead_us", "connect_10000_vs_1_policies"), costs.measure),
    "open": ((), costs.opens),
    "model": (("model_cases", "model_disagreements"), agreement.measure),
}
FIGURES = tuple(figure for figures, _ in PARTS.values() for figure in figures)


def run(context: Context) -> None:
    """Run the chosen parts. What cannot be measured is reported with its reason."""
    if context.options.endpoint:
        for name in FIGURES:
            context.report.absent(name, "needs a daemon of the bench's own, not --endpoint")
        return

    def make(stack: contextlib.ExitStack) -> Context:
        return context

    run_parts(context, PARTS, make, EXPECTED)
