"""Samples of operations and what is told about them. Pure.

An operation is one create → first command → destroy, or whatever a bench repeats. Times are
microseconds since the start of its round.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Operation:
    """One operation: who did it, from when to when (µs), and whether it succeeded."""

    worker: int
    start_us: float
    end_us: float
    ok: bool = True

    @property
    def micros(self) -> float:
        return self.end_us - self.start_us


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value below which `share` (0..1) of `values` lie, linearly interpolated.

    Raises ValueError when there are no values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values")
    place = share * (len(ordered) - 1)
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def rate(operations: Sequence[Operation]) -> float:
    """Return successful operations per second while every worker was busy.

    The sum of each worker's own rate: dividing by the whole round instead would charge slow
    contenders for the idle time of the workers that ended first.
    """
    total = 0.0
    by_worker: dict[int, list[Operation]] = {}
    for operation in operations:
        by_worker.setdefault(operation.worker, []).append(operation)
    for mine in by_worker.values():
        busy = max(o.end_us for o in mine) - min(o.start_us for o in mine)
        done = sum(o.ok for o in mine)
        if busy > 0:
            total += done / busy * 1e6
    return total


@dataclass(slots=True)
class Round:
    """One contender's turn: `rate` per second, latencies in ms of the successes, failures.

    `done` counts the successes where fewer latencies than that are known.
    """

    rate: float
    latencies_ms: list[float] = field(default_factory=list)
    failures: int = 0
    error: str = ""
    steps_ms: dict[str, list[float]] = field(default_factory=dict)
    done: int | None = None

    @classmethod
    def of(
        cls,
        operations: Sequence[Operation],
        error: str = "",
        steps_ms: dict[str, list[float]] | None = None,
    ) -> Round:
        """Return what `operations` amount to."""
        good = [o.micros / 1e3 for o in operations if o.ok]
        return cls(rate(operations), good, len(operations) - len(good), error, steps_ms or {})


@dataclass(slots=True)
class Summary:
    """Several rounds of one contender: medians over the rounds, percentiles over all operations."""

    rate: float
    rates: list[float]
    operations: int
    failures: int
    p50_ms: float
    p95_ms: float
    p99_ms: float
    error: str = ""
    steps_ms: dict[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, rounds: Sequence[Round]) -> Summary:
        """Return the summary of `rounds`. Raises ValueError when no operation succeeded."""
        latencies = [value for one in rounds for value in one.latencies_ms]
        failures = sum(one.failures for one in rounds)
        error = next((one.error for one in rounds if one.error), "")
        if not latencies:
            raise ValueError(f"no operation succeeded: {error or f'{failures} failures'}")
        steps: dict[str, list[float]] = {}
        for one in rounds:
            for name, values in one.steps_ms.items():
                steps.setdefault(name, []).extend(values)
        rates = [one.rate for one in rounds]
        return cls(
            rate=statistics.median(rates),
            rates=rates,
            operations=sum(len(r.latencies_ms) if r.done is None else r.done for r in rounds),
            failures=failures,
            p50_ms=percentile(latencies, 0.50),
            p95_ms=percentile(latencies, 0.95),
            p99_ms=percentile(latencies, 0.99),
            error=error,
            steps_ms={name: statistics.median(values) for name, values in steps.items() if values},
        )


def interleave(contenders: Sequence[T], rounds: int) -> Iterator[tuple[int, T]]:
    """Yield (round, contender): each once per round, every other round in reverse order.

    A machine that slows down during the run then slows every contender alike.
    """
    for number in range(rounds):
        order = contenders if number % 2 == 0 else list(reversed(contenders))
        for contender in order:
            yield number, contender


def paired_ratio(ours: Sequence[Round], theirs: Sequence[Round]) -> float:
    """Return the median over the rounds of our rate over theirs in the same round.

    Raises ValueError when a round is missing or a contender did nothing in all of them.
    """
    pairs = [(a.rate, b.rate) for a, b in zip(ours, theirs, strict=True)]
    ratios = [a / b for a, b in pairs if b > 0]
    if not ratios:
        raise ValueError("the contender completed nothing")
    return statistics.median(ratios)
