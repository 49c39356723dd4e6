"""The picture of a report of `dsec-bench create`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec_bench.report import Report

OURS = "#c44e2b"
THEIRS = "#8a97a6"


def plot(report: Report, path: Path) -> None:
    """Draw four panels into the PNG `path`: peers, concurrency, bursts, growth."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(12, 8), layout="constrained")
    _peers(axes[0][0], report)
    _concurrency(axes[0][1], report)
    _bursts(axes[1][0], report)
    _growth(axes[1][1], report)
    machine = report.machine
    figure.suptitle(
        f"create → first command → destroy · {machine['cpus']} × {machine['cpu']} · "
        f"Linux {machine['kernel']}"
    )
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def _empty(axis: Any, title: str) -> None:
    axis.set_title(title)
    axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
    axis.set_axis_off()


def _peers(axis: Any, report: Report) -> None:
    title = "8 in parallel, per second (log)"
    rows = sorted(
        (row for row in report.rows if row.series == "peers"), key=lambda row: row.summary.rate
    )
    if not rows:
        return _empty(axis, title)
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
        return _empty(axis, title)
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
        return _empty(axis, title)
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
        return _empty(axis, title)
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
