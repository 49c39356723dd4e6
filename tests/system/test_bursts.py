"""faults.md, "Bursts"."""

from __future__ import annotations

import asyncio
import time

import pytest

from libdsec import model
from tests.system.daemon import IMAGE, daemon

pytestmark = pytest.mark.root


async def test_all_of_a_hundred_concurrent_creates_succeed_and_differ() -> None:
    async with daemon() as d:
        client = await d.client()
        infos = await asyncio.gather(*(client.create(f"k{i}", IMAGE) for i in range(100)))
        assert len({info.id for info in infos}) == 100
        marks = await asyncio.gather(
            *(client.run(info.id, "sh", "-c", f"echo {info.id} > /m; cat /m") for info in infos)
        )
        assert [mark.stdout.decode().strip() for mark in marks] == [info.id for info in infos]
        await asyncio.gather(*(client.stop(info.id) for info in infos))
        assert d.remains() == []


async def test_the_same_key_a_hundred_times_is_one_sandbox() -> None:
    async with daemon() as d:
        clients = [await d.client() for _ in range(10)]
        infos = await asyncio.gather(*(c.create("one", IMAGE) for c in clients for _ in range(10)))
        assert len({info.id for info in infos}) == 1
        assert len(d.cgroups()) == 1


async def test_a_batch_of_128_takes_seconds_at_most() -> None:
    async with daemon() as d:
        client = await d.client()
        keys = [f"k{i}" for i in range(128)]
        args = model.DSecContainerRunArgs(container_image=IMAGE)
        begun = time.monotonic()
        call = client.open("sandbox.create_many", model.CreateManyArgs(keys=keys, args=args))
        seen = set()
        for _ in keys:
            created = await call.item(model.Created)
            assert created.error is None
            seen.add(created.info.id)
            call.grant(1)
        await call.answer()
        assert time.monotonic() - begun < 10
        assert len(seen) == 128


@pytest.mark.slow
async def test_latency_does_not_grow_with_the_number_of_live_sandboxes() -> None:
    async with daemon() as d:
        client = await d.client()

        async def median_ms(tag: str) -> float:
            times = []
            for i in range(40):
                begun = time.perf_counter()
                await client.create(f"{tag}{i}", IMAGE)
                times.append(time.perf_counter() - begun)
            return sorted(times)[20] * 1e3

        await median_ms("warm")
        empty = await median_ms("a")
        await asyncio.gather(*(client.create(f"fill{i}", IMAGE) for i in range(400)))
        full = await median_ms("b")
        assert full < 3 * empty + 1
