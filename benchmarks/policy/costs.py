"""What a policy costs each connect(2), datagram, connection and byte, and each open(2)."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dsec_bench.bench import Context
from dsec_bench.cgroups import own_group
from dsec_bench.leftovers import TEMPORARY
from dsec_bench.policy import places, rules
from dsec_bench.policy.places import COUNTS, NFT, NO_POLICY, OURS, Instrument, Place
from dsec_bench.policy.world import command
from dsec_bench.report import Row
from dsec_bench.stats import Round, Summary, interleave

# command of the instrument → operations in a sample: a millisecond or two
SAMPLES = {"connect": 400, "send": 300, "tcp": 30, "stream": 30}
TRIES = {
    "connect": 6
}  # the best of so many: a hook of 80 ns drowns in what others do to the caches
TITLES = {
    "connect": "connect(2), no packet",
    "send": "a datagram sent and received",
    "tcp": "a connection made and reset",
    "stream": "64 KiB of a stream",
    "open": "open(2) and close(2)",
}
OPENS = 2000
DIRECTORIES = 8
UPDATES = 9
Samples = dict[str, list[float]]  # nanoseconds of each round, by the name of the place


def measure(context: Context) -> None:
    """All that goes through sockets."""
    rounds = 150 if context.options.quick else 400
    steps = context.steps
    with contextlib.ExitStack() as stack:
        steps.now("policies and tables")
        free = stack.enter_context(places.outside())
        spots = [stack.enter_context(places.bare(free))]
        spots += [stack.enter_context(places.ours(count)) for count in COUNTS]
        for count in COUNTS:
            steps.now(f"a table of nftables with {count:,} sets")
            spots.append(stack.enter_context(places.nftables(count, free)))
        wires = [place.wire for place in spots]
        instrument = Instrument(free.procs("free"), wires)
        stack.callback(instrument.close)
        taken = _rounds(context, instrument, spots, rounds)
        _record(context, taken)
        for place in spots:
            if place.kind == NFT:
                _nft_updates(context, place)


def _rounds(
    context: Context, instrument: Instrument, spots: Sequence[Place], rounds: int
) -> dict[str, Samples]:
    """Return samples; in each round every place has its turn, so noise is that of all."""
    # connect(2) of a datagram socket has no hook in nftables
    taken: dict[str, Samples] = {
        what: {place.name: [] for place in spots if what != "connect" or place.kind != NFT}
        for what in SAMPLES
    }
    context.steps.expect(rounds * len(spots))
    for number, place in interleave(spots, rounds + 1):
        context.steps.now(f"round {number} of {rounds}")
        instrument.enter(place)
        for what, count in SAMPLES.items():
            if place.name not in taken[what]:
                continue
            tries = range(TRIES.get(what, 1))
            value = min(instrument.ask(what, rules.SERVER, rules.PORT, count) for _ in tries)
            if number:  # the first round warms up
                taken[what][place.name].append(value)
        context.steps.done()
    return taken


def _record(context: Context, taken: dict[str, Samples]) -> None:
    report = context.report
    for what, samples in taken.items():
        rows(context, TITLES[what], samples, SAMPLES[what])
        report.run(
            "policy cost",
            what=what,
            extra_ns={name: paired(samples[NO_POLICY], values) for name, values in samples.items()},
        )
    for name, value in derive(taken["connect"]).items():
        report.figure(name, value)


def rows(context: Context, title: str, samples: Samples, count: int) -> None:
    """Record a table of samples, each of `count` operations."""
    base = samples[NO_POLICY]
    for name, values in samples.items():
        extra = paired(base, values)
        note = "" if name == NO_POLICY else f"{extra:+,.0f} ns, × {quotient(values, base):.2f}"
        made = Summary.of([Round(1e9 / each, [each / 1e6], done=count) for each in values])
        context.report.row(Row(title, name, made, note=note, unit="µs"))


def paired(base: Sequence[float], values: Sequence[float]) -> float:
    """Return the median of the differences in the same round."""
    return statistics.median(b - a for a, b in zip(base, values, strict=True))


def quotient(values: Sequence[float], base: Sequence[float]) -> float:
    """Return the median of the quotients in the same round."""
    return statistics.median(a / b for a, b in zip(values, base, strict=True))


def derive(connects: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Return the figures of connect(2): both are about what it costs more than without policy."""
    extra = [paired(connects[NO_POLICY], connects[f"{OURS}, {count:,}"]) for count in COUNTS]
    return {
        "connect_overhead_us": max(extra) / 1e3,
        "connect_10000_vs_1_policies": extra[-1] / extra[0],
    }


def _nft_updates(context: Context, place: Place) -> None:
    """Record how long nft(8) takes to change the set of one sandbox."""
    mine = place.policies - 1

    def change(number: int) -> None:
        text = rules.update(mine, place.policies + number)
        command(place.wire.world, "nft", "-f", "-", text=text)

    context.steps.now(f"updates of a table with {place.policies:,} sets")
    found = timed(change, range(UPDATES))
    context.report.row(Row("update of a policy", place.name, found, unit="µs", note="nft -f"))


def timed(work: Callable[[int], object], items: Sequence[int]) -> Summary:
    """Return how long `work` takes for each of `items`."""
    found = []
    for item in items:
        start = time.perf_counter_ns()
        work(item)
        found.append((time.perf_counter_ns() - start) / 1e6)
    return Summary.of([Round(1e3 / statistics.median(found), found)])


# --- files --------------------------------------------------------------------------------------


def opens(context: Context) -> None:
    """open(2) in Landlock domains that allow eight directories, beside other such domains."""
    rounds = 60 if context.options.quick else 300
    with contextlib.ExitStack() as stack:
        free = stack.enter_context(places.outside())
        folder = Path(
            stack.enter_context(TemporaryDirectory(prefix=own_group("-open-"), dir=TEMPORARY))
        )
        allowed = [folder / f"d{number}" for number in range(DIRECTORIES)]
        for path in allowed:
            path.mkdir()
            (path / "file").write_bytes(b"x")
        instruments: dict[str, Instrument] = {}
        for count in (0, *COUNTS):
            name = f"Landlock, {count:,}" if count else NO_POLICY
            instruments[name] = made = Instrument(free.procs("free"), [])
            stack.callback(made.close)
            if count:
                context.steps.now(f"{count:,} Landlock domains")
                made.ask("domains", count, *allowed)
        samples: Samples = {name: [] for name in instruments}
        context.steps.expect(rounds * len(instruments))
        for number, (name, instrument) in interleave(list(instruments.items()), rounds + 1):
            context.steps.now(f"round {number} of {rounds}")
            value = instrument.ask("open", allowed[DIRECTORIES // 2] / "file", OPENS)
            if number:
                samples[name].append(value)
            context.steps.done()
        rows(context, TITLES["open"], samples, OPENS)
