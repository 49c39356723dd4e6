"""A daemon of two fake backends, one of which makes microVMs, for tests of several."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Iterable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from dsecd.backends.abc import Capabilities, Handle, Listener
from dsecd.backends.fake import CAPABILITIES, FakeBackend
from dsecd.engine.manager import Manager
from libdsec.errors import (
    Unsupported,
)
from libdsec.model import VmArgs
from tests.unit.engine_fixtures import Bench, bench
from tests.wire_client import WireClient

ABLE = msgspec.structs.replace(CAPABILITIES, vm=True, survives_daemon=True)
VM = VmArgs(vcpus=2, layers="block", data_disk_mb=8)


class NotedBackend(FakeBackend):
    """Notes in `said` what the engine has every such backend do, in order."""

    def __init__(self, said: list[Any], name: str, able: Capabilities = ABLE) -> None:
        super().__init__(name=name, capabilities=able)
        self.said = said
        self.unable = ""  # to start
        self.destroyed: list[str] = []

    async def start(self, listener: Listener) -> None:
        self.said.append(("start", self.name))
        if self.unable:
            raise Unsupported(self.unable, reason=self.unable)
        await super().start(listener)

    async def sweep(self, known: Collection[str]) -> Iterable[str]:
        self.said.append(("sweep", self.name, frozenset(known)))
        return await super().sweep(known)

    async def destroy(self, handle: Handle) -> None:
        assert handle.backend == self.name
        self.destroyed.append(handle.sandbox)
        await super().destroy(handle)

    async def close(self) -> None:
        self.said.append(("close", self.name))


@asynccontextmanager
async def two(said: list[Any] | None = None) -> AsyncIterator[tuple[Bench, FakeBackend]]:
    """A daemon with the host's own backend, which survives it, and one for microVMs."""
    noted: list[Any] = [] if said is None else said
    able = msgspec.structs.replace(CAPABILITIES, survives_daemon=True)
    guests = NotedBackend(noted, "microvm")
    async with bench(backend=NotedBackend(noted, "fake", able), others=[guests]) as made:
        yield made, guests


def manager_of(made: Bench) -> Manager:
    assert made.service is not None
    return made.service.manager


async def both(client: WireClient) -> tuple[str, str]:
    """Make a sandbox of each kind."""
    plain = await client.create("c")
    guest = await client.create("v", backend="microvm", vm=VM, memory_limit_mb=512)
    return plain.id, guest.id


async def restart(made: Bench, others: list[FakeBackend] | None = None) -> WireClient:
    for client in made.clients:
        await client.close()
    made.clients.clear()
    await made.close(keep=True)
    if others is not None:
        made.others = others
    await made.start()
    return await made.client()
