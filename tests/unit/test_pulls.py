"""A create whose image is in a registry: progress, patience and errors."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from dsecd.backends.spec import Spec
from dsecd.config import Limits
from dsecd.images.library import Named
from dsecd.images.pulls import Pulls
from dsecd.images.tool import Report, unreported
from libdsec import DSecClient, DSecContainerRunArgs, ImportProgress
from libdsec.errors import DSecError, Timeout, Unavailable
from tests.unit.engine_fixtures import Bench, bench
from tests.waiting import let_pass, until

IMAGE = "registry.example/x:1"


class Registry:
    """Stands in for the fake backend's layers: images there are pulled while `gate` is closed."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.pulled = 0
        self.error: DSecError | None = None
        self.pulls = Pulls(self._pull)

    def located(self, spec: Spec) -> bool:
        return not spec.image.startswith("registry.")

    async def pull(self, spec: Spec, report: Report = unreported) -> None:
        await self.pulls.get(spec.image, report)

    async def _pull(self, name: str, report: Report) -> Named:
        self.pulled += 1
        done = 0
        while not self.gate.is_set():
            done += 1
            await asyncio.to_thread(report, "fetching", done, 0)
            await asyncio.sleep(0.01)
        if self.error is not None:
            raise self.error
        return cast(Any, None)


@pytest.fixture
async def host() -> AsyncIterator[Bench]:
    async with bench(Limits(concurrent_creates=1, create_timeout_s=20)) as made:
        yield made


@pytest.fixture
def registry(host: Bench, monkeypatch: pytest.MonkeyPatch) -> Registry:
    made = Registry()
    monkeypatch.setattr(host.backend, "located", made.located)
    monkeypatch.setattr(host.backend, "pull", made.pull)
    return made


@pytest.fixture
async def client(host: Bench) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{host.config.socket}") as made:
        yield made


def args(image: str = IMAGE) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image=image)


async def test_a_pull_tells_all_who_wait_how_far_it_is(
    registry: Registry, client: DSecClient
) -> None:
    seen: list[list[ImportProgress]] = [[], []]
    creates = [
        asyncio.ensure_future(client.run_container(args(), on_progress=items.append))
        for items in seen
    ]
    async with asyncio.timeout(10):
        while not all(len(items) > 1 for items in seen):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    registry.gate.set()
    boxes = await asyncio.gather(*creates)
    assert len({box.id for box in boxes}) == 2
    assert registry.pulled == 1
    assert {item.stage for items in seen for item in items} == {"fetching"}


async def test_a_batch_pulls_once(registry: Registry, client: DSecClient) -> None:
    registry.gate.set()
    made = [one async for one in client.run_containers(args(), 20)]
    assert not [one for one in made if isinstance(one, DSecError)]
    assert registry.pulled == 1


async def test_a_pull_holds_up_no_other_create_and_may_take_longer(
    registry: Registry, client: DSecClient
) -> None:
    """A pull used to take one of the places for creates, and had their time only."""
    slow = asyncio.ensure_future(client.run_container(args()))
    await until(lambda: registry.pulled)
    await client.run_container(args("base/x"), timeout=15)
    let_pass(30)  # longer than create_timeout_s
    await client.host_stats()
    assert not slow.done()
    registry.gate.set()
    assert (await slow).info.state == "running"


async def test_a_create_given_up_while_it_pulls_is_gone_at_once(
    host: Bench, registry: Registry, client: DSecClient
) -> None:
    with pytest.raises(Timeout, match=r"not running after 0\.1 s; the create is undone"):
        await client.run_container(args(), timeout=0.1, on_progress=lambda item: None)
    slow = asyncio.ensure_future(client.run_container(args(), on_progress=lambda item: None))
    await asyncio.sleep(0.1)
    slow.cancel()
    await asyncio.gather(slow, return_exceptions=True)
    assert host.service is not None
    async with asyncio.timeout(5):
        while host.service.manager.live:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    again = asyncio.ensure_future(client.run_container(args()))
    await asyncio.sleep(0.1)
    assert not again.done()
    registry.gate.set()
    assert (await again).info.state == "running"
    assert registry.pulled == 1  # it went on meanwhile


async def test_a_failed_image_pull_is_visible_to_the_client(
    registry: Registry, client: DSecClient
) -> None:
    registry.error = Unavailable("the registry says no")
    registry.gate.set()
    for progress in (None, lambda item: None):
        with pytest.raises(Unavailable, match="the registry says no"):
            await client.run_container(args(), on_progress=progress)
    made = [one async for one in client.run_containers(args(), 3)]
    assert [str(one) for one in made] == ["the registry says no"] * 3


async def test_a_progress_callback_that_fails_ends_the_create(
    host: Bench, registry: Registry, client: DSecClient
) -> None:
    def fail(item: ImportProgress) -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match="mine"):
        await client.run_container(args(), on_progress=fail)
    assert host.service is not None
    async with asyncio.timeout(5):
        while host.service.manager.live:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    registry.gate.set()


async def test_the_end_of_the_daemon_ends_pulls(registry: Registry) -> None:
    waiting = asyncio.ensure_future(registry.pulls.get("x", unreported))
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await registry.pulls.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
