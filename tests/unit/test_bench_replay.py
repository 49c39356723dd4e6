"""The replayed workload of `dsec-bench density`: its statistics, and what is made of a run."""

from __future__ import annotations

import asyncio
import io
import itertools
import math
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Coroutine
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from dsec_bench.create.daemon import configuration
from dsec_bench.create.sdk import Sdk
from dsec_bench.density import footprint, replay, workload
from dsec_bench.density.footprint import Footprint
from dsec_bench.density.parts import LIVES, QUICK_LIVES
from dsec_bench.density.workload import Life, Scale, Turn, draw
from dsec_bench.stats import percentile

from dsecd import config

MIB = 1 << 20
HELD: Callable[[Footprint], int] = attrgetter("held_bytes")
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


# --- the replay itself, without a daemon ----------------------------------------------------------


class Agent:
    """Answers each line; says who listens."""

    def __init__(self) -> None:
        self.lines = ["ready"]
        self.heard: list[str] = []
        self.followed = False

    async def send_stdin(self, line: str) -> None:
        assert not self.followed, "the sandbox was in use while it waited"
        self.heard.append(line)
        self.lines.append("done")

    def __aiter__(self) -> Agent:
        self.followed = True
        return self

    async def __anext__(self) -> SimpleNamespace:
        return SimpleNamespace(data=self.lines.pop(0).encode() + b"\n")

    async def disconnect(self) -> None:
        self.followed = False


class Client:
    """Makes sandboxes that are their own `commands`."""

    def __init__(self) -> None:
        self.agents: list[Agent] = []
        self.live = self.commands_run = 0

    async def run_container(self, args: object) -> Client:
        self.live += 1
        return self

    @property
    def commands(self) -> SimpleNamespace:
        return SimpleNamespace(run=self._start)

    async def _start(self, words: list[str], background: bool, stdin: bool) -> Agent:
        assert background
        assert stdin
        assert words[-1].isdigit()
        self.agents.append(Agent())
        return self.agents[-1]

    async def run(self, *argv: str) -> SimpleNamespace:
        self.commands_run += 1
        return SimpleNamespace(exit_code=0)

    async def get_metrics(self) -> SimpleNamespace:
        return SimpleNamespace(cpu_usage_s=1.0, uptime_s=50.0)

    async def stop(self) -> None:
        self.live -= 1


class Bench:
    """What the replay needs of an `Sdk`."""

    args = None

    def __init__(self) -> None:
        self.client = Client()
        self.stopped = False

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        asyncio.run(work)

    def stop_all(self) -> None:
        self.stopped = True


SHORT = [
    Life(0.0, 0.02, 8, (Turn(0.001, 0.02, 0.0, 0.5), Turn(0.002, 0.01, 0.25, 0.5))),
    Life(0.01, 0.02, 16, (Turn(0.001, 0.01, 0.5, 1.0),)),
]


def test_a_replay_takes_all_turns_and_lets_its_sandboxes_wait_alone() -> None:
    bench, done = Bench(), list[None]()
    nothing = Footprint(1, 0, 0, 0, 0, 0)
    run = replay.measure(cast(Sdk, bench), SHORT, 1e6, lambda: nothing, lambda: done.append(None))
    assert [agent.heard for agent in bench.client.agents] == [
        [f"0 {4 * MIB} 1000\n", f"{2 * MIB} {4 * MIB} 2000\n"],
        [f"{8 * MIB} {16 * MIB} 1000\n"],
    ]
    assert not any(agent.followed for agent in bench.client.agents)
    assert bench.client.commands_run == len(run.turns_ms) == 3
    assert len(run.lives_s) == len(done) == 2
    assert run.shares == [0.02, 0.02]
    assert max(run.lives_s) <= run.makespan_s == run.seen[-1][0]
    assert run.integral(HELD) == pytest.approx(run.makespan_s, abs=0.05)
    assert bench.stopped
    assert bench.client.live == 0


def test_a_replay_that_cannot_be_watched_is_none() -> None:
    def look() -> Footprint:
        raise FileNotFoundError("memory.stat")

    bench = Bench()
    with pytest.raises(ExceptionGroup) as caught:
        replay.measure(cast(Sdk, bench), SHORT, 1e6, look, lambda: None)
    assert caught.group_contains(FileNotFoundError)
    assert bench.stopped


# --- what a run amounts to ------------------------------------------------------------------------


def seen(held: int, at_s: float) -> tuple[float, Footprint]:
    """A look at `held` MiB of which a quarter is in zram."""
    return at_s, Footprint(held * MIB * 3 // 4, 0, 0, held * MIB // 2, held * MIB // 4, -held)


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
