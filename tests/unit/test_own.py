"""Sandboxes of the engine's own, against the fake backend: no client can do anything with one."""

from __future__ import annotations

import pytest

from dsecd.engine import own, pausing
from dsecd.engine.manager import Manager
from dsecd.engine.request import CONTAINERS
from dsecd.engine.sandbox import Sandbox
from libdsec.errors import NotFound
from libdsec.model import DSecContainerRunArgs, Paused
from tests.unit.engine_fixtures import Bench, bench

LABELS = {"job": "a"}
REFS = (
    "sandbox.get", "sandbox.stop", "sandbox.metrics", "sandbox.checkpoint", "sandbox.pause",
    "sandbox.resume",
)  # fmt: skip


def manager_of(made: Bench) -> Manager:
    assert made.service is not None
    return made.service.manager


async def create(made: Bench) -> Sandbox:
    args = DSecContainerRunArgs(container_image="base/debian:12", labels=LABELS)
    return await own.create(manager_of(made), "", "test", CONTAINERS, args)


async def test_it_cannot_be_named_listed_or_paused() -> None:
    async with bench() as made:
        client, sandbox = await made.client(), await create(made)
        for op in REFS:
            with pytest.raises(NotFound):
                await client.call(op, {"id": sandbox.id})
        with pytest.raises(NotFound):
            await client.call("sandbox.set_cpu_class", {"id": sandbox.id, "cpu_class": "standard"})
        with pytest.raises(NotFound):
            await client.run(sandbox.id, "true")
        assert await client.call("sandbox.list", {"all": True}) == []
        paused = await client.call("sandbox.pause_many", {"labels": LABELS}, kind=list[Paused])
        assert paused == []
        with pytest.raises(NotFound):
            await pausing.pause(manager_of(made), sandbox.id, by="idle")
        assert sandbox.state == "running"


async def test_nothing_of_it_is_remembered() -> None:
    async with bench() as made:
        sandbox = await create(made)
        own.end(manager_of(made), sandbox, "over")
        await sandbox.gone
        assert not manager_of(made).ended
        assert manager_of(made).by_key("", sandbox.key) is None
        assert not made.backend.sandboxes


async def test_it_ends_with_the_daemon_that_made_it() -> None:
    async with bench() as made:
        await create(made)
        made.backend.capabilities = type(made.backend.capabilities)(survives_daemon=True)
        await made.close(keep=True)
        service = await made.start()
        assert not service.manager.live
        assert not service.manager.ended
        assert not made.backend.sandboxes
