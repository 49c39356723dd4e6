"""`dsec-bench density` runs here and leaves nothing; how good its figures are is not asked."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.system.memory_lab import needs_zram

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]

# Less than --quick, whose figures are worth telling.
SMALL = """
import sys
from dsec_bench import main
from dsec_bench.density import parts
parts.ROUNDS = 1
parts.QUICK_LIVES = parts.Scale(sandboxes=10, compression=60, burst_s=2, window_s=15)
sys.exit(main.main())
"""


def quick(part: str, tmp_path: Path) -> dict[str, Any]:
    """Return the report of one part."""
    report = tmp_path / "report.json"
    command = [sys.executable, "-c", SMALL, "density", "--quick", "--only", part]
    done = subprocess.run(
        [*command, "--json", str(report)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 1, done.stderr  # the figures of the other parts are missing
    made: dict[str, Any] = json.loads(report.read_text())
    return made


def test_a_quick_run_has_sandboxes_that_all_answer(tmp_path: Path) -> None:
    made = quick("idle", tmp_path)
    (facts,) = (run for run in made["runs"] if run["kind"] == "idle")
    assert facts["live"] == facts["answered"] == made["figures"]["live_idle_sandboxes"]
    if not facts["why"]:  # the host had the room
        assert facts["live"] == facts["wanted"] == 200
    assert facts["errors"] == {}
    assert 0 < facts["mib_per_sandbox"] < 20


def test_pythons_that_wait_all_answer(tmp_path: Path) -> None:
    made = quick("pythons", tmp_path)
    (facts,) = (run for run in made["runs"] if run["kind"] == "idle")
    assert facts["live"] == facts["answered"] == facts["wanted"] == 20
    assert facts["errors"] == {}


@needs_zram
def test_paused_pythons_give_their_memory_and_answer(tmp_path: Path) -> None:
    made = quick("pause", tmp_path)
    (facts,) = (run for run in made["runs"] if run["kind"] == "paused")
    assert facts["live"] == facts["wanted"] == 20
    assert facts["notes"] == []
    assert 0 < made["figures"]["paused_python_mib"] < facts["running_mib"] / 2
    assert made["figures"]["resume_ms"] > 0


def test_a_load_of_standard_class_is_felt(tmp_path: Path) -> None:
    figures = quick("classes", tmp_path)["figures"]
    loaded = figures["default_p50_loaded_vs_unloaded"]
    assert loaded > 1.2
    assert figures["ls_p50_loaded_vs_unloaded"] < loaded


@needs_zram
def test_replayed_agents_hold_less_with_reclaim(tmp_path: Path) -> None:
    made = quick("replay", tmp_path)
    runs = {run["mode"]: run for run in made["runs"] if run["kind"] == "replay"}
    assert runs["off"]["turns"] == runs["on"]["turns"] > 0
    assert runs["off"]["swapped_peak_mib"] == 0
    assert runs["on"]["swapped_peak_mib"] > 0
    assert 0 < made["figures"]["memory_time_saving"] < 1
