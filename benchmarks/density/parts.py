"""The parts of `dsec-bench density`, in the order they run."""

from __future__ import annotations

import contextlib
import functools
import statistics
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter

from dsec_bench.bench import Context
from dsec_bench.cgroups import CgroupError
from dsec_bench.create.daemon import NO_SWAP, Daemon, DaemonError, zram
from dsec_bench.create.image import ImageError, Root, chosen_root, place, python_root
from dsec_bench.create.sdk import Sdk, Wrong
from dsec_bench.density import classes, fncall, footprint, idle, pausing, replay
from dsec_bench.density.series import BESIDE, CALLS, IDLE, PAUSED, REPLAY
from dsec_bench.density.workload import Scale, draw
from dsec_bench.report import Report, Row
from dsec_bench.rootfs import RootfsError
from dsec_bench.running import run_parts
from dsec_bench.stats import Round, Summary, interleave, percentile
from dsec_bench.toolchain import ToolchainError

from libdsec.errors import DSecError

LIVE = 3200
QUICK_LIVE = 200
SLEEP_BYTES, PYTHON_BYTES = 5 << 20, 40 << 20  # at most, of one that waits
PYTHONS, QUICK_PYTHONS = 1000, 20
ASKED = 200  # of them, at most
ZRAM_MB = 48 << 10  # what is written to it takes a third or so
ROUNDS = 5
BURSTS, QUICK_BURSTS = 60, 15  # of a round
LIVES = Scale(sandboxes=48, compression=34, burst_s=10, window_s=55)
QUICK_LIVES = Scale(sandboxes=24, compression=60, burst_s=5, window_s=30)
MIB, GIB = 1 << 20, 1 << 30
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
    daemon, sdk = _daemon(context, root, stack)
    context.report.run("root", digest=root.manifest.digest, origin=root.origin)
    return Bed(context, daemon, sdk)


def _daemon(
    context: Context,
    root: Root,
    stack: contextlib.ExitStack,
    serial: int = 0,
    reclaim: str = NO_SWAP,
) -> tuple[Daemon, Sdk]:
    """Return a daemon that has `root` as its layer, and a client of it, until `stack` ends."""
    image = context.options.image
    daemon = stack.enter_context(Daemon(serial, reclaim))
    place(root, daemon.kept, image)
    daemon.start()
    sdk = Sdk(daemon.endpoint, image)
    stack.callback(sdk.close)
    sdk.open()
    return daemon, sdk


def _idle(bed: Bed) -> None:
    report, steps = bed.context.report, bed.context.steps
    wanted = QUICK_LIVE if bed.context.options.quick else LIVE
    steps.expect(wanted)
    steps.now(f"{wanted:,} sandboxes asleep")
    found = idle.measure(bed.sdk, bed.daemon.pid, wanted, idle.sleep, SLEEP_BYTES, steps.done)
    for level in found.levels:
        report.run(
            "idle level", live=level.live, used_bytes=level.used_bytes,
            daemon_bytes=level.daemon_bytes,
        )  # fmt: skip
    _tell_idle(report, "asleep", wanted, found)
    report.figure("live_idle_sandboxes", len(found.answers_ms))


def _pythons(bed: Bed) -> None:
    """As many as there can be without pausing them."""
    context = bed.context
    wanted = QUICK_PYTHONS if context.options.quick else PYTHONS
    with contextlib.ExitStack() as stack:
        daemon, sdk = _daemon(context, python_root(stack), stack, 1)
        context.steps.expect(wanted)
        context.steps.now(f"{wanted:,} Pythons that wait")
        found = idle.measure(
            sdk, daemon.pid, wanted, pausing.start, PYTHON_BYTES, context.steps.done
        )
    _tell_idle(context.report, "with a Python", wanted, found)


def _tell_idle(report: Report, what: str, wanted: int, found: idle.Result) -> None:
    report.run(
        "idle", what=what, wanted=wanted, live=found.live, answered=len(found.answers_ms),
        why=found.why, fill_s=found.fill_s, mib_per_sandbox=found.mib_per_sandbox,
        errors=found.errors,
    )  # fmt: skip
    answers = found.answers_ms
    rate = 1e3 * len(answers) / sum(answers) if answers else 0.0
    summary = Summary.of([Round(rate, answers, found.live - len(answers))])
    note = f"{found.live:,} live, {found.mib_per_sandbox:.2f} MiB of the host each"
    report.row(Row(IDLE, what, summary, 1, note))


def _pausing(bed: Bed) -> None:
    """With a daemon that has swap; the shared one has none, so that nothing hides there."""
    context = bed.context
    wanted = QUICK_PYTHONS if context.options.quick else PYTHONS
    with contextlib.ExitStack() as stack:
        _, sdk = _daemon(context, python_root(stack), stack, 1, zram(ZRAM_MB))
        context.steps.expect(wanted)
        context.steps.now(f"{wanted:,} paused Pythons")
        found = pausing.measure(sdk, wanted, min(ASKED, wanted), context.steps.done)
    report, live = context.report, len(found.paused)
    report.run(
        "paused", wanted=wanted, live=live, why=found.why, notes=sorted(found.notes),
        running_mib=statistics.median(found.running) / MIB,
        swapped_mib=statistics.median(found.swapped) / MIB,
        host_mib_each=(found.used_bytes[-1] - found.used_bytes[0]) / live / MIB,
        zram_mib_each=(found.hosts[-1].zram_bytes - found.hosts[0].zram_bytes) / live / MIB,
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
    quick = bed.context.options.quick
    bursts = QUICK_BURSTS if quick else BURSTS
    loads = classes.QUICK_LOADS if quick else classes.LOADS
    steps.expect(ROUNDS * len(classes.steps(loads)))
    steps.now("20 ms each 100 ms beside processes that want CPU time")
    found = classes.measure(bed.sdk, loads, ROUNDS, bursts, steps.done)
    report.run("classes", notes=found.notes)
    for (case, percent), rounds in found.bursts_ms.items():
        p50, p99 = (found.ratio(case, percent, share) for share in (0.5, 0.99))
        report.run("classes load", case=case, percent=percent, p50_ratio=p50, p99_ratio=p99)
        summary = Summary.of([Round(1e3 * len(ms) / sum(ms), ms) for ms in rounds])
        note = f"{percent}% load, to unloaded {p50:.2f}, p99 {p99:.2f}"
        report.row(Row(BESIDE, case, summary, 1, note))
    ratio = functools.partial(found.ratio, percent=classes.FULL)
    report.figure("ls_p50_loaded_vs_unloaded", ratio("latency_sensitive", share=0.5))
    report.figure("ls_p99_loaded_vs_unloaded", ratio("latency_sensitive", share=0.99))
    report.figure("default_p50_loaded_vs_unloaded", ratio("standard", share=0.5))


def _replay(bed: Bed) -> None:
    """Each run has a daemon of its own, so that none finds what another has left."""
    context = bed.context
    scale, rounds = (QUICK_LIVES, 1) if context.options.quick else (LIVES, ROUNDS)
    context.steps.expect(len(replay.MODES) * rounds * scale.sandboxes)
    found, steps_per_s = replay.Result(), 0.0
    with contextlib.ExitStack() as kept:
        root = python_root(kept)
        for number, mode in interleave(replay.MODES, rounds):
            context.steps.now(f"lives of {scale.sandboxes} agents, reclaim {mode}")
            before = footprint.host()
            with contextlib.ExitStack() as stack:
                daemon, sdk = _daemon(context, root, stack, 2, replay.RECLAIM[mode])
                steps_per_s = steps_per_s or replay.calibrate(sdk)
                group = footprint.memory_group(daemon.name)
                look = functools.partial(footprint.read, group, before)
                lives = draw(scale, seed=number)
                run = replay.measure(sdk, lives, steps_per_s, look, context.steps.done)
            found.runs[mode].append(run)
            _tell_run(context.report, scale, number, mode, run)
    _tell_replay(context.report, found)


def _tell_run(report: Report, scale: Scale, number: int, mode: str, run: replay.Run) -> None:
    report.run(
        "replay", mode=mode, seed=number, sandboxes=scale.sandboxes, turns=len(run.turns_ms),
        compression=scale.compression, window_s=scale.window_s,
        **{
            f"{name}_gib_s": run.integral(attrgetter(f"{name}_bytes")) / GIB
            for name in ("held", "charged", "zram", "cached", "gone")
        },
        **{
            f"{name}_peak_mib": run.peak(attrgetter(f"{name}_bytes")) / MIB
            for name in ("held", "swapped", "stored", "zram")
        },
        turns_s=sum(run.turns_ms) / 1e3, lives_s=sum(run.lives_s), makespan_s=run.makespan_s,
        cpu_share_p50=percentile(run.shares, 0.5), cpu_share_p90=percentile(run.shares, 0.9),
    )  # fmt: skip
    report.run(
        "replay seen", mode=mode, seed=number, t_s=[at for at, _ in run.seen],
        held_mib=[now.held_bytes / MIB for _, now in run.seen],
    )  # fmt: skip


def _tell_replay(report: Report, found: replay.Result) -> None:
    saving = found.saving(attrgetter("held_bytes"))
    more = {
        "turns": found.more(lambda run: sum(run.turns_ms)),
        "lives": found.more(lambda run: sum(run.lives_s)),
        "makespan": found.more(lambda run: run.makespan_s),
    }
    report.run(
        "replay saving", saving=saving, saving_by_host=found.saving(attrgetter("gone_bytes")),
        more=more,
    )  # fmt: skip
    extra = ", ".join(f"{name} {share:+.1%}" for name, share in more.items())
    for mode, runs in found.runs.items():
        rounds = [Round(1e3 * len(run.turns_ms) / sum(run.turns_ms), run.turns_ms) for run in runs]
        note = extra if mode == "on" else ""
        report.row(Row(REPLAY, f"reclaim {mode}", Summary.of(rounds), len(runs[0].lives_s), note))
    report.figure("memory_time_saving", saving)


def _fncall(bed: Bed) -> None:
    """All with the same Python, the host's."""
    context, report, steps = bed.context, bed.context.report, bed.context.steps
    seconds = 2.0 if context.options.quick else 10.0
    found = {}
    with contextlib.ExitStack() as stack:
        _, sdk = _daemon(context, python_root(stack), stack, 1)
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
    "pythons": ((), _pythons),
    "pause": (("paused_python_mib", "resume_ms"), _pausing),
    "classes": (
        (
            "ls_p50_loaded_vs_unloaded",
            "ls_p99_loaded_vs_unloaded",
            "default_p50_loaded_vs_unloaded",
        ),
        _classes,
    ),
    "replay": (("memory_time_saving",), _replay),
}
FIGURES = tuple(figure for figures, _ in PARTS.values() for figure in figures)
