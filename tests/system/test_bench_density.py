"""`dsec-bench density` runs here and leaves nothing; how good its figures are is not asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow]


def test_a_quick_run_has_sandboxes_that_all_answer(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "dsec_bench.main", "density", "--quick", "--only", "idle"]
    done = subprocess.run(
        [*command, "--json", str(report)], capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr
    made = json.loads(report.read_text())
    (facts,) = (run for run in made["runs"] if run["kind"] == "idle")
    assert facts["live"] == facts["answered"] == made["figures"]["live_idle_sandboxes"]
    if not facts["why"]:  # the host had the room
        assert facts["live"] == facts["wanted"] == 200
    assert facts["errors"] == {}
    assert 0 < facts["mib_per_sandbox"] < 20
