"""What `dsec-bench density` computes and promises, without a host to measure."""

from __future__ import annotations

import pytest
from dsec_bench.bench import Context, Options
from dsec_bench.density import DENSITY, classes, idle, parts
from dsec_bench.density.idle import Level, Result
from dsec_bench.progress import Steps
from dsec_bench.report import Report

GIB = 1 << 30
MIB = 1 << 20


def test_every_figure_has_a_part() -> None:
    assert set(DENSITY.figures) == {
        "fncall_per_s", "fncall_p50_ms", "fncall_vs_fresh_container",
        "live_idle_sandboxes", "paused_python_mib", "resume_ms", "ls_p50_loaded_vs_unloaded",
        "ls_p99_loaded_vs_unloaded", "default_p50_loaded_vs_unloaded", "memory_time_saving",
    }  # fmt: skip
    assert set(DENSITY.parts) == set(parts.PARTS)


def test_a_running_daemon_is_not_measured() -> None:
    report = Report("density", DENSITY.figures, {})
    with Steps() as steps:
        DENSITY.run(Context(Options(endpoint="unix:/nowhere"), report, steps))
    assert set(report.missing) == set(DENSITY.figures)


def test_a_sandbox_costs_what_the_host_has_less() -> None:
    result = Result([Level(0, 2 * GIB, 0), Level(200, 3 * GIB, 0), Level(1000, 4 * GIB, 9 * MIB)])
    assert result.live == 1000
    assert result.mib_per_sandbox == pytest.approx(2.048)
    assert Result([Level(0, GIB, 0)]).mib_per_sandbox == 0
    assert Result().live == 0


def test_a_host_that_runs_short_is_left_alone() -> None:
    assert idle.short({"MemAvailable": 7 * GIB}) == ""
    assert idle.short({"MemAvailable": 5 * GIB}) == "only 5.0 GiB of memory are available"


def test_errors_are_counted_by_what_they_say() -> None:
    result = Result()
    for text in ("full", "full", "gone"):
        result.failed(OSError(text))
    assert result.errors == {"full": 2, "gone": 1}


def test_a_ratio_is_of_two_cases_of_one_round() -> None:
    """A host that became slower in the second of three rounds is in both."""
    result = classes.Result()
    result.bursts_ms["unloaded", 0] = [[20.0, 21.0, 22.0], [40.0, 42.0, 44.0], [20.0, 21.0, 30.0]]
    result.bursts_ms["standard", 50] = [[60.0, 63.0, 64.0], [80.0, 84.0, 99.0], [60.0, 63.0, 66.0]]
    assert result.ratio("standard", 50, 0.5) == pytest.approx(3)
    assert result.ratio("unloaded", 0, 0.99) == 1


def test_each_class_meets_each_load_and_one_step_has_none() -> None:
    made = classes.steps(classes.LOADS)
    assert [step.setting.case for step in made if not step.percent] == ["unloaded"]
    assert len(made) == 1 + len(classes.LOADS) * len(classes.SETTINGS) == len(set(made))
    assert {step.setting.case for step in made if step.setting.idle} == {"SCHED_IDLE"}
    assert set(classes.QUICK_LOADS) <= set(classes.LOADS)


def test_a_load_is_divided_among_its_hogs() -> None:
    """Two for each CPU: together they take the load, but at 100 none ever stops."""
    shares = {step.percent: step.share for step in classes.steps(classes.LOADS) if step.percent}
    assert shares == {25: 125, 50: 250, 75: 375, 100: 1000}
