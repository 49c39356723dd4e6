"""The life of the daemon itself: start, signals, locks, exposition, limits seen inside."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys

import pytest

from libdsec import model
from libdsec.errors import NotFound, WrongState
from tests import leaks
from tests.system.daemon import IMAGE, Daemon, daemon, until
from tests.system.user_view import first_process

pytestmark = pytest.mark.root


def dsecd(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run dsecd to its end."""
    command = [sys.executable, "-m", "dsecd", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)


@pytest.mark.vm
async def test_create_run_stop() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE)
        assert (await client.run(info.id, "echo", "hello world")).stdout == b"hello world\n"
        assert (await client.run(info.id, "sh", "-c", "exit 7")).exit_code == 7
        assert (await client.stop(info.id)).state == "stopped"
        assert d.remains() == []


async def test_identity_seen_inside() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, hostname="worker-1", env={"A": "b c"})
        read = await client.run(info.id, "sh", "-c", "hostname; cat /etc/hostname; id -u; echo $A")
        assert read.stdout == b"worker-1\nworker-1\n0\nb c\n"
        ids = [
            (await client.run(info.id, "cat", "/etc/machine-id")).stdout.strip() for _ in range(2)
        ]
        other = await client.create("k2", IMAGE)
        ids.append((await client.run(other.id, "cat", "/etc/machine-id")).stdout.strip())
        assert ids[0] == ids[1] != ids[2]
        assert len(ids[0]) == 32


async def test_cpu_count_follows_the_limit() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, cpu_cores_limit=0.5)
        assert (await client.run(info.id, "nproc")).stdout == b"1\n"
        cpuinfo = await client.run(info.id, "grep", "-c", "^processor", "/proc/cpuinfo")
        assert cpuinfo.stdout == b"1\n"


async def test_sigterm_stops_sandboxes() -> None:
    async with daemon() as d:
        client = await d.client()
        for i in range(5):
            await client.create(f"k{i}", IMAGE)
        assert await d.end(signal.SIGTERM) == 0
        assert d.remains() == []


@pytest.mark.vm
@pytest.mark.parametrize("how", ["sigusr2", "keep"])
async def test_a_stop_that_keeps_sandboxes(how: str) -> None:
    async with daemon() as d:
        if how == "keep":
            await d.end()
            await d.start(keep=True)
        client = await d.client()
        info = await client.create("k", IMAGE)
        start = model.ExecArgs(cid="bg", shell=b"sleep 1; echo survived", background=True)
        await client.call("exec.start", start, info.id)
        assert await d.end(signal.SIGUSR2 if how == "sigusr2" else signal.SIGTERM) == 0
        assert d.cgroups() == [info.id]
        await d.start()
        client = await d.client()
        attach = client.open("exec.attach", model.AttachArgs(cid="bg"), info.id)
        output = b"".join([item.data async for item in attach.stream(model.Output)])
        assert output + (await attach.answer(model.CommandResult)).stdout == b"survived\n"
        assert (await client.create("k", IMAGE)).id == info.id


async def test_a_second_daemon_on_the_same_directories_is_refused() -> None:
    async with daemon() as d:
        done = dsecd("--config", str(d.config_file))
        assert done.returncode == 1
        assert f"another dsecd (pid {d.process.pid}) uses the state directory" in done.stderr
        assert (await (await d.client()).call("host.stats", {}, kind=model.HostStats)).node == "t0"


async def test_a_wrong_configuration_is_refused_with_a_hint() -> None:
    async with daemon() as d:
        file = d.root / "wrong.toml"
        file.write_text("[limits]\nsandboxen = 3\n")
        done = dsecd("--config", str(file))
        assert done.returncode == 2
        assert "did you mean limits.sandboxes" in done.stderr


async def failed_start(d: Daemon) -> None:
    """Start a daemon that finds out at its last step that it cannot run."""
    file = d.root / "broken.toml"
    text = d.config_file.read_text()
    file.write_text(text.replace("[paths]", '[paths]\nspawner = "/nonexistent"', 1))
    done = await asyncio.to_thread(dsecd, "--config", str(file))
    assert done.returncode == 1
    assert "/nonexistent" in done.stderr


async def test_a_start_that_fails_leaves_nothing() -> None:
    async with daemon() as d:
        await d.end()
        before = leaks.take(leaks.Scope(host=True, own=d.name))
        await failed_start(d)
        assert leaks.left_over(before, leaks.take(leaks.Scope(host=True, own=d.name))) == []


async def test_a_start_that_fails_takes_nothing_from_sandboxes_that_live() -> None:
    async with daemon() as d:
        info = await (await d.client()).create("k", IMAGE)
        assert await d.end(signal.SIGUSR2) == 0
        await failed_start(d)
        await d.start()
        done = await (await d.client()).run(info.id, "head", "-n1", "/etc/group")
        assert done.stdout == b"root:x:0:\n"


async def test_logs_and_metrics_name_what_happened() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE)
        with pytest.raises(NotFound, match="base/none"):
            await client.create("k2", "base/none")
        await client.stop(info.id)

        def mine() -> list[str]:
            whole, _, _ = d.log().rpartition("\n")
            records = [json.loads(line) for line in whole.splitlines()]
            return [r["message"] for r in records if r.get("sandbox") == info.id]

        # lines below a warning are written together, a little later
        await until(lambda: mine()[-1:] == ["stopped"])
        assert mine()[0] == "created"
        reader, writer = await asyncio.open_unix_connection(str(d.runtime / "metrics.sock"))
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        text = (await reader.read()).decode()
        writer.close()
        assert "dsec_creates_total 1" in text
        assert 'dsec_create_failures_total{code="not_found"} 1' in text


@pytest.mark.vm
async def test_a_death_is_noticed_at_once() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE)
        call = client.open("exec.run", model.ExecArgs(cid="c", argv=[b"sleep", b"60"]), info.id)
        await client.run(info.id, "true")
        os.kill(first_process(d, info.id), signal.SIGKILL)
        # long before the command's own end: nobody has to ask first
        with pytest.raises(WrongState, match="init"):
            await call.answer()
        found = await client.get(info.id)
        assert found.state == "failed"
        assert "init" in found.reason
        await until(lambda: d.remains() == [])


@pytest.mark.vm
async def test_nat_attaches_and_detaches() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, network="nat")
        assert info.address
        seen = await client.run(info.id, "ip", "-4", "addr")
        assert info.address.encode() in seen.stdout
        resolv = await client.run(info.id, "cat", "/etc/resolv.conf")
        assert b"192.0.2.53" in resolv.stdout
        await client.stop(info.id)
        sealed = await client.create("s", IMAGE, network_rules={"pypi": False})
        assert sealed.address == ""


async def test_metrics_of_a_sandbox() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE, memory_limit_mb=64, disk_limit_mb=32)
        await client.run(info.id, "dd", "if=/dev/zero", "of=/f", "bs=1M", "count=8")
        found = await client.call(
            "sandbox.metrics", model.SandboxRef(id=info.id), kind=model.Metrics
        )
        assert found.memory_limit_bytes == 64 << 20
        assert found.disk_limit_bytes == 32 << 20
        assert 8 << 20 <= found.disk_bytes < 10 << 20
        assert found.memory_bytes >= 8 << 20
        assert found.cpu_usage_s > 0
