"""`sandbox.display` through client, daemon and engine, on a backend with a display of no pixels."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from dsecd.backends.abc import Handle, Instance
from dsecd.backends.fake import FakeBackend
from dsecd.backends.spec import Spec
from libdsec import DSecClient, DSecContainerRunArgs, DSecFullVMRunArgs
from libdsec.errors import Unsupported
from libdsec.model import MouseButton, Screenshot
from tests.unit.engine_fixtures import bench

ARGS = DSecContainerRunArgs(container_image="base/debian:12")


class Seen:
    """Remembers what was done to it."""

    def __init__(self) -> None:
        self.did: list[tuple[Any, ...]] = []

    async def screenshot(self) -> Screenshot:
        return Screenshot(width=640, height=480, png=b"png")

    async def click(self, x: int, y: int, button: MouseButton | None, count: int) -> None:
        self.did.append(("click", x, y, button, count))

    async def scroll(self, x: int, y: int, steps: int) -> None:
        self.did.append(("scroll", x, y, steps))

    async def type_text(self, text: str) -> None:
        self.did.append(("type", text))

    async def press(self, keys: Sequence[str]) -> None:
        self.did.append(("key", *keys))


class Showing(FakeBackend):
    def __init__(self) -> None:
        super().__init__()
        self.display = Seen()

    async def create(self, handle: Handle, spec: Spec) -> Instance:
        made = await super().create(handle, spec)
        return msgspec.structs.replace(made, display=self.display)

    async def recover(self, handle: Handle) -> Instance | None:
        made = await super().recover(handle)
        return msgspec.structs.replace(made, display=self.display) if made is not None else None


async def test_what_is_done_at_a_screen_reaches_it() -> None:
    backend = Showing()
    async with bench(backend=backend) as b, DSecClient(str(b.config.socket)) as client:
        display = (await client.run_container(ARGS)).display
        assert await display.size() == (640, 480)
        assert await display.screenshot() == b"png"
        await display.click(1, 2, button="right", count=2)
        await display.move(3, 4)
        await display.scroll(5, 6, -2)
        await display.type("text")
        await display.key("ctrl", "c")
    assert backend.display.did == [
        ("click", 1, 2, "right", 2), ("click", 3, 4, None, 1), ("scroll", 5, 6, -2),
        ("type", "text"), ("key", "ctrl", "c"),
    ]  # fmt: skip


async def test_looking_wakes_a_paused_sandbox() -> None:
    async with bench(backend=Showing()) as b, DSecClient(str(b.config.socket)) as client:
        sandbox = await client.run_container(ARGS)
        await sandbox.pause()
        assert await sandbox.display.screenshot() == b"png"
        assert (await sandbox.get_info()).state == "running"


async def test_a_sandbox_without_a_screen_says_so() -> None:
    async with bench() as b, DSecClient(str(b.config.socket)) as client:
        sandbox = await client.run_container(ARGS)
        with pytest.raises(Unsupported, match="have no display: use a full VM"):
            await sandbox.display.screenshot()


async def test_a_host_without_full_vms_says_what_it_needs() -> None:
    async with bench() as b, DSecClient(str(b.config.socket)) as client:
        await b.close()
        b.absent = {"fullvm": "apt-get install mtools"}
        await b.start()
        with pytest.raises(Unsupported, match="no fullvm backend: apt-get install mtools"):
            await asyncio.wait_for(client.run_fullvm(DSecFullVMRunArgs(image="x")), 30)
