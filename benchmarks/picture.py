"""What the pictures of all benches have in common: colours, a grid of panels, a title, a PNG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from dsec_bench.report import Report

OURS = "#c44e2b"
THEIRS = "#8a97a6"


def draw(
    report: Report,
    path: Path,
    what: str,
    panels: Sequence[Callable[[Any, Report], None]],
    size: tuple[float, float],
) -> None:
    """Draw `panels`, two in a row, into the PNG `path`; `what` and the machine are the title."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(panels) // 2, 2, figsize=size, layout="constrained")
    for axis, panel in zip(axes.flat, panels, strict=True):
        panel(axis, report)
    machine = report.machine
    figure.suptitle(f"{what} · {machine['cpus']} × {machine['cpu']} · Linux {machine['kernel']}")
    figure.savefig(path, dpi=120, format="png")
    pyplot.close(figure)


def empty(axis: Any, title: str) -> None:
    """Leave a panel without content, and say so."""
    axis.set_title(title)
    axis.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axis.transAxes)
    axis.set_axis_off()
