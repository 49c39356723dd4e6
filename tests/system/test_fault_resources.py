"""faults.md, "Memory, processes, disk": each fault as a user of libdsec meets it."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path

import pytest

from libdsec import DSecError, Exhausted, Sandbox, model
from tests.system.compat.debian import debian
from tests.system.daemon import Daemon, until
from tests.system.user_view import commands_on_host, first_process, lend_programs, viewed

pytestmark = pytest.mark.root

# starts processes for ever; unlike a shell it goes on when fork fails
STORM = """awk 'BEGIN { while (1) system("sleep 600 &") }'"""


def on_disk(d: Daemon, box: Sandbox) -> int:
    """Return what the daemon's state takes of the host's disk, with files that are only held open.

    Not what the disk has left: of that everybody takes.
    """
    named = [Path(place) / name for place, _, names in os.walk(d.state) for name in names]
    held = [link for pid in d.pids_of(box.id) for link in Path(f"/proc/{pid}/fd").glob("*")]
    device, seen = d.state.stat().st_dev, {}
    for look in (*(path.lstat for path in named), *(link.stat for link in held)):
        with contextlib.suppress(OSError):  # it ended
            if (found := look()).st_dev == device:
                seen[found.st_ino] = found.st_blocks * 512
    return sum(seen.values())


@pytest.mark.vm
async def test_oom_is_reported_and_the_sandbox_does_not_restart_by_itself() -> None:
    async with viewed(memory_limit_mb=48) as view:
        box, first = view.sandbox, first_process(view.daemon, view.sandbox.id)
        events = view.client.events(box.id)
        event = asyncio.ensure_future(anext(events))
        bystander = await box.commands.run("sleep 600", background=True)
        await box.files.write("/mark", "before")
        result = await box.run_shell("tail < /dev/zero")
        assert result.oom_killed
        assert not result.timed_out
        assert not result.ok
        assert (await asyncio.wait_for(event, 10)).kind == "oom"
        await events.aclose()
        assert (await box.get_metrics()).oom_kills >= 1
        # the same sandbox goes on: same first process, same files, same other commands
        assert first_process(view.daemon, box.id) == first
        assert await box.files.read("/mark") == "before"
        assert (await box.run("kill", "-0", str(bystander.pid))).exit_code == 0
        assert not (await box.run_shell("exit 137")).oom_killed


async def test_oom_of_a_child_is_reported_with_the_command_that_started_it() -> None:
    async with viewed(memory_limit_mb=48) as view:
        result = await view.sandbox.run_shell("tail < /dev/zero; exit 3")
        assert result.oom_killed
        assert result.exit_code == 3


@pytest.mark.vm
async def test_a_fork_storm_meets_the_limit_and_the_agent_survives() -> None:
    async with viewed(pids_limit=100) as view:
        box = view.sandbox
        bomb = await box.commands.run(STORM, background=True)
        await until(lambda: len(view.daemon.pids_of(box.id)) > 80)
        for _ in range(5):  # the state is right while it rages, and what cannot start says why
            assert (await box.get_info()).state == "running"
            assert (await box.get_metrics()).pids <= 100
            with contextlib.suppress(Exhausted):  # a file operation is a process, too
                await box.files.write("/alive", "yes")
        other = await view.another()
        assert (await other.run("echo", "unharmed")).stdout == "unharmed\n"
        await bomb.kill()
        await until(lambda: not commands_on_host(view.daemon, box.id))
        await box.files.write("/alive", "yes")
        assert (await box.run("cat", "/alive")).stdout == "yes"


async def test_a_command_beyond_the_process_limit_is_refused_not_lost() -> None:
    async with viewed(pids_limit=32) as view:
        box = view.sandbox
        script = "i=0; while [ $i -lt 100 ]; do sleep 600 & i=$((i+1)); done; wait"
        storm = await box.commands.run(script, background=True)
        await until(lambda: len(view.daemon.pids_of(box.id)) >= 30)
        await asyncio.sleep(0.3)
        with contextlib.suppress(Exhausted):  # any other error is none that says what it is
            result = await box.run_shell("true | true; true", timeout=30)
            assert result.exit_code is not None or result.signal is not None
        await storm.kill()


async def test_stopping_a_fork_storm_leaves_nothing() -> None:
    async with viewed(pids_limit=200) as view:
        box = view.sandbox
        await box.commands.run(STORM, background=True)
        await until(lambda: len(view.daemon.pids_of(box.id)) > 150)
        assert (await box.stop()).state == "stopped"
        assert view.daemon.remains() == []


async def test_death_of_the_agent_is_the_state_at_once() -> None:
    async with viewed() as view:
        events = view.client.events(view.sandbox.id)
        event = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)  # it is asked for
        await view.sandbox.run("true")
        os.kill(first_process(view.daemon, view.sandbox.id), 9)
        assert (await asyncio.wait_for(event, 10)).kind == "failed"  # nobody asked
        await events.aclose()
        assert (await view.sandbox.get_info()).state == "failed"


@pytest.mark.parametrize("cores", [0.5, 1])
async def test_nproc_follows_the_limit(cores: float) -> None:
    async with viewed(cpu_cores_limit=cores) as view:
        box = view.sandbox
        await lend_programs(box, "/usr/bin/nproc", "/usr/bin/getconf")
        assert (await box.run("/bin/busybox", "nproc")).stdout == "1\n"
        assert (await box.run("/usr/bin/nproc")).stdout == "1\n"
        assert (await box.run("grep", "-c", "^processor", "/proc/cpuinfo")).stdout == "1\n"


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.timeout(1200)  # the first one builds the layer
@pytest.mark.parametrize("cores", [1, 2])
async def test_cpu_counts_that_builds_ask_for_follow_the_limit(cores: int) -> None:
    count = min(cores, os.cpu_count() or 1)
    script = """
    nproc; getconf _NPROCESSORS_ONLN
    python3 -c 'import os; print(os.cpu_count(), len(os.sched_getaffinity(0)))'
    python3 -c 'import multiprocessing as m; print(m.cpu_count())'
    grep -c ^processor /proc/cpuinfo
    """
    async with debian(cpu_cores_limit=cores) as box:
        result = await box.run_shell(script)
        assert set(result.stdout.split()) == {str(count)}, result.stdout + result.stderr


@pytest.mark.slow
@pytest.mark.compat
@pytest.mark.timeout(1200)
@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs a host of two CPUs")
@pytest.mark.xfail(strict=True, reason="/proc/stat shows the host's CPUs; old Node counts there")
async def test_cpu_counts_of_node_follow_the_limit() -> None:
    async with debian(cpu_cores_limit=1) as box:
        result = await box.run("node", "-e", "console.log(os.cpus().length)")
        assert result.stdout == "1\n"


async def test_machine_id_is_stable_per_sandbox_and_hostname_is_as_asked() -> None:
    async with viewed(hostname="worker-7") as view:
        other, unnamed = await view.another(hostname="worker-7"), await view.another()
        boxes = (view.sandbox, other, unnamed)
        ids = [(await box.files.read("/etc/machine-id")).strip() for box in boxes]
        assert len(set(ids)) == 3
        assert all(len(bytes.fromhex(one)) == 16 for one in ids)
        await view.daemon.restart()
        again = [(await box.run("cat", "/etc/machine-id")).stdout.strip() for box in boxes]
        assert again == ids
        assert (await view.sandbox.run("hostname")).stdout == "worker-7\n"
        assert (await unnamed.run("hostname")).stdout.strip() not in ("", os.uname().nodename)


@pytest.mark.parametrize("upper", ["memory", "disk"])
async def test_an_upper_layer_does_not_fill_the_host(upper: str) -> None:
    async with viewed(memory_limit_mb=128, disk_limit_mb=16, upper=upper) as view:
        box, before = view.sandbox, on_disk(view.daemon, view.sandbox)
        result = await box.run("dd", "if=/dev/zero", "of=/f", "bs=1M", "count=64")
        # a volume with quotas says the one, a file system of the sandbox's own the other
        assert "No space left" in result.stderr or "quota exceeded" in result.stderr
        assert not result.oom_killed
        many = await box.run_shell("i=0; while echo x > /m$i; do i=$((i+1)); done", timeout=60)
        assert not many.timed_out
        metrics = await box.get_metrics()
        assert metrics.disk_bytes <= metrics.disk_limit_bytes + (2 << 20)
        assert on_disk(view.daemon, box) - before < 64 << 20
        await box.run_shell("rm -f /f /m*", check=True)
        assert (await box.run("dd", "if=/dev/zero", "of=/f", "bs=1M", "count=8")).exit_code == 0


@pytest.mark.parametrize(
    "upper",
    [
        "memory",
        "disk",
    ],
)
async def test_a_full_disk_is_reported_as_what_it_is(upper: str) -> None:
    async with viewed(memory_limit_mb=128, disk_limit_mb=16, upper=upper) as view:
        result = await view.sandbox.run("dd", "if=/dev/zero", "of=/f", "bs=1M", "count=64")
        assert not result.oom_killed
        assert result.disk_full


async def test_captured_output_of_many_commands_does_not_fill_the_host() -> None:
    async with viewed(output_limit_mb=4, spool_limit_mb=8, memory_limit_mb=64) as view:
        box, before = view.sandbox, on_disk(view.daemon, view.sandbox)
        handles = []
        for _ in range(12):
            script = "dd if=/dev/zero bs=1M count=20 2>/dev/null"
            handles.append(await box.commands.run(script, background=True))
        results = [await handle.wait() for handle in handles]
        assert all(result.output_truncated for result in results)
        assert {result.exit_code for result in results} == {0}
        assert all(result.stdout_total == 20 << 20 for result in results)
        assert on_disk(view.daemon, box) - before < 32 << 20
        await box.stop()
        assert list((view.daemon.state / "spool").rglob("*")) == []


async def test_a_sandbox_does_not_fill_the_host_through_the_daemons_log() -> None:
    async with viewed() as view:
        box = view.sandbox
        before = len(view.daemon.log())
        for _ in range(200):
            result = await box.run_shell("echo noise; echo noise >&2; kill -11 $$")
            assert result.signal == 11
            with pytest.raises(DSecError):
                await box.run("no-such-program-" + "x" * 200)
        assert len(view.daemon.log()) - before < 4096
        assert isinstance((await view.client.host_stats()), model.HostStats)
