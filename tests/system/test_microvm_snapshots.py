"""MicroVMs saved with their memory: checkpoint, rollback, branches, pause; whoever dies meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest
import pytest_asyncio

from libdsec import DSecClient, Sandbox
from libdsec.errors import DSecError, InvalidArgument, NotFound
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
    "hostname; cat /etc/machine-id; cat /proc/sys/kernel/random/uuid;"
    "ip -4 -o addr show eth0 | awk '{print $4}'"
)
# counts in memory only: what it says is what its process is
COUNTER = "i=0; while :; do i=$((i+1)); echo $i > /dev/shm/count; sleep 0.05; done"


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
        await made.start(COUNTER) if False else None
        yield made


def saved(host: Daemon) -> list[str]:
    return sorted(path.name for path in (host.state / "vm/saved").iterdir())


async def said(box: Sandbox, command: str) -> str:
    done = await box.run_shell(command, user="root", timeout=60)
    assert done.ok, f"{done.ending}: {done.stderr}"
    return done.stdout.strip()


async def test_smoke(host: Daemon, client: DSecClient, box: Sandbox) -> None:
    await said(box, f"({COUNTER}) > /dev/null 2>&1 & echo a > /etc/mine; echo A | dd of=/dev/vdb")
    for _ in range(3):
        point = await box.checkpoint()
        print("checkpoint", point)
    first = int(await said(box, "cat /dev/shm/count"))
    await said(box, "echo b > /etc/mine; echo B | dd of=/dev/vdb; sleep 1")
    begun = time.perf_counter()
    print("rollback", await box.rollback(point), time.perf_counter() - begun)
    now = int(await said(box, "cat /dev/shm/count"))
    print("count", first, now)
    assert await said(box, "cat /etc/mine; head -c 1 /dev/vdb") == "a\nA"
    begun = time.perf_counter()
    branches = await box.branch(4)
    print("branch of 4", time.perf_counter() - begun)
    for one in branches:
        pid = monitor_of(host, one.id)
        roll = {l.split(":")[0]: int(l.split()[1]) for l in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]}
        print(one.id, (await said(one, IDENTITY)).split(), {k: roll[k] >> 10 for k in ("Rss", "Pss", "Private_Dirty", "Private_Clean")}, await said(one, "cat /dev/shm/count /etc/mine"))
    print(await said(box, IDENTITY))
    for one in branches[1:]:
        await one.stop()
    one = branches[0]
    two, = await one.branch(1)
    print("branch of a branch", (await said(two, IDENTITY)).split())
    begun = time.perf_counter()
    print(await two.pause(), time.perf_counter() - begun)
    begun = time.perf_counter()
    print(await said(two, "cat /dev/shm/count"), time.perf_counter() - begun)
    await two.stop(); await one.stop()
    print(saved(host))
