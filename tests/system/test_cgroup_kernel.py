"""The cgroup driver on the kernel that is here, whichever kind it has."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsecd.host.cgroup import SandboxCgroup, Slot, TreeDriver, detect
from dsecd.host.probe_resources import clone_into

pytestmark = [pytest.mark.root, pytest.mark.needs("cgroup", "clone_into_cgroup")]

MIB = 1 << 20


@pytest_asyncio.fixture
async def driver(test_name: str) -> AsyncIterator[TreeDriver]:
    made = detect(name=test_name, slots=2)
    made.start()
    yield made
    for name in made.list_sandboxes():
        left = made.find(name)
        assert left is not None
        made.kill(left.path)
        await made.remove(left.path)
    await made.close()


def run_inside(cgroup: SandboxCgroup, slot: Slot | None, code: str) -> int:
    """Start python with `code` in the sandbox's groups, as a spawner's child would be; its pid."""
    if slot is not None:  # the child of a process inside the slot inherits it
        code = f"""
import os
for path in {slot.procs_paths!r}:
    with open(path, "w") as file:
        file.write(str(os.getpid()))
{code}"""
    pid = clone_into(cgroup.fd)
    if pid == 0:
        os.execv(sys.executable, [sys.executable, "-c", code])
    return pid


def groups(
    driver: TreeDriver, memory: int, cpu: float, pids: int
) -> tuple[SandboxCgroup, Slot | None]:
    cgroup = driver.make("sb", 65534)
    slot = driver.slots.acquire() if driver.slots is not None else None
    for write in driver.limits(slot or cgroup, memory, cpu, pids):
        driver.files.write(write.path, write.value)
    return cgroup, slot


async def ended(pid: int) -> int:
    return await asyncio.to_thread(lambda: os.waitpid(pid, 0)[1])


async def finish(driver: TreeDriver, cgroup: SandboxCgroup, slot: Slot | None) -> None:
    driver.kill(cgroup.path)
    cgroup.close()
    await driver.remove(cgroup.path)
    if slot is not None:
        assert driver.slots is not None
        driver.slots.release(slot)


async def test_oom_is_noticed_counted_and_forgotten_with_the_life(driver: TreeDriver) -> None:
    """OOM is a reported state: the watch fires and the counter tells."""
    cgroup, slot = groups(driver, 64 * MIB, 1.0, 64)
    seen: asyncio.Queue[int] = asyncio.Queue()
    watch = driver.watch_oom(cgroup, slot, seen.put_nowait)
    status = await ended(run_inside(cgroup, slot, "b = b'x' * (200 << 20)"))
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert await asyncio.wait_for(seen.get(), 5) == 1
    assert driver.oom_kills(cgroup, slot) == 1
    assert driver.usage(cgroup, slot).oom_kills == 1
    watch.close()
    watch.close()
    await finish(driver, cgroup, slot)
    if slot is not None and driver.slots is not None:
        async with asyncio.timeout(5):
            while driver.slots.draining:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert slot.oom_kills == 1  # the next life begins at 0
        assert driver.oom_kills(cgroup, slot) == 0


async def test_limits_hold_and_usage_tells(driver: TreeDriver) -> None:
    cgroup, slot = groups(driver, 512 * MIB, 0.5, 20)
    code = "b = bytearray(50 << 20); b[::4096] = b'x' * len(b[::4096])\nwhile True: pass"
    pid = run_inside(cgroup, slot, code)
    share = 0.0
    async with asyncio.timeout(60):
        while driver.usage(cgroup, slot).memory_bytes <= 50 * MIB:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        while share <= 0.2:  # others may leave it little for a while
            start = time.monotonic()  # around the looks: a pause between them adds no share
            before = driver.usage(cgroup, slot).cpu_usage_s
            await asyncio.sleep(1.0)
            usage = driver.usage(cgroup, slot)
            share = (usage.cpu_usage_s - before) / (time.monotonic() - start)
            assert share < 0.65, f"a limit of 0.5 CPUs gave {share:.2f}"
    assert 50 * MIB < usage.memory_bytes < 120 * MIB
    assert usage.pids == 0  # the one process counts as dsec-init
    os.kill(pid, signal.SIGKILL)
    await ended(pid)
    await finish(driver, cgroup, slot)


async def test_fork_storm_stops_at_the_limit(driver: TreeDriver) -> None:
    cgroup, slot = groups(driver, 512 * MIB, 2.0, 10)
    code = """
import os, sys, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except OSError:
    os._exit(made)
os._exit(255)
"""
    status = await ended(run_inside(cgroup, slot, code))
    assert os.waitstatus_to_exitcode(status) == 10  # the limit, dsec-init's place not counted
    await finish(driver, cgroup, slot)


async def test_kill_works_on_frozen_processes(driver: TreeDriver) -> None:
    cgroup, slot = groups(driver, 512 * MIB, 1.0, 10)
    pid = run_inside(cgroup, slot, "while True: pass")
    await driver.freeze(cgroup.path)
    frozen = driver.usage(cgroup, slot).cpu_usage_s
    await asyncio.sleep(0.1)
    assert driver.usage(cgroup, slot).cpu_usage_s - frozen < 0.02
    driver.kill(cgroup.path)
    assert os.WTERMSIG(await ended(pid)) == signal.SIGKILL
    await finish(driver, cgroup, slot)


async def test_page_cache_of_an_earlier_life_is_not_counted(
    driver: TreeDriver, tmp_path: Path
) -> None:
    if driver.slots is None:
        pytest.skip("v2 directories are fresh for every sandbox")
    big = tmp_path / "big"
    big.write_bytes(os.urandom(MIB) * 20)
    with big.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    cgroup, slot = groups(driver, 512 * MIB, 1.0, 10)
    assert slot is not None
    await ended(run_inside(cgroup, slot, f"open({str(big)!r}, 'rb').read()"))
    assert driver.usage(cgroup, slot).cache_bytes >= 20 * MIB
    await finish(driver, cgroup, slot)
    async with asyncio.timeout(5):
        while driver.slots.draining:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert slot.residue_bytes >= 20 * MIB
    cgroup = driver.make("next", 65534)
    assert driver.usage(cgroup, slot).memory_bytes < 2 * MIB
    await finish(driver, cgroup, None)


async def test_a_sandbox_can_move_its_own_processes_but_not_its_limits(driver: TreeDriver) -> None:
    cgroup, slot = groups(driver, 512 * MIB, 1.0, 10)
    owned = {path.name for path in Path(cgroup.path).iterdir() if path.stat().st_uid == 65534}
    assert owned == {"cgroup.procs"}
    await finish(driver, cgroup, slot)


async def test_restart_finds_live_sandboxes_and_their_slots(
    driver: TreeDriver, test_name: str
) -> None:
    cgroup, slot = groups(driver, 512 * MIB, 1.0, 10)
    pid = run_inside(cgroup, slot, "import time; b = b'x' * (8 << 20); time.sleep(60)")
    async with asyncio.timeout(5):
        while driver.usage(cgroup, slot).memory_bytes < 4 * MIB:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    again = detect(name=test_name, slots=1)
    again.start()
    found = again.find("sb")
    assert found is not None
    assert again.pids(found) == (pid,)
    if slot is not None:
        assert again.slots is not None
        assert again.list_slots()[slot.name] == (pid,)
        adopted = again.slots.adopt(slot.name)
        again.slots.end_recovery()
        assert again.usage(found, adopted).memory_bytes > MIB
    await again.close()
    assert again.pids(found) == (pid,)  # closing leaves the living alone
    await finish(driver, cgroup, slot)
    await ended(pid)
