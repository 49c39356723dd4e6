"""Samples into figures: percentiles, rates, the order of rounds, ratios."""

from __future__ import annotations

import pytest
from dsec_bench.stats import Operation, Round, Summary, interleave, paired_ratio, percentile, rate
from hypothesis import given
from hypothesis import strategies as st

finite = st.floats(-1e9, 1e9)


def test_percentile_interpolates() -> None:
    assert percentile([1, 2, 3, 4, 5], 0.5) == 3
    assert percentile([1, 2], 0.5) == 1.5
    assert percentile([7], 0.99) == 7


def test_percentile_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


@given(st.lists(finite, min_size=1), st.floats(0, 1))
def test_percentile_lies_within_the_values(values: list[float], share: float) -> None:
    assert min(values) - 1e-3 <= percentile(values, share) <= max(values) + 1e-3


def test_rate_is_the_sum_of_the_workers_own_rates() -> None:
    """A worker that ended early must not count as idle: its second is not the round's."""
    first = [Operation(0, i * 1e5, (i + 1) * 1e5) for i in range(10)]  # 10 per second, for 1 s
    second = [Operation(1, 0, 5e5)]  # 2 per second, for half a second
    assert rate([*first, *second]) == pytest.approx(12)


def test_rate_counts_successes_only() -> None:
    operations = [Operation(0, 0, 5e5), Operation(0, 5e5, 1e6, ok=False)]
    assert rate(operations) == pytest.approx(1)
    assert rate([]) == 0


def test_round_keeps_failures_apart() -> None:
    result = Round.of([Operation(0, 0, 2000), Operation(0, 2000, 9000, ok=False)], "boom")
    assert result.latencies_ms == [2.0]
    assert result.failures == 1
    assert result.error == "boom"


def test_summary_takes_the_median_round() -> None:
    rounds = [Round(r, [r], steps_ms={"create": [r]}) for r in (1.0, 100.0, 3.0)]
    summary = Summary.of(rounds)
    assert summary.rate == 3
    assert summary.rates == [1, 100, 3]
    assert summary.operations == 3
    assert summary.steps_ms == {"create": 3}


def test_summary_without_success_says_why() -> None:
    with pytest.raises(ValueError, match="no such root"):
        Summary.of([Round(0, [], 4, "no such root")])


def test_interleave_reverses_every_other_round() -> None:
    order = list(interleave(["a", "b", "c"], 3))
    assert order == [
        (0, "a"), (0, "b"), (0, "c"), (1, "c"), (1, "b"), (1, "a"), (2, "a"), (2, "b"), (2, "c"),
    ]  # fmt: skip


def test_paired_ratio_cancels_drift() -> None:
    """The machine slows down to a third; the ratio of each round is the same."""
    ours = [Round(300), Round(200), Round(100)]
    theirs = [Round(30), Round(20), Round(10)]
    assert paired_ratio(ours, theirs) == pytest.approx(10)


def test_paired_ratio_needs_a_contender_that_did_something() -> None:
    with pytest.raises(ValueError, match="completed nothing"):
        paired_ratio([Round(1)], [Round(0)])
    with pytest.raises(ValueError, match="zip"):
        paired_ratio([Round(1)], [])
