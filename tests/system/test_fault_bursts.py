"""faults.md, "Bursts": as users of libdsec meet them. How fast it goes is for `dsec-bench`."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, Sandbox
from tests.system.daemon import IMAGE, Daemon, daemon
from tests.system.user_view import first_process

pytestmark = pytest.mark.root

ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=16)


async def stop_all(client: DSecClient, boxes: list[Sandbox]) -> None:
    stopped = await asyncio.gather(*(box.stop() for box in boxes))
    assert {info.state for info in stopped} <= {"stopped"}
    assert await client.list_sandboxes() == []


async def test_two_callers_are_never_given_one_sandbox() -> None:
    async with daemon() as d:
        clients = [await DSecClient(f"unix:{d.socket}").open() for _ in range(8)]
        boxes = await asyncio.gather(
            *(client.run_container(ARGS) for client in clients for _ in range(12))
        )
        assert len({box.id for box in boxes}) == 96
        assert len({first_process(d, box.id) for box in boxes}) == 96
        await asyncio.gather(*(box.files.write("/whose", box.id) for box in boxes))
        assert [await box.files.read("/whose") for box in boxes] == [box.id for box in boxes]
        await stop_all(clients[0], boxes)
        assert d.remains() == []
        await asyncio.gather(*(client.close() for client in clients))


async def test_a_batch_of_128_does_not_wait_for_its_last() -> None:
    """Each sandbox is usable as soon as it is there, while others are being made.

    A client that stands still may find all made when it looks first: another batch will tell then.
    """
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        firsts: list[int] = []
        while not firsts or (firsts[-1] >= 128 and len(firsts) < 10):
            boxes, there = [], []
            async for box in client.run_containers(ARGS, 128):
                assert isinstance(box, Sandbox), box
                there.append(len(d.cgroups()))
                boxes.append(box)
                if len(boxes) == 1:
                    assert (await box.run("echo", "first")).stdout == "first\n"
            assert len({box.id for box in boxes}) == 128
            firsts.append(there[0])
            await stop_all(client, boxes)
            assert d.remains() == []
        assert firsts[-1] < 128, firsts


async def test_a_batch_left_early_leaves_nothing() -> None:
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        made = client.run_containers(ARGS, 100)
        box = await anext(made)
        assert isinstance(box, Sandbox)
        await made.aclose()
        for _ in range(400):
            left = {info.id for info in await client.list_sandboxes()}
            if left <= {box.id} and set(d.cgroups()) <= {box.id}:
                break
            await asyncio.sleep(0.05)
        assert {info.id for info in await client.list_sandboxes()} <= {box.id}
        await box.kill()
        assert d.remains() == []


async def test_a_burst_beyond_the_limit_is_refused_cleanly_and_can_be_retried() -> None:
    sections: dict[str, dict[str, object]] = {"limits": {"sandboxes": 20}}
    async with daemon(**sections) as d, DSecClient(f"unix:{d.socket}") as client:
        answers = await asyncio.gather(
            *(client.run_container(ARGS) for _ in range(50)), return_exceptions=True
        )
        boxes = [one for one in answers if isinstance(one, Sandbox)]
        refused = [one for one in answers if isinstance(one, DSecError)]
        assert (len(boxes), len(refused)) == (20, 30)
        assert all(error.retryable for error in refused)
        assert len(d.cgroups()) == 20
        await stop_all(client, boxes)
        again = await client.run_container(ARGS)
        await again.stop()
        assert d.remains() == []


def _cpu_s(d: Daemon) -> float:
    """CPU time that the daemon and its spawners have used: unlike a clock, load leaves it alone."""
    assert d.process is not None
    top = psutil.Process(d.process.pid)
    times = [process.cpu_times() for process in (top, *top.children())]
    return sum(used.user + used.system for used in times)


@pytest.mark.slow
async def test_the_cost_of_a_create_does_not_grow_with_the_number_of_live_sandboxes() -> None:
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:

        async def cost() -> float:
            before = _cpu_s(d)
            for _ in range(100):
                await (await client.run_container(ARGS)).stop()
            return _cpu_s(d) - before

        await cost()
        empty = await cost()
        boxes = await asyncio.gather(*(client.run_container(ARGS) for _ in range(800)))
        full = await cost()
        assert full < 2 * empty + 0.1
        await stop_all(client, boxes)
        assert d.remains() == []


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_2000_of_2000_creates_of_a_burst_succeed() -> None:
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        boxes = await asyncio.gather(*(client.run_container(ARGS) for _ in range(2000)))
        assert len({box.id for box in boxes}) == 2000
        assert d.cgroups() == sorted(box.id for box in boxes)
        listed = await client.list_sandboxes()
        assert {info.state for info in listed} == {"running"}
        for box in boxes[::100]:
            assert (await box.run("echo", box.id)).stdout == f"{box.id}\n"
        await stop_all(client, list(boxes))
        assert d.remains() == []
