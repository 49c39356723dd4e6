"""MicroVMs saved with their memory: checkpoint, rollback, branch, pause; whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import DSecClient, Sandbox
from libdsec.errors import DSecError, NotFound, Unavailable
from tests.system.daemon import Daemon, until
from tests.system.vm_lab import boot, monitor_of, vm_daemon

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(300),
]
MIB = 1 << 20
IDENTITY = (
    "hostname; cat /etc/machine-id; grep -o '[^ \t]*$' /etc/hosts | tail -1;"
    "cat /proc/sys/kernel/random/uuid; ip -4 -o addr show eth0 | awk '{print $4}'"
)
# counts in a variable of a shell: no disk has it
PROCESS = (
    "echo $(sh -c 'echo $PPID') > /dev/shm/pid; n=0;"
    "while sleep 0.3; do n=$((n+1)); echo $n > /dev/shm/n; mv /dev/shm/n /dev/shm/count; done"
)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """One census for the module, around its daemon."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(guest_kernel: Path) -> AsyncIterator[Daemon]:
    async with vm_daemon(guest_kernel) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(host: Daemon) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{host.socket}") as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(client: DSecClient) -> AsyncIterator[Sandbox]:
    async with await boot(client, network="nat", data_disk_mb=16) as made:
        await said(made, f"echo 0 > /dev/shm/count; ({PROCESS}) > /dev/null 2>&1 &")
        yield made


def saved(host: Daemon) -> list[str]:
    return sorted(path.name for path in (host.state / "vm/saved").iterdir())


def digest(host: Daemon, place: str) -> str:
    """Return what tells whether the memory of a saved machine was written to."""
    with (host.state / "vm/saved" / place / "ram").open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


async def said(box: Sandbox, command: str) -> str:
    done = await box.run_shell(command, user="root", timeout=60)
    assert done.ok, f"{done.ending}: {done.stderr}"
    return done.stdout.strip()


async def count(box: Sandbox) -> int:
    return int(await said(box, "cat /dev/shm/count"))


async def counts(box: Sandbox) -> None:
    """Wait until the process is seen to go on."""
    before = await count(box)
    deadline = time.monotonic() + 30
    while await count(box) == before:
        assert time.monotonic() < deadline, "its process stands still"
        await asyncio.sleep(0.2)


async def test_a_rollback_brings_back_files_disks_and_processes(host: Daemon, box: Sandbox) -> None:
    await counts(box)
    await said(box, "echo before > /etc/mine; echo before | dd of=/dev/vdb; sync")
    point = await box.checkpoint()
    assert point.method == "memory"
    assert 0 < point.frozen_ms < point.took_ms
    await counts(box)
    await said(box, "echo after > /etc/mine; echo after | dd of=/dev/vdb; touch /etc/new")
    await said(box, "hostname other; kill -9 $(cat /dev/shm/pid); echo 1000000 > /dev/shm/count")
    following = asyncio.ensure_future(box.run("sleep", "1000"))
    await said(box, "until grep -aqs 'sleep.100[0]' /proc/[0-9]*/cmdline; do sleep 0.1; done")
    back = await box.rollback(point)
    assert back.id == point.id
    with pytest.raises(DSecError):  # what was open then is not what is there now
        await asyncio.wait_for(following, 30)
    assert await said(box, "cat /etc/mine; head -c 6 /dev/vdb; ls /etc/new 2>&1 | wc -l") == (
        "before\nbefore1"
    )
    assert await said(box, "hostname") != "other"
    assert await count(box) < 1_000_000  # it goes on from where it was
    await counts(box)
    before = time.time()
    assert before - 5 < int(await said(box, "date +%s")) < time.time() + 5
    assert [found.id for found in await box.checkpoints()] == [point.id]
    await box.delete_checkpoint(point)
    assert saved(host) == []
    with pytest.raises(NotFound):
        await box.rollback(point)


async def test_branches_are_machines_of_their_own_on_one_memory(host: Daemon, box: Sandbox) -> None:
    await said(box, "echo shared > /dev/shm/old; echo origin > /etc/mine; sync")
    branches = await box.branch(2)
    (place,) = saved(host)
    before = digest(host, place)
    known = [(await said(one, IDENTITY)).split() for one in (box, *branches)]
    for values in zip(*known, strict=True):
        assert len(set(values)) == 3, values
    for one in branches:
        assert known[branches.index(one) + 1][4].split("/")[0] == one.info.address
        await said(one, f"echo {one.id} > /etc/mine; echo {one.id} > /dev/shm/old")
        await counts(one)
    assert await said(box, "cat /etc/mine /dev/shm/old") == "origin\nshared"
    for one in branches:
        assert await said(one, "cat /etc/mine /dev/shm/old") == f"{one.id}\n{one.id}"
    assert digest(host, place) == before
    for one in branches[1:]:
        await one.stop()

    # a branch has all that others have, on a file that its origin has forgotten
    (point,) = await box.checkpoints()
    await box.delete_checkpoint(point)
    first = branches[0]
    (second,) = await first.branch()
    assert len(saved(host)) == 2
    assert await said(second, "cat /etc/mine /dev/shm/old") == f"{first.id}\n{first.id}"
    await counts(second)
    (own,) = await first.checkpoints()
    await said(first, "echo changed > /dev/shm/old")
    await first.rollback(own)
    assert await said(first, "cat /dev/shm/old") == first.id
    await first.stop()
    assert len(saved(host)) == 1
    await second.stop()
    assert saved(host) == []


async def test_a_pause_frees_the_memory_and_the_next_call_finds_all_as_it_was(
    host: Daemon, box: Sandbox
) -> None:
    await counts(box)
    await said(box, "echo kept > /dev/shm/mine")
    open_call = asyncio.ensure_future(box.run_shell("sleep 2; echo done"))
    await asyncio.sleep(0.5)
    paused = await box.pause()
    assert paused.memory_before_bytes - paused.memory_bytes > 48 * MIB
    assert paused.notes == []
    with pytest.raises(AssertionError, match="no monitor"):
        monitor_of(host, box.id)
    assert len(saved(host)) == 1
    assert await said(box, "cat /dev/shm/mine") == "kept"
    assert (await open_call).stdout == "done\n"
    await counts(box)
    await until(lambda: saved(host) == [])  # calls are answered before it is removed

    await box.pause()
    await host.restart()
    assert (await box.get_info()).state == "paused"
    await counts(box)
    await until(lambda: saved(host) == [])
    await box.pause()
    await box.stop()
    await until(lambda: host.remains() == [])
    assert saved(host) == []


async def killed_when(host: Daemon, true: Callable[[], bool], work: Awaitable[object]) -> None:
    """Kill the daemon in the middle of `work`, and start another."""
    task = asyncio.ensure_future(work)
    while not true() and not task.done():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    host.kill()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await host.start()


async def test_kill_9_at_any_step_loses_nothing(host: Daemon, client: DSecClient) -> None:
    box = await boot(client)
    await said(box, "echo one > /etc/mine; sync")
    await said(box, f"echo 0 > /dev/shm/count; ({PROCESS}) > /dev/null 2>&1 &")
    await counts(box)

    def gone() -> bool:
        try:
            monitor_of(host, box.id)
        except AssertionError:
            return True
        return False

    def another() -> bool:
        with contextlib.suppress(AssertionError):
            return monitor_of(host, box.id) != monitor
        return False

    # while it is written, and when it has its name
    await killed_when(host, lambda: saved(host) != [], box.checkpoint())
    await counts(box)
    known = [found.id for found in await box.checkpoints()]
    assert len(saved(host)) == len(known)
    await killed_when(
        host, lambda: any(not name.startswith(".") for name in saved(host)), box.checkpoint()
    )
    await counts(box)
    assert len(saved(host)) == len(await box.checkpoints())

    point = await box.checkpoint()
    for step in (gone, another):
        monitor = monitor_of(host, box.id)
        await said(box, "echo two > /etc/mine; sync")
        await killed_when(host, step, box.rollback(point))
        assert await said(box, "cat /etc/mine") == "one"
        await counts(box)

    monitor = monitor_of(host, box.id)
    await killed_when(host, gone, box.pause())
    assert (await box.get_info()).state == "paused"
    await counts(box)
    await box.pause()
    await killed_when(host, another, box.resume())
    await counts(box)
    kept = len(await box.checkpoints())
    await until(lambda: len(saved(host)) == kept)

    before = len(await client.list_sandboxes())
    await killed_when(host, lambda: len(host.cgroups()) > before, box.branch(2, point))
    await counts(box)
    await box.stop()
    for info in await client.list_sandboxes():
        with contextlib.suppress(DSecError, Unavailable):
            await (await client.get_sandbox(info.id)).stop()
    await until(lambda: host.remains() == [])
    assert saved(host) == []
