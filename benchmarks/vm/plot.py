"""The picture of a report of `dsec-bench vm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dsec_bench.picture import OURS, THEIRS, draw, empty
from dsec_bench.report import Report
from dsec_bench.vm.starts import STARTS

LINES = {"pmem": OURS, "block": THEIRS, "plain QEMU": "#444444"}


def plot(report: Report, path: Path) -> None:
    """Draw four panels into the PNG `path`."""
    draw(report, path, "vm", (_starts, _layers, _replay, _reading), (12, 9))


def _starts(axis: Any, report: Report) -> None:
    title = f"{STARTS}, ms"
    rows = [run for run in report.runs if run["kind"] == STARTS]
    if not rows:
        return empty(axis, title)
    axis.bar(range(len(rows)), [row["p50_ms"] for row in rows], 0.6, color=OURS)
    axis.set_xticks(range(len(rows)), [row["name"] for row in rows])
    axis.set_title(title)


def _named(run: dict[str, Any]) -> str:
    reporting = run["free_page_reporting"]
    return run["device"] + (
        "" if reporting is None else f", reporting {'on' if reporting else 'off'}"
    )


def _layers(axis: Any, report: Report) -> None:
    """The paper's figure 12: peak by the number of guests, and dotted what idle guests keep."""
    title = "guests on one layer, MiB: peak; dotted: at the end"
    found = [run for run in report.runs if run["kind"] == "layers"]
    if not found:
        return empty(axis, title)
    for name in dict.fromkeys(map(_named, found)):
        mine = [run for run in found if _named(run) == name]
        guests = [run["guests"] for run in mine]
        (line,) = axis.plot(guests, [run["peak_mib"] for run in mine], "o-", label=name)
        axis.plot(guests, [run["held_mib"][-1] for run in mine], "o:", color=line.get_color())
    axis.set_xlabel("guests")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.set_title(title)


def _replay(axis: Any, report: Report) -> None:
    title = "memory held by replayed agents in machines, MiB"
    found = {run["mode"]: run for run in report.runs if run["kind"] == "replay"}
    if not found:
        return empty(axis, title)
    for mode, colour in (("off", THEIRS), ("on", OURS)):
        if mode in found:
            seen = found[mode]
            axis.plot(seen["t_s"], seen["held_mib"], color=colour, label=f"reclaim {mode}")
            axis.fill_between(seen["t_s"], seen["held_mib"], color=colour, alpha=0.2)
    axis.set_xlabel("seconds")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.set_title(title)


def _reading(axis: Any, report: Report) -> None:
    """The largest of these runs, over its time."""
    title = "memory while guests read, use and free, MiB"
    found = [run for run in report.runs if run["kind"] == "layers"]
    if not found:
        return empty(axis, title)
    most = max(run["guests"] for run in found)
    for run in found:
        if run["guests"] == most:
            colour, reporting = LINES[run["device"]], run["free_page_reporting"]
            style = ":" if reporting is False else "-"
            axis.plot(run["t_s"], run["held_mib"], style, color=colour, label=_named(run))
    axis.set_xlabel(f"seconds, {most} guests")
    axis.set_ylim(bottom=0)
    axis.legend()
    axis.set_title(title)
