"""The parts of `dsec-bench create`, in the order they run, and what they need.

All peers, the SDK path, the native path and the bare loop take turns in rounds, so that a machine
whose speed drifts slows all of them alike; a ratio is the median of the ratios of each round.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from dsec_bench.bench import Context
from dsec_bench.cgroups import CgroupError
from dsec_bench.create import burst, growth, live
from dsec_bench.create.daemon import Daemon, DaemonError
from dsec_bench.create.floor import Floor, FloorError
from dsec_bench.create.image import ImageError, Root, chosen_root, place, root_of
from dsec_bench.create.native import Native
from dsec_bench.create.sdk import Sdk, Wrong
from dsec_bench.peers.drivers import PEERS
from dsec_bench.peers.stage import Stage, StageError, stages
from dsec_bench.report import Row
from dsec_bench.rootfs import RootfsError
from dsec_bench.running import run_parts, said
from dsec_bench.stats import Round, Summary, interleave, paired_ratio, percentile
from dsec_bench.toolchain import ToolchainError

from libdsec.errors import DSecError

CONCURRENCY = 8
BURSTS = (100, 500, 2000)
LIVE = (0, 1000, 2000, 3000)
READOPT = 500
EXPECTED = (
    CgroupError, DSecError, DaemonError, FloorError, ImageError, RootfsError, StageError,
    ToolchainError, Wrong, ExceptionGroup, OSError, ValueError,
)  # fmt: skip

# ratio → (whose rate, over whose)
RATIOS = {
    "sdk_vs_crun": ("dsec", "crun"),
    "sdk_vs_bubblewrap": ("dsec", "bubblewrap"),
    "sdk_vs_docker": ("dsec", "docker"),
    "native_vs_crun": ("dsec-native", "crun"),
    "native_vs_floor": ("dsec-native", "bare C loop"),
}
FIGURES = (
    *RATIOS,
    "burst2000_succeeded",
    "p99_live3000_vs_live0",
    "idle_mib_per_sandbox",
    "roundtrip_ms",
    "readopt500_s",
)


class Contender(Protocol):
    """Whoever takes part in the rounds."""

    name: str

    def round(self, concurrency: int, seconds: float) -> Round: ...


@dataclass(slots=True)
class Bed:
    """What the parts share: the root, our daemon (None: a given one is used), the client."""

    context: Context
    root: Root
    daemon: Daemon | None
    sdk: Sdk

    @property
    def quick(self) -> bool:
        return self.context.options.quick

    @property
    def rounds(self) -> int:
        return 5 if self.quick else 9

    @property
    def seconds(self) -> float:
        return 1.0 if self.quick else 3.0


def run(context: Context) -> None:
    """Run the chosen parts. What cannot be measured is reported with its reason."""
    run_parts(context, PARTS, lambda stack: _bed(context, stack), EXPECTED)


def _bed(context: Context, stack: contextlib.ExitStack) -> Bed:
    """Start what the parts share; everything is closed with `stack`."""
    options = context.options
    context.steps.now("start of the daemon")
    daemon: Daemon | None = None
    if options.endpoint:
        sdk = Sdk(options.endpoint, options.image)
        stack.callback(sdk.close)
        sdk.open()
        root = root_of(sdk, options, stack)
    else:
        root = chosen_root(options, stack)
        daemon, sdk = _own_daemon(root, options.image, 0, stack)
    context.report.run("root", digest=root.manifest.digest, origin=root.origin)
    return Bed(context, root, daemon, sdk)


def _own_daemon(
    root: Root, image: str, serial: int, stack: contextlib.ExitStack
) -> tuple[Daemon, Sdk]:
    """Start a daemon that has `root` as its layer `image`, and a client of it."""
    daemon = stack.enter_context(Daemon(serial))
    place(root, daemon.kept, image)
    daemon.start()
    sdk = Sdk(daemon.endpoint, image)
    stack.callback(sdk.close)
    sdk.open()
    return daemon, sdk


# --- peers ------------------------------------------------------------------------------------


def _peers(bed: Bed) -> None:
    report, steps = bed.context.report, bed.context.steps
    names = bed.context.options.peers
    names = tuple(PEERS) if names is None else names
    with contextlib.ExitStack() as stack:
        steps.now("setting up the peers")
        opened, reasons = stack.enter_context(stages(names, bed.root.tree))
        contenders: list[Contender] = [bed.sdk]
        contenders += _optional(bed, stack, reasons)
        contenders += opened
        for name, reason in reasons.items():
            report.absent(name, reason)
            steps.note(f"{name} is left out: {reason}")
        taken = _take_turns(bed, contenders)
    _record_peers(bed, taken, opened, reasons)


def _optional(bed: Bed, stack: contextlib.ExitStack, reasons: dict[str, str]) -> list[Contender]:
    """Return the native path and the bare loop, where they can be set up."""
    found: list[Contender] = []
    for made in (Native(bed.root, bed.context.options.image), Floor(bed.root)):
        stack.callback(made.close)
        try:
            made.open()
        except EXPECTED as error:
            reasons[made.name] = said(error)
        else:
            found.append(made)
    return found


def _take_turns(bed: Bed, contenders: list[Contender]) -> dict[str, list[Round]]:
    """Return each contender's rounds, after one that warms it up and is not counted."""
    steps = bed.context.steps
    steps.expect(len(contenders) * (bed.rounds + 1))
    taken: dict[str, list[Round]] = {contender.name: [] for contender in contenders}
    for contender in contenders:
        steps.now(f"warming up: {contender.name}")
        contender.round(CONCURRENCY, bed.seconds / 4)
        steps.done()
    for number, contender in interleave(contenders, bed.rounds):
        steps.now(f"round {number + 1} of {bed.rounds}: {contender.name}")
        taken[contender.name].append(contender.round(CONCURRENCY, bed.seconds))
        steps.done()
    return taken


def _record_peers(
    bed: Bed, taken: dict[str, list[Round]], opened: list[Stage], reasons: dict[str, str]
) -> None:
    report = bed.context.report
    versions = {stage.name: stage.version for stage in opened}
    for name, rounds in taken.items():
        try:
            summary = Summary.of(rounds)
        except ValueError as error:
            reasons[name] = str(error)
            report.absent(name, str(error))
        else:
            report.row(Row("peers", name, summary, CONCURRENCY, versions.get(name, "")))
    for figure, (ours, theirs) in RATIOS.items():
        gone = [name for name in (ours, theirs) if name not in taken or name in reasons]
        if gone:
            why = "; ".join(f"{name}: {reasons.get(name, 'not asked for')}" for name in gone)
            report.absent(figure, why)
        else:
            report.figure(figure, paired_ratio(taken[ours], taken[theirs]))


# --- the SDK path alone -----------------------------------------------------------------------


def _concurrency(bed: Bed) -> None:
    levels = (1, CONCURRENCY, 64)
    bed.context.steps.expect(len(levels) * bed.rounds)
    taken: dict[int, list[Round]] = {level: [] for level in levels}
    for _, level in interleave(levels, bed.rounds):
        bed.context.steps.now(f"{level} in parallel")
        taken[level].append(bed.sdk.round(level, bed.seconds))
        bed.context.steps.done()
    for level, rounds in taken.items():
        bed.context.report.row(Row("concurrency", "dsec", Summary.of(rounds), level))


def _burst(bed: Bed) -> None:
    report, steps = bed.context.report, bed.context.steps
    steps.expect(sum(BURSTS))
    for count in BURSTS:
        steps.now(f"burst of {count:,}")
        result = burst.burst(bed.sdk, count, steps.done)
        report.run("burst", answered_ms=result.answered_ms, **result.facts())
        steps.done(count - result.succeeded)
        steps.note(
            f"burst of {count:,}: {result.succeeded:,} answered in {result.seconds:.2f} s, "
            f"stopped in {result.stop_s:.2f} s"
        )
        if count == BURSTS[-1]:
            report.figure("burst2000_succeeded", result.succeeded)


def _growth(bed: Bed) -> None:
    report, steps = bed.context.report, bed.context.steps
    steps.expect(LIVE[-1] + len(LIVE) * bed.rounds)

    def on_round(count: int) -> None:
        steps.now(f"{count:,} live sandboxes")
        steps.done()

    levels = growth.levels(bed.sdk, LIVE, bed.seconds, bed.rounds, steps.done, on_round)
    summaries = [Summary.of(level.rounds) for level in levels]
    for level, summary in zip(levels, summaries, strict=True):
        report.row(Row("growth", "dsec", summary, CONCURRENCY, f"{level.live:,} live"))
        report.run("memory", live=level.live, used_bytes=level.used_bytes)
    report.figure("p99_live3000_vs_live0", summaries[-1].p99_ms / summaries[0].p99_ms)
    idle = growth.idle_mib(levels[0], levels[-1])
    if idle is None:
        report.absent("idle_mib_per_sandbox", "this host does not let us drop its caches")
    else:
        report.figure("idle_mib_per_sandbox", idle)


def _roundtrip(bed: Bed) -> None:
    count = 500 if bed.quick else 3000
    through_sdk = live.roundtrips_ms(bed.sdk, count)
    process = live.process_ms(count)
    median = statistics.median(through_sdk)
    bed.context.report.run(
        "roundtrip",
        p50_ms=median,
        p95_ms=percentile(through_sdk, 0.95),
        p99_ms=percentile(through_sdk, 0.99),
        process_p50_ms=statistics.median(process),
        above_process_ms=median - statistics.median(process),
    )
    bed.context.report.figure("roundtrip_ms", median)


def _readopt(bed: Bed) -> None:
    """With a daemon of its own in any case: nobody wants theirs killed."""
    report, steps = bed.context.report, bed.context.steps
    steps.expect(READOPT)
    with contextlib.ExitStack() as stack:
        daemon, sdk = bed.daemon, bed.sdk
        if daemon is None:
            daemon, sdk = _own_daemon(bed.root, bed.context.options.image, 1, stack)
        result = live.readopt(daemon, sdk, READOPT, steps.done)
    report.run(
        "readopt", live=result.live, first_s=result.first_s, all_s=result.all_s, lost=result.lost
    )
    if result.lost:
        report.absent("readopt500_s", f"{result.lost} of {result.live} sandboxes did not answer")
    else:
        report.figure("readopt500_s", result.all_s)


PARTS: dict[str, tuple[tuple[str, ...], Callable[[Bed], None]]] = {
    "peers": (tuple(RATIOS), _peers),
    "concurrency": ((), _concurrency),
    "burst": (("burst2000_succeeded",), _burst),
    "growth": (("p99_live3000_vs_live0", "idle_mib_per_sandbox"), _growth),
    "roundtrip": (("roundtrip_ms",), _roundtrip),
    "readopt": (("readopt500_s",), _readopt),
}
