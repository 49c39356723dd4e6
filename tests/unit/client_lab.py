"""A client of a wire server, whose tasks are counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from tests.unit.wire_sandbox import Command
from tests.unit.wire_server import WireServer
from tests.waiting import until

ARGS = DSecContainerRunArgs(container_image="base/debian:12")


# Shell text: stand still until `open_gate`
GATE = "until [ -e gate ]; do sleep 0.05; done"


def open_gate(server: WireServer, sandbox: Sandbox) -> None:
    (server.root / sandbox.id / "gate").touch()


async def began(server: WireServer) -> Command:
    """Wait for a command's process; the only one's."""
    commands = server.world.commands
    await until(lambda: any(each.process is not None for each in commands.values()))
    (command,) = commands.values()
    return command


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
