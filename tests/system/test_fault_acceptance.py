"""The big ones: kill -9 with 500 sandboxes, 10 GB that nobody reads. Times are printed, not judged:
how fast it must be is for `dsec-bench`, here it must be right."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec import CommandResult, DSecClient, DSecContainerRunArgs, Sandbox, model
from tests.system.daemon import IMAGE, Daemon, daemon, until
from tests.system.user_view import lend_programs
from tests.wire_client import WireClient

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20

# Known output on both streams, all along: before, during and after the daemon's death.
TALK = """
seq 1 5000; echo first >&2
i=0; while [ ! -e /go ]; do echo tick $i; i=$((i+1)); sleep 0.2; done
echo ticks $i; seq 5001 20000; echo last >&2; printf 'the end'; exit 7
"""


def expected(result: CommandResult) -> bytes:
    """Return what `TALK` wrote; only its number of ticks is not known before."""
    ticks = result.stdout_bytes.count(b"tick ")
    before = b"".join(b"%d\n" % n for n in range(1, 5001))
    during = b"".join(b"tick %d\n" % n for n in range(ticks)) + b"ticks %d\n" % ticks
    return before + during + b"".join(b"%d\n" % n for n in range(5001, 20001)) + b"the end"


async def follow(box: Sandbox, n: int) -> CommandResult:
    """Run `TALK` in one of the ways a user follows a command."""
    if n % 2:
        return await box.run_shell(TALK)
    handle = await box.commands.run(TALK, background=True)
    pieces: dict[int, bytes] = {1: b"", 2: b""}
    async for output in handle:
        pieces[output.stream] += output.data
    result = await handle.wait()
    assert (result.stdout_bytes, result.stderr_bytes) == (pieces[1], pieces[2])
    return result


async def begun_in(box: Sandbox) -> None:
    """Wait until a command runs in `box`."""
    while True:
        if any(one.running for one in await box.commands.list()):
            return
        await asyncio.sleep(0.05)


async def survive(sandboxes: int, talking: int) -> None:
    """kill -9 of a daemon with that many sandboxes; the client stays connected throughout."""
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        args = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=32)
        boxes = await asyncio.gather(*(client.run_container(args) for _ in range(sandboxes)))
        calls = [asyncio.ensure_future(follow(box, n)) for n, box in enumerate(boxes[:talking])]
        await asyncio.gather(*(begun_in(box) for box in boxes[:talking]))
        await asyncio.sleep(1)
        d.kill()
        await asyncio.sleep(1)  # the commands write on with nobody there
        begun = time.monotonic()
        await d.start()
        ready = time.monotonic() - begun
        answers = await asyncio.gather(*(box.run("echo", box.id) for box in boxes))
        print(f"\nready after {ready:.2f} s, {len(boxes)} answered", end=" ")
        print(f"after {time.monotonic() - begun:.2f} s")
        assert [answer.stdout.strip() for answer in answers] == [box.id for box in boxes]
        assert not any(call.done() for call in calls)
        await asyncio.gather(*(box.files.write("/go", "") for box in boxes[:talking]))
        for result in await asyncio.gather(*calls):
            assert result.exit_code == 7
            assert result.stdout_bytes == expected(result)
            assert result.stderr_bytes == b"first\nlast\n"
            assert not result.output_truncated
        stopped = await asyncio.gather(*(box.stop() for box in boxes))
        assert {info.state for info in stopped} == {"stopped"}
        assert d.remains() == []


async def test_kill_9_with_50_sandboxes_and_5_commands_loses_nothing() -> None:
    await survive(50, 5)


async def test_kill_9_with_500_sandboxes_and_50_commands_loses_nothing() -> None:
    await survive(500, 50)


def spooled(d: Daemon, box: Sandbox) -> int:
    """Return the bytes on disk of the spools, also of files without a name that are held open."""
    spool, seen = d.state / "spool", {}
    held = [
        link
        for pid in d.pids_of(box.id)
        for link in Path(f"/proc/{pid}/fd").glob("*")
        if _target(link).startswith(f"{spool}/")
    ]
    for path in (*spool.rglob("*"), *held):
        with contextlib.suppress(OSError):
            found = path.stat()
            seen[found.st_dev, found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


def _target(link: Path) -> str:
    try:
        return str(link.readlink())
    except OSError:
        return ""


@contextlib.asynccontextmanager
async def deaf_client(d: Daemon, box: Sandbox, script: bytes) -> AsyncIterator[None]:
    """A client that starts a command, asks for its stream and reads nothing of it, ever."""
    client = await WireClient.connect(d.socket)
    args = model.ExecArgs(cid="flood", shell=script, stream=True, timeout_s=200)
    call = client.open("exec.run", args, box.id)
    call.grant(1 << 20)  # it promises to take everything
    client.writer.transport.pause_reading()
    try:
        yield
    finally:
        client.abort()
        await asyncio.wait({client.task})


async def test_10_gb_of_yes_whose_client_reads_nothing_costs_neither_memory_nor_disk() -> None:
    cap = 8
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        args = DSecContainerRunArgs(
            container_image=IMAGE, cpu_cores_limit=2, output_limit_mb=cap, spool_limit_mb=2 * cap
        )
        box = await client.run_container(args)
        await lend_programs(box, "/usr/bin/yes", "/usr/bin/head")
        script = b"/usr/bin/yes | /usr/bin/head -c 10G; echo $? > /done; sleep 1"
        memory, begun, most, kept = d.memory_bytes(), time.monotonic(), 0, 0
        async with deaf_client(d, box, script):
            while not (await box.run("test", "-s", "/done")).ok:  # there, and written
                most = max(most, d.memory_bytes() - memory)
                assert most < 50 * MIB
                kept = max(kept, spooled(d, box))
                assert kept <= (cap + 1) * MIB
                await asyncio.sleep(0.5)
            assert (await box.run("echo", "meanwhile")).stdout == "meanwhile\n"
            assert await box.files.read("/done") == "0\n"
        print(f"\n10 GB in {time.monotonic() - begun:.1f} s, memory grew {most / MIB:.1f} MiB")
        assert kept >= cap * MIB  # up to the cap it is there for whoever asks
        await box.stop()
        await until(lambda: spooled(d, box) == 0)
        assert d.remains() == []
