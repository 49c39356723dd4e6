"""A client of a wire server, whose tasks are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs
from tests.unit.wire_server import WireServer

ARGS = DSecContainerRunArgs(container_image="base/debian:12")


@contextlib.asynccontextmanager
async def serving(folder: Path) -> AsyncIterator[WireServer]:
    server = WireServer(folder)
    await server.start()
    yield server
    await server.close()


@contextlib.asynccontextmanager
async def connected(server: WireServer) -> AsyncIterator[DSecClient]:
    before = asyncio.all_tasks()
    async with DSecClient(server.socket) as client:
        yield client
    ours = {task for task in asyncio.all_tasks() - before if task.get_name().startswith("libdsec")}
    assert not ours, "the client left tasks behind"
