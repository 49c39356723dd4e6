"""One suite, every backend: each test gets a connected client and an image that exists.

MicroVMs have one daemon for the module, which makes what they boot from once.
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from libdsec import model
from tests.system.daemon import IMAGE, Daemon, daemon
from tests.system.vm_lab import CREATE_S, MEMORY_MB, vm_daemon
from tests.unit.engine_fixtures import bench
from tests.wire_client import WireClient

MICROVM_MARKS = (
    pytest.mark.root,
    pytest.mark.guest_kernel,
    pytest.mark.leaky("the daemon is the module's; one census is taken around it"),
)


@dataclass
class Subject:
    """What a conformance test may use."""

    client: WireClient
    image: str
    backend: str


class MicroVMClient(WireClient):
    """Makes microVMs where the tests say no more than "a sandbox".

    Keys are those of a client: others of the same daemon have had them.
    """

    _clients = itertools.count()

    def __init__(self) -> None:
        super().__init__()
        self._number = next(self._clients)

    async def create(
        self,
        key: str,
        image: str = IMAGE,
        backend: str = model.MICROVM,
        vm: model.VmArgs | None = None,
        **fields: Any,
    ) -> model.SandboxInfo:
        args = model.DSecContainerRunArgs(
            container_image=image, **{"memory_limit_mb": MEMORY_MB, **fields}
        )
        create = model.CreateArgs(
            key=f"{key} of {self._number}",
            args=args,
            backend=backend,
            vm=vm or model.VmArgs(layers="block"),
        )
        info: model.SandboxInfo = await self.call(
            "sandbox.create", create, kind=model.SandboxInfo, timeout_s=CREATE_S
        )
        return info


@pytest.fixture(scope="module")
def microvm_host(guest_kernel: Path) -> Iterator[Daemon]:
    with asyncio.Runner() as runner:
        running = vm_daemon(guest_kernel)
        yield runner.run(running.__aenter__())
        runner.run(running.__aexit__(None, None, None))


@pytest.fixture(
    params=[
        "fake",
        pytest.param("container", marks=pytest.mark.root),
        pytest.param("microvm", marks=MICROVM_MARKS),
    ]
)
def place(request: pytest.FixtureRequest) -> tuple[str, Daemon | None]:
    """The backend, and the daemon that all tests of it share, if they do."""
    if request.param != "fake" and os.geteuid() != 0:
        pytest.skip(f"root: the {request.param} backend needs it")
    shared = request.getfixturevalue("microvm_host") if request.param == "microvm" else None
    return request.param, shared


@pytest.fixture
async def subject(place: tuple[str, Daemon | None]) -> AsyncIterator[Subject]:
    backend, shared = place
    if backend == "fake":
        async with bench() as b:
            yield Subject(await b.client(), "base/any:1", backend)
    elif shared is None:
        async with daemon() as d:
            yield Subject(await d.client(), IMAGE, backend)
    else:
        client = await MicroVMClient.connect(shared.socket)
        yield Subject(client, IMAGE, backend)
        for info in await client.list():
            await client.stop(info.id)
        await client.close()
