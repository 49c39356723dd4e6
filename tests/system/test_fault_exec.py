"""faults.md, "Exec": each fault as a user of libdsec meets it, against a real daemon."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time

import pytest

from libdsec import CommandFailed, DSecClient, DSecError, Timeout, Unavailable
from tests.system.daemon import until
from tests.system.user_view import commands_on_host, lend_programs, viewed

pytestmark = pytest.mark.root

TIMEOUTS = (0.5, 2.0, 8.0)  # a busy machine may need longer to come as far as the first word
TREE = "echo before; (setsid sleep 600 &); setsid sh -c 'sleep 601 & sleep 602' & sleep 603"


@pytest.mark.parametrize("where", ["shell", "argv", "session"])
async def test_timeout_kills_the_whole_tree_and_keeps_the_output(where: str) -> None:
    async with viewed() as view:
        box = view.sandbox
        for timeout in TIMEOUTS:
            if where == "argv":
                result = await box.run("sh", "-c", TREE, timeout=timeout)
            elif where == "shell":
                result = await box.run_shell(TREE, timeout=timeout)
            else:
                session = await box.create_session()
                result = await session.run(TREE, timeout=timeout)
            assert result.timed_out
            assert not result.ok
            if where == "session":  # what else the session holds is the session's
                await session.close()
            await until(lambda: not commands_on_host(view.daemon, box.id))
            if result.stdout:
                break
        assert result.stdout == "before\n"
        assert (await box.run("echo", "next")).stdout == "next\n"


async def test_timeout_is_a_field_and_never_an_exit_code() -> None:
    async with viewed() as view:
        result = await view.sandbox.run_shell("sleep 60", timeout=0.2)
        assert (result.timed_out, result.exit_code) == (True, None)
        quick = await view.sandbox.run_shell("exit 255", timeout=30)
        assert (quick.timed_out, quick.exit_code, quick.signal) == (False, 255, None)
        with pytest.raises(CommandFailed, match="timed out"):
            await view.sandbox.run_shell("sleep 60", timeout=0.2, check=True)


async def test_a_signal_death_is_told_from_an_exit_code() -> None:
    async with viewed() as view:
        for number in (6, 9, 11, 15):
            died = await view.sandbox.run_shell(f"kill -{number} $$")
            exited = await view.sandbox.run_shell(f"exit {128 + number}")
            assert (died.signal, died.exit_code) == (number, None)
            assert (exited.signal, exited.exit_code) == (None, 128 + number)
            assert not died.timed_out
            assert not died.oom_killed


async def test_a_default_timeout_does_not_kill_background_commands() -> None:
    """Neither the call's time, nor the client's own, nor its end bounds the command."""
    async with viewed() as view:
        box = view.sandbox
        for own in TIMEOUTS:
            script = f"sleep {3 * own}; echo outlived"
            with contextlib.suppress(Timeout):  # of the start itself: the machine stood still
                async with DSecClient(f"unix:{view.daemon.socket}", request_timeout=own) as hasty:
                    mine = await hasty.connect(box.id)
                    handle = await mine.commands.run(script, background=True)
                    shell = await mine.run_shell(f"({script} > /orphan) & echo started")
                break
        assert shell.stdout == "started\n"
        result = await (await box.commands.connect(handle.cid)).wait()
        assert (result.exit_code, result.stdout) == (0, "outlived\n")
        # the orphan sleeps as long as the command, but began later: wait for it
        waited = await box.run_shell("until [ -s /orphan ]; do sleep 0.05; done", timeout=30)
        assert waited.exit_code == 0
        assert await box.files.read("/orphan") == "outlived\n"


async def test_a_background_child_that_holds_the_pipe_does_not_block_the_exec() -> None:
    async with viewed() as view:
        box = view.sandbox
        # a call that waited for the pipe would last until the timeout, and say so
        result = await box.run_shell("sleep 600 & echo $!", timeout=60)
        assert not result.timed_out
        assert result.exit_code == 0
        alive = await box.run_shell(f"kill -0 {result.stdout.strip()}")
        assert alive.exit_code == 0


async def test_an_orphan_is_drained_and_does_not_die_of_sigpipe() -> None:
    async with viewed() as view:
        box = view.sandbox
        script = "(sleep 0.5; head -c 1000000 /dev/zero && echo $? > /code) & echo now"
        assert (await box.run_shell(script)).stdout == "now\n"
        waited = await box.run_shell("until [ -s /code ]; do sleep 0.05; done", timeout=30)
        assert waited.exit_code == 0
        assert await box.files.read("/code") == "0\n"


async def test_the_stream_is_closed_after_the_last_byte() -> None:
    async with viewed() as view:
        handle = await view.sandbox.commands.run("seq 1 50000; printf end", background=True)
        pieces = [output.data async for output in handle]
        expected = b"".join(b"%d\n" % n for n in range(1, 50001)) + b"end"
        assert b"".join(pieces) == expected
        assert (await handle.wait()).exit_code == 0


async def test_no_command_pays_a_fixed_extra_second() -> None:
    async with viewed() as view:
        begun = time.monotonic()
        for n in range(40):
            assert (await view.sandbox.run("echo", str(n))).stdout == f"{n}\n"
        # far above what a busy machine needs, far below one second for each
        assert time.monotonic() - begun < 20


async def test_a_dropped_connection_does_not_hang_the_client() -> None:
    """The daemon is gone for good: every waiting call ends with an error that says so."""
    async with viewed() as view:
        async with DSecClient(f"unix:{view.daemon.socket}", reconnect_timeout=0.5) as client:
            box = await client.connect(view.sandbox.id)
            handle = await box.commands.run("sleep 600", background=True)
            waiting = [
                asyncio.ensure_future(work)
                for work in (box.run_shell("sleep 600"), handle.wait(), anext(client.events()))
            ]
            await asyncio.sleep(0.3)
            view.daemon.kill()
            ended = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
            assert all(isinstance(error, Unavailable) for error in ended), ended
            with pytest.raises(Unavailable):
                await box.run("true")
        await view.daemon.start()


async def test_a_dropped_connection_is_made_again_and_loses_no_byte() -> None:
    async with viewed() as view:
        script = "i=0; while [ $i -lt 30 ]; do echo line $i; i=$((i+1)); sleep 0.05; done"
        call = asyncio.ensure_future(view.sandbox.run_shell(script))
        await asyncio.sleep(0.4)
        await view.daemon.restart()
        result = await asyncio.wait_for(call, 30)
        assert result.stdout == "".join(f"line {n}\n" for n in range(30))
        assert result.exit_code == 0


async def test_a_pty_does_not_truncate_the_end() -> None:
    async with viewed() as view:
        for _ in range(5):
            seen: list[bytes] = []
            handle = await view.sandbox.pty.create(
                (24, 80), seen.append, cmd="seq 1 20000; printf 'the very end'"
            )
            await handle.wait()
            text = b"".join(seen)
            assert text.endswith(b"20000\r\nthe very end")
            assert text.count(b"\r\n") == 20000


@pytest.mark.parametrize(
    "data",
    [b"no newline", b"\0nul\0\0", b"\xff\xfe\xc3(\xe2\x82", bytes(range(256)) * 5000, b""],
    ids=["no-newline", "nul", "invalid-utf-8", "all-bytes", "empty"],
)
async def test_output_bytes_are_bytes(data: bytes) -> None:
    async with viewed() as view:
        await view.sandbox.files.write("/data", data)
        result = await view.sandbox.run_shell("cat /data; cat /data >&2")
        assert result.stdout_bytes == data
        assert result.stderr_bytes == data
        assert not result.output_truncated
        handle = await view.sandbox.commands.run("cat /data", background=True)
        assert b"".join([output.data async for output in handle]) == data


async def test_gigabytes_of_yes_meet_a_cap_that_is_reported() -> None:
    async with viewed(output_limit_mb=2) as view:
        await lend_programs(view.sandbox, "/usr/bin/yes", "/usr/bin/head")
        script = "/usr/bin/yes | /usr/bin/head -c 2000000000; exit 5"
        result = await view.sandbox.run_shell(script, timeout=100)
        assert result.output_truncated
        assert result.exit_code == 5
        assert result.stdout_total == 2_000_000_000
        assert result.stdout_bytes == b"y\n" * (1 << 20)


async def test_a_closed_stdin_is_seen() -> None:
    async with viewed() as view:
        commands = view.sandbox.commands
        handle = await commands.run("cat; echo closed", background=True, stdin=True)
        await handle.send_stdin("given ")
        await handle.close_stdin()
        assert (await handle.wait()).stdout == "given closed\n"
        # a command that was promised no stdin reads its end at once
        assert (await commands.run("cat; echo none", timeout=60)).stdout == "none\n"
        deaf = await commands.run("exec 0<&-; echo deaf; sleep 600", background=True, stdin=True)
        assert (await anext(aiter(deaf))).data == b"deaf\n"
        with pytest.raises(DSecError):
            await deaf.send_stdin(b"x" * 1_000_000)
        await deaf.kill()


async def test_a_stdin_larger_than_the_pipe_does_not_deadlock() -> None:
    data = os.urandom(20_000_000)
    async with viewed() as view:
        result = await view.sandbox.run_shell("sha256sum | cut -c-64", input=data, timeout=60)
        assert result.stdout.strip() == hashlib.sha256(data).hexdigest()
        both = await view.sandbox.run("cat", input=data, timeout=60)  # both pipes are full
        assert both.stdout_bytes == data
        # a command that reads only a little of it ends when it ends
        assert (await view.sandbox.run("head", "-c", "3", input=data)).stdout_bytes == data[:3]
