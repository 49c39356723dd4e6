"""Slots of v1 hierarchies: made ahead, handed out once, made ready for their next life."""

from __future__ import annotations

import asyncio
import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dsecd.host.cgroup import HybridDriver
from libdsec.errors import Internal, NotFound
from tests.unit.cgroup_lab import TwinFiles, detected, placed, read


@pytest.fixture
def hybrid(tmp_path: Path) -> TwinFiles:
    return TwinFiles(tmp_path, "hybrid")


async def until(condition: Callable[[], bool]) -> None:
    """Wait for the background task, which tells nobody what it did."""
    async with asyncio.timeout(5):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_pool_fills_hands_out_once_and_recycles(hybrid: TwinFiles) -> None:
    driver = detected(hybrid, slots=3)
    assert isinstance(driver, HybridDriver)
    driver.start()
    slots = driver.slots
    await until(lambda: slots.ready == 3)
    taken = [slots.acquire() for _ in range(10)]
    assert len({slot.name for slot in taken}) == 10
    slot = taken[0]
    pids = Path(slot.directories["pids"], "pids.current")
    pids.write_text("1\n")  # a process is still leaving
    Path(slot.directories["cpu"], "cpu.cfs_quota_us").write_text("1000\n")
    memory = Path(slot.directories["memory"])
    (memory / "memory.stat").write_text("cache 5000\nrss 0\nshmem 0\n")
    (memory / "memory.usage_in_bytes").write_text("5000\n")
    (memory / "memory.oom_control").write_text("oom_kill 3\n")
    slots.release(slot)
    await asyncio.sleep(0.05)
    assert slots.draining == 1
    pids.write_text("0\n")
    await until(lambda: slots.draining == 0)
    assert (slot.residue_bytes, slot.oom_kills) == (5000, 3)
    assert Path(slot.directories["cpu"], "cpu.cfs_quota_us").read_text() == "-1"
    assert hybrid.tags[str(memory)] == "5000 3"
    with pytest.raises(Internal, match="twice"):
        slots.release(slot)
    for other in taken[1:]:
        slots.release(other)
    await driver.close()
    assert not (hybrid.root / "memory/dsec-test").exists()
    assert not (hybrid.root / "cpu/dsec-test").exists()


async def test_fault_swap_that_came_later_was_not_limited(hybrid: TwinFiles) -> None:
    driver = detected(hybrid, slots=0)
    assert isinstance(driver, HybridDriver)
    driver.start()
    for mib in (256, 64, 128):  # lives of one slot
        slot = driver.slots.acquire()
        for write in driver.limits(slot, mib << 20, 1.0, 10):
            hybrid.write(write.path, write.value)
        both = Path(slot.directories["memory"], "memory.memsw.limit_in_bytes")
        assert both.read_text() == str(mib << 20)
        Path(slot.directories["memory"], "memory.usage_in_bytes").write_text(str(1 << 30))
        driver.slots.release(slot)
        await until(lambda: driver.slots.ready == 1)
    await driver.close()


async def test_too_much_page_cache_is_trimmed(hybrid: TwinFiles) -> None:
    driver = detected(hybrid, slots=0)
    assert isinstance(driver, HybridDriver)
    driver.start()
    slot = driver.slots.acquire()
    Path(slot.directories["memory"], "memory.usage_in_bytes").write_text(str(1 << 30))
    hybrid.writes.clear()
    driver.slots.release(slot)
    await until(lambda: driver.slots.ready == 1)
    limits = [value for path, value in hybrid.writes if path.endswith("memory.limit_in_bytes")]
    assert limits == [str(32 << 20), "-1"]
    await driver.close()


async def test_restarted_daemon_finds_slots_and_their_baseline(hybrid: TwinFiles) -> None:
    first = detected(hybrid, slots=0)
    assert isinstance(first, HybridDriver)
    first.start()
    live, dead = first.slots.acquire(), first.slots.acquire()
    Path(live.directories["memory"], "cgroup.procs").write_text("101\n102\n")
    Path(dead.directories["memory"], "cgroup.procs").write_text("103\n")
    Path(dead.directories["pids"], "pids.current").write_text("1\n")
    hybrid.tags[live.directories["memory"]] = "11 33"
    # killed: no close
    assert first.slots._task is not None
    first.slots._task.cancel()

    second = detected(hybrid, slots=0)
    assert isinstance(second, HybridDriver)
    second.start()
    assert second.list_slots() == {live.name: (101, 102), dead.name: (103,)}
    adopted = second.slots.adopt(live.name)
    assert (adopted.residue_bytes, adopted.oom_kills) == (11, 33)
    with pytest.raises(NotFound):
        second.slots.adopt(live.name)
    second.slots.end_recovery()
    fresh = second.slots.acquire()
    assert fresh.name not in (live.name, dead.name)
    assert second.slots.ready == 0
    Path(dead.directories["pids"], "pids.current").write_text("0\n")
    await until(lambda: second.slots.ready == 1)
    second.slots.release(fresh)
    await second.close()
    assert Path(live.directories["memory"]).exists()  # it lives


async def test_half_made_slot_is_undone_and_half_left_one_completed(
    hybrid: TwinFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = detected(hybrid, slots=0)
    assert isinstance(driver, HybridDriver)
    mkdir = hybrid.mkdir

    def refuse(path: str) -> None:
        if "/pids/" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)
        mkdir(path)

    monkeypatch.setattr(hybrid, "mkdir", refuse)
    with pytest.raises(Exception, match="slot"):
        driver.slots.acquire()
    assert hybrid.directories(str(hybrid.root / "memory/dsec-test")) == []
    monkeypatch.setattr(hybrid, "mkdir", mkdir)
    hybrid.mkdir(str(hybrid.root / "memory/dsec-test/slot-7"))
    driver.start()
    await until(lambda: driver.slots.ready == 1)
    assert (hybrid.root / "pids/dsec-test/slot-7/pids.max").exists()
    await driver.close()


async def test_the_next_life_of_a_slot_has_no_class(hybrid: TwinFiles) -> None:
    driver, slot, cgroup = placed(hybrid)
    assert driver.set_cpu_class(cgroup, slot, "best_effort") == ()
    assert read(slot.directories["cpu"], "cpu.idle") == ["1"]
    await driver.slots._recycle(slot)
    assert read(slot.directories["cpu"], "cpu.idle", "cpu.shares") == ["0", "1024"]
    await driver.close()
