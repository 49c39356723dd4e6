"""`dsec-bench vm` runs here and leaves nothing; how good its figures are is not asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]


def test_starts_are_measured_and_say_how_guests_ran(guest_kernel: Path, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [sys.executable, "-m", "dsec_bench.main", "vm", "--quick", "--only", "starts"]
    done = subprocess.run(
        [*command, "--json", str(report)],
        env={**os.environ, "DSEC_GUEST_KERNEL": str(guest_kernel)},
        capture_output=True, text=True, timeout=280, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr  # the figures of the other parts are missing
    made = json.loads(report.read_text())
    assert 0 < made["figures"]["template_start_s"] < 60
    assert 0 < made["figures"]["cold_start_s"] < 60
    assert 0 < made["figures"]["roundtrip_extra_ms"] < 1000
    (guests,) = (run for run in made["runs"] if run["kind"] == "guests")
    assert guests["accel"] in ("tcg", "kvm")
    starts = [run for run in made["runs"] if "p50_ms" in run]
    assert {"boot", "template"} <= {run["name"] for run in starts}
    assert all(run["note"] for run in starts)
