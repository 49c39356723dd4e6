"""Pause, resume and CPU classes in the engine, against the fake backend."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd.backends.abc import Handle, Save
from dsecd.backends.fake import FakeSandbox
from dsecd.config import Limits, Reclaim
from dsecd.engine import pausing
from dsecd.engine.manager import Manager
from dsecd.engine.reclaiming import Reclaimer
from dsecd.host.kernelfs import KernelFiles
from dsecd.host.swap import Swap, Wanted
from libdsec.errors import InvalidArgument, WrongState
from libdsec.model import Event, Paused, Resumed, SandboxInfo
from tests.unit.engine_fixtures import Bench, bench
from tests.unit.test_reclaiming import fill
from tests.waiting import let_pass, until
from tests.wire_client import WireClient

MIB = 1 << 20


def manager_of(made: Bench) -> Manager:
    assert made.service is not None
    return made.service.manager


def state_of(made: Bench, sandbox: FakeSandbox) -> str:
    return manager_of(made).get(sandbox.name).state


async def one(made: Bench, **fields: Any) -> tuple[WireClient, FakeSandbox]:
    client = await made.client()
    info = await client.create("key", **fields)
    return client, made.backend.sandboxes[info.id]


async def pause(client: WireClient, name: str, **args: object) -> Paused:
    paused: Paused = await client.call("sandbox.pause", {"id": name, **args}, kind=Paused)
    return paused


async def test_a_paused_sandbox_gives_its_memory_and_says_how_much() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        sandbox.memory_bytes = 100 * MIB
        paused = await pause(client, sandbox.name, target_bytes=4 * MIB)
        assert paused.memory_before_bytes == 100 * MIB
        assert paused.memory_bytes == 4 * MIB
        assert paused.memory_swapped_bytes == 96 * MIB
        assert (await client.get(sandbox.name)).state == "paused"
        again = await pause(client, sandbox.name)
        assert again.memory_bytes == 0
        assert sandbox.pauses == 1


async def test_memory_that_stays_is_said_and_why() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        sandbox.memory_bytes = 100 * MIB

        async def nothing(handle: Handle, want: int) -> int:
            return 0

        made.backend.trim = nothing  # type: ignore[method-assign]
        paused = await pause(client, sandbox.name)
        assert paused.memory_bytes == 100 * MIB
        assert any("no swap" in note for note in paused.notes)


@pytest.mark.parametrize("op", ["exec", "files", "checkpoint"])
async def test_any_call_resumes_it(op: str) -> None:
    async with bench() as made:
        able = msgspec.structs.replace(made.backend.capabilities, checkpoints=True)
        made.backend.capabilities = able
        client, sandbox = await one(made)
        await pause(client, sandbox.name)
        if op == "exec":
            assert (await client.run(sandbox.name, "echo", "a")).stdout == b"a\n"
        elif op == "files":
            await client.call("files.write", {"path": b"/x", "data": b"y"}, sandbox.name)
        else:  # the fake keeps none; it is resumed to be asked
            with pytest.raises(Exception, match="checkpoints"):
                await client.call("sandbox.checkpoint", {"id": sandbox.name})
        assert (await client.get(sandbox.name)).state == "running"
        assert sandbox.resumes == 1


async def test_many_calls_at_once_resume_it_once() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        await pause(client, sandbox.name)
        results = await asyncio.gather(*(client.run(sandbox.name, "true") for _ in range(50)))
        assert all(result.exit_code == 0 for result in results)
        assert sandbox.resumes == 1


async def test_what_only_looks_does_not_resume_it() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        await pause(client, sandbox.name)
        await client.call("sandbox.metrics", {"id": sandbox.name})
        await client.call("sandbox.list", {})
        await client.call("sandbox.set_timeout", {"id": sandbox.name, "ttl_running_stop": 9.0})
        args = {"id": sandbox.name, "cpu_class": "best_effort"}
        await client.call("sandbox.set_cpu_class", args)
        assert (await client.get(sandbox.name)).state == "paused"


async def test_a_call_that_came_while_it_froze_is_answered() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        freeze, begun = made.backend.pause, asyncio.Event()

        async def slow(handle: Handle, save: Save) -> None:
            begun.set()
            sandbox.going.clear()
            await asyncio.sleep(0.05)
            await freeze(handle, save)

        made.backend.pause = slow  # type: ignore[method-assign]
        pausing_call = client.open("sandbox.pause", {"id": sandbox.name})
        await begun.wait()
        assert (await client.run(sandbox.name, "true")).exit_code == 0
        await pausing_call.answer()
        assert (await client.get(sandbox.name)).state == "running"


async def test_a_failed_resumption_is_the_callers_to_know_and_can_be_tried_again() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        await pause(client, sandbox.name)
        resume = made.backend.resume

        async def fail(handle: Handle, save: Save) -> None:
            raise WrongState("told to fail")

        made.backend.resume = fail  # type: ignore[method-assign]
        with pytest.raises(WrongState, match="told to fail"):
            await client.run(sandbox.name, "true")
        assert (await client.get(sandbox.name)).state == "paused"
        made.backend.resume = resume  # type: ignore[method-assign]
        assert (await client.run(sandbox.name, "true")).exit_code == 0


async def test_a_failed_pause_leaves_it_running() -> None:
    async with bench() as made:
        client, sandbox = await one(made)

        async def fail(handle: Handle, save: Save) -> None:
            raise WrongState("told to fail")

        made.backend.pause = fail  # type: ignore[method-assign]
        with pytest.raises(WrongState, match="told to fail"):
            await pause(client, sandbox.name)
        assert (await client.run(sandbox.name, "true")).exit_code == 0


async def test_a_paused_sandbox_is_stopped() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        await pause(client, sandbox.name)
        assert (await client.stop(sandbox.name)).state == "stopped"
        with pytest.raises(WrongState):
            await client.call("sandbox.resume", {"id": sandbox.name})
        with pytest.raises(WrongState):
            await pause(client, sandbox.name)


async def test_no_idle_timeout_while_its_caller_has_it_paused() -> None:
    async with bench() as made:
        client, sandbox = await one(made, ttl_running_stop=60)
        await pause(client, sandbox.name)
        assert (await client.get(sandbox.name)).expires_at is None
        let_pass(90)
        assert (await client.get(sandbox.name)).state == "paused"
        resumed = await client.call("sandbox.resume", {"id": sandbox.name}, kind=SandboxInfo)
        assert resumed.expires_at is not None  # counted from now
        let_pass(90)
        await until(lambda: state_of(made, sandbox) == "stopped")


async def test_the_maximum_lifetime_runs_on_while_paused() -> None:
    async with bench() as made:
        client, sandbox = await one(made, max_lifetime_s=60)
        await pause(client, sandbox.name)
        let_pass(90)
        await until(lambda: state_of(made, sandbox) == "stopped")


async def test_a_sandbox_paused_for_being_idle_keeps_its_idle_timeout() -> None:
    async with bench() as made:
        client, sandbox = await one(made, ttl_running_stop=60)
        await pausing.pause(manager_of(made), sandbox.name, by="idle")
        assert (await client.get(sandbox.name)).state == "paused"
        let_pass(90)
        await until(lambda: state_of(made, sandbox) == "stopped")


async def test_the_daemon_does_not_pause_one_with_an_open_call() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        call = client.open("files.write", {"path": b"/x"}, sandbox.name)
        await until(lambda: manager_of(made).live[sandbox.name].calls == 1)
        await pausing.pause(manager_of(made), sandbox.name, by="idle")
        assert (await client.get(sandbox.name)).state == "running"
        call.end()
        await call.answer()


async def test_under_pressure_those_idle_for_long_are_paused() -> None:
    async with bench() as made:
        _, sandbox = await one(made)
        sandbox.memory_bytes = 100 * MIB
        fill(made, 0.9)
        config = Reclaim(trim_after_s=0.01, rest_s=0.01, pause_after_s=0.02)
        subject = Reclaimer(manager_of(made), config)
        for _ in range(3):
            await asyncio.sleep(0.05)
            await subject.round()
        assert sandbox.pauses == 1
        assert sandbox.memory_bytes == 0, "more than was needed: it is not looked at again"
        assert manager_of(made).live[sandbox.name].paused_by == "idle"
        assert manager_of(made).registry.reclaims.values == {"pause": 1}


async def test_a_job_is_paused_and_resumed_by_its_labels() -> None:
    async with bench() as made:
        client = await made.client()
        for number in range(20):
            labels = {"job": "a" if number % 2 else "b"}
            await client.create(f"key-{number}", labels=labels)
        args = {"labels": {"job": "a"}}
        paused = await client.call("sandbox.pause_many", args, kind=list[Paused])
        assert len(paused) == 10
        assert not any(found.error for found in paused)
        infos = await client.call("sandbox.list", {}, kind=list[SandboxInfo])
        assert sorted(info.state for info in infos) == ["paused"] * 10 + ["running"] * 10
        resumed = await client.call("sandbox.resume_many", args, kind=list[Resumed])
        assert len(resumed) == 10
        with pytest.raises(InvalidArgument, match="labels"):
            await client.call("sandbox.pause_many", {"labels": {}})


async def test_events_and_metrics_tell_of_it() -> None:
    async with bench() as made:
        client, sandbox = await one(made)
        events = client.open("events.subscribe", {})
        await until(lambda: manager_of(made).events._subscriptions)
        await pause(client, sandbox.name)
        await client.run(sandbox.name, "true")
        kinds = [(await events.item(Event)).kind for _ in range(2)]
        assert kinds == ["paused", "resumed"]
        text = manager_of(made).registry.render()
        assert 'dsec_pauses_total{by="caller"} 1' in text
        assert "dsec_resumes_total 1" in text


async def test_a_restart_finds_it_paused_and_its_class_as_it_was() -> None:
    async with bench(limits=Limits(default_idle_s=60)) as made:
        made.backend.capabilities = type(made.backend.capabilities)(
            network=("none",), oom=True, trim=True, pause=True, survives_daemon=True
        )
        client, sandbox = await one(made)
        args = {"id": sandbox.name, "cpu_class": "best_effort"}
        await client.call("sandbox.set_cpu_class", args)
        await pause(client, sandbox.name)
        await client.close()
        await made.close(keep=True)
        sandbox.cpu_class = "standard"
        await made.start()
        client = await made.client()
        info = await client.get(sandbox.name)
        assert (info.state, info.cpu_class) == ("paused", "best_effort")
        assert sandbox.cpu_class == "best_effort"
        let_pass(90)
        assert (await client.get(sandbox.name)).state == "paused"  # by its caller, still
        assert (await client.run(sandbox.name, "true")).exit_code == 0


async def test_cpu_class_of_a_create_and_later() -> None:
    async with bench() as made:
        client, sandbox = await one(made, cpu_class="best_effort")
        assert sandbox.cpu_class == "best_effort"
        info = await client.get(sandbox.name)
        assert info.cpu_class == "best_effort"
        assert "fake: no CPU is shared" in info.notes
        args = {"id": sandbox.name, "cpu_class": "standard"}
        changed = await client.call("sandbox.set_cpu_class", args, kind=SandboxInfo)
        assert sandbox.cpu_class == changed.cpu_class == "standard"
        assert changed.notes == []
        info = await client.get(sandbox.name)
        assert info.args is not None
        assert info.args.cpu_class == "standard"  # what a branch begins with
        with pytest.raises(InvalidArgument, match="cpu_class"):
            await client.call("sandbox.set_cpu_class", {"id": sandbox.name, "cpu_class": "best"})


async def test_concurrent_pauses_resumes_calls_and_a_stop() -> None:
    """Every call is answered, and what is seen afterwards is what the last word said."""
    seed = int(os.environ.get("DSEC_SEED", "0")) or secrets.randbelow(1 << 30) + 1
    print(f"DSEC_SEED={seed}")
    dice = random.Random(seed)
    async with bench() as made:
        client, sandbox = await one(made)

        async def act() -> None:
            for _ in range(30):
                await asyncio.sleep(dice.random() * 0.005)
                kind = dice.choice(["pause", "resume", "run", "run", "idle", "class"])
                if kind == "pause":
                    await pause(client, sandbox.name)
                elif kind == "resume":
                    await client.call("sandbox.resume", {"id": sandbox.name})
                elif kind == "idle":
                    await pausing.pause(manager_of(made), sandbox.name, by="idle")
                elif kind == "class":
                    cpu_class = dice.choice(["standard", "best_effort"])
                    args = {"id": sandbox.name, "cpu_class": cpu_class}
                    await client.call("sandbox.set_cpu_class", args)
                else:
                    # a pause that comes while it runs holds it up: somebody resumes it again
                    await client.run(sandbox.name, "true")

        acting = asyncio.gather(*(act() for _ in range(8)))
        while not acting.done():
            await asyncio.wait([acting], timeout=0.05)
            if not acting.done():
                await client.call("sandbox.resume", {"id": sandbox.name})
        await acting
        live = manager_of(made).live[sandbox.name]
        assert live.state in ("running", "paused")
        assert sandbox.going.is_set() == (live.state == "running")
        assert sandbox.pauses - sandbox.resumes == (live.state == "paused")
        assert live.calls == 0
        stop = client.open("sandbox.stop", {"id": sandbox.name})
        late = [
            client.open("sandbox.pause", {"id": sandbox.name}),
            client.open("exec.run", {"cid": "late", "argv": [b"true"]}, sandbox.name),
        ]
        assert (await stop.answer(SandboxInfo)).state == "stopped"
        for call in late:
            with pytest.raises(WrongState):
                await call.answer()


@pytest.mark.parametrize(
    ("paths", "slow"),
    [([], False), (["/dev/zram0"], False), (["/dev/zram0", "/var/swap file"], True)],
)
def test_only_from_swap_that_is_waited_for_memory_is_read_ahead(
    tmp_path: Path, paths: list[str], slow: bool
) -> None:
    """A fault of resumption: to read all of zram ahead took the CPU from the first answer."""

    class Files(KernelFiles):
        def read(self, path: str) -> str:
            assert path == "/proc/swaps"
            rows = [f"{path}\tpartition\t1024\t512\t-2" for path in paths]
            return "\n".join(["Filename\tType\tSize\tUsed\tPriority", *rows, ""])

    assert Swap(Wanted(), tmp_path / "record", tmp_path, Files()).slow() == slow
