"""MicroVMs of a real daemon: commands, files and limits as sandboxes have them, in one guest."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import DSecClient, Sandbox
from libdsec.errors import NotFound
from tests.system.daemon import Daemon
from tests.system.test_pause import cpu_group
from tests.system.vm_lab import MEMORY_MB, boot, monitor_of, vm_daemon

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
MIB = 1 << 20
DISK_MB, PIDS, VCPUS = 96, 60, 2


@dataclass
class Guest:
    host: Daemon
    client: DSecClient
    box: Sandbox


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """One census for the module, around its daemon."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guest(guest_kernel: Path) -> AsyncIterator[Guest]:
    async with (
        vm_daemon(guest_kernel) as host,
        DSecClient(f"unix:{host.socket}") as client,
        await boot(
            client, vcpus=VCPUS, pids_limit=PIDS, disk_limit_mb=DISK_MB, output_limit_mb=1,
            hostname="inner", init_user="agent", workdir="/tmp", env={"WHO": "me"},
        ) as box,
    ):  # fmt: skip
        yield Guest(host, client, box)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(guest: Guest) -> Sandbox:
    return guest.box


async def said(box: Sandbox, command: str, user: str = "root") -> str:
    done = await box.run_shell(command, user=user, timeout=60)
    assert done.ok, f"{done.ending}: {done.stderr}"
    return done.stdout.strip()


# --- what it is -----------------------------------------------------------------------------------


async def test_it_is_what_was_asked_for(guest: Guest) -> None:
    done = await guest.box.run_shell('id -u; pwd; echo "$WHO $HOME"; hostname')
    assert done.stdout.split("\n")[:4] == ["1000", "/tmp", "me /home/agent", "inner"]
    machine = await said(guest.box, "cat /etc/machine-id")
    assert re.fullmatch("[0-9a-f]{32}", machine)
    assert machine != Path("/etc/machine-id").read_text().strip()
    assert await said(guest.box, "uname -r") != os.uname().release
    assert "inner" in await said(guest.box, "cat /etc/hosts")
    info = await guest.box.get_info()
    assert info.state == "running"


async def test_its_limits_are_those_of_the_machine(guest: Guest) -> None:
    total = int(await said(guest.box, "awk '/MemTotal/ {print $2}' /proc/meminfo")) << 10
    assert 0.75 * MEMORY_MB * MIB < total <= MEMORY_MB * MIB
    assert await said(guest.box, "nproc") == str(VCPUS)
    # what was used in the last second is not reclaimed: the kernel kills before it thrashes
    assert await said(guest.box, "cat /sys/kernel/mm/lru_gen/min_ttl_ms") == "1000"
    size = int(await said(guest.box, "df -k / | awk 'NR==2 {print $2}'")) << 10
    assert 0.75 * DISK_MB * MIB < size <= DISK_MB * MIB
    found = await guest.box.get_metrics()
    assert (found.memory_limit_bytes, found.pids_limit) == (MEMORY_MB * MIB, PIDS)
    assert found.disk_limit_bytes == DISK_MB * MIB
    assert found.cpu_limit == VCPUS
    assert found.memory_bytes > 16 * MIB


async def test_its_class_is_that_of_every_thread_of_the_monitor(guest: Guest) -> None:
    monitor = monitor_of(guest.host, guest.box.id)
    threads = Path(f"/proc/{monitor}/task")
    assert len(list(threads.iterdir())) > VCPUS
    for cpu_class, idle in (("best_effort", "1"), ("standard", "0")):
        await guest.box.set_cpu_class(cpu_class)  # type: ignore[arg-type]
        # the command's group is below that of the sandbox, where cgroup v2 has the controller
        groups = set()
        for thread in threads.iterdir():
            with contextlib.suppress(OSError):  # QEMU ends those of its disks that have no work
                group = cpu_group(int(thread.name))
                groups |= {group, group.parent}
        assert idle in {(group / "cpu.idle").read_text().strip() for group in groups}


async def test_its_clock_is_the_hosts(box: Sandbox) -> None:
    before = time.time()
    assert before - 3 < int(await said(box, "date +%s")) < time.time() + 3


async def test_root_inside_does_not_reach_the_agents_port(box: Sandbox) -> None:
    """The port has one opener, and the agent holds it."""
    port = await said(box, "ls /dev | grep '^vport'")
    done = await box.run_shell(f"exec 3<>/dev/{port}", user="root")
    assert "busy" in done.stderr.lower()
    assert not done.ok
    # the kernel keeps from PID 1 what it has no handler for
    assert (await box.run_shell("kill -9 1; kill -11 1", user="root")).exit_code is not None
    assert (await box.run("true")).ok


# --- results of commands --------------------------------------------------------------------------


async def test_exit_codes_and_signals_are_exact(box: Sandbox) -> None:
    assert (await box.run_shell("exit 77")).exit_code == 77
    done = await box.run_shell("kill -9 $$")
    assert (done.exit_code, done.signal) == (None, signal.SIGKILL)
    done = await box.run_shell("echo out; echo err >&2")
    assert (done.stdout, done.stderr) == ("out\n", "err\n")
    with pytest.raises(NotFound):
        await box.run("/absent")


async def test_a_timeout_ends_all_that_the_command_started(box: Sandbox) -> None:
    done = await box.run_shell("sleep 4321 & setsid sleep 4321 & sleep 4321", timeout=0.5)
    assert (done.timed_out, done.exit_code) == (True, None)
    assert 0.4 < done.duration_s < 10
    await said(box, "while grep -aqs 'sleep.432[1]' /proc/[0-9]*/cmdline; do sleep 0.1; done")


async def test_output_beyond_the_limit_is_counted_not_kept(box: Sandbox) -> None:
    done = await box.run_shell("head -c 3000000 /dev/zero")
    assert done.output_truncated
    assert done.stdout_total == 3_000_000
    assert len(done.stdout_bytes) <= MIB


async def test_output_that_nobody_reads_stops_nobody_else(box: Sandbox) -> None:
    unread = await box.commands.run("yes | head -c 1000000", background=True)
    assert (await asyncio.wait_for(box.run("echo", "mine"), 20)).stdout == "mine\n"
    done = await unread.wait()
    assert done.stdout_total == 1_000_000
    assert done.stdout_bytes[:4] == b"y\ny\n"


async def test_a_full_disk_is_a_field_and_passes(box: Sandbox) -> None:
    done = await box.run_shell("dd if=/dev/zero of=/var/tmp/big bs=1M", user="root", timeout=60)
    assert done.disk_full
    assert done.exit_code == 1
    done = await box.run_shell("rm /var/tmp/big && echo x > /var/tmp/small", user="root")
    assert (done.exit_code, done.disk_full) == (0, False)


async def test_the_guest_out_of_memory_kills_one_command(box: Sandbox) -> None:
    before = (await box.get_metrics()).oom_kills
    done = await box.run_shell("exec tail < /dev/zero", timeout=90)
    assert done.oom_killed, done.ending
    assert done.signal == signal.SIGKILL
    assert not (await box.run("true")).oom_killed
    assert (await box.get_metrics()).oom_kills > before
    assert (await box.get_info()).state == "running"


async def test_no_more_processes_than_allowed(box: Sandbox) -> None:
    script = "i=0; while [ $i -lt 100 ]; do sleep 60 & i=$((i+1)); done"
    done = await box.run("/bin/sh", "-c", script, timeout=30)
    assert "fork" in done.stderr
    await box.run_shell("kill -9 -1")  # all of this user
    assert (await box.run("true")).ok


# --- ways to run ----------------------------------------------------------------------------------


async def test_stdin_background_and_attach(box: Sandbox) -> None:
    assert (await box.run("cat", input=b"\0in" * 1000)).stdout_bytes == b"\0in" * 1000
    handle = await box.commands.run("read word; echo got $word", background=True, stdin=True)
    await handle.disconnect()
    again = await box.commands.connect(handle.cid)
    await again.send_stdin("it\n")
    assert (await again.wait()).stdout == "got it\n"


async def test_a_terminal(box: Sandbox) -> None:
    seen = bytearray()
    pty = await box.pty.create((30, 90), seen.extend, cmd=["/bin/sh"])
    await box.pty.send_input(pty.cid, "stty size; tty; exit 3\n")
    assert (await pty.wait()).exit_code == 3
    assert b"30 90" in seen
    assert b"/dev/pts/" in seen


async def test_a_session_keeps_its_state(box: Sandbox) -> None:
    async with await box.create_session() as session:
        await session.run("cd /var; export A=1")
        assert (await session.run("echo $PWD $A")).stdout == "/var 1\n"


async def test_files_and_watching(box: Sandbox) -> None:
    await box.files.make_dir("/tmp/seen")
    async with await box.files.watch_dir("/tmp/seen") as watch:
        await box.files.write("/tmp/seen/new", "text")
        event = await asyncio.wait_for(anext(watch), 10)
        assert event.name == "new"
    assert await box.files.read("/tmp/seen/new") == "text"
    assert [entry.name for entry in await box.files.list("/tmp/seen")] == ["new"]
    await box.files.remove("/tmp/seen")
    assert not await box.files.exists("/tmp/seen")


async def test_32_mib_come_back_as_they_went(box: Sandbox, tmp_path: Path) -> None:
    sent, back = tmp_path / "sent", tmp_path / "back"
    sent.write_bytes(os.urandom(32 * MIB))
    assert await box.files.upload(sent, "/tmp/large") == 32 * MIB
    assert await box.files.download("/tmp/large", back) == 32 * MIB
    assert sent.read_bytes() == back.read_bytes()
    await box.files.remove("/tmp/large")


async def test_tcp_is_forwarded_into_the_guest(box: Sandbox) -> None:
    server = await box.commands.run("nc -l -p 7777 -e cat", background=True)
    for _ in range(50):  # until it listens
        reader, writer = await box.forward(7777)
        writer.write(b"echo" * 1000)
        try:
            assert await reader.readexactly(4000) == b"echo" * 1000
            break
        except (ConnectionResetError, asyncio.IncompleteReadError):
            await asyncio.sleep(0.1)
        finally:
            writer.close()
    else:
        pytest.fail("no connection in 5 s")
    await server.kill()


# --- the end: this must be the last test of the module --------------------------------------------


async def test_stopped_it_is_gone(guest: Guest) -> None:
    assert (await guest.box.stop()).state == "stopped"
    assert guest.host.remains() == []
