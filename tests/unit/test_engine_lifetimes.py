"""How long a sandbox lives: idle, with an open call, at most; through the wire, over the fake."""

from __future__ import annotations

import time

import pytest

from libdsec import model
from libdsec.errors import WrongState
from tests.unit.engine_fixtures import bench
from tests.waiting import let_pass, until


async def test_idle_timeout_counts_from_the_end_of_the_last_call() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k", ttl_running_stop=300)
        sandbox = b.service.manager.live[info.id]
        call = client.open("files.write", model.WriteArgs(path=b"/x"), info.id)
        await until(lambda: sandbox.calls == 1)
        let_pass(400)
        assert (await client.get(info.id)).state == "running"  # an open call is activity
        call.end()
        await call.answer()
        let_pass(200)
        assert (await client.get(info.id)).state == "running"
        let_pass(200)
        await until(lambda: sandbox.state == "stopped")
        assert "idle timeout" in (await client.get(info.id)).reason


async def test_a_background_command_is_no_activity() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k", ttl_running_stop=60)
        args = model.ExecArgs(cid="bg", argv=[b"sleep", b"600"], background=True)
        await client.call("exec.start", args, info.id)
        sandbox = b.service.manager.live[info.id]
        let_pass(90)
        await until(lambda: sandbox.state == "stopped")


async def test_set_timeout_replaces_the_idle_timeout() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k", ttl_running_stop=60)
        begun = time.time()
        longer = await client.call(
            "sandbox.set_timeout",
            model.SetTimeout(id=info.id, ttl_running_stop=300.0),
            kind=model.SandboxInfo,
        )
        assert begun - 0.1 < longer.expires_at - 300 < time.time() + 0.1
        let_pass(90)
        assert (await client.get(info.id)).state == "running"
        await client.call("sandbox.set_timeout", model.SetTimeout(id=info.id, ttl_running_stop=60))
        sandbox = b.service.manager.live[info.id]
        let_pass(90)
        await until(lambda: sandbox.state == "stopped")


async def test_maximum_lifetime_ends_a_busy_sandbox() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k", max_lifetime_s=0.2)
        with pytest.raises(WrongState):
            await client.run(info.id, "sleep", "30")
        assert "maximum lifetime" in (await client.get(info.id)).reason
