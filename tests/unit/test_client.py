"""The client against a real peer: calls, streams, loss, cancellation, throughput."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from libdsec import (
    CommandFailed,
    DSecClient,
    DSecContainerRunArgs,
    DSecError,
    Internal,
    InvalidArgument,
    NotFound,
    Timeout,
    Unavailable,
    WrongState,
    link,
    model,
    wire,
)
from libdsec.link import pack
from tests.unit.client_lab import ARGS, GATE, began, connected, open_gate, serving
from tests.waiting import let_pass, on_the_loops_clock, until


@pytest.fixture
async def server(tmp_path):
    async with serving(tmp_path) as made:
        yield made


@pytest.fixture
async def client(server):
    async with connected(server) as made:
        yield made


@pytest.fixture
async def sandbox(client):
    return await client.run_container(ARGS)


# --- calls


async def test_listing_1(server, client):
    sandbox = await client.run_container(ARGS, timeout=120)
    result = await sandbox.run_shell("echo hello world")
    assert (result.exit_code, result.stdout, result.ok) == (0, "hello world\n", True)
    assert (await sandbox.stop()).state == "stopped"
    assert not await sandbox.is_running()


async def test_many_calls_share_one_connection(server, client, sandbox):
    results = await asyncio.gather(*(sandbox.run("echo", str(n)) for n in range(64)))
    assert [result.stdout for result in results] == [f"{n}\n" for n in range(64)]
    assert server.count("hello") == 1


async def test_a_slow_call_does_not_hold_others(server, client, sandbox):
    slow = asyncio.create_task(sandbox.run_shell(GATE))
    await began(server)
    assert (await sandbox.run("true")).ok
    assert not slow.done()
    open_gate(server, sandbox)
    await slow


async def test_list_connect_info_metrics_timeout(server, client):
    one = await client.run_container(
        DSecContainerRunArgs(container_image="base/debian:12", labels={"job": "a"})
    )
    await client.run_container(ARGS)
    assert [info.id for info in await client.list_sandboxes(labels={"job": "a"})] == [one.id]
    assert len(await client.list_sandboxes()) == 2
    again = await client.get_sandbox(one.id)
    assert again.info.labels == {"job": "a"}
    assert (await again.get_metrics()).memory_limit_bytes == 1 << 30
    assert (await again.set_timeout(60)).expires_at > time.time() + 50
    with pytest.raises(NotFound):
        await client.connect("n1-77")
    assert (await client.host_stats()).sandboxes == 2
    assert [f.reason for f in await client.check() if not f.available] == ["no SCHED_CORE"]


async def test_layers(client):
    layer = await client.layers.import_("base/x:1", "/srv/x")
    assert [known.name for known in await client.layers.list()] == [layer.name]
    await client.layers.remove("base/x:1")
    with pytest.raises(NotFound):
        await client.layers.remove("base/x:1")


async def test_sandbox_context_manager_stops_it(server, client):
    async with await client.run_container(ARGS) as sandbox:
        assert await sandbox.is_running()
    assert server.sandboxes[sandbox.id].state == "stopped"


async def test_events(server, client):
    from libdsec.model import Event

    stream = client.events()
    waiting = asyncio.create_task(anext(stream))
    while not server.subscribers:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    server.subscribers[0].put_nowait(Event(time=1.0, sandbox="n1-1", kind="oom"))
    assert (await waiting).kind == "oom"
    await stream.aclose()
    await client.host_stats()
    assert server.cancels == ["events.subscribe"]


async def test_answer_that_is_not_understood_is_internal(server, client):
    async def odd(call):
        return {"id": 7}

    server.on["sandbox.get"] = odd
    with pytest.raises(Internal, match="not understood"):
        await client.connect("n1-1")


async def test_request_timeout_cancels_the_call(server):
    async def never(call):
        await asyncio.sleep(60)

    server.on["host.stats"] = never
    async with DSecClient(server.socket, request_timeout=40) as client:
        asking = asyncio.create_task(client.host_stats())
        await until(lambda: server.count("host.stats"))
        let_pass(50)
        with pytest.raises(Timeout, match=r"host\.stats was not answered within 40 s"):
            await asking
        await client.check()
    assert server.cancels == ["host.stats"]


# --- no daemon


async def test_no_daemon_says_how_to_start_it(tmp_path):
    with pytest.raises(Unavailable, match="systemctl start dsecd"):
        await DSecClient(str(tmp_path / "none.sock")).open()
    (tmp_path / "stale.sock").touch()
    with pytest.raises(Unavailable, match="refused the connection"):
        await DSecClient(f"unix:{tmp_path}/stale.sock").open()
    with pytest.raises(Unavailable, match="no daemon at tcp://127"):
        await DSecClient("tcp://127.0.0.1:1").open()


async def test_a_closed_client_refuses_calls(server):
    client = DSecClient(server.socket)
    await client.open()
    await client.close()
    await client.close()
    with pytest.raises(WrongState, match="closed"):
        await client.host_stats()


async def test_a_peer_that_breaks_the_protocol_is_left(server, client):
    async def garbage(call):
        call.peer.transport.write(b"\xff\xff\xff\xff")
        await asyncio.sleep(60)

    server.on["layer.remove"] = garbage
    with pytest.raises(Unavailable, match="broke the protocol"):
        await client.layers.remove("x")
    await client.host_stats()  # on a new connection


def test_an_unclosed_client_only_warns(tmp_path):
    client = DSecClient(str(tmp_path / "none.sock"))
    client._open = True
    with pytest.warns(ResourceWarning, match="unclosed"):
        client.__del__()
    client._open = False


# --- loss


async def test_calls_are_repeated_after_a_restart_of_the_daemon(server, client):
    await client.host_stats()
    await server.halt()
    asking = asyncio.create_task(client.host_stats())
    await asyncio.sleep(0.1)
    assert not asking.done()
    await server.start()
    assert (await asking).node == "n1"


async def test_calls_fail_when_the_daemon_stays_away(server, monkeypatch):
    on_the_loops_clock(monkeypatch, link)
    async with DSecClient(server.socket, reconnect_timeout=40) as client:
        await server.halt()
        asking = asyncio.create_task(client.host_stats())
        await asyncio.sleep(0.1)
        assert not asking.done()
        let_pass(50)
        with pytest.raises(Unavailable, match="no daemon"):
            await asking
        await server.start()
        await client.host_stats()


async def test_lost_create_is_retried_with_the_same_key(server, client):
    server.create_delay_s = 60
    keys = []
    create = server.on["sandbox.create"]

    async def noting(call):
        from libdsec import model

        keys.append(call.args(model.CreateArgs).key)
        return await create(call)

    server.on["sandbox.create"] = noting
    making = asyncio.create_task(client.run_container(ARGS))
    await until(lambda: keys)
    server.create_delay_s = 0
    await server.drop()
    await making
    assert len(keys) == 2
    assert len(set(keys)) == 1
    assert len(server.sandboxes) == 1


async def test_running_command_survives_a_restart_of_the_daemon(server, client, sandbox):
    lines = "for i in 1 2 3 4 5 6 7 8; do echo line $i; sleep 0.1; done"
    script = f"{lines}; {GATE}; echo err >&2; exit 3"
    seen = []
    running = asyncio.create_task(sandbox.run_shell(script, on_stdout=seen.append))
    await began(server)
    for attached in range(2):
        await asyncio.sleep(0.2)
        await server.halt()
        await asyncio.sleep(0.05)
        await server.start()
        await until(lambda: server.count("exec.attach") > attached)  # noqa: B023
    open_gate(server, sandbox)
    result = await running
    expected = "".join(f"line {n}\n" for n in range(1, 9))
    assert (result.exit_code, result.stdout, result.stderr) == (3, expected, "err\n")
    assert "".join(seen) == expected
    assert len(server.world.commands) == 1
    assert server.count("exec.attach") >= 2


async def test_command_whose_request_was_lost_runs_once(server, client, sandbox):
    run = server.on["exec.run"]
    lost = []

    async def losing(call):
        if not lost:
            lost.append(call)
            await server.drop()
            await asyncio.sleep(60)
        return await run(call)

    server.on["exec.run"] = losing
    assert (await sandbox.run("echo", "once")).stdout == "once\n"
    assert len(server.world.commands) == 1


async def test_background_handle_survives_a_restart(server, client, sandbox):
    handle = await sandbox.commands.run("echo a; sleep 0.4; echo b", background=True)
    first = await anext(handle)
    await server.drop()
    assert (first.data, (await handle.wait()).stdout) == (b"a\n", "a\nb\n")


async def test_file_streams_fail_on_a_lost_connection(server, client, sandbox):
    async def endless():
        while True:
            yield b"x" * 100_000
            await asyncio.sleep(0.01)

    writing = asyncio.create_task(sandbox.files.write("big", endless()))
    await asyncio.sleep(0.2)
    await server.drop()
    with pytest.raises(Unavailable):
        await writing
    assert not await sandbox.files.exists("big")


# --- cancellation


async def test_cancelled_create_stops_the_sandbox_made_after_all(server, client):
    async def stubborn(call):
        args = call.args(model.CreateArgs)
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        return server.make(args.key, args.args)

    server.on["sandbox.create"] = stubborn
    making = asyncio.create_task(client.run_container(ARGS))
    await until(lambda: server.count("sandbox.create"))
    making.cancel()
    with pytest.raises(asyncio.CancelledError):
        await making
    await client.close()
    await until(lambda: [info.state for info in server.sandboxes.values()] == ["stopped"])


async def test_create_timeout_leaves_no_sandbox(server, client):
    server.create_delay_s = 60
    with pytest.raises(Timeout):
        await client.run_container(ARGS, timeout=-0.8)
    await client.host_stats()
    assert server.cancels == ["sandbox.create"]
    assert not server.sandboxes


async def test_cancelled_command_is_killed(server, client, sandbox):
    running = asyncio.create_task(sandbox.run_shell("sleep 60"))
    command = await began(server)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await asyncio.wait_for(command.done.wait(), 5)
    assert command.result({1: 0, 2: 0}).signal == 9


async def test_command_cancelled_after_a_reconnect_is_killed(server, client, sandbox):
    running = asyncio.create_task(sandbox.run_shell("echo x; sleep 60"))
    command = await began(server)
    await until(lambda: command.spool[1])
    await server.halt()
    await asyncio.sleep(0.05)
    running.cancel()  # while there is no connection at all
    await asyncio.gather(running, return_exceptions=True)
    await server.start()
    await asyncio.wait_for(command.done.wait(), 5)


async def test_abandoned_read_stream_is_cancelled(server, client, sandbox):
    await sandbox.files.write("big", b"x" * 20_000_000)
    stream = await sandbox.files.read("big", format="stream")
    assert len(await anext(stream)) == wire.MAX_ITEM
    await stream.aclose()
    await client.host_stats()
    assert server.cancels == ["files.read"]


# --- batches


async def test_run_containers_yields_sandboxes_and_errors(server, client):
    args = DSecContainerRunArgs(container_image="b", labels={"fail_every": "3"})
    made = [item async for item in client.run_containers(args, 30)]
    errors = [item for item in made if isinstance(item, DSecError)]
    assert (len(made), len(errors)) == (30, 10)
    assert len({sandbox.id for sandbox in made if sandbox not in errors}) == 20


async def test_run_containers_survives_a_lost_connection(server, client):
    server.create_delay_s = 0.01
    ids = set()
    async for sandbox in client.run_containers(ARGS, 20):
        ids.add(sandbox.id)
        if len(ids) == 5:
            await server.drop()
    assert len(ids) == len(server.sandboxes) == 20


async def test_run_containers_left_early_stops_the_rest(server, client):
    batch = client.run_containers(ARGS, 40)
    first = await anext(batch)
    await asyncio.sleep(0.1)
    await batch.aclose()
    await client.host_stats()

    def running():
        return [info.id for info in server.sandboxes.values() if info.state == "running"]

    await until(lambda: running() == [first.id])


async def test_run_containers_failing_whole_gives_each_its_error(server, client):
    async def full(call):
        raise InvalidArgument("no")

    server.on["sandbox.create_many"] = full
    made = [item async for item in client.run_containers(ARGS, 3)]
    assert [type(item) for item in made] == [InvalidArgument] * 3
    with pytest.raises(InvalidArgument, match="count"):
        await anext(client.run_containers(ARGS, 0))


# --- streams


async def test_an_unread_stream_holds_the_sender(server, client, sandbox):
    """The kind: gigabytes of `yes` whose reader sleeps must cost no memory."""
    handle = await sandbox.commands.run("head -c 30000000 /dev/zero", background=True)
    await anext(handle)
    await asyncio.sleep(0.3)
    (call,) = [c for peer in server.peers for c in peer.calls.values()]
    assert call.sent <= wire.INITIAL_CREDIT + 1
    result = await handle.wait()
    assert len(result.stdout_bytes) == result.stdout_total == 30_000_000


async def test_uploads_respect_the_peers_credit(server, client, sandbox):
    gate = asyncio.Event()

    async def slow(call):
        await gate.wait()
        return {"size": sum([len(data) async for data in call.items()])}

    server.on["files.write"] = slow
    produced = 0

    async def blocks():
        nonlocal produced
        for _ in range(100):
            produced += 1
            yield b"x" * 1000

    writing = asyncio.create_task(sandbox.files.write("f", blocks()))
    await asyncio.sleep(0.1)
    assert produced <= wire.INITIAL_CREDIT + 1
    gate.set()
    assert (await writing).size == 100_000


async def test_output_larger_than_a_frame_arrives_whole(client, sandbox):
    result = await sandbox.run_shell("seq 1000000; echo done >&2")
    assert len(result.stdout_bytes) == 6888896
    assert result.stdout.endswith("1000000\n")
    assert result.stderr == "done\n"


async def test_two_readers_of_one_stream_are_refused(server, client):
    call = await client._link.start("events.subscribe", pack({}))
    reading = asyncio.create_task(call.next_item())
    await asyncio.sleep(0.01)
    with pytest.raises(WrongState, match="another task"):
        await call.next_item()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    call.cancel()


# --- cost


async def test_client_cpu_of_a_round_trip(server, client, sandbox):
    """Promise: a call costs the client less than 100 µs of CPU. The peer shares this process."""

    async def at_once(call):
        return {"cid": "x", "exit_code": 0}

    server.on["exec.run"] = at_once
    for _ in range(200):
        await sandbox.run("true")
    best = 1.0
    for _ in range(3):
        begun = time.process_time()
        for _ in range(500):
            await sandbox.run("true")
        best = min(best, (time.process_time() - begun) / 500)
    assert best < 400e-6, f"{best * 1e6:.0f} µs for client and peer together"


async def test_check_raises_with_the_result(client, sandbox):
    with pytest.raises(CommandFailed, match="exited with code 2: no") as caught:
        await sandbox.run_shell("echo no >&2; exit 2", check=True)
    assert caught.value.result.exit_code == 2
