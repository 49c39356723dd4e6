"""Daemons that read layers of a shared store through dsec-blobd."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from tests.system.daemon import IMAGE, Daemon, daemon
from tests.system.remote_lab import blobd_processes

pytestmark = pytest.mark.root
BASE = DSecContainerRunArgs(container_image=IMAGE)
BIG = 24 << 20


@pytest.fixture
async def store(tmp_path: Path) -> Path:
    """A store with the base and a layer of big files, made by a daemon of its own."""
    big = tmp_path / "big"
    big.mkdir()
    for n in range(4):
        (big / f"big{n}").write_bytes(os.urandom(BIG // 4))
    shared = tmp_path / "store"
    async with (
        daemon(store={"url": str(shared)}) as builder,
        DSecClient(f"unix:{builder.socket}") as client,
    ):
        await client.layers.import_("toolkit/big:1", str(big))
    return shared


@contextlib.asynccontextmanager
async def reader(store: Path, on_demand: str = "fuse") -> AsyncIterator[tuple[Daemon, DSecClient]]:
    cache = {"use": "always", "on_demand": on_demand}
    async with (
        daemon(base=False, store={"url": str(store)}, cache=cache) as running,
        DSecClient(f"unix:{running.socket}") as client,
    ):
        yield running, client


def sums(store: Path) -> dict[str, str]:
    folder = store.parent / "big"
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


async def hashes(box: Sandbox) -> dict[str, str]:
    """Return the digests that could be read; a read that fails, fails."""
    found = {}
    for n in range(4):
        done = await box.run("sha256sum", f"/big{n}")
        if done.exit_code == 0:
            found[f"big{n}"] = done.stdout.split()[0]
    return found


async def test_only_what_is_read_comes_to_the_host(store: Path) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/big:1"])
    async with reader(store) as (running, client), await client.run_container(args) as box:
        blobs = running.state / "cache/blobs"
        cached = sum(path.stat().st_blocks * 512 for path in blobs.iterdir())
        assert cached < BIG // 2
        assert await hashes(box) == sums(store)
        cached = sum(path.stat().st_blocks * 512 for path in blobs.iterdir())
        assert cached >= BIG


async def test_sandboxes_live_through_kills_of_blobd_and_dsecd(store: Path) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/big:1"])
    async with reader(store) as (running, client):
        boxes = await asyncio.gather(*(client.run_container(args) for _ in range(3)))
        expected = sums(store)
        reading = [asyncio.create_task(hashes(box)) for box in boxes]
        for process in blobd_processes(running):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        await asyncio.sleep(0.1)
        running.kill()
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await running.start()
        async with DSecClient(f"unix:{running.socket}") as again:
            for box in boxes:
                known = await again.connect(box.id)
                found = await hashes(known)
                for name, digest in found.items():
                    assert digest == expected[name]
            async with await again.run_container(args) as fresh:
                assert await hashes(fresh) == expected
            for box in boxes:
                await (await again.connect(box.id)).stop()


async def test_a_restart_keeps_the_cache_and_its_readers(store: Path) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/big:1"])
    async with reader(store) as (running, client):
        box = await client.run_container(args)
        before = [process.pid for process in blobd_processes(running)]
        running.kill()
        await running.start()
        assert [process.pid for process in blobd_processes(running)] == before
        async with DSecClient(f"unix:{running.socket}") as again:
            known = await again.connect(box.id)
            assert await hashes(known) == sums(store)
            await known.stop()


async def test_metrics_tell_what_dsec_blobd_counts(store: Path) -> None:
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/big:1"])
    async with reader(store) as (running, client), await client.run_container(args) as box:
        assert await hashes(box) == sums(store)
        # a dsec-blobd that does not answer in time is left out
        while "dsec_blobd_blobs" not in (first := await scrape(running)):
            assert first["dsec_creates_total"] == 1
        assert first["dsec_blobd_reads_total"] >= first["dsec_blobd_misses_total"] > 0
        assert first["dsec_blobd_fetched_bytes_total"] >= BIG
        assert first["dsec_blobd_cache_bytes"] >= BIG
        assert first["dsec_blobd_read_errors_total"] == 0
        assert first["dsec_creates_total"] == 1
        for process in blobd_processes(running):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        while (again := await scrape(running)).get("dsec_blobd_restarts_total") != 1:
            assert again["dsec_creates_total"] == 1
            await asyncio.sleep(0.05)
        assert again["dsec_blobd_blobs"] == first["dsec_blobd_blobs"]


async def scrape(running: Daemon) -> dict[str, float]:
    stream, writer = await asyncio.open_unix_connection(running.runtime / "metrics.sock")
    writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    _, _, body = (await stream.read()).decode().partition("\r\n\r\n")
    writer.close()
    rows = (line.rsplit(" ", 1) for line in body.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, value in rows}


@pytest.mark.needs("pre_access")
async def test_sandboxes_on_pre_access_live_through_kills(store: Path) -> None:
    """Its keeper, or dsecd, is always there: when both are gone it fails open."""
    args = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/big:1"])
    async with reader(store, "pre-access") as (running, client):
        blobs = running.state / "cache/blobs"
        boxes = await asyncio.gather(*(client.run_container(args) for _ in range(3)))
        assert sum(path.stat().st_blocks * 512 for path in blobs.iterdir()) < BIG // 2
        expected = sums(store)
        reading = [asyncio.create_task(hashes(box)) for box in boxes]
        for process in blobd_processes(running):
            if process.name() == "dsec-blobd":
                process.kill()
        running.kill()
        for task in reading:
            task.cancel()
        await asyncio.gather(*reading, return_exceptions=True)
        await running.start()
        async with DSecClient(f"unix:{running.socket}") as again:
            for process in blobd_processes(running):
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            for box in boxes:
                assert await hashes(await again.connect(box.id)) == expected
            async with await again.run_container(args) as fresh:
                assert await hashes(fresh) == expected
            for box in boxes:
                await (await again.connect(box.id)).stop()
