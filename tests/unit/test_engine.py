"""The engine through the wire, over the fake backend."""

from __future__ import annotations

import asyncio

import pytest

from dsecd.config import Limits
from dsecd.engine.backends import Backends
from dsecd.model import Death, Reading, parse_id
from libdsec import model
from libdsec.errors import (
    AlreadyExists,
    Exhausted,
    InvalidArgument,
    NotFound,
    Timeout,
    Unsupported,
    WrongState,
)
from tests.unit.engine_fixtures import Bench, bench
from tests.waiting import let_pass, until
from tests.wire_client import WireClient


async def test_create_run_stop() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k1", labels={"task": "7"})
        assert info.state == "running"
        assert parse_id(info.id) is not None
        assert (await client.run(info.id, "echo", "hi")).stdout == b"hi\n"
        assert [found.id for found in await client.list()] == [info.id]
        stopped = await client.stop(info.id)
        assert (stopped.state, stopped.reason) == ("stopped", "stopped by request")
        assert (await client.stop(info.id)).state == "stopped"  # idempotent
        assert await client.list() == []
        assert [found.id for found in await client.list(everything=True)] == [info.id]
        assert b.backend.sandboxes == {}
        assert b.backend.prepared == set()
        with pytest.raises(WrongState, match="stopped by request"):
            await client.run(info.id, "true")


async def test_the_same_key_gives_the_same_sandbox_also_concurrently() -> None:
    async with bench(latency_s=0.02) as b:
        clients = [await b.client() for _ in range(4)]
        infos = await asyncio.gather(*(c.create("same") for c in clients for _ in range(5)))
        assert len({info.id for info in infos}) == 1
        assert len(b.backend.sandboxes) == 1
        assert (await clients[0].create("same")).id == infos[0].id


async def test_a_key_used_for_another_request_is_refused() -> None:
    async with bench() as b:
        client = await b.client()
        await client.create("k", memory_limit_mb=64)
        with pytest.raises(AlreadyExists):
            await client.create("k", memory_limit_mb=65)


async def test_two_callers_are_never_given_one_sandbox() -> None:
    async with bench() as b:
        client = await b.client()
        infos = await asyncio.gather(*(client.create(f"k{i}") for i in range(500)))
        assert len({info.id for info in infos}) == 500


async def test_a_failed_create_leaves_nothing_and_frees_its_key() -> None:
    async with bench() as b:
        client = await b.client()
        with pytest.raises(Exhausted, match="no space left"):
            await client.create("k", image="broken")
        with pytest.raises(NotFound):
            await client.create("m", image="missing")
        assert b.backend.prepared == set()
        assert b.service.manager.admission.sandboxes == 0
        assert (await client.create("k")).state == "running"


async def test_the_key_is_known_after_a_restart() -> None:
    async with bench() as b:
        client = await b.client()
        first = await client.create("k", labels={"a": "b"})
        await client.close()
        # a fake sandbox lives in this process: what a restart keeps is the backend object
        b.backend.capabilities = type(b.backend.capabilities)(survives_daemon=True, oom=True)
        await b.close(keep=True)
        await b.start()
        client = await b.client()
        again = await client.create("k", labels={"a": "b"})
        assert (again.id, again.labels) == (first.id, {"a": "b"})
        assert (await client.run(first.id, "echo", "still")).stdout == b"still\n"
        fresh = await client.create("other")
        assert parse_id(fresh.id).epoch == parse_id(first.id).epoch + 1


async def test_a_sandbox_found_dead_after_a_restart_is_reported_failed() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        b.backend.capabilities = type(b.backend.capabilities)(survives_daemon=True)
        await b.close(keep=True)
        b.backend.sandboxes.clear()
        await b.start()
        client = await b.client()
        found = await client.get(info.id)
        assert (found.state, found.reason) == ("failed", "found dead when dsecd started")


async def test_ended_sandboxes_answer_why_after_a_restart() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        await client.stop(info.id)
        await b.close()
        await b.start()
        client = await b.client()
        assert (await client.get(info.id)).reason == "stopped by request"


def held(b: Bench) -> tuple[asyncio.Event, asyncio.Event]:
    """Have creates wait; returns what tells that one has begun, and what has it go on."""
    begun, go, create = asyncio.Event(), asyncio.Event(), b.backend.create

    async def waiting(handle, spec):
        begun.set()
        await go.wait()
        return await create(handle, spec)

    b.backend.create = waiting  # type: ignore[method-assign]
    return begun, go


async def test_a_client_that_dies_before_the_answer_leaves_no_orphan() -> None:
    async with bench(Limits(unclaimed_grace_s=60)) as b:
        begun, go = held(b)
        dying = await WireClient.connect(b.config.socket)
        dying.open(
            "sandbox.create",
            model.CreateArgs(key="lost", args=model.DSecContainerRunArgs(container_image="x")),
        )
        await begun.wait()
        (sandbox,) = b.service.manager.live.values()
        dying.abort()
        go.set()
        await until(lambda: len(b.backend.sandboxes) == 1)
        await until(lambda: sandbox.state == "running" and sandbox.claim_deadline is not None)
        let_pass(90)
        await until(lambda: not b.backend.sandboxes)
        await until(lambda: not b.service.manager.live)


async def test_the_key_of_a_lost_create_can_be_claimed_within_the_grace() -> None:
    async with bench(Limits(unclaimed_grace_s=60)) as b:
        begun, go = held(b)
        dying = await WireClient.connect(b.config.socket)
        args = model.DSecContainerRunArgs(container_image="base/debian:12")
        dying.open("sandbox.create", model.CreateArgs(key="lost", args=args))
        await begun.wait()
        (sandbox,) = b.service.manager.live.values()
        dying.abort()
        go.set()
        await until(lambda: sandbox.state == "running" and sandbox.claim_deadline is not None)
        client = await b.client()
        info = await client.create("lost")
        assert info.id == sandbox.id
        let_pass(90)
        assert (await client.get(info.id)).state == "running"
        assert len(b.backend.sandboxes) == 1


async def test_an_answer_that_was_never_read_counts_as_lost() -> None:
    async with bench(Limits(unclaimed_grace_s=0.2)) as b:
        import socket

        from libdsec import wire

        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, str(b.config.socket))
        args = model.DSecContainerRunArgs(container_image="x")
        for frame in (
            wire.Request(1, "hello", wire.pack(model.Hello(protocol=wire.PROTOCOL))),
            wire.Request(2, "sandbox.create", wire.pack(model.CreateArgs(key="k", args=args))),
        ):
            await loop.sock_sendall(sock, wire.encode(frame))
        await until(lambda: len(b.backend.sandboxes) == 1)
        await asyncio.sleep(0.05)  # the answer lies in the socket's buffer
        sock.close()
        await until(lambda: not b.backend.sandboxes)


async def test_a_cancelled_create_is_undone_at_once() -> None:
    async with bench() as b:
        client = await b.client()
        begun, go = held(b)
        args = model.DSecContainerRunArgs(container_image="x")
        call = client.open("sandbox.create", model.CreateArgs(key="k", args=args))
        await begun.wait()
        call.cancel()
        await client.call("sandbox.list", model.ListArgs())  # it has heard the cancellation, too
        go.set()
        with pytest.raises(Timeout):
            await call.answer()
        await until(lambda: not b.service.manager.live)
        assert b.backend.sandboxes == {}


async def test_a_create_cancelled_in_the_same_breath_is_answered() -> None:
    async with bench() as b:
        client = await b.client()
        args = model.DSecContainerRunArgs(container_image="x")
        calls = []
        for i in range(20):
            call = client.open("sandbox.create", model.CreateArgs(key=f"k{i}", args=args))
            call.cancel()
            calls.append(call)
        for call in calls:
            with pytest.raises(Timeout):
                await call.answer()
        await until(lambda: not b.service.manager.live)


async def test_a_create_that_takes_too_long_is_undone() -> None:
    async with bench(latency_s=0.2) as b:
        client = await b.client()
        args = model.DSecContainerRunArgs(container_image="x")
        with pytest.raises(Timeout, match="undone"):
            await client.call(
                "sandbox.create", model.CreateArgs(key="k", args=args, timeout_s=0.05)
            )
        await until(lambda: not b.service.manager.live)
        assert b.backend.sandboxes == {}


async def test_create_many_yields_each_in_order_of_completion() -> None:
    async with bench(latency_s=0.005) as b:
        client = await b.client()
        keys = [f"k{i}" for i in range(300)]
        args = model.DSecContainerRunArgs(container_image="x")
        call = client.open("sandbox.create_many", model.CreateManyArgs(keys=keys, args=args))
        seen = {}
        for n in range(300):
            created = await call.item(model.Created)
            seen[created.key] = created.info.id
            call.grant(1)
            assert n < 300
        assert await call.answer() is None
        assert set(seen) == set(keys)
        assert len(set(seen.values())) == 300


async def test_create_many_reports_the_error_of_each() -> None:
    async with bench(Limits(sandboxes=3)) as b:
        client = await b.client()
        args = model.DSecContainerRunArgs(container_image="x")
        keys = [f"k{i}" for i in range(5)]
        call = client.open("sandbox.create_many", model.CreateManyArgs(keys=keys, args=args))
        items = [await call.item(model.Created) for _ in keys]
        assert sum(item.info is not None for item in items) == 3
        assert {item.error["code"] for item in items if item.error} == {"exhausted"}


async def test_a_full_host_refuses_with_a_retryable_error() -> None:
    async with bench(Limits(sandboxes=1)) as b:
        client = await b.client()
        info = await client.create("a")
        with pytest.raises(Exhausted) as caught:
            await client.create("b")
        assert caught.value.retryable
        assert caught.value.detail["limit"] == "sandboxes"
        await client.stop(info.id)
        assert (await client.create("b")).state == "running"


@pytest.mark.parametrize(
    ("change", "limit"),
    [
        ({"memory_available_bytes": 100 << 20}, "memory"),
        ({"tasks": 32000, "tasks_max": 32768}, "pids"),
        ({"critical": "thrashing"}, "pressure"),
        ({"disk_free_bytes": 1 << 20}, "disk"),
    ],
)
async def test_admission_looks_at_the_host(change: dict[str, object], limit: str) -> None:
    async with bench() as b:
        values = {
            "memory_total_bytes": 64 << 30, "memory_available_bytes": 60 << 30,
            "tasks": 300, "tasks_max": 32768, **change,
        }  # fmt: skip
        b.host.reading = Reading(**values)
        client = await b.client()
        with pytest.raises(Exhausted) as caught:
            await client.create("a")
        assert caught.value.detail["limit"] == limit


async def test_memory_overcommit_bounds_what_is_promised() -> None:
    async with bench(Limits(memory_overcommit=1.0)) as b:
        client = await b.client()
        await client.create("a", memory_limit_mb=60 << 10)
        with pytest.raises(Exhausted, match="promised"):
            await client.create("b", memory_limit_mb=5 << 10)
        with pytest.raises(InvalidArgument, match="more than the host has"):
            await client.create("c", memory_limit_mb=65 << 10)


async def test_a_death_is_noticed_at_once_and_fails_open_calls() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        args = model.ExecArgs(cid="long", argv=[b"sleep", b"60"])
        call = client.open("exec.run", args, info.id)
        await client.run(info.id, "true")
        b.service.manager.died(info.id, Death("its init was killed"))
        with pytest.raises(WrongState):
            await call.answer()
        found = await client.get(info.id)
        assert (found.state, found.reason) == ("failed", "its init was killed")
        await until(lambda: not b.backend.sandboxes)
        with pytest.raises(WrongState, match="its init was killed"):
            await client.run(info.id, "true")


async def test_oom_is_a_field_of_the_result_and_an_event() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        events = client.open("events.subscribe", model.EventFilter(sandbox=info.id))
        before = await client.run(info.id, "exit", "3")
        assert not before.oom_killed
        killed = await client.run(info.id, "oom")
        assert (killed.oom_killed, killed.signal, killed.exit_code) == (True, 9, None)
        assert not (await client.run(info.id, "exit", "137")).oom_killed
        event = await events.item(model.Event)
        assert (event.kind, event.sandbox) == ("oom", info.id)
        usage = await client.call(
            "sandbox.metrics", model.SandboxRef(id=info.id), kind=model.Metrics
        )
        assert usage.oom_kills == 1


async def test_a_network_that_the_backend_does_not_offer_is_refused() -> None:
    async with bench() as b:
        client = await b.client()
        with pytest.raises(Unsupported, match="nat"):
            await client.create("n", network="nat")
        with pytest.raises(Unsupported, match="nat"):
            await client.create("k", network_rules={"pypi": True})
        assert (await client.create("s", network_rules={"pypi": False})).state == "running"


async def test_events_tell_the_life_of_a_sandbox() -> None:
    async with bench() as b:
        client = await b.client()
        events = client.open("events.subscribe", model.EventFilter())
        await client.call("sandbox.list", model.ListArgs())
        info = await client.create("k")
        await client.stop(info.id)
        kinds = [(await events.item(model.Event)).kind for _ in range(2)]
        assert kinds == ["created", "stopped"]
        events.cancel()
        with pytest.raises(Timeout):
            await events.answer()
        assert not b.service.manager.events._subscriptions


async def test_destroy_is_retried_until_it_succeeds(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        destroy, failures = b.backend.destroy, [RuntimeError("busy"), RuntimeError("busy")]

        async def flaky(handle):
            if failures:
                raise failures.pop()
            await destroy(handle)

        monkeypatch.setattr(b.backend, "destroy", flaky)
        monkeypatch.setattr("dsecd.engine.manager.DESTROY_RETRY_S", (0.01, 0.02))
        assert (await client.stop(info.id)).state == "stopped"
        assert not failures


async def test_a_stop_that_takes_too_long_says_so_and_goes_on() -> None:
    async with bench(Limits(stop_timeout_s=0.1)) as b:
        client = await b.client()
        info = await client.create("k")
        release, destroy = asyncio.Event(), b.backend.destroy

        async def slow(handle):
            await release.wait()
            await destroy(handle)

        b.backend.destroy = slow
        with pytest.raises(Timeout, match="still being stopped"):
            await client.stop(info.id)
        assert (await client.get(info.id)).state == "stopping"
        release.set()
        await until(lambda: not b.service.manager.live)


async def test_a_graceful_end_of_the_daemon_stops_every_sandbox() -> None:
    async with bench() as b:
        client = await b.client()
        for i in range(20):
            await client.create(f"k{i}")
        await b.close()
        assert b.backend.sandboxes == {}


async def test_remembered_sandboxes_are_bounded() -> None:
    async with bench(Limits(ended_kept=5)) as b:
        client = await b.client()
        for i in range(12):
            await client.stop((await client.create(f"k{i}")).id)
        manager = b.service.manager
        assert len(manager.ended) == 5
        assert len(manager._by_key) == 5
        assert len(manager.journal.rows()) <= 6


async def test_a_second_daemon_on_the_same_state_is_refused() -> None:
    from dsecd.service import Service
    from libdsec.errors import Unavailable

    async with bench() as b:
        with pytest.raises(
            Unavailable, match=r"another dsecd \(pid \d+\) uses the state directory"
        ):
            await Service(b.config, Backends([b.backend]), b.host).start()


async def test_timers_cost_nothing_per_call() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k", ttl_running_stop=30)
        timer = b.service.manager._timer
        for _ in range(50):
            await client.run(info.id, "true")
        assert len(timer._heap) <= 2
