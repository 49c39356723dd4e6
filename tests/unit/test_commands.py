"""``run_shell``, ``sandbox.commands``, sessions, terminals and forwarding against a real peer."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, InvalidArgument, NotFound, WrongState
from libdsec.result import CommandResult
from tests.unit.client_lab import GATE, began, open_gate
from tests.unit.wire_server import WireServer
from tests.waiting import let_pass, until

ARGS = DSecContainerRunArgs(container_image="base/debian:12")


@pytest.fixture
async def server(tmp_path):
    server = WireServer(tmp_path)
    await server.start()
    yield server
    await server.close()


@pytest.fixture
async def sandbox(server):
    async with DSecClient(server.socket) as client:
        yield await client.run_container(ARGS)


async def test_output_is_bytes_and_text(sandbox):
    result = await sandbox.run_shell(r"printf 'a\000\377b'; printf 'e\303' >&2")
    assert result.stdout_bytes == b"a\x00\xffb"
    assert result.stdout == "a\x00�b"
    assert (result.stderr_bytes, result.stderr) == (b"e\xc3", "e�")


async def test_signal_is_not_an_exit_code(sandbox):
    result = await sandbox.run_shell("kill -9 $$")
    assert (result.exit_code, result.signal, result.ok) == (None, signal.SIGKILL, False)


async def test_timeout_says_so_with_the_output_so_far(server, sandbox):
    running = asyncio.create_task(sandbox.run_shell("echo begun; sleep 60", timeout=40))
    command = await began(server)
    await until(lambda: command.spool[1])
    let_pass(50)
    result = await running
    assert (result.timed_out, result.stdout, result.ok) == (True, "begun\n", False)


async def test_env_cwd_and_input(server, sandbox):
    (server.root / sandbox.id / "sub dir").mkdir()
    result = await sandbox.run_shell(
        "pwd; echo $A; cat", env={"A": "x y"}, cwd="sub dir", input="in"
    )
    assert result.stdout.splitlines()[0].endswith("/sub dir")
    assert result.stdout.splitlines()[1:] == ["x y", "in"]


async def test_stdin_larger_than_the_pipe_does_not_deadlock(sandbox):
    data = os.urandom(3_000_000)
    assert (await sandbox.run("cat", input=data)).stdout_bytes == data
    # a command that reads none of it ends all the same
    assert (await sandbox.run("true", input=data)).exit_code == 0


async def test_argv_keeps_every_byte(sandbox):
    result = await sandbox.run(b"/usr/bin/printf", b"%s", b"\xff' \"\n$x")
    assert result.stdout_bytes == b"\xff' \"\n$x"


async def test_callbacks_get_whole_characters(sandbox):
    chunks, errors = [], []

    async def on_stderr(text):
        errors.append(text)

    result = await sandbox.run_shell(
        r"printf '\303'; sleep 0.2; printf '\244x'; echo e >&2",
        on_stdout=chunks.append,
        on_stderr=on_stderr,
    )
    assert chunks == ["äx"]
    assert errors == ["e\n"]
    assert result.stdout == "äx"


async def test_a_failing_callback_kills_the_command(server, sandbox):
    def broken(text):
        raise ValueError(text)

    with pytest.raises(ValueError, match="x"):
        await sandbox.run_shell("echo x; sleep 60", on_stdout=broken)
    (command,) = server.world.commands.values()
    await asyncio.wait_for(command.done.wait(), 5)


async def test_background_list_connect_stdin_kill(sandbox):
    handle = await sandbox.commands.run("cat; echo end", background=True, stdin=True)
    await handle.send_stdin("one\n")
    (known,) = await sandbox.commands.list()
    assert (known.cid, known.running, known.pid) == (handle.cid, True, handle.pid)
    other = await sandbox.commands.connect(handle.cid)
    assert (await anext(other)).data == b"one\n"
    await sandbox.commands.send_stdin(handle.cid, b"two\n")
    await sandbox.commands.close_stdin(handle.cid)
    assert (await other.wait()).stdout == (await handle.wait()).stdout == "one\ntwo\nend\n"
    assert await sandbox.commands.forget(handle.cid)
    assert not await sandbox.commands.forget(handle.cid)
    with pytest.raises(NotFound):
        await sandbox.commands.connect(handle.cid)

    handle = await sandbox.commands.run("sleep 60", background=True)
    assert await handle.kill()
    assert (await handle.wait()).signal == 9
    assert not await sandbox.commands.kill("unknown")


async def test_background_callbacks_and_disconnect(sandbox):
    seen = []
    handle = await sandbox.commands.run(
        "echo a; sleep 0.3; echo b", background=True, on_stdout=seen.append
    )
    with pytest.raises(WrongState, match="callbacks"):
        await anext(handle)
    assert (await handle.wait()).ok
    assert "".join(seen) == "a\nb\n"

    handle = await sandbox.commands.run("exec sleep 60", background=True, on_stdout=seen.append)
    await handle.disconnect()
    assert (await sandbox.commands.list())[-1].running
    await sandbox.commands.send_signal(handle.cid, signal.SIGTERM)
    assert (await handle.wait()).signal == signal.SIGTERM


async def test_cancelled_wait_can_be_resumed(server, sandbox):
    handle = await sandbox.commands.run(f"echo a; {GATE}; echo b", background=True)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(handle.wait(), 0.2)
    open_gate(server, sandbox)
    assert (await handle.wait()).stdout == "a\nb\n"


async def test_arguments_that_contradict_are_refused(sandbox):
    with pytest.raises(InvalidArgument):
        await sandbox.commands.run("x", stdin=True)
    with pytest.raises(InvalidArgument):
        await sandbox.commands.run("x", background=True, check=True)


async def test_sessions(server, sandbox):
    async with await sandbox.create_session() as session:
        assert (await session.run("echo x")).stdout == "x\n"
        assert (await sandbox.run_shell("echo y", session=session.name)).ok
    assert not server.world.sessions
    await session.close()
    with pytest.raises(NotFound):
        await session.run("true")


async def test_session_whose_answer_was_lost_is_ours(server, sandbox):
    opened = server.on["session.open"]

    async def losing(call):
        await opened(call)
        if server.count("session.open") == 1:
            await server.drop()
            await asyncio.sleep(60)

    server.on["session.open"] = losing
    session = await sandbox.create_session()
    assert server.world.sessions == {session.name}


async def test_pty(server, sandbox):
    seen = bytearray()
    handle = await sandbox.pty.create((30, 100), seen.extend, cmd=["cat"])
    await sandbox.pty.send_input(handle.cid, "typed\n")
    await sandbox.pty.resize(handle.cid, (40, 120))
    while seen.count(b"typed\r\n") < 2:  # noqa: ASYNC110 - the echo, and cat's answer
        await asyncio.sleep(0.01)
    assert server.world.resized == [(40, 120)]
    await sandbox.pty.send_input(handle.cid, b"\x04")
    assert (await handle.wait()).exit_code == 0


# --- forwarding


@pytest.fixture
async def echo_port():
    async def serve(reader, writer):
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.write(b"bye")
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    yield server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()


async def test_forward_is_a_duplex_stream(sandbox, echo_port):
    reader, writer = await sandbox.forward(echo_port)
    data = os.urandom(5_000_000)

    async def send():
        writer.write(data)
        await writer.drain()
        writer.write_eof()

    sending = asyncio.create_task(send())
    received = await reader.read(-1)
    await sending
    assert received == data + b"bye"
    writer.close()
    await writer.wait_closed()


async def test_forward_whose_peer_answered_and_closed_can_still_be_drained(sandbox):
    """As with a socket: what was written did arrive. Only what is written later finds nobody."""

    async def serve(reader, writer):
        writer.write(await reader.readline())
        writer.close()
        await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listener:
        reader, writer = await sandbox.forward(listener.sockets[0].getsockname()[1])
        writer.write(b"line\n")
        assert await reader.read() == b"line\n"
        await writer.drain()
        writer.write(b"too late")
        with pytest.raises(ConnectionResetError):
            await writer.drain()
        writer.close()


async def test_forward_to_a_closed_port_is_reset(sandbox):
    reader, writer = await sandbox.forward(1)
    with pytest.raises(ConnectionResetError, match="nothing listens"):
        await reader.read(1)
    writer.close()


async def test_forward_server(server, sandbox, echo_port):
    async with await sandbox.forward_server(0, echo_port) as local:
        reader, writer = await asyncio.open_connection("127.0.0.1", local.local_port)
        writer.write(b"hello")
        assert await reader.readexactly(5) == b"hello"
        writer.write_eof()
        assert await reader.read() == b"bye"
        writer.close()
        await writer.wait_closed()
    async with await sandbox.forward_server(0, 1) as local:
        reader, writer = await asyncio.open_connection("127.0.0.1", local.local_port)
        with contextlib.suppress(ConnectionResetError):
            assert await reader.read() == b""
        writer.close()
        with contextlib.suppress(ConnectionResetError):
            await writer.wait_closed()


def test_result_messages():
    assert str(_failure(timed_out=True, signal=9, duration_s=2)) == "command timed out after 2.0 s"
    assert "ran out of memory" in str(_failure(oom_killed=True, signal=9))
    assert "killed by SIGSEGV" in str(_failure(signal=11))
    assert "disk limit" in str(_failure(exit_code=1, disk_full=True))


def _failure(**fields):
    with pytest.raises(Exception, match="command") as caught:
        CommandResult(**fields).check()
    return caught.value
