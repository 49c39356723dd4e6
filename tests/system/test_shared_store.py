"""Several hosts on one store: what one has mounted, another does not collect."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import NotFound, Unavailable
from tests.system.daemon import IMAGE, Daemon, daemon

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]
ARGS = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/t:1"])


@contextlib.asynccontextmanager
async def host(store: Path, base: bool = False) -> AsyncIterator[tuple[Daemon, DSecClient]]:
    async with (
        daemon(base, store={"url": str(store)}, cache={"use": "always"}) as running,
        DSecClient(f"unix:{running.socket}") as client,
    ):
        yield running, client


async def import_toolkit(client: DSecClient, source: Path, name: str = "toolkit/t:1") -> bytes:
    """Make a layer of one file that no other layer has anything of."""
    source.mkdir(exist_ok=True)
    content = os.urandom(3 << 20)
    (source / "unread").write_bytes(content)
    await client.layers.import_(name, str(source), replace=True)
    return content


def objects(store: Path, prefix: str) -> set[str]:
    return {path.name for path in (store / prefix).iterdir()}


async def test_a_layer_mounted_by_another_host_stays_readable(tmp_path: Path) -> None:
    store = tmp_path / "store"
    async with host(store, base=True) as (_, builder), host(store) as (reader, client):
        content = await import_toolkit(builder, tmp_path / "t")
        before = objects(store, "blobs")
        async with await client.run_container(ARGS) as box:
            await builder.layers.remove("toolkit/t:1")
            for _ in range(3):
                await builder.layers.collect(grace_s=0, wait_s=0)
            assert objects(store, "blobs") == before
            assert await box.files.read("/unread", "bytes") == content
            reader.kill()  # what lives goes on, and its lease with it
            for _ in range(2):
                await builder.layers.collect(grace_s=0, wait_s=0)
            await reader.start()
            async with DSecClient(f"unix:{reader.socket}") as again:
                known = await again.connect(box.id)
                assert await known.files.read("/unread", "bytes") == content
                await known.stop()
    # both stopped for good: nobody needs anything without a name
    assert objects(store, "leases") == set()
    async with host(store) as (_, client):
        done = [await client.layers.collect(grace_s=0, wait_s=0) for _ in range(3)]
        assert sum(one.deleted for one in done) >= 4
        assert len(objects(store, "blobs")) == len(before) - 1


async def test_creates_during_collections_elsewhere_work_or_are_refused(tmp_path: Path) -> None:
    """The layer loses its name in the middle of a burst: a sandbox that is made can read it."""
    store = tmp_path / "store"
    async with host(store, base=True) as (_, builder), host(store) as (_, client):
        stop = asyncio.Event()

        async def collect_all_the_time() -> None:
            while not stop.is_set():
                await builder.layers.collect(grace_s=0, wait_s=0)

        async def create(toolkit: str, delay_s: float, content: bytes) -> str:
            await asyncio.sleep(delay_s)
            args = DSecContainerRunArgs(container_image=IMAGE, toolkits=[toolkit])
            try:
                box = await client.run_container(args)
            except (NotFound, Unavailable):
                return "refused"
            try:
                assert await box.files.read("/unread", "bytes") == content
            finally:
                await box.stop()
            return "read"

        collecting = asyncio.create_task(collect_all_the_time())
        outcomes: list[str] = []
        n = 0
        while n < 6 or "read" not in outcomes:  # each time the name stays a little longer
            name = f"toolkit/t:{n}"  # not one name: a host may see where it led for a second
            content = await import_toolkit(builder, tmp_path / "t", name)
            digest = (await builder.layers.get(name)).digest
            creates = [
                asyncio.create_task(create(digest if k % 2 else name, 0.02 * k, content))
                for k in range(8 if n % 2 else 2)
            ]
            await asyncio.sleep(0.02 * n)
            await builder.layers.remove(name)
            outcomes += await asyncio.gather(*creates)
            n += 1
        stop.set()
        await collecting
