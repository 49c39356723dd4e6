"""faults.md, "Leaks and crashes": what environments leave, when a part of the work fails or dies.

"Caches, dangling layers and logs are never reclaimed"; "a create that fails half-way leaks".
Requests to a remote store: test_remote_faults.py. Steps of the spawner: test_leaks_engine.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import time
from pathlib import Path

import msgspec
import pytest

from dsecd.host import mountinfo
from dsecd.images.records import Lease
from dsecd.images.stores.opening import open_store
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import Internal
from tests.system.daemon import IMAGE, Daemon, daemon
from tests.system.remote_lab import random_files

pytestmark = pytest.mark.root
ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=256, disk_limit_mb=128)
KINDS = ("workspace", "toolkit")
LONG_AGO = time.time() - 10 * 86400
PLACES = ("blobs", "images", "indexes", "layers", "traces", "trash", "leases")


def objects(host: Daemon) -> set[str]:
    store = host.state / "store"
    return {
        f"{place}/{path.name}"
        for place in PLACES
        if (store / place).is_dir()
        for path in (store / place).iterdir()
        if not path.name.startswith("host-")  # of the daemon that runs
    }


def temporary(host: Daemon) -> list[Path]:
    places = (host.state / "builds", host.state / "store/tmp")
    return [path for place in places if place.is_dir() for path in place.iterdir()]


async def collect_all(client: DSecClient) -> None:
    """Two looks, as an hour apart; there is nothing that is too young."""
    for _ in range(2):
        await client.layers.collect(grace_s=0, wait_s=0)


async def works(host: Daemon, box: Sandbox) -> None:
    """It runs, and is not frozen."""
    done = await asyncio.wait_for(box.run("echo", "alive"), 10)
    assert done.stdout == "alive\n"


async def test_what_killed_builds_leave_is_reclaimed(tmp_path: Path) -> None:
    """kill -9 at any moment of an import: its scratch at the next start, the rest at two looks."""
    source = tmp_path / "source"
    async with daemon() as host:
        before = objects(host)
        for n in range(4):
            random_files(source / str(n), 8, 1 << 20)
            async with DSecClient(f"unix:{host.socket}") as client:
                name = f"toolkit/big:{n}"
                work = asyncio.create_task(client.layers.import_(name, str(source / str(n))))
                await asyncio.sleep(0.02 + 0.05 * n)
                host.kill()
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
            await host.start()
            assert list((host.state / "builds").iterdir()) == []
        async with DSecClient(f"unix:{host.socket}") as client:
            for info in await client.layers.list():
                if info.name != IMAGE:  # it was quicker than the kill
                    await client.layers.remove(info.name)
            for path in temporary(host):
                os.utime(path, (LONG_AGO, LONG_AGO))
            await collect_all(client)
            assert objects(host) == before
            assert [info.name for info in await client.layers.list()] == [IMAGE]
            assert temporary(host) == []
            async with await client.run_container(ARGS) as box:
                await works(host, box)


@pytest.mark.parametrize("action", ["pack_diff", "checkpoint"])
async def test_a_sandbox_is_not_left_frozen_by_a_kill_of_dsecd(action: str) -> None:
    """Its changes are read while it stands still; who was to let it go on is gone."""
    async with daemon() as host, DSecClient(f"unix:{host.socket}") as client:
        box = await client.run_container(ARGS)
        await box.run_shell("dd if=/dev/urandom of=/root/big bs=65536 count=640 2>&1", check=True)
        beat = await box.commands.run("while :; do sleep 0.05; done", background=True)
        for n in range(2):
            call = box.pack_diff(f"snapshot/s:{n}") if action == "pack_diff" else box.checkpoint()
            work = asyncio.ensure_future(call)
            frozen = frozen_file(host, box)
            while not work.done() and "frozen 1" not in frozen.read_text():  # noqa: ASYNC110
                await asyncio.sleep(0.0005)
            await asyncio.sleep(0.01 * n)
            host.kill()
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await host.start()
            await works(host, box)
            assert "frozen 0" in frozen.read_text()
        await beat.kill()
        await box.stop()
        assert host.remains() == []
        assert list((host.state / "builds").iterdir()) == []
        assert list((host.runtime / "checkpoints").iterdir()) == []


def frozen_file(host: Daemon, box: Sandbox) -> Path:
    for tree in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
        file = Path(tree) / host.name / box.id / "cgroup.events"
        if file.exists():
            return file
    raise AssertionError(f"{box.id} has no cgroup")


async def test_whatever_nothing_refers_to_goes_at_two_looks() -> None:
    """Every kind of object, as writers left it that died between any two of their steps."""
    async with daemon() as host, DSecClient(f"unix:{host.socket}") as client:
        before, store = objects(host), host.state / "store"
        for place in ("blobs", "indexes", "images", "traces"):
            path = store / place / hashlib.sha256(place.encode()).hexdigest()
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(b"x" * 4096)
            os.utime(path, (LONG_AGO, LONG_AGO))
        (store / "trash").mkdir(exist_ok=True)
        (store / "trash" / ("0" * 64)).write_bytes(b"garbage\n")  # of what is gone already
        await expired_lease(host)
        assert len(objects(host)) == len(before) + 6
        assert (await client.layers.collect(wait_s=0)).marked == 4
        assert (await client.layers.collect(wait_s=0)).deleted == 4
        assert objects(host) == before
        async with await client.run_container(ARGS) as box:
            await works(host, box)


async def expired_lease(host: Daemon) -> None:
    store = await open_store(str(host.state / "store"))
    try:
        lease = Lease(holder="dead:1", expires_at=LONG_AGO, blobs=["*"])
        await store.swap_name(f"leases/{'1' * 32}", msgspec.json.encode(lease), None)
    finally:
        await store.close()


async def test_an_environment_that_fails_half_way_leaks_nothing(tmp_path: Path) -> None:
    """Each step of mounting each of three layers fails once, in a create of its own."""
    async with daemon() as host:
        async with DSecClient(f"unix:{host.socket}") as client:
            for n in range(20):
                for kind in KINDS:
                    random_files(tmp_path / f"{kind}{n}", 1, 5000)
                    source = str(tmp_path / f"{kind}{n}")
                    await client.layers.import_(f"{kind}/f{n}:1", source, at=f"/{kind}")
        await host.end()
        await host.start(crash_at="fail-a-mount")
        order = host.root / "fail-a-mount"
        async with DSecClient(f"unix:{host.socket}") as client:
            for n in range(20):
                args = DSecContainerRunArgs(
                    container_image=IMAGE,
                    workspace=f"workspace/f{n}:1",
                    toolkits=[f"toolkit/f{n}:1"],
                )
                order.write_text(str(n + 1))
                with contextlib.suppress(Internal):
                    box = await client.run_container(args)
                    break  # it has fewer steps
                assert_clean(host)
                async with await client.run_container(args) as box:  # the next one works at once
                    assert await same(box, tmp_path, n)
            order.unlink()
            assert n >= 6
            assert await same(box, tmp_path, n)
            await box.stop()
            assert_clean(host)


def assert_clean(host: Daemon) -> None:
    """No sandbox, no mount twice, no directory for one that is not there."""
    assert host.remains() == []
    prefix = f"{host.runtime}/layers/"
    mounted = [m.point for m in mountinfo.mounts() if m.point.startswith(prefix)]
    assert len(set(mounted)) == len(mounted)
    assert {str(path) for path in (host.runtime / "layers").iterdir()} == set(mounted)


async def same(box: Sandbox, folder: Path, n: int) -> bool:
    found = [await box.files.read(f"/{kind}/file0", format="bytes") for kind in KINDS]
    return found == [(folder / f"{kind}{n}" / "file0").read_bytes() for kind in KINDS]
