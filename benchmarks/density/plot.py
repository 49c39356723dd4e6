"""The picture of a report of `dsec-bench density`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec_bench.picture import OURS, THEIRS, draw, empty
from dsec_bench.report import Report


def plot(report: Report, path: Path) -> None:
    """Draw two panels into the PNG `path`."""
    draw(report, path, "density", (_host, _daemon), (12, 5))


def _levels(report: Report) -> list[dict[str, Any]]:
    return [run for run in report.runs if run["kind"] == "idle level"]


def _host(axis: Any, report: Report) -> None:
    title = "memory of the host with sandboxes asleep, GiB"
    levels = _levels(report)
    if not levels:
        return empty(axis, title)
    base = levels[0]["used_bytes"]
    used = [(level["used_bytes"] - base) / (1 << 30) for level in levels]
    axis.plot([level["live"] for level in levels], used, "o-", color=OURS)
    axis.set_xlabel("live sandboxes")
    axis.set_ylim(bottom=0)
    axis.set_title(title)


def _daemon(axis: Any, report: Report) -> None:
    title = "of it dsecd's own, MiB"
    levels = _levels(report)
    if not levels:
        return empty(axis, title)
    held = [level["daemon_bytes"] / (1 << 20) for level in levels]
    axis.plot([level["live"] for level in levels], held, "s-", color=THEIRS)
    axis.set_xlabel("live sandboxes")
    axis.set_ylim(bottom=0)
    axis.set_title(title)
