"""The picture of a report of `dsec-bench policy`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec_bench.picture import OURS, THEIRS, draw, empty
from dsec_bench.policy import places
from dsec_bench.policy.binding import SERIES as BINDING
from dsec_bench.policy.costs import TITLES
from dsec_bench.policy.live import SERIES as UPDATES
from dsec_bench.report import Report


def plot(report: Report, path: Path) -> None:
    """Draw six panels into the PNG `path`."""
    panels = (_binding, _updates, *(_extra(what) for what in ("connect", "send", "stream", "tcp")))
    draw(report, path, "policies", panels, (13, 12))


def _bars(axis: Any, report: Report, series: str, title: str) -> None:
    rows = [row for row in report.rows if row.series == series][::-1]
    if not rows:
        return empty(axis, title)
    names = [f"{row.name}\n{row.note}" if series == BINDING else row.name for row in rows]
    colours = [THEIRS if places.NFT in name else OURS for name in names]
    bars = axis.barh(names, [row.summary.p50_ms * 1e3 for row in rows], color=colours)
    axis.bar_label(bars, fmt="{:,.1f}", padding=3, fontsize=8)
    axis.set_xscale("log")
    axis.set_xlim(right=5 * axis.get_xlim()[1])  # room for the labels
    axis.set_title(title)


def _binding(axis: Any, report: Report) -> None:
    _bars(axis, report, BINDING, "in the daemon: median µs (log)")


def _updates(axis: Any, report: Report) -> None:
    _bars(axis, report, UPDATES, "a live policy changed: median µs (log)")


def extra_ns(report: Report, what: str, kind: str) -> dict[int, float]:
    """Return what an operation costs more than without policy, by the number of policies. Pure."""
    found: dict[int, float] = {}
    for run in report.runs:
        if run["kind"] == "policy cost" and run["what"] == what:
            for name, value in run["extra_ns"].items():
                if name.startswith(f"{kind}, "):
                    found[int(name.removeprefix(f"{kind}, ").replace(",", ""))] = value
    return found


def _extra(what: str) -> Any:
    def panel(axis: Any, report: Report) -> None:
        title = f"{TITLES[what]}:\nns more than without policy"
        highest = 0.0
        for kind, colour in ((places.OURS, OURS), (places.NFT, THEIRS)):
            found = extra_ns(report, what, kind)
            if found:
                highest = max(highest, *found.values())
                axis.plot(list(found), list(found.values()), "o-", color=colour, label=kind)
        if not highest:
            return empty(axis, title)
        axis.set_xscale("log")
        axis.set_xlabel("policies in force")
        axis.set_ylim(0, 1.3 * highest)
        axis.legend(loc="lower center")
        axis.set_title(title)

    return panel
