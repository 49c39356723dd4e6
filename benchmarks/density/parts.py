"""The parts of `dsec-bench density`, in the order they run."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from dsec_bench.bench import Context
from dsec_bench.cgroups import CgroupError
from dsec_bench.create.daemon import Daemon, DaemonError
from dsec_bench.create.image import ImageError, chosen_root, place
from dsec_bench.create.sdk import Sdk, Wrong
from dsec_bench.density import idle
from dsec_bench.report import Row
from dsec_bench.rootfs import RootfsError
from dsec_bench.running import run_parts
from dsec_bench.stats import Round, Summary

from libdsec.errors import DSecError

LIVE = 3200
QUICK_LIVE = 200
SERIES = "answers of idle sandboxes"
EXPECTED = (
    CgroupError, DSecError, DaemonError, ImageError, RootfsError, Wrong, ExceptionGroup, OSError,
    ValueError, TimeoutError, subprocess.SubprocessError,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Bed:
    """What the parts share: a daemon of our own, and its client."""

    context: Context
    daemon: Daemon
    sdk: Sdk


def run(context: Context) -> None:
    """Run the chosen parts. What cannot be measured is reported with its reason."""
    if context.options.endpoint:
        for name in FIGURES:
            context.report.absent(name, "needs a daemon of the bench's own, not --endpoint")
        return
    run_parts(context, PARTS, lambda stack: _bed(context, stack), EXPECTED)


def _bed(context: Context, stack: contextlib.ExitStack) -> Bed:
    context.steps.now("start of the daemon")
    root = chosen_root(context.options, stack)
    daemon = stack.enter_context(Daemon())
    place(root, daemon.kept, context.options.image)
    daemon.start()
    sdk = Sdk(daemon.endpoint, context.options.image)
    stack.callback(sdk.close)
    sdk.open()
    context.report.run("root", digest=root.manifest.digest, origin=root.origin)
    return Bed(context, daemon, sdk)


def _idle(bed: Bed) -> None:
    report, steps = bed.context.report, bed.context.steps
    wanted = QUICK_LIVE if bed.context.options.quick else LIVE
    steps.expect(wanted)
    steps.now(f"{wanted:,} sandboxes asleep")
    found = idle.measure(bed.sdk, bed.daemon.pid, wanted, steps.done)
    for level in found.levels:
        report.run(
            "idle level", live=level.live, used_bytes=level.used_bytes,
            daemon_bytes=level.daemon_bytes,
        )  # fmt: skip
    report.run(
        "idle", wanted=wanted, live=found.live, answered=len(found.answers_ms), why=found.why,
        fill_s=found.fill_s, mib_per_sandbox=found.mib_per_sandbox, errors=found.errors,
    )  # fmt: skip
    answers = found.answers_ms
    rate = 1e3 * len(answers) / sum(answers) if answers else 0.0
    summary = Summary.of([Round(rate, answers, found.live - len(answers))])
    report.row(Row(SERIES, "dsec", summary, 1, f"{found.live:,} live"))
    report.figure("live_idle_sandboxes", len(answers))


PARTS: dict[str, tuple[tuple[str, ...], Callable[[Bed], None]]] = {
    "idle": (("live_idle_sandboxes",), _idle),
}
FIGURES = tuple(figure for figures, _ in PARTS.values() for figure in figures)
