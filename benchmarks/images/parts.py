"""The parts of `dsec-bench images`, in the order they run."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from dsec_bench.bench import Context
from dsec_bench.cgroups import CgroupError
from dsec_bench.create.daemon import DaemonError
from dsec_bench.images import builds, distinct, ondemand, shares, snapshots
from dsec_bench.images.bed import Bed, TaskError, bed
from dsec_bench.images.environment import EnvironmentError
from dsec_bench.images.server import ServerError
from dsec_bench.running import run_parts

from libdsec.errors import DSecError

EXPECTED = (
    CgroupError, DSecError, DaemonError, EnvironmentError, ServerError, TaskError, ExceptionGroup,
    OSError, ValueError, subprocess.SubprocessError,
)  # fmt: skip
PARTS: dict[str, tuple[tuple[str, ...], Callable[[Bed], None]]] = {
    "environment": (
        (
            "first_uncached_ready_ms",
            "disk_writes_vs_tar",
            "disk_writes_vs_copy",
            "prefetch_5ms_vs_local",
        ),
        ondemand.compare,
    ),
    "second": (("second_sandbox_extra_ms",), ondemand.second),
    "shares": ((), shares.shares),
    "burst": ((), distinct.burst),
    "build": (("small_change_store_mib",), builds.build),
    "snapshots": (
        ("checkpoint_ms", "rollback_ms", "branch100_s", "pack_diff_1mb_ms"),
        snapshots.snapshots,
    ),
}
FIGURES = tuple(figure for figures, _ in PARTS.values() for figure in figures)


def run(context: Context) -> None:
    """Run the chosen parts. What cannot be measured is reported with its reason."""
    if context.options.endpoint:
        for name in FIGURES:
            context.report.absent(name, "needs daemons of the bench's own, not --endpoint")
        return
    run_parts(context, PARTS, lambda stack: stack.enter_context(bed(context)), EXPECTED)
