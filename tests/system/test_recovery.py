"""kill -9 of dsecd at any instant: no running sandbox is lost, nothing leaks.

With 500 sandboxes and a client that stays connected: test_fault_acceptance.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
from pathlib import Path

import pytest

from libdsec import model
from libdsec.errors import DSecError, Unavailable
from tests.system.daemon import IMAGE, daemon, until
from tests.system.user_view import commands_on_host, first_process

pytestmark = pytest.mark.root


async def output_of(client, sandbox: str, cid: str, offset: int = 0) -> bytes:
    """Attach to a command and return all it wrote from `offset` on."""
    call = client.open("exec.attach", model.AttachArgs(cid=cid, stdout_offset=offset), sandbox)
    pieces = [item.data async for item in call.stream(model.Output)]
    return b"".join(pieces) + (await call.answer(model.CommandResult)).stdout


@pytest.mark.vm
async def test_running_sandboxes_are_readopted_with_their_commands() -> None:
    async with daemon() as d:
        client = await d.client()
        infos = [await client.create(f"k{i}", IMAGE, memory_limit_mb=64) for i in range(5)]
        script = b"for i in 1 2 3 4 5 6 7 8 9 10; do echo line$i; sleep 0.2; done"
        for info in infos:
            args = model.ExecArgs(cid="bg", shell=script, background=True)
            await client.call("exec.start", args, info.id)
        await asyncio.sleep(0.3)
        await d.restart()
        client = await d.client()
        assert {found.id for found in await client.list()} == {info.id for info in infos}
        expected = b"".join(b"line%d\n" % i for i in range(1, 11))
        for info in infos:
            assert await output_of(client, info.id, "bg") == expected
            found = await client.call(
                "sandbox.metrics", model.SandboxRef(id=info.id), kind=model.Metrics
            )
            assert found.memory_limit_bytes == 64 << 20
        killed = await client.run(infos[0].id, "sh", "-c", "tail < /dev/zero")
        assert killed.oom_killed
        for info in infos:
            assert (await client.stop(info.id)).state == "stopped"
        assert d.remains() == []


async def test_a_foreground_command_survives_the_daemon() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE)
        await client.run(info.id, "mkfifo", "/go")
        args = model.ExecArgs(cid="fg", shell=b"read go < /go; echo through")
        call = client.open("exec.run", args, info.id)
        await until(lambda: commands_on_host(d, info.id))
        await d.restart()
        with pytest.raises(Unavailable):
            await call.answer()
        client = await d.client()
        await client.run(info.id, "sh", "-c", "echo > /go")
        assert await output_of(client, info.id, "fg") == b"through\n"


async def test_a_restart_gives_a_new_sandbox_nothing_of_a_live_one() -> None:
    async with daemon() as d:
        client = await d.client()
        old = [await client.create(f"k{i}", IMAGE) for i in range(6)]
        await d.restart()
        client = await d.client()
        new = [await client.create(f"n{i}", IMAGE) for i in range(6)]
        for info in old + new:
            assert (await client.run(info.id, "sh", "-c", "echo x > /m; cat /m")).exit_code == 0
        users = set()
        for info in old + new:
            for pid in d.pids_of(info.id):
                status = Path(f"/proc/{pid}/status").read_text()
                users.add((info.id, status.partition("\nUid:")[2].split()[0]))
        assert len({uid for _, uid in users}) == 12


async def test_sandboxes_that_died_meanwhile_are_failed_and_freed() -> None:
    async with daemon() as d:
        client = await d.client()
        infos = [await client.create(f"k{i}", IMAGE) for i in range(3)]
        dead = infos[1].id
        init = os.pidfd_open(first_process(d, dead))
        d.kill()
        for base in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
            with contextlib.suppress(OSError):
                kill = f"{base}/{d.name}/{dead}/cgroup.kill"
                with open(kill, "w") as file:  # noqa: PTH123
                    file.write("1")
                break
        await asyncio.to_thread(select.select, [init], [], [], 30)  # killed is not yet dead
        os.close(init)
        await d.start()
        client = await d.client()
        found = await client.get(dead)
        assert (found.state, found.reason) == ("failed", "found dead when dsecd started")
        assert d.cgroups() == sorted([infos[0].id, infos[2].id])


@pytest.mark.parametrize("step", ["prepared", "intent", "created", "running", "destroyed"])
@pytest.mark.parametrize("network", ["none", "nat"])
async def test_kill_9_at_every_step_leaks_nothing(step: str, network: str) -> None:
    async with daemon() as d:
        client = await d.client()
        survivor = await client.create("survivor", IMAGE)
        await d.end(12)  # SIGUSR2: keep
        await d.start(crash_at=step)
        client = await d.client()
        with contextlib.suppress(DSecError):
            info = await client.create("victim", IMAGE, network=network)
            await client.stop(info.id)
        await asyncio.to_thread(d.process.wait, 20)
        await d.start()
        client = await d.client()
        assert (await client.run(survivor.id, "true")).exit_code == 0
        # the retry with the same key gives one sandbox, whatever the crash left
        again = await client.create("victim", IMAGE, network=network)
        if again.state == "running":
            assert (await client.run(again.id, "true")).exit_code == 0
            await client.stop(again.id)
        await client.stop(survivor.id)
        assert d.remains() == []


async def test_kill_9_during_a_burst_leaks_nothing() -> None:
    async with daemon() as d:
        client = await d.client()
        keys = [f"k{i}" for i in range(60)]
        args = model.DSecContainerRunArgs(container_image=IMAGE)
        client.open("sandbox.create_many", model.CreateManyArgs(keys=keys, args=args))
        await until(lambda: len(d.cgroups()) > 10)
        await d.restart()
        client = await d.client()
        infos = await asyncio.gather(*(client.create(key, IMAGE) for key in keys))
        assert len({info.id for info in infos}) == 60
        assert d.cgroups() == sorted(info.id for info in infos)
        await asyncio.gather(*(client.stop(info.id) for info in infos))
        assert d.remains() == []


async def test_the_clocks_go_on_after_a_restart() -> None:
    async with daemon() as d:
        client = await d.client()
        short = await client.create("s", IMAGE, max_lifetime_s=2.0)
        idle = await client.create("i", IMAGE, ttl_running_stop=1.0)
        await d.restart()
        client = await d.client()
        await until(lambda: d.cgroups() == [], 8)
        assert "maximum lifetime" in (await client.get(short.id)).reason
        assert "idle timeout" in (await client.get(idle.id)).reason
