"""kill -9 of dsecd: no microVM is lost, and what was half made leaves nothing."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from libdsec import model
from libdsec.errors import DSecError
from tests.system.daemon import IMAGE, Daemon, until
from tests.system.vm_lab import CREATE_S, MEMORY_MB, vm_daemon
from tests.wire_client import WireClient

pytestmark = [
    pytest.mark.root,
    pytest.mark.slow,
    # one boot costs seconds where it is emulated: each test says all it can of one daemon
    pytest.mark.timeout(300),
]
LINES = 25


async def create(client: WireClient, key: str) -> model.SandboxInfo:
    args = model.DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=MEMORY_MB)
    wanted = model.CreateArgs(
        key=key, args=args, backend=model.MICROVM, vm=model.VmArgs(layers="block")
    )
    info: model.SandboxInfo = await client.call(
        "sandbox.create", wanted, kind=model.SandboxInfo, timeout_s=CREATE_S
    )
    return info


async def output_of(client: WireClient, sandbox: str, cid: str) -> bytes:
    call = client.open("exec.attach", model.AttachArgs(cid=cid), sandbox)
    pieces = [item.data async for item in call.stream(model.Output)]
    return b"".join(pieces) + (await call.answer(model.CommandResult)).stdout


async def begin_counting(client: WireClient, sandbox: str, cid: str) -> None:
    script = b"i=1; while [ $i -le %d ]; do echo line$i; i=$((i+1)); sleep 0.2; done" % LINES
    args = model.ExecArgs(cid=cid, shell=script, background=True)
    await client.call("exec.start", args, sandbox)


EXPECTED = b"".join(b"line%d\n" % number for number in range(1, LINES + 1))


async def test_machines_go_on_whatever_becomes_of_the_daemon(guest_kernel: Path) -> None:
    async with vm_daemon(guest_kernel) as d:
        client = await d.client()
        infos = [await create(client, key) for key in ("one", "two")]
        for info in infos:
            await begin_counting(client, info.id, "killed")
        await d.restart()
        client = await d.client()
        assert {found.id for found in await client.list()} == {info.id for info in infos}
        for info in infos:
            assert await output_of(client, info.id, "killed") == EXPECTED
            assert (await client.get(info.id)).vm == model.VmArgs(layers="block")

        await begin_counting(client, infos[0].id, "kept")
        assert await d.end(12) == 0  # SIGUSR2: keep
        await d.start()
        client = await d.client()
        assert await output_of(client, infos[0].id, "kept") == EXPECTED
        await client.stop(infos[1].id)
        assert d.cgroups() == [infos[0].id]

        # and a daemon without microVMs frees what it finds of them
        await d.end(12)
        config = d.config_file.read_text()
        d.config_file.write_text(config.replace('enabled = "yes"', 'enabled = "no"'))
        await d.start()
        client = await d.client()
        await until(lambda: d.remains() == [])
        assert await client.list() == []
        assert infos[0].id in d.log()
        assert "microvm" in d.log().partition(infos[0].id)[2]


async def half_made(d: Daemon, step: str) -> None:
    """Let the daemon die at `step` of a create or a stop, and see what the next one finds."""
    await d.end(12)
    await d.start(crash_at=step)
    assert d.process is not None
    client = await d.client()
    with contextlib.suppress(DSecError):
        info = await create(client, f"at-{step}")
        await client.stop(info.id)
    await asyncio.to_thread(d.process.wait, 60)
    await d.start()
    client = await d.client()
    for info in await client.list():  # the journal had it: it lives and answers
        assert (await client.run(info.id, "true")).exit_code == 0
        await client.stop(info.id)
    await until(lambda: d.remains() == [])


async def test_kill_9_at_steps_of_a_create_leaks_nothing(guest_kernel: Path) -> None:
    async with vm_daemon(guest_kernel) as d:
        for step in ("prepared", "intent", "created", "running", "destroyed"):
            await half_made(d, step)


async def test_kill_9_while_the_guest_boots_leaks_nothing(guest_kernel: Path) -> None:
    async with vm_daemon(guest_kernel, templates=0) as d:
        for attempt in range(5):  # until the guest was not quicker than we
            client = await d.client()
            booting = asyncio.ensure_future(create(client, f"k{attempt}"))
            await until(lambda: any(d.pids_of(name) for name in d.cgroups()), CREATE_S)
            await asyncio.sleep(0.5)
            d.kill()
            (made,) = await asyncio.gather(booting, return_exceptions=True)
            await d.start()
            if isinstance(made, BaseException):
                break
            await (await d.client()).stop(made.id)
        assert isinstance(made, DSecError)
        await until(lambda: d.remains() == [])
