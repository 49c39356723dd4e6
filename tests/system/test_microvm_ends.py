"""MicroVMs that end by themselves: each is reported as what happened, and leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import DSecClient
from libdsec.errors import DSecError
from tests.system.daemon import Daemon, until
from tests.system.vm_lab import boot, failed, jail_init_of, monitor_of, vm_daemon

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
NOTICED_S = 15.0


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """One census for the module, around its daemon."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def host(guest_kernel: Path) -> AsyncIterator[Daemon]:
    async with vm_daemon(guest_kernel, ping_s=1.0) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(host: Daemon) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{host.socket}") as made:
        yield made


@pytest.mark.parametrize(
    ("command", "reason"),
    [
        ("halt -f", "the guest halted"),
        ("poweroff -f", "the guest switched itself off"),
        ("reboot -f", "the guest began to reboot"),
        ("echo c > /proc/sysrq-trigger", "the guest's kernel panicked"),
    ],
)
async def test_a_guest_that_ends_itself(
    host: Daemon, client: DSecClient, command: str, reason: str
) -> None:
    box = await boot(client)
    last = asyncio.ensure_future(box.run_shell(command, user="root"))
    info = await failed(client, box.id, NOTICED_S)
    assert reason in info.reason
    with pytest.raises(DSecError):  # a command under way is answered
        await asyncio.wait_for(last, 10)
    with contextlib.suppress(DSecError):
        await box.stop()
    await until(lambda: host.remains() == [])


@pytest.mark.parametrize(
    ("victim", "reason"),
    [(monitor_of, "virtual machine monitor ended"), (jail_init_of, "init")],
)
async def test_a_machine_that_is_killed(
    host: Daemon, client: DSecClient, victim: object, reason: str
) -> None:
    box = await boot(client)
    assert callable(victim)
    last = asyncio.ensure_future(box.run("sleep", "60"))
    await asyncio.sleep(0.2)
    os.kill(victim(host, box.id), signal.SIGKILL)
    info = await failed(client, box.id, NOTICED_S)
    assert reason in info.reason
    with pytest.raises(DSecError):
        await asyncio.wait_for(last, 10)
    with contextlib.suppress(DSecError):
        await box.stop()
    await until(lambda: host.remains() == [])
