"""The report: the flat map of figures, reasons for what is missing, the table, the plot."""

from __future__ import annotations

import io
import json
from pathlib import Path

from dsec_bench.report import Report, Row, show
from dsec_bench.stats import Round, Summary
from rich.console import Console

MACHINE = {"cpu": "test", "cpus": 2, "kernel": "6.18"}


def report() -> Report:
    made = Report("create", ("sdk_vs_crun", "roundtrip_ms"), MACHINE)
    rounds = [Round(100.0 + n, [1.0, 2.0, 3.0], steps_ms={"create": [1.0]}) for n in range(5)]
    summary = Summary.of(rounds)
    made.row(Row("peers", "dsec", summary, 8))
    made.row(Row("peers", "crun", summary, 8, "crun version 1.8"))
    made.row(Row("concurrency", "dsec", summary, 64))
    made.row(Row("growth", "dsec", summary, 8, "1,000 live"))
    made.run("burst", asked=2, succeeded=2, answered_ms=[5.0, 6.0])
    return made


def test_figures_are_a_flat_map_of_numbers(tmp_path: Path) -> None:
    made = report()
    made.figure("sdk_vs_crun", 3.14159265358979)
    made.write(tmp_path / "report.json")
    read = json.loads((tmp_path / "report.json").read_text())
    assert read["figures"] == {"sdk_vs_crun": 3.14159}
    assert read["machine"] == MACHINE
    assert {"kind": "peers", "name": "crun"}.items() <= read["runs"][1].items()


def test_a_missing_figure_is_left_out_and_its_reason_kept() -> None:
    made = report()
    made.absent("sdk_vs_crun", "crun not found")
    told = made.as_json()
    assert told["figures"] == {}
    gone = {run["name"]: run["reason"] for run in told["runs"] if run["kind"] == "missing"}
    assert gone == {"sdk_vs_crun": "crun not found", "roundtrip_ms": "the run ended before it"}
    assert not made.complete


def test_a_measured_figure_is_not_missing() -> None:
    made = report()
    made.absent("roundtrip_ms", "first try failed")
    made.figure("roundtrip_ms", 1.0)
    made.absent("roundtrip_ms", "too late")
    assert made.missing == {}
    made.figure("sdk_vs_crun", 2)
    assert made.complete


def test_the_tables_name_every_series_and_reason() -> None:
    made = report()
    made.absent("runsc", "runsc not found")
    text = io.StringIO()
    show(made, Console(file=text, width=160))
    told = text.getvalue()
    for word in ("peers", "concurrency", "crun version 1.8", "missing", "runsc: runsc not found"):
        assert word in told
