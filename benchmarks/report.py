"""The report of one bench: figures, what was missing, every run; as JSON and as tables."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dsec_bench.stats import Summary
from rich.console import Console
from rich.table import Table


@dataclass(slots=True)
class Row:
    """A line of the table: who, under which circumstances, and what came out.

    `unit` is the one that the table of the series is printed in.
    """

    series: str  # rows of one series are compared with one another
    name: str
    summary: Summary
    concurrency: int = 1
    note: str = ""
    unit: Literal["ms", "µs"] = "ms"


@dataclass(slots=True)
class Report:
    """Filled by a bench as it goes, so that an interrupted run still has what was measured.

    `figures` maps a promised figure to its value; a figure that cannot be measured goes to
    `missing` with the reason. `runs` holds everything else, one JSON object each.
    """

    bench: str
    wanted: tuple[str, ...]
    machine: dict[str, Any]
    quick: bool = False
    figures: dict[str, float] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    runs: list[dict[str, Any]] = field(default_factory=list)

    def figure(self, name: str, value: float) -> None:
        """Record the promised figure `name`."""
        self.figures[name] = float(f"{value:.6g}")
        self.missing.pop(name, None)

    def absent(self, name: str, reason: str) -> None:
        """Record why `name` (a figure or a peer) could not be measured."""
        if name not in self.figures:
            self.missing[name] = reason

    def row(self, row: Row) -> None:
        """Record a line of the table, which is a run too."""
        self.rows.append(row)
        self.runs.append(
            {
                "kind": row.series,
                "name": row.name,
                "concurrency": row.concurrency,
                "note": row.note,
                **{key: _rounded(value) for key, value in asdict(row.summary).items()},
            }
        )

    def run(self, kind: str, **facts: Any) -> None:
        """Record facts that are no line of the table."""
        self.runs.append({"kind": kind, **{key: _rounded(value) for key, value in facts.items()}})

    @property
    def complete(self) -> bool:
        """Whether every promised figure is there."""
        return all(name in self.figures for name in self.wanted)

    def as_json(self) -> dict[str, Any]:
        """Return the report's JSON form: a flat `figures` map, `machine`, `runs`."""
        gone = [
            {"kind": "missing", "name": name, "reason": reason}
            for name, reason in self.missing.items()
        ]
        unknown = [
            {"kind": "missing", "name": name, "reason": "the run ended before it"}
            for name in self.wanted
            if name not in self.figures and name not in self.missing
        ]
        return {
            "bench": self.bench,
            "quick": self.quick,
            "figures": self.figures,
            "machine": self.machine,
            "runs": [*self.runs, *gone, *unknown],
        }

    def write(self, path: Path) -> None:
        """Write the JSON form to `path`, whole or not at all."""
        part = path.with_name(f".{path.name}.part")
        part.write_text(json.dumps(self.as_json(), indent=1) + "\n")
        part.replace(path)


def _rounded(value: Any) -> Any:
    """Six digits are more than any of this can carry."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return value


def show(report: Report, console: Console) -> None:
    """Print the report's tables."""
    for series in dict.fromkeys(row.series for row in report.rows):
        console.print(_series_table(report, series))
    by_step = [row for row in report.rows if row.summary.steps_ms and row.series != "growth"]
    if by_step:
        console.print(_steps_table(by_step))
    figures = Table("figure", "value", title=f"figures of dsec-bench {report.bench}")
    figures.columns[1].justify = "right"
    for name in report.wanted:
        value = report.figures.get(name)
        figures.add_row(name, "[red]missing[/]" if value is None else f"{value:.4g}")
    console.print(figures)
    for name, reason in report.missing.items():
        console.print(f"{name}: {reason}", markup=False, highlight=False)


def _series_table(report: Report, series: str) -> Table:
    rows = [row for row in report.rows if row.series == series]
    table = Table(title=series)
    table.add_column("who", no_wrap=True)
    unit, scale = (rows[0].unit, {"ms": 1, "µs": 1000}[rows[0].unit])
    latencies = (f"p50 {unit}", f"p95 {unit}", f"p99 {unit}")
    for title in ("at once", "per s", *latencies, "n", "failed"):
        table.add_column(title, justify="right")
    if any(row.note for row in rows):
        table.add_column("note", no_wrap=True, overflow="ellipsis")
    for row in rows:
        s = row.summary
        cells = [row.name, str(row.concurrency), f"{s.rate:,.1f}"]
        cells += [f"{value * scale:,.2f}" for value in (s.p50_ms, s.p95_ms, s.p99_ms)]
        cells += [f"{s.operations:,}", f"[red]{s.failures}[/]" if s.failures else "0"]
        if len(table.columns) > len(cells):
            cells.append(row.note)
        table.add_row(*cells)
    return table


def _steps_table(rows: list[Row]) -> Table:
    """Medians of each step, one column for each who was measured step by step."""
    table = Table("step, ms", title="medians of the steps")
    for row in rows:
        table.add_column(f"{row.name}\n{row.concurrency} at once", justify="right")
    for step in dict.fromkeys(step for row in rows for step in row.summary.steps_ms):
        cells = [row.summary.steps_ms.get(step) for row in rows]
        table.add_row(step, *("" if ms is None else f"{ms:.3f}" for ms in cells))
    return table
