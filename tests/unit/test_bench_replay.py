"""The replayed workload of `dsec-bench density`: its statistics, and what is made of a run."""

from __future__ import annotations

import io
import itertools
import math
import statistics
import sys
import time
import zlib
from collections.abc import Callable
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from dsec_bench.create.daemon import configuration
from dsec_bench.density import footprint, replay, workload
from dsec_bench.density.footprint import Footprint
from dsec_bench.density.parts import LIVES, QUICK_LIVES
from dsec_bench.density.workload import Life, Scale, draw
from dsec_bench.stats import percentile

from dsecd import config

MIB = 1 << 20
MANY = Scale(sandboxes=6000, compression=34, burst_s=10, window_s=math.inf)


@pytest.fixture(scope="module")
def lives() -> list[Life]:
    return draw(MANY, seed=7)


def test_lives_are_the_papers_but_shorter(lives: list[Life]) -> None:
    real_s = [life.life_s * MANY.compression for life in lives]
    assert statistics.median(real_s) == pytest.approx(17 * 60, rel=0.05)
    assert percentile(real_s, 0.99) == pytest.approx(3 * 3600, rel=0.2)


def test_nine_of_ten_use_at_most_a_twentieth_of_a_cpu(lives: list[Life]) -> None:
    shares = [sum(turn.work_s for turn in life.turns) / life.life_s for life in lives]
    assert statistics.fmean(share <= 0.05 for share in shares) == pytest.approx(0.9, abs=0.015)
    assert max(shares) <= workload.MOST_SHARE + 1e-9


def test_turns_are_as_long_as_without_compression(lives: list[Life]) -> None:
    """But for the last of each life, which is cut."""
    took_s = [turn.work_s + turn.think_s for life in lives for turn in life.turns[:-1]]
    slower = draw(Scale(sandboxes=500, compression=1, burst_s=0, window_s=math.inf), seed=7)
    whole_s = [turn.work_s + turn.think_s for life in slower for turn in life.turns[:-1]]
    assert statistics.median(whole_s) == pytest.approx(workload.MEDIAN_TURN_S, rel=0.05)
    assert statistics.median(took_s) == pytest.approx(workload.MEDIAN_TURN_S, rel=0.25)


def test_the_same_seed_draws_the_same_lives() -> None:
    assert draw(LIVES, seed=3) == draw(LIVES, seed=3) != draw(LIVES, seed=4)


@pytest.mark.parametrize("scale", [LIVES, QUICK_LIVES])
def test_a_replay_ends_with_its_window(scale: Scale) -> None:
    for life in draw(scale, seed=0):
        assert 0 <= life.start_s <= scale.burst_s
        assert 0 < life.start_s + life.life_s <= scale.window_s + 1e-6
        assert workload.LEAST_HELD_MIB <= life.held_mib <= workload.MOST_HELD_MIB
        for turn in life.turns:
            assert 0 <= turn.begin < turn.end <= 1
            assert min(turn.work_s, turn.think_s) > 0


@pytest.mark.parametrize(("scale", "rounds", "minutes"), [(LIVES, 5, 12), (QUICK_LIVES, 1, 2)])
def test_a_replay_does_not_take_too_long(scale: Scale, rounds: int, minutes: float) -> None:
    """With half a minute for the root, and some seconds for each daemon."""
    assert 30 + 2 * rounds * (scale.window_s + 8) <= minutes * 60


def test_the_memory_of_all_agents_fits() -> None:
    """Into their limits, with a copy of what a turn touches, and into a third of 24 GiB."""
    most = workload.MOST_HELD_MIB * (1 + workload.TOUCHED[1]) + 32
    assert most < 256
    for seed in range(5):
        assert sum(life.held_mib + 32 for life in draw(LIVES, seed)) < 8 << 10


def test_the_modes_are_configurations_of_the_daemon(tmp_path: Path) -> None:
    made = {
        mode: config.parse(configuration("dsec-bench-x", tmp_path, tmp_path, 2, lines)).reclaim
        for mode, lines in replay.RECLAIM.items()
    }
    assert made["off"].when == made["off"].swap == "off"
    assert (made["on"].when, made["on"].swap) == ("always", "zram")
    assert 0 < made["on"].trim_after_s < made["on"].pause_after_s


def agent(monkeypatch: pytest.MonkeyPatch, turns: str) -> dict[str, Any]:
    """Have an agent of 2 MiB take `turns`; returns its variables."""
    monkeypatch.setattr(sys, "argv", ["-c", "2"])
    monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
    variables: dict[str, Any] = {}
    exec(replay.AGENT, variables)
    return variables


def test_an_agent_answers_each_turn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    held = agent(monkeypatch, f"0 4096 10\n{MIB} {2 * MIB} 0\n")["held"]
    assert capsys.readouterr().out.split() == ["ready", "done", "done"]
    assert len(held) == 2 * MIB


def test_what_an_agent_holds_is_made_a_third_of(monkeypatch: pytest.MonkeyPatch) -> None:
    held = agent(monkeypatch, "")["held"]
    pages = [bytes(held[at : at + 4096]) for at in range(0, len(held), 4096)]
    assert len(set(pages)) == 256  # nothing in it is the same within one MiB
    ratio = sum(map(len, pages)) / sum(len(zlib.compress(page, 1)) for page in pages)
    assert 2.5 < ratio < 3.2


def test_steps_are_counted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ticks = itertools.count(step=0.5)
    monkeypatch.setattr(time, "process_time", lambda: next(ticks))
    exec(replay.CALIBRATE, {})
    assert int(capsys.readouterr().out) == 2 * replay.TRIAL_STEPS


# --- what a run amounts to ------------------------------------------------------------------------


def seen(held: int, at_s: float) -> tuple[float, Footprint]:
    """A look at `held` MiB of which a quarter is in zram."""
    return at_s, Footprint(held * MIB * 3 // 4, 0, 0, held * MIB // 2, held * MIB // 4, -held)


HELD: Callable[[Footprint], int] = attrgetter("held_bytes")


def test_memory_counts_by_how_long_it_is_held() -> None:
    """Looks need not come at even times."""
    run = replay.Run(seen=[seen(0, 0), seen(400, 1), seen(400, 4), seen(0, 4.5)])
    assert run.integral(HELD) == pytest.approx((200 + 1200 + 100) * MIB)
    assert run.peak(HELD) == 400 * MIB
    assert run.peak(attrgetter("zram_bytes")) == 100 * MIB


def test_a_saving_is_of_two_runs_of_one_round() -> None:
    result = replay.Result()
    for off, on in ((100, 50), (200, 120), (100, 60)):
        result.runs["off"].append(replay.Run([seen(off, 0), seen(off, 1)], makespan_s=10))
        result.runs["on"].append(replay.Run([seen(on, 0), seen(on, 1)], makespan_s=10.5))
    assert result.saving(HELD) == pytest.approx(0.4)
    assert result.more(lambda run: run.makespan_s) == pytest.approx(0.05)


V1 = """\
cache 1
rss 2
shmem 3
total_cache 900
total_rss 2000
total_shmem 100
total_inactive_anon 1500
total_active_anon 700
total_unevictable 50
total_swap 4000
"""
V2 = """\
anon 2000
file 900
kernel 300
shmem 100
inactive_anon 1500
active_anon 700
unevictable 50
"""


@pytest.mark.parametrize(
    ("stat", "name", "number"),
    [(V1, "memory.kmem.usage_in_bytes", 300), (V2, "memory.swap.current", 4000)],
)
def test_both_hierarchies_tell_the_same(tmp_path: Path, stat: str, name: str, number: int) -> None:
    """What groups below were charged with is in; what files have in the page cache is not."""
    (tmp_path / "memory.stat").write_text(stat)
    (tmp_path / name).write_text(f"{number}\n")
    found = footprint.read(tmp_path, footprint.Host(0, 0, 0))
    assert (found.charged_bytes, found.cached_bytes) == (1500 + 700 + 50 + 300, 800)
    assert found.swapped_bytes == 4000


def test_zram_counts_with_its_table_and_anybodys(tmp_path: Path) -> None:
    for name, stat, size in (
        ("zram0", "8192 100 4096 0 4096 0 0 0 0", 1 << 20), ("zram1", "0 0 0 0 0 0 0 0 0", 0)
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "mm_stat").write_text(stat)
        (tmp_path / name / "disksize").write_text(f"{size}\n")
    (tmp_path / "zram2").mkdir()  # it is being removed
    found = footprint.host(tmp_path)
    assert found.stored_bytes == 8192
    assert found.zram_bytes == 4096 + 256 * footprint.ENTRY_BYTES


def test_the_host_is_compared_with_before(tmp_path: Path) -> None:
    (tmp_path / "memory.stat").write_text(V2)
    found = footprint.read(tmp_path, footprint.Host(0, -5, 1 << 60))
    assert found.zram_bytes >= 5
    assert found.held_bytes == found.charged_bytes + found.zram_bytes
    assert 0 < found.gone_bytes < 1 << 60
