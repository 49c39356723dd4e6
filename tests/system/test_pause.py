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
from tests.system.daemon import IMAGE, Daemon, daemon
from tests.system.memory_lab import FILES, HELD, MIB, hold, metrics, needs_zram, still_held
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


COUNT = "while :; do n=$((n+1)); echo $n > /tmp/n; sleep 0.02; done"


async def counted(client: WireClient, name: str) -> int:
    return int((await client.run(name, "cat", "/tmp/n")).stdout or b"0")


@pytest.mark.vm
async def test_it_stands_still_until_a_call_resumes_it() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image=IMAGE)
        await start(client, info.id, COUNT)
        await asyncio.sleep(0.3)
        before = await counted(client, info.id)
        await pause(client, info.id)
        assert frozen(made, info.id)
        await asyncio.sleep(1.5)
        assert (await client.get(info.id)).state == "paused"
        after = await counted(client, info.id)
        assert before <= after < before + 60  # 1.5 s of counting would be 75 and more
        assert (await client.get(info.id)).state == "running"
        assert not frozen(made, info.id)
        await asyncio.sleep(0.3)
        assert await counted(client, info.id) > after


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
        args = {"cid": "slow", "argv": [b"sleep", b"30"], "timeout_s": 1.0}
        call = client.open("exec.run", args, info.id)
        await asyncio.sleep(0.2)
        await pause(client, info.id)
        await asyncio.sleep(2.0)
        await client.call("sandbox.resume", {"id": info.id}, kind=SandboxInfo)
        resumed = time.monotonic()
        result: CommandResult = await call.answer(CommandResult)
        assert result.timed_out
        assert time.monotonic() - resumed > 0.5
        assert result.duration_s < 1.8


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
        await pause(client, infos[0].id)
        await pause(client, infos[1].id)
        await client.call("sandbox.resume", {"id": infos[1].id})
        await made.restart()
        client = await made.client()
        states = [(await client.get(info.id)).state for info in infos]
        assert states == ["paused", "running", "running"]
        assert frozen(made, infos[0].id)
        assert await counted(client, infos[0].id) > 0
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
    """A job of 20 ms each 100 ms beside hogs on every CPU. Quick where the hogs are best effort."""
    script = (
        "for i in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15; do s=$(cut -d' ' -f1 /proc/uptime); "
        "n=0; while [ $n -lt 12000 ]; do n=$((n+1)); done; "
        "e=$(cut -d' ' -f1 /proc/uptime); echo $s $e; sleep 0.08; done"
    )
    hogs = "for i in 1 2 3 4; do (while :; do :; done) & done; wait"
    async with daemon() as made:
        client = await made.client()
        job = await client.create("job", image=IMAGE)

        async def took() -> float:
            out = (await client.run(job.id, "sh", "-c", script)).stdout.split()
            times = [float(e) - float(s) for s, e in zip(out[::2], out[1::2], strict=True)]
            return sum(times)

        alone = await took()
        cpus = float(os.cpu_count() or 1)
        other = await client.create("hogs", image=IMAGE, cpu_cores_limit=cpus)
        await start(client, other.id, hogs)
        await asyncio.sleep(0.5)
        beside = await took()
        args = {"id": other.id, "cpu_class": "best_effort"}
        await client.call("sandbox.set_cpu_class", args)
        yielded = await took()
        print(f"alone {alone:.2f} s, standard {beside:.2f} s, best effort {yielded:.2f} s")
        assert yielded - alone < (beside - alone) / 2
