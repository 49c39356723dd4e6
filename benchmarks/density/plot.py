"""The picture of a report of `dsec-bench density`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec_bench.density.series import PAUSED, REPLAY
from dsec_bench.picture import OURS, THEIRS, draw, empty
from dsec_bench.report import Report


def plot(report: Report, path: Path) -> None:
    """Draw six panels into the PNG `path`."""
    panels = (_host, _daemon, _paused, _beside, _replay, _turns)
    draw(report, path, "density", panels, (12, 13))


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


def _paused(axis: Any, report: Report) -> None:
    _bars(axis, report, PAUSED, "paused Pythons: pausing, and the first answer, ms")


def _beside(axis: Any, report: Report) -> None:
    """The paper's figure 13: how much longer the job takes, by what the others want."""
    title = "20 ms of work beside a load, times that without"
    found = [run for run in report.runs if run["kind"] == "classes load"]
    if not found:
        return empty(axis, title)
    for case in dict.fromkeys(run["case"] for run in found if run["percent"]):
        mine = [run for run in found if run["case"] == case or not run["percent"]]
        loads = [run["percent"] for run in mine]
        (line,) = axis.plot(loads, [run["p50_ratio"] for run in mine], "o-", label=case)
        axis.plot(loads, [run["p99_ratio"] for run in mine], "o:", color=line.get_color())
    axis.set_xlabel("load, % of the host's CPU time; at 100 it never stops. Dotted: p99")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.set_title(title)


def _replay(axis: Any, report: Report) -> None:
    """The paper's figure 12, with the last round's two runs."""
    title = "memory held by replayed agents, GiB"
    found = {run["mode"]: run for run in report.runs if run["kind"] == "replay seen"}
    if not found:
        return empty(axis, title)
    for mode, colour in (("off", THEIRS), ("on", OURS)):
        if mode in found:
            held = [mib / 1024 for mib in found[mode]["held_mib"]]
            axis.plot(found[mode]["t_s"], held, color=colour, label=f"reclaim {mode}")
            axis.fill_between(found[mode]["t_s"], held, color=colour, alpha=0.2)
    axis.set_xlabel("seconds")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.set_title(title)


def _turns(axis: Any, report: Report) -> None:
    _bars(axis, report, REPLAY, "turns of these agents, ms")


def _bars(axis: Any, report: Report, series: str, title: str) -> None:
    """Median and 99th percentile of each row of a series."""
    rows = [run for run in report.runs if run["kind"] == series]
    if not rows:
        return empty(axis, title)
    for shift, key, colour in ((-0.2, "p50_ms", OURS), (0.2, "p99_ms", THEIRS)):
        places = [number + shift for number in range(len(rows))]
        axis.bar(places, [row[key] for row in rows], 0.4, color=colour, label=key[:3])
    axis.set_xticks(range(len(rows)), [row["name"] for row in rows])
    axis.legend()
    axis.set_title(title)
