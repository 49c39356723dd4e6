"""MicroVMs made and ended over and over while daemon and monitors are killed: nothing stays.

DSEC_CHURN says how many (12), DSEC_CHURN_SEED which sequence of faults (it is in the failure).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
from pathlib import Path

import pytest

from libdsec import model
from libdsec.errors import DSecError
from tests.system.daemon import IMAGE, Daemon, until
from tests.system.vm_lab import CREATE_S, monitor_of, vm_daemon
from tests.wire_client import WireClient

COUNT = int(os.environ.get("DSEC_CHURN", "12"))
SEED = int(os.environ.get("DSEC_CHURN_SEED", "1"))
pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(60 + 30 * COUNT)]
MEMORY_MB = 128
FAULTS = ("none", "none", "daemon while it boots", "daemon while it runs", "monitor", "both")


async def create(client: WireClient, key: str) -> model.SandboxInfo:
    args = model.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=MEMORY_MB)
    vm = model.VmArgs(layers="block")
    wanted = model.CreateArgs(key=key, args=args, backend=model.MICROVM, vm=vm)
    info: model.SandboxInfo = await client.call(
        "sandbox.create", wanted, kind=model.SandboxInfo, timeout_s=CREATE_S
    )
    return info


async def die_while_it_boots(d: Daemon, key: str, after_s: float) -> None:
    client = await d.client()
    booting = asyncio.ensure_future(create(client, key))
    await asyncio.sleep(after_s)
    await d.restart()
    with contextlib.suppress(DSecError):
        await booting


async def one(d: Daemon, key: str, fault: str, after_s: float) -> None:
    if fault == "daemon while it boots":
        await die_while_it_boots(d, key, after_s)
        return
    client = await d.client()
    info = await create(client, key)
    assert (await client.run(info.id, "echo", key)).stdout.decode() == f"{key}\n"
    if fault in ("monitor", "both"):
        os.kill(monitor_of(d, info.id), signal.SIGKILL)
    if fault in ("daemon while it runs", "both"):
        await d.restart()
        client = await d.client()
    if fault == "daemon while it runs":
        assert (await client.run(info.id, "true")).exit_code == 0
    with contextlib.suppress(DSecError):
        await client.stop(info.id)


async def test_nothing_stays_of_microvms(guest_kernel: Path) -> None:
    chance = random.Random(SEED)
    done: list[str] = []
    async with vm_daemon(guest_kernel) as d:
        for number in range(COUNT):
            fault = chance.choice(FAULTS)
            done.append(fault)
            try:
                await one(d, f"k{number}", fault, chance.uniform(0.0, 4.0))
                client = await d.client()
                for info in await client.list():
                    with contextlib.suppress(DSecError):
                        await client.stop(info.id)
                await until(lambda: d.remains() == [], 20)
            except BaseException as error:
                error.add_note(f"seed {SEED}, faults so far: {done}")
                raise
