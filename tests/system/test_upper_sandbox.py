"""Disk uppers and re-adopted layers, seen from a sandbox of a real daemon."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from libdsec import model
from tests.system.daemon import IMAGE, Daemon, daemon

pytestmark = pytest.mark.root


def subvolumes(running: Daemon) -> list[str]:
    return sorted(entry.name for entry in (running.runtime / "upper").iterdir())


async def test_a_full_disk_upper_stops_the_sandbox_that_filled_it_and_no_other() -> None:
    """Fault: a sandbox fills the host's disk through its upper layer."""
    async with daemon() as running:
        client = await running.client()
        full = await client.create("full", IMAGE, upper="disk", disk_limit_mb=16)
        other = await client.create("other", IMAGE, upper="disk", disk_limit_mb=64)
        fill = "dd if=/dev/urandom of=/f bs=65536 count=%d 2>&1"
        done = await client.run(full.id, "sh", "-c", fill % 480)
        assert done.exit_code != 0
        assert b"uota" in done.stdout or b"No space" in done.stdout
        assert (await client.run(other.id, "sh", "-c", fill % 480)).exit_code == 0
        metrics = await client.call(
            "sandbox.metrics", model.SandboxRef(id=full.id), kind=model.Metrics
        )
        assert metrics.disk_limit_bytes == 16 << 20
        assert metrics.disk_bytes > 14 << 20
        assert (
            await client.run(full.id, "sh", "-c", "rm /f && sync && echo x > /g")
        ).exit_code == 0
        assert len(subvolumes(running)) == 2
        await client.stop(full.id)
        await client.stop(other.id)
        assert subvolumes(running) == []


async def test_uppers_and_layers_survive_the_daemon() -> None:
    async with daemon() as running:
        client = await running.client()
        old = await client.create("old", IMAGE, upper="disk", disk_limit_mb=32)
        await client.run(old.id, "sh", "-c", "echo kept > /kept")
        held = subvolumes(running)
        await running.restart()
        client = await running.client()
        assert (await client.run(old.id, "cat", "/kept")).stdout == b"kept\n"
        assert subvolumes(running) == held
        # its lower is a clone of the mount that the first daemon made
        new = [await client.create(f"new{n}", IMAGE, upper="disk") for n in range(3)]
        for info in new:
            assert (await client.run(info.id, "sh", "-c", "ls /bin/busybox; id -u")).stdout == (
                b"/bin/busybox\n0\n"
            )
        layers = await client.call("layer.list", {}, kind=list[model.LayerInfo])
        assert [layer.in_use for layer in layers] == [4]
        for info in (old, *new):
            await client.stop(info.id)
        assert subvolumes(running) == []


async def test_the_volume_cannot_be_left_or_lifted_from_inside() -> None:
    async with daemon() as running:
        client = await running.client()
        info = await client.create("k", IMAGE, upper="disk", disk_limit_mb=16)
        mounts = (await client.run(info.id, "cat", "/proc/mounts")).stdout.decode()
        assert info.id not in mounts
        pid = next(iter(running.pids_of(info.id)))
        root = Path(f"/proc/{pid}/root")
        # as the sandbox's processes see it: no path below it leads to the volume
        assert not (root / str(running.runtime / "upper").lstrip("/")).exists()
        with contextlib.suppress(FileNotFoundError):
            assert os.listdir(root / "var/tmp") == []  # noqa: PTH208
        await client.stop(info.id)
