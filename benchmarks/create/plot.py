"""The picture of a report of `dsec-bench create`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec_bench.picture import OURS, THEIRS, draw, empty
from dsec_bench.report import Report


def plot(report: Report, path: Path) -> None:
    """Draw four panels into the PNG `path`: peers, concurrency, bursts, growth."""
    panels = (_peers, _concurrency, _bursts, _growth)
    draw(report, path, "create → first command → destroy", panels, (12, 8))


def _peers(axis: Any, report: Report) -> None:
    title = "8 in parallel, per second (log)"
    rows = sorted(
        (row for row in report.rows if row.series == "peers"), key=lambda row: row.summary.rate
    )
    if not rows:
        return empty(axis, title)
    rates = [row.summary.rate for row in rows]
    colours = [OURS if row.name.startswith("dsec") else THEIRS for row in rows]
    bars = axis.barh([row.name for row in rows], rates, color=colours)
    axis.bar_label(bars, fmt="{:,.0f}", padding=3)
    axis.set_xscale("log")
    axis.set_xlim(min(rates) / 2, max(rates) * 3)
    axis.set_title(title)


def _concurrency(axis: Any, report: Report) -> None:
    title = "dsec: latency by concurrency, ms"
    rows = [row for row in report.rows if row.series == "concurrency"]
    if not rows:
        return empty(axis, title)
    places = range(len(rows))
    for offset, point in enumerate(("p50_ms", "p95_ms", "p99_ms")):
        heights = [getattr(row.summary, point) for row in rows]
        bars = axis.bar([p + 0.25 * (offset - 1) for p in places], heights, 0.24, label=point[:3])
        axis.bar_label(bars, fmt="{:.1f}", fontsize=8)
    labels = [f"{row.concurrency}\n({row.summary.rate:,.0f}/s)" for row in rows]
    axis.set_xticks(list(places), labels)
    axis.legend()
    axis.set_title(title)


def _bursts(axis: Any, report: Report) -> None:
    title = "bursts: share answered over time"
    bursts = [run for run in report.runs if run["kind"] == "burst" and run["answered_ms"]]
    if not bursts:
        return empty(axis, title)
    for run in bursts:
        times = sorted(run["answered_ms"])
        shares = [(index + 1) / run["asked"] for index in range(len(times))]
        label = f"{run['asked']:,} ({run['succeeded']:,} answered)"
        axis.plot([ms / 1e3 for ms in times], shares, label=label)
    axis.set_xlabel("seconds since the burst")
    axis.legend(loc="lower right")
    axis.set_title(title)


def _growth(axis: Any, report: Report) -> None:
    title = "8 in parallel while others live"
    rows = [row for row in report.rows if row.series == "growth"]
    if not rows:
        return empty(axis, title)
    live = [int(row.note.split()[0].replace(",", "")) for row in rows]
    axis.plot(live, [row.summary.rate for row in rows], "o-", color=OURS)
    axis.set_ylabel("per second", color=OURS)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("idle live sandboxes")
    other = axis.twinx()
    other.plot(live, [row.summary.p99_ms for row in rows], "s--", color=THEIRS)
    other.set_ylabel("p99 ms", color=THEIRS)
    other.set_ylim(bottom=0)
    axis.set_title(title)
