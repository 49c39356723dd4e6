"""What every backend promises, through the wire."""

from __future__ import annotations

import asyncio
import os

import pytest

from libdsec import model
from libdsec.errors import InvalidArgument, NotFound, WrongState
from tests.conformance.conftest import Subject


async def test_create_run_stop(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image)
    assert info.state == "running"
    result = await subject.client.run(info.id, "echo", "hello", "world")
    assert (result.exit_code, result.stdout, result.stderr) == (0, b"hello world\n", b"")
    assert result.signal is None
    assert not any((result.timed_out, result.oom_killed, result.output_truncated))
    assert result.stdout_total == 12
    assert (await subject.client.stop(info.id)).state == "stopped"


async def test_exit_codes_are_exact(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image)
    assert (await subject.client.run(info.id, "true")).exit_code == 0
    assert (await subject.client.run(info.id, "false")).exit_code == 1


async def test_a_timeout_is_a_field(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image)
    result = await subject.client.run(info.id, "sleep", "30", timeout_s=0.2)
    assert result.timed_out
    assert result.exit_code is None
    assert 0.15 < result.duration_s < 5


async def test_a_cid_that_exists_is_attached_to_not_run_twice(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image)
    both = await asyncio.gather(
        subject.client.run(info.id, "sleep", "0.5", cid="one", background=True),
        subject.client.run(info.id, "sleep", "0.5", cid="one", background=True),
    )
    assert [result.exit_code for result in both] == [0, 0]
    # what ran in the background is listed after its end, too: no need to look while it runs
    listed = await subject.client.call("exec.list", {}, info.id, kind=list[model.CommandInfo])
    assert [command.cid for command in listed].count("one") == 1


async def test_background_commands_outlive_their_call(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image)
    args = model.ExecArgs(cid="bg", argv=[b"sleep", b"0.3"], background=True)
    started = await subject.client.call("exec.start", args, info.id, kind=model.CommandInfo)
    assert started.running
    result = await subject.client.call(
        "exec.wait", model.AttachArgs(cid="bg"), info.id, kind=model.CommandResult
    )
    assert result.exit_code == 0


@pytest.mark.parametrize("size", [0, 1, 1000, 3_000_000])
async def test_files_come_back_as_they_were(subject: Subject, size: int) -> None:
    info = await subject.client.create("k", subject.image)
    content = os.urandom(size)
    path = b"/tmp/a b\n\xff"
    call = subject.client.open("files.write", model.WriteArgs(path=path), info.id)
    for offset in range(0, size, 100_000):
        await asyncio.wait_for(call.push(content[offset : offset + 100_000]), 10)
    call.end()
    assert (await call.answer(model.Transferred)).size == size
    stat = await subject.client.call(
        "files.stat", model.PathArgs(path=path), info.id, kind=model.FileStat
    )
    assert (stat.size, stat.type, stat.name) == (size, "file", b"a b\n\xff")
    call = subject.client.open("files.read", model.ReadArgs(path=path), info.id)
    got = b"".join([piece async for piece in call.stream(bytes)])
    answer = await call.answer(model.Transferred)
    assert got + (answer.data or b"") == content


async def test_what_is_not_there_is_not_found(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image)
    with pytest.raises(NotFound):
        await subject.client.call("files.read", model.ReadArgs(path=b"/absent"), info.id)
    with pytest.raises(NotFound):
        await subject.client.call("exec.wait", model.AttachArgs(cid="absent"), info.id)
    with pytest.raises(NotFound):
        await subject.client.create("m", "missing/image:0")


async def test_unknown_arguments_are_refused(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image)
    with pytest.raises(InvalidArgument):
        await subject.client.call("exec.run", {"cid": "c", "argv": [b"true"], "tty": 1}, info.id)


async def test_open_calls_end_when_the_sandbox_is_stopped(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image)
    args = model.ExecArgs(cid="long", argv=[b"sleep", b"60"])
    call = subject.client.open("exec.run", args, info.id)
    await subject.client.run(info.id, "true")
    await subject.client.stop(info.id)
    with pytest.raises(WrongState):
        await call.answer(timeout_s=5)


async def test_sandboxes_do_not_see_each_other(subject: Subject) -> None:
    one = await subject.client.create("1", subject.image)
    two = await subject.client.create("2", subject.image)
    await subject.client.call("files.write", model.WriteArgs(path=b"/tmp/f", data=b"1"), one.id)
    with pytest.raises(NotFound):
        await subject.client.call("files.stat", model.PathArgs(path=b"/tmp/f"), two.id)


async def test_metrics_repeat_the_limits(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image, memory_limit_mb=64, pids_limit=99)
    found = await subject.client.call(
        "sandbox.metrics", model.SandboxRef(id=info.id), kind=model.Metrics
    )
    assert (found.memory_limit_bytes, found.pids_limit) == (64 << 20, 99)
    assert found.uptime_s > 0


async def test_a_paused_sandbox_is_resumed_by_a_call_and_has_its_files(subject: Subject) -> None:
    info = await subject.client.create("k", subject.image, cpu_class="best_effort")
    await subject.client.call("files.write", model.WriteArgs(path=b"/tmp/f", data=b"1"), info.id)
    for _ in range(3):
        paused = await subject.client.call(
            "sandbox.pause", model.PauseArgs(id=info.id), kind=model.Paused
        )
        # the kernel's counters lag by some pages
        assert paused.memory_bytes <= paused.memory_before_bytes + (1 << 20)
        assert (await subject.client.get(info.id)).state == "paused"
        both = (subject.client.run(info.id, "echo", word) for word in ("a", "b"))
        assert [found.stdout for found in await asyncio.gather(*both)] == [b"a\n", b"b\n"]
        found = await subject.client.call(
            "files.read", model.ReadArgs(path=b"/tmp/f"), info.id, kind=model.Transferred
        )
        assert found.data == b"1"
        assert (await subject.client.get(info.id)).state == "running"
