"""A daemon with several backends after a restart: each sandbox is its own backend's again."""

from __future__ import annotations

import logging
import sqlite3
from typing import Any

import msgspec
import pytest

from dsecd.backends.fake import CAPABILITIES
from dsecd.engine.journal import Row
from libdsec.errors import (
    WrongState,
)
from tests.unit.engine_fixtures import bench
from tests.unit.two_backends import ABLE, VM, NotedBackend, both, manager_of, restart, two


async def test_both_kinds_are_readopted_by_their_backend() -> None:
    said: list[Any] = []
    async with two(said) as (made, guests):
        plain, guest = await both(await made.client())
        said.clear()
        client = await restart(made)
        live = frozenset((plain, guest))
        assert said == [
            ("close", "microvm"), ("close", "fake"),
            ("start", "fake"), ("start", "microvm"),
            ("sweep", "fake", live), ("sweep", "microvm", live),
        ]  # fmt: skip
        info = await client.get(guest)
        assert (info.state, info.backend, info.vm) == ("running", "microvm", VM)
        assert manager_of(made).get(guest).backend is guests
        assert (await client.run(guest, "echo", "hi")).stdout == b"hi\n"
        again = await client.create("v", backend="microvm", vm=VM, memory_limit_mb=512)
        assert again.id == guest
        spec = manager_of(made).get(guest).spec
        assert spec.vm is not None
        assert (spec.backend, spec.vm.vcpus) == ("microvm", 2)
        assert (await client.get(plain)).backend == "fake"


async def test_a_dead_one_is_freed_by_its_backend() -> None:
    async with two() as (made, guests):
        _, guest = await both(await made.client())
        guests.sandboxes.clear()
        client = await restart(made)
        found = await client.get(guest)
        assert (found.state, found.backend) == ("failed", "microvm")
        assert found.reason == "found dead when dsecd started"
        assert isinstance(guests, NotedBackend)
        assert guests.destroyed == [guest]


async def test_a_sandbox_whose_backend_is_not_there_any_more_is_said_to_have_failed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: list[Any] = []
    async with two(said) as (made, _):
        plain, guest = await both(await made.client())
        made.absent = {"microvm": "QEMU is not installed: install it"}
        said.clear()
        with caplog.at_level(logging.ERROR):
            client = await restart(made, others=[])
        (record,) = [r for r in caplog.records if "its backend is not there" in r.message]
        assert getattr(record, "fields")["backend"] == "microvm"  # noqa: B009
        assert "QEMU" in getattr(record, "fields")["why"]  # noqa: B009
        # what it left carries its id, and is swept by the host's own
        assert said[-1] == ("sweep", "fake", frozenset((plain,)))
        assert isinstance(made.backend, NotedBackend)
        assert made.backend.destroyed == []
        for _ in range(2):  # and it is remembered like that
            found = await client.get(guest)
            assert (found.state, found.backend) == ("failed", "microvm")
            assert "without its backend, microvm: QEMU is not installed" in found.reason
            with pytest.raises(WrongState, match="failed"):
                await client.run(guest, "true")
            with pytest.raises(WrongState):
                await client.call("sandbox.pause", {"id": guest})
            client = await restart(made)
        assert (await client.run(plain, "echo", "hi")).stdout == b"hi\n"


async def test_a_journal_of_a_daemon_that_knew_only_containers_is_read() -> None:
    async with bench() as made:
        made.backend.capabilities = msgspec.structs.replace(CAPABILITIES, survives_daemon=True)
        client = await made.client()
        info = await client.create("k", memory_limit_mb=64)
        await client.close()
        made.clients.clear()
        await made.close(keep=True)
        with sqlite3.connect(made.config.state / "dsecd.db") as db:
            ((body,),) = db.execute("SELECT body FROM sandboxes").fetchall()
            former = msgspec.msgpack.decode(body)
            assert former.pop("backend") == "fake"
            assert former.pop("vm") is None
            db.execute("UPDATE sandboxes SET body = ?", (msgspec.msgpack.encode(former),))
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(former), type=Row).vm is None
        await made.start()
        client = await made.client()
        again = await client.create("k", memory_limit_mb=64)
        assert (again.id, again.state, again.backend) == (info.id, "running", "fake")


async def test_only_what_survives_the_daemon_is_kept() -> None:
    async with two() as (made, guests):
        guests.capabilities = msgspec.structs.replace(ABLE, survives_daemon=False)
        plain, guest = await both(await made.client())
        client = await restart(made)
        assert (await client.get(plain)).state == "running"
        found = await client.get(guest)
        assert (found.state, found.reason) == ("stopped", "dsecd was stopped")
