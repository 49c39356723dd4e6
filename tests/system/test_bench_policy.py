"""`dsec-bench policy` runs here and leaves nothing; how good its figures are is not asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf_cgroup", "veth", "nftables")]


def test_a_quick_run_has_the_figures_of_its_parts(tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    chosen = [word for part in ("bind", "open", "model") for word in ("--only", part)]
    command = [sys.executable, "-m", "dsec_bench.main", "policy", "--quick", *chosen]
    done = subprocess.run(
        [*command, "--json", str(report)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1, done.stderr  # the figures of the other parts are missing
    made = json.loads(report.read_text())
    figures = made["figures"]
    assert set(figures) == {"bind_us", "model_cases", "model_disagreements"}
    assert figures["bind_us"] > 0
    assert figures["model_cases"] >= 5000
    assert figures["model_disagreements"] == 0
    series = {run["kind"] for run in made["runs"]}
    assert {"in the daemon", "open(2) and close(2)", "model"} <= series
    (facts,) = (run for run in made["runs"] if run["kind"] == "model")
    assert facts["seed"] >= 0
    assert set(facts["compared"]) == {"connect", "sendto", "egress", "ping", "frame", "name"}
