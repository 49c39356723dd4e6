"""The parts of `dsec-bench density`, in the order they run."""

from __future__ import annotations

import contextlib
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass

from dsec_bench.bench import Context
from dsec_bench.cgroups import CgroupError
from dsec_bench.create.daemon import Daemon, DaemonError
from dsec_bench.create.image import ImageError, chosen_root, place, python_root
from dsec_bench.create.sdk import Sdk, Wrong
from dsec_bench.density import classes, fncall, idle, pausing
from dsec_bench.density.series import BESIDE, CALLS, IDLE, PAUSED
from dsec_bench.report import Row
from dsec_bench.rootfs import RootfsError
from dsec_bench.running import run_parts
from dsec_bench.stats import Round, Summary
from dsec_bench.toolchain import ToolchainError

from libdsec.errors import DSecError

LIVE = 3200
QUICK_LIVE = 200
PYTHONS, QUICK_PYTHONS = 1000, 20
ASKED = 200  # of them, at most
ZRAM_MB = 48 << 10  # what is written to it takes a third or so
ROUNDS = 5
BURSTS, QUICK_BURSTS = 60, 20  # of a round
MIB = 1 << 20
EXPECTED = (
    CgroupError, DSecError, DaemonError, ImageError, RootfsError, Wrong, ToolchainError,
    ExceptionGroup, OSError, ValueError, TimeoutError, subprocess.SubprocessError,
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


def _python_sdk(context: Context, stack: contextlib.ExitStack, zram_mb: int = 0) -> Sdk:
    """Return the client of a daemon beside the bed's, whose image has the host's Python."""
    root = python_root(stack)
    daemon = stack.enter_context(Daemon(1, zram_mb))
    place(root, daemon.kept, context.options.image)
    daemon.start()
    sdk = Sdk(daemon.endpoint, context.options.image)
    stack.callback(sdk.close)
    sdk.open()
    return sdk


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
    report.row(Row(IDLE, "dsec", summary, 1, f"{found.live:,} live"))
    report.figure("live_idle_sandboxes", len(answers))


def _pausing(bed: Bed) -> None:
    """With a daemon that has swap; the shared one has none, so that nothing hides there."""
    context = bed.context
    wanted = QUICK_PYTHONS if context.options.quick else PYTHONS
    with contextlib.ExitStack() as stack:
        sdk = _python_sdk(context, stack, ZRAM_MB)
        context.steps.expect(wanted)
        context.steps.now(f"{wanted:,} paused Pythons")
        found = pausing.measure(sdk, wanted, min(ASKED, wanted), context.steps.done)
    report, live = context.report, len(found.paused)
    report.run(
        "paused", wanted=wanted, live=live, why=found.why, notes=sorted(found.notes),
        running_mib=statistics.median(found.running) / MIB,
        swapped_mib=statistics.median(found.swapped) / MIB,
        host_mib_each=(found.used_bytes[-1] - found.used_bytes[0]) / live / MIB,
    )  # fmt: skip
    for name, times in (
        ("pause", found.pause_ms), ("its answer to a line", found.answer_ms),
        ("`true` beside it", found.command_ms),
    ):  # fmt: skip
        rate = 1e3 * len(times) / sum(times)
        report.row(Row(PAUSED, name, Summary.of([Round(rate, times)]), 1, f"{live:,} paused"))
    if live == wanted:
        report.figure("paused_python_mib", statistics.median(found.paused) / MIB)
    else:
        report.absent("paused_python_mib", f"{live} of {wanted}: {found.why}")
    report.figure("resume_ms", statistics.median(found.answer_ms))


def _classes(bed: Bed) -> None:
    report, steps = bed.context.report, bed.context.steps
    bursts = QUICK_BURSTS if bed.context.options.quick else BURSTS
    steps.expect(ROUNDS * len(classes.SETTINGS))
    steps.now("20 ms each 100 ms beside processes that never stop")
    found = classes.measure(bed.sdk, ROUNDS, bursts, steps.done)
    report.run("classes", notes=found.notes)
    for case, rounds in found.bursts_ms.items():
        summary = Summary.of([Round(1e3 * len(ms) / sum(ms), ms) for ms in rounds])
        report.row(Row(BESIDE, case, summary, 1, f"p99/unloaded {found.ratio(case, 0.99):.2f}"))
    report.figure("ls_p50_loaded_vs_unloaded", found.ratio("best_effort", 0.5))
    report.figure("ls_p99_loaded_vs_unloaded", found.ratio("best_effort", 0.99))
    report.figure("default_p50_loaded_vs_unloaded", found.ratio("standard", 0.5))


def _fncall(bed: Bed) -> None:
    """All with the same Python, the host's."""
    context, report, steps = bed.context, bed.context.report, bed.context.steps
    seconds = 2.0 if context.options.quick else 10.0
    found = {}
    with contextlib.ExitStack() as stack:
        sdk = _python_sdk(context, stack)
        kinds = {
            "warm workers": lambda: fncall.warm(sdk.client, context.options.image, seconds),
            "fresh containers": lambda: fncall.fresh(sdk.client, sdk.args, seconds),
            "forks of one process": lambda: fncall.forked(seconds),
            "multiprocessing": lambda: fncall.pooled(seconds),
        }
        steps.expect(len(kinds))
        for name, measure in kinds.items():
            steps.now(f"{CALLS}: {name}")
            found[name] = made = sdk.run(measure())
            report.run("fncall", how=name, per_s=made.per_s, p50_ms=made.p50_ms)
            summary = Summary.of([Round(made.per_s, made.alone_ms, 0)])
            report.row(Row(CALLS, name, summary, fncall.CONCURRENCY, ""))
            steps.done(1)
    warm = found["warm workers"]
    report.run("fncall interpreter", host=fncall.interpreter())
    report.figure("fncall_per_s", warm.per_s)
    report.figure("fncall_p50_ms", warm.p50_ms)
    report.figure("fncall_vs_fresh_container", warm.per_s / found["fresh containers"].per_s)


PARTS: dict[str, tuple[tuple[str, ...], Callable[[Bed], None]]] = {
    "idle": (("live_idle_sandboxes",), _idle),
    "fncall": (("fncall_per_s", "fncall_p50_ms", "fncall_vs_fresh_container"), _fncall),
    "pause": (("paused_python_mib", "resume_ms"), _pausing),
    "classes": (
        (
            "ls_p50_loaded_vs_unloaded",
            "ls_p99_loaded_vs_unloaded",
            "default_p50_loaded_vs_unloaded",
        ),
        _classes,
    ),
}
FIGURES = tuple(figure for figures, _ in PARTS.values() for figure in figures)
