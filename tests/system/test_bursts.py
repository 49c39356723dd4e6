"""faults.md, "Bursts", on the wire; as a user of libdsec meets them: test_fault_bursts.py."""

from __future__ import annotations

import asyncio

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


async def test_a_batch_of_128_is_one_stream_of_128_answers() -> None:
    async with daemon() as d:
        client = await d.client()
        keys = [f"k{i}" for i in range(128)]
        args = model.DSecContainerRunArgs(container_image=IMAGE)
        call = client.open("sandbox.create_many", model.CreateManyArgs(keys=keys, args=args))
        seen = set()
        for _ in keys:
            created = await call.item(model.Created)
            assert created.error is None
            seen.add(created.info.id)
            call.grant(1)
        await call.answer()
        assert len(seen) == 128
