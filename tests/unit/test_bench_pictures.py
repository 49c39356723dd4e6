"""The pictures of all benches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from dsec_bench.main import BENCHES


@pytest.mark.parametrize("name", [bench.name for bench in BENCHES])
def test_the_picture_is_drawn_of_an_empty_report(name: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    code = (
        "import pathlib, sys; from dsec_bench.main import BENCHES; from dsec_bench.report import "
        "Report; name, path = sys.argv[1:]; (bench,) = [b for b in BENCHES if b.name == name]; "
        "bench.plot(Report(name, (), {'cpus': 2, 'cpu': 'x', 'kernel': '6'}), pathlib.Path(path))"
    )
    made = tmp_path / "plot.png"  # in a process of its own: it keeps its fonts open
    subprocess.run([sys.executable, "-c", code, name, str(made)], check=True)
    assert made.read_bytes().startswith(b"\x89PNG")
