"""The pictures of all benches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dsec_bench.main import BENCHES

# Draws what it can, one after the other: to load the library takes longer than all pictures.
DRAW = """
import pathlib, sys, traceback
from dsec_bench.main import BENCHES
from dsec_bench.report import Report
from tests.unit.test_bench_report import report
machine = {"cpus": 2, "cpu": "x", "kernel": "6"}
reports = {bench.name: (bench, Report(bench.name, (), machine)) for bench in BENCHES}
reports["half"] = (reports["create"][0], report())
for name, (bench, drawn) in reports.items():
    try:
        bench.plot(drawn, pathlib.Path(sys.argv[1], f"{name}.png"))
    except Exception:
        traceback.print_exc()
"""


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory of pictures, drawn in a process of its own: it keeps its fonts open."""
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    made = tmp_path_factory.mktemp("pictures")
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", DRAW, str(made)], check=True, cwd=root)
    return made


@pytest.mark.parametrize("name", [bench.name for bench in BENCHES])
def test_the_picture_is_drawn_of_an_empty_report(name: str, pictures: Path) -> None:
    assert (pictures / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_the_picture_is_drawn_of_half_a_report(pictures: Path) -> None:
    assert (pictures / "half.png").read_bytes().startswith(b"\x89PNG")
