"""Pausing real sandboxes: they stand still, give their memory, and go on where they were."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

import pytest

from dsecd import fastpath
from dsecd.host import swap
from libdsec.model import CommandResult, Paused, SandboxInfo
from tests.system.daemon import IMAGE, Daemon, daemon, until
from tests.system.memory_lab import FILES, HELD, MIB, hold, metrics, needs_zram, still_held
from tests.system.user_view import commands_on_host
from tests.wire_client import WireClient

ZRAM = {"swap": "zram", "swap_mb": 256, "when": "off"}

pytestmark = pytest.mark.root


async def pause(client: WireClient, name: str, target_bytes: int | None = None) -> Paused:
    args = {"id": name, "target_bytes": target_bytes}
    paused: Paused = await client.call("sandbox.pause", args, kind=Paused)
    return paused


async def start(client: WireClient, name: str, script: str, **fields: object) -> None:
    args = {"argv": [b"sh", b"-c", script.encode()], "background": True, "cid": "job", **fields}
    await client.call("exec.start", args, name)


def frozen(made: Daemon, name: str) -> bool:
    for base in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        events = Path(base) / made.name / name / "cgroup.events"
        if events.exists():
            return "frozen 1" in events.read_text()
    raise AssertionError("the sandbox has no group")


COUNT = "while :; do echo -n . >> /tmp/n; sleep 0.02; done"


async def counted(client: WireClient, name: str, more_than: int = 0) -> int:
    """Return how far it has come, once that is further than `more_than`."""
    for _ in range(500):
        found = len((await client.run(name, "cat", "/tmp/n")).stdout)
        if found > more_than:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("it does not count")


def seen(made: Daemon, name: str) -> int:
    """How far `COUNT` has come, looked at from the host: no call resumes the sandbox."""
    for pid in made.pids_of(name):
        file = Path(f"/proc/{pid}/root/tmp/n")
        if file.exists():
            return file.stat().st_size
    raise AssertionError("nobody counts")


@pytest.mark.vm
async def test_it_stands_still_until_a_call_resumes_it() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        await start(client, info.id, COUNT)
        before = await counted(client, info.id)
        await pause(client, info.id)
        assert frozen(made, info.id)
        stands = seen(made, info.id)
        await asyncio.sleep(1.5)  # of counting would be 75 and more
        assert (await client.get(info.id)).state == "paused"
        assert before <= seen(made, info.id) == stands
        after = await counted(client, info.id)
        assert stands <= after
        assert (await client.get(info.id)).state == "running"
        assert not frozen(made, info.id)
        assert await counted(client, info.id, after) > after


async def test_many_calls_resume_it_once_and_are_all_answered() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        for _ in range(5):
            await pause(client, info.id)
            runs = (client.run(info.id, "echo", str(n)) for n in range(20))
            answers = await asyncio.gather(*runs)
            assert [answer.stdout for answer in answers] == [b"%d\n" % n for n in range(20)]


async def test_a_timeout_does_not_run_while_paused() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        timeout_s = 5.0  # the pause comes before its end, on a busy machine too
        args = {"cid": "slow", "argv": [b"sleep", b"60"], "timeout_s": timeout_s}
        begun = time.monotonic()
        call = client.open("exec.run", args, info.id)
        await until(lambda: commands_on_host(made, info.id))
        await pause(client, info.id)
        paused = time.monotonic()
        await asyncio.sleep(2.0)
        paused_s = time.monotonic() - paused
        await client.call("sandbox.resume", {"id": info.id}, kind=SandboxInfo)
        result: CommandResult = await call.answer(CommandResult)
        ran_s = time.monotonic() - begun - paused_s
        assert result.timed_out
        assert timeout_s <= result.duration_s <= ran_s


async def test_a_paused_sandbox_is_stopped_and_leaves_nothing() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        await start(client, info.id, "sleep 1000")
        await pause(client, info.id)
        begun = time.monotonic()
        assert (await client.stop(info.id)).state == "stopped"
        assert time.monotonic() - begun < 5
        assert made.remains() == []


async def test_it_stays_paused_when_the_daemon_is_killed() -> None:
    async with daemon() as made:
        client = await made.client()
        infos = [await client.create(key, image=IMAGE) for key in ("a", "b", "c")]
        for info in infos:
            await start(client, info.id, COUNT)
            assert await counted(client, info.id) > 0
        await pause(client, infos[0].id)
        stands = seen(made, infos[0].id)
        await pause(client, infos[1].id)
        await client.call("sandbox.resume", {"id": infos[1].id})
        await made.restart()
        client = await made.client()
        states = [(await client.get(info.id)).state for info in infos]
        assert states == ["paused", "running", "running"]
        assert frozen(made, infos[0].id)
        assert seen(made, infos[0].id) == stands
        assert await counted(client, infos[0].id, stands) > stands
        for info in infos:
            assert not frozen(made, info.id)
            assert (await client.run(info.id, "true")).exit_code == 0


async def test_a_kill_in_the_middle_of_pausing_leaves_it_running() -> None:
    async with daemon() as made:
        await made.end()
        await made.start(crash_at="in-a-pause")
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        await start(client, info.id, COUNT)
        with pytest.raises(Exception):  # noqa: B017, PT011 - the daemon dies
            await pause(client, info.id)
        assert made.process is not None
        await asyncio.to_thread(made.process.wait)
        assert frozen(made, info.id)
        await made.start()
        client = await made.client()
        assert (await client.get(info.id)).state == "running"
        assert not frozen(made, info.id)
        assert await counted(client, info.id) > 0


async def test_checkpoint_pack_and_rollback_of_a_paused_sandbox() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        await client.call("files.write", {"path": b"/x", "data": b"1"}, info.id)
        await pause(client, info.id)
        saved = await client.call("sandbox.checkpoint", {"id": info.id})
        await client.call("files.write", {"path": b"/x", "data": b"2"}, info.id)
        await pause(client, info.id)
        args = {"id": info.id, "name": "toolkit/x:1"}
        assert (await client.call("sandbox.pack_diff", args))["entries"] >= 1
        await pause(client, info.id)
        args = {"id": info.id, "checkpoint": saved["id"]}
        await client.call("sandbox.rollback", args)
        assert (await client.run(info.id, "cat", "/x")).stdout == b"1"


@pytest.mark.parametrize("kind", [pytest.param("zram", marks=[needs_zram, pytest.mark.vm]), "file"])
async def test_paused_memory_is_in_swap_and_comes_back(kind: str) -> None:
    async with daemon(reclaim=ZRAM | {"swap": kind}) as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        await hold(client, info.id)
        paused = await pause(client, info.id)
        assert paused.memory_before_bytes >= HELD
        assert paused.memory_bytes <= 8 * MIB
        assert paused.memory_swapped_bytes >= HELD * 3 // 4
        await still_held(client, info.id)


async def test_without_swap_the_reply_says_what_stays() -> None:
    if swap.active(FILES):
        pytest.skip("the host has swap")
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        await hold(client, info.id)
        paused = await pause(client, info.id)
        assert any("no swap" in note for note in paused.notes)
        assert paused.memory_bytes >= HELD


@needs_zram
async def test_under_pressure_the_daemon_pauses_what_is_idle_for_long() -> None:
    often = {"when": "always", "trim_after_s": 0.0, "pause_after_s": 1.0, "period_s": 0.5}
    async with daemon(reclaim=ZRAM | often) as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE, ttl_running_stop=600.0)
        await hold(client, info.id)
        for _ in range(100):
            found = await client.get(info.id)
            if found.state == "paused":
                break
            await asyncio.sleep(0.1)
        assert found.state == "paused"
        assert found.expires_at is not None, "an idle timeout holds for what the daemon paused"
        for _ in range(100):  # step by step
            use = await metrics(client, info.id)
            if use.memory_bytes <= 8 * MIB:
                break
            await asyncio.sleep(0.1)
        assert use.memory_bytes <= 8 * MIB
        assert use.memory_swapped_bytes >= HELD * 3 // 4
        assert (await client.run(info.id, "cat", "/tmp/held")).stdout == b"%d\n" % HELD


@pytest.mark.vm
async def test_cpu_classes_are_in_the_sandbox_s_group() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE, cpu_class="best_effort")
        (pid, *_) = made.pids_of(info.id)
        group = cpu_group(pid)
        assert (group / "cpu.idle").read_text().strip() == "1"
        args = {"id": info.id, "cpu_class": "latency_sensitive"}
        changed = await client.call("sandbox.set_cpu_class", args, kind=SandboxInfo)
        assert changed.cpu_class == "latency_sensitive"
        assert (group / "cpu.idle").read_text().strip() == "0"
        await made.restart()
        client = await made.client()
        assert (await client.get(info.id)).cpu_class == "latency_sensitive"
        await client.stop(info.id)
        for number in range(8):  # the slot comes round again
            info = await client.create(f"b{number}", image=IMAGE)
            (pid, *_) = made.pids_of(info.id)
            assert (cpu_group(pid) / "cpu.idle").read_text().strip() == "0"
            await client.stop(info.id)


@pytest.mark.needs("core_scheduling")
async def test_nobody_runs_beside_a_latency_sensitive_sandbox() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE, cpu_class="latency_sensitive")
        other = await client.create("b", image=IMAGE, cpu_class="latency_sensitive")
        await start(client, info.id, "sleep 1000")

        def cookies(name: str) -> set[int]:
            return {fastpath.get_sched_cookie(pid) for pid in made.pids_of(name)}

        for cpu_class in ("standard", "latency_sensitive", "latency_sensitive", "best_effort"):
            own = cookies(info.id)
            assert len(own) == 1, "one for all of its processes"
            sensitive = (await client.get(info.id)).cpu_class == "latency_sensitive"
            assert (own != {0}) == sensitive
            assert own != cookies(other.id) != {0}
            args = {"id": info.id, "cpu_class": cpu_class}
            await client.call("sandbox.set_cpu_class", args)


def cpu_group(pid: int) -> Path:
    """The directory of a process's group that has the cpu controller."""
    for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "cpu" in controllers.split(","):
            return Path("/sys/fs/cgroup/cpu") / path.lstrip("/")
    return Path("/sys/fs/cgroup") / path.lstrip("/")


async def test_best_effort_yields_to_a_standard_sandbox() -> None:
    """Hogs on every CPU in both: what one gets of what both get, whatever else the host does."""
    cpus = os.cpu_count() or 1
    hogs = f"for i in $(seq {2 * cpus}); do (while :; do :; done) & done; wait"
    async with daemon() as made:
        client = await made.client()
        job = await client.create("job", image=IMAGE, cpu_cores_limit=float(cpus))
        other = await client.create("hogs", image=IMAGE, cpu_cores_limit=float(cpus))
        for info in (job, other):
            await start(client, info.id, hogs)
            await until(lambda name=info.id: len(commands_on_host(made, name)) > 2 * cpus)

        async def used() -> list[float]:
            return [(await metrics(client, info.id)).cpu_usage_s for info in (job, other)]

        async def share() -> float:
            """What part of two CPU seconds `other` gets."""
            begun, got = await used(), [0.0, 0.0]
            while sum(got) < 2.0:
                await asyncio.sleep(0.1)
                got = [now - then for now, then in zip(await used(), begun, strict=True)]
            return got[1] / sum(got)

        beside = await share()
        args = {"id": other.id, "cpu_class": "best_effort"}
        await client.call("sandbox.set_cpu_class", args)
        yielded = await share()
        print(f"standard {beside:.0%}, best effort {yielded:.0%}")
        assert yielded < beside / 2
