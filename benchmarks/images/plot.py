"""The picture of a report of `dsec-bench images`."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from dsec_bench.picture import OURS, THEIRS, draw, empty
from dsec_bench.report import Report, Row

LIGHT = "#e3a78f"
PALE = "#c5cdd6"


def plot(report: Report, path: Path) -> None:
    """Draw six panels into the PNG `path`."""
    panels = (_times, _bytes, _shares, _burst, _builds, _snapshots)
    draw(report, path, "environments", panels, (13, 13))


def rows_of(report: Report, series: str) -> list[Row]:
    return [row for row in report.rows if row.series == series]


def medians(report: Report, kind: str, by: str, value: str) -> dict[str, float]:
    """Return the median of `value` in the runs of a kind, by the name in `by`. Pure."""
    found: dict[str, list[float]] = {}
    for run in report.runs:
        if run["kind"] == kind and run.get(value) is not None:
            found.setdefault(run[by], []).append(run[value])
    return {name: statistics.median(values) for name, values in found.items()}


def _colour(name: str) -> str:
    return OURS if "demand" in name or name.startswith("dsec") else THEIRS


def _times(axis: Any, report: Report) -> None:
    title = "first sandbox of 1 GB, and a task in it, s"
    rows = rows_of(report, "ready and task")[::-1]
    if not rows:
        return empty(axis, title)
    names = [row.name for row in rows]
    ready = [row.summary.steps_ms["ready"] / 1e3 for row in rows]
    work = [row.summary.steps_ms["work"] / 1e3 for row in rows]
    axis.barh(names, ready, color=[_colour(name) for name in names], label="until it answers")
    light = [LIGHT if _colour(name) == OURS else PALE for name in names]
    bars = axis.barh(names, work, left=ready, color=light, label="task")
    labels = [f"{a * 1e3:,.0f} ms + {b:.1f} s" for a, b in zip(ready, work, strict=True)]
    axis.bar_label(bars, labels, padding=3, fontsize=8)
    axis.set_xlim(right=1.3 * max(a + b for a, b in zip(ready, work, strict=True)))
    axis.set_title(title)


def _bytes(axis: Any, report: Report) -> None:
    title = "MiB written to the disk (dark), fetched (light)"
    written = medians(report, "environment run", "way", "written_mib")
    fetched = medians(report, "environment run", "way", "fetched_mib")
    if not written:
        return empty(axis, title)
    names = sorted(written, key=lambda name: written[name])
    places = range(len(names))
    dark = axis.barh(
        [p + 0.2 for p in places], [written[n] for n in names], 0.38,
        color=[_colour(n) for n in names],
    )  # fmt: skip
    light = axis.barh(
        [p - 0.2 for p in places], [fetched[n] for n in names], 0.38,
        color=[LIGHT if _colour(n) == OURS else PALE for n in names],
    )  # fmt: skip
    for bars in (dark, light):
        axis.bar_label(bars, fmt="{:,.0f}", padding=3, fontsize=8)
    axis.set_yticks(list(places), names)
    axis.set_xlim(right=1.2 * max(*written.values(), *fetched.values()))
    axis.set_title(title)


def _shares(axis: Any, report: Report) -> None:
    title = "share of the image that was fetched"
    runs = [run for run in report.runs if run["kind"] == "share"]
    if not runs:
        return empty(axis, title)
    names = [run["name"] + ("" if run["real"] else "\n(replayed)") for run in runs]
    colours = [OURS if run["real"] else LIGHT for run in runs]
    bars = axis.bar(names, [run["share"] * 100 for run in runs], color=colours)
    axis.bar_label(bars, fmt="{:.1f}%")
    axis.set_title(title)


def _burst(axis: Any, report: Report) -> None:
    title = "burst of distinct images: s until each has read its part"
    seconds = medians(report, "distinct images", "way", "seconds")
    middle = medians(report, "distinct images", "way", "median_s")
    if not seconds:
        return empty(axis, title)
    places = range(len(seconds))
    for offset, values, label in ((-0.2, middle, "median image"), (0.2, seconds, "all")):
        bars = axis.bar([p + offset for p in places], list(values.values()), 0.38, label=label)
        axis.bar_label(bars, fmt="{:.2f}", fontsize=8)
    axis.set_xticks(list(places), list(seconds))
    axis.legend()
    axis.set_title(title)


def _builds(axis: Any, report: Report) -> None:
    title = "a version of a workspace: MiB of store (log), s"
    runs = [run for run in report.runs if run["kind"] == "build"]
    if not runs:
        return empty(axis, title)
    names = list(dict.fromkeys(run["way"] for run in runs))
    for offset, is_first, label in ((0.2, True, "first"), (-0.2, False, "changed")):
        chosen = {
            name: [run for run in runs if run["way"] == name and (run["version"] == 0) is is_first]
            for name in names
        }
        size = [statistics.median(run["mib"] for run in chosen[name]) for name in names]
        time = [statistics.median(run["seconds"] for run in chosen[name]) for name in names]
        bars = axis.barh([p + offset for p in range(len(names))], size, 0.38, label=label)
        texts = [f"{a:,.1f} MiB, {b:.1f} s" for a, b in zip(size, time, strict=True)]
        axis.bar_label(bars, texts, padding=3, fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.set_xscale("log")
    axis.set_xlim(right=3000)
    axis.legend(loc="lower right")
    axis.set_title(title)


def _snapshots(axis: Any, report: Report) -> None:
    title = "pack_diff, checkpoint, rollback: ms (log)"
    rows = [
        row
        for row in report.rows
        if row.series in ("pack_diff", "checkpoint", "rollback", "branch")
    ]
    if not rows:
        return empty(axis, title)
    names = [f"{row.series}\n{row.name}" for row in rows]
    bars = axis.barh(names, [row.summary.p50_ms for row in rows], color=OURS)
    axis.bar_label(bars, fmt="{:,.1f}", padding=3, fontsize=8)
    axis.set_xscale("log")
    axis.invert_yaxis()
    axis.set_title(title)
