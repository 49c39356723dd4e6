"""The parts of `dsec-bench vm`, in the order they run."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable

from dsec_bench.bench import Context
from dsec_bench.cgroups import CgroupError
from dsec_bench.create.daemon import DaemonError
from dsec_bench.create.image import ImageError
from dsec_bench.create.sdk import Wrong
from dsec_bench.rootfs import RootfsError
from dsec_bench.running import run_parts
from dsec_bench.toolchain import ToolchainError
from dsec_bench.vm import layers, replayed, reporting, snapshots, starts
from dsec_bench.vm.bed import Bed, BedError

from libdsec.errors import DSecError

EXPECTED = (
    BedError, CgroupError, DSecError, DaemonError, ImageError, RootfsError, ToolchainError, Wrong,
    ExceptionGroup, OSError, ValueError, TimeoutError, subprocess.SubprocessError,
)  # fmt: skip
PARTS: dict[str, tuple[tuple[str, ...], Callable[[Bed], None]]] = {
    "starts": (("cold_start_s", "template_start_s", "roundtrip_extra_ms"), starts.measure),
    "layers": (("pmem_saving_4_guests",), layers.measure),
    "reporting": (("fpr_returned_share",), reporting.measure),
    "replay": (("damon_fpr_memory_time_saving",), replayed.measure),
    "snapshots": (
        ("checkpoint_pause_ms", "branch4_s", "branch_private_mib"),
        snapshots.measure,
    ),
}
FIGURES = tuple(figure for figures, _ in PARTS.values() for figure in figures)


def run(context: Context) -> None:
    """Run the chosen parts. What cannot be measured is reported with its reason."""
    if context.options.endpoint:
        for name in FIGURES:
            context.report.absent(name, "needs a daemon of the bench's own, not --endpoint")
        return

    def make(stack: contextlib.ExitStack) -> Bed:
        return Bed(context)

    run_parts(context, PARTS, make, EXPECTED)
