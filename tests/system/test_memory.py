"""faults.md, "Memory, processes, disk": each fault named, none of them here."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest

from libdsec import model
from tests.system.daemon import IMAGE, daemon, until

pytestmark = pytest.mark.root


async def test_oom_is_a_reported_state_and_the_sandbox_goes_on() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, memory_limit_mb=48)
        events = client.open("events.subscribe", model.EventFilter(sandbox=info.id))
        await client.run(info.id, "sh", "-c", "echo before > /mark")
        # tail keeps all of one endless line in memory
        result = await client.run(info.id, "sh", "-c", "tail < /dev/zero")
        assert result.oom_killed
        assert result.exit_code != 0
        assert (await events.item(model.Event)).kind == "oom"
        assert (await client.run(info.id, "cat", "/mark")).stdout == b"before\n"
        assert not (await client.run(info.id, "false")).oom_killed
        assert (await client.get(info.id)).state == "running"


async def test_oom_of_a_background_command_is_reported_when_it_is_waited_for() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, memory_limit_mb=48)
        args = model.ExecArgs(cid="bg", shell=b"tail < /dev/zero", background=True)
        await client.call("exec.start", args, info.id)
        result = await client.call(
            "exec.wait", model.AttachArgs(cid="bg"), info.id, kind=model.CommandResult
        )
        assert result.oom_killed


async def test_a_fork_storm_meets_its_limit_and_the_agent_survives() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, pids_limit=64)
        storm = b"i=0; while [ $i -lt 500 ]; do sleep 30 & i=$((i+1)); done; echo done"
        await client.call(
            "exec.run",
            model.ExecArgs(cid="storm", shell=storm, timeout_s=20),
            info.id,
            kind=model.CommandResult,
        )
        found = await client.call(
            "sandbox.metrics", model.SandboxRef(id=info.id), kind=model.Metrics
        )
        assert found.pids <= 64
        assert (await client.get(info.id)).state == "running"
        await client.call("exec.kill", {"cid": "storm"}, info.id)

        async def answers() -> bool:
            try:
                return (await client.run(info.id, "true")).exit_code == 0
            except Exception:
                return False

        for _ in range(100):
            if await answers():
                break
            await asyncio.sleep(0.05)
        assert await answers()


async def test_a_full_disk_is_no_oom_and_the_host_is_spared() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, memory_limit_mb=64, disk_limit_mb=16)
        result = await client.run(info.id, "dd", "if=/dev/zero", "of=/f", "bs=1M", "count=64")
        assert result.exit_code != 0
        assert not result.oom_killed
        assert b"No space left" in result.stderr
        assert (await client.run(info.id, "true")).exit_code == 0
        found = await client.call(
            "sandbox.metrics", model.SandboxRef(id=info.id), kind=model.Metrics
        )
        assert found.disk_bytes <= 17 << 20


def _held_open(spool: Path) -> int:
    """Return the bytes on disk of the files without a name that processes hold open in `spool`."""
    used = 0
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it ended while we looked
            for link in (process / "fd").iterdir():
                with contextlib.suppress(OSError):
                    if str(link.readlink()).startswith(f"{spool}/"):
                        used += link.stat().st_blocks * 512
    return used


async def test_output_nobody_reads_costs_neither_memory_nor_disk() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, output_limit_mb=8, spool_limit_mb=16)
        before = d.memory_bytes()
        args = model.ExecArgs(
            cid="yes", shell=b"yes | head -c 1000000000", stream=True, timeout_s=60
        )
        client.open("exec.run", args, info.id)
        for _ in range(20):
            await asyncio.sleep(0.1)
            assert d.memory_bytes() - before < 50 << 20
            assert _held_open(d.state / "spool") <= 18 << 20


async def test_memory_of_the_daemon_does_not_grow_with_lives() -> None:
    async with daemon() as d:
        client = await d.client()

        async def lives(n: int, tag: str) -> None:
            for i in range(n):
                info = await client.create(f"{tag}{i}", IMAGE)
                await client.run(info.id, "true")
                await client.stop(info.id)

        await lives(60, "warm")
        files, memory = d.open_files(), d.memory_bytes()
        await lives(60, "more")
        await until(lambda: d.open_files() <= files + 8)
        assert d.memory_bytes() - memory < 4 << 20
