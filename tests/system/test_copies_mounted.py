"""Copies of images and indexes go while layers are mounted from others of them."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsecd.backends.container_layers import ContainerLayers
from dsecd.config import parse
from dsecd.engine.request import compile_spec
from dsecd.host.layers import LayerMounts
from dsecd.images.local import Local
from libdsec import DSecContainerRunArgs
from libdsec.model import LayerImport

pytestmark = pytest.mark.root


class Host:
    """The layers of a backend, without the rest of it. An image here takes over 128 KiB."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self.config = parse(
            f"""
            [paths]
            runtime = "{place / "run"}"
            state = "{place / "lib"}"
            [store]
            url = "{place / "store"}"
            [cache]
            use = "always"
            size_mb = 1
            """
        )

    async def start(self, grace_s: float = 0.0) -> None:
        self.mounts = LayerMounts(self.place / "run/layers", grace_s=grace_s)
        self.layers = ContainerLayers(self.config, self.mounts)
        self.mounts.start()
        await self.layers.start()

    async def add(self, name: str) -> None:
        tree = self.place / name
        tree.mkdir()
        for n in range(1500):
            (tree / f"{name}-{n:05}").symlink_to("somewhere/or/other")
        (tree / "content").write_bytes(os.urandom(100_000))
        await self.layers.import_(LayerImport(name=f"base/{name}:1", source=str(tree)))

    async def provide(self, name: str) -> Local:
        args = DSecContainerRunArgs(container_image=f"base/{name}:1")
        (layer,) = (await self.layers.locate(compile_spec("box", args))).layers
        return layer

    async def mount(self, name: str) -> Local:
        layer = await self.provide(name)
        self.mounts.acquire(layer.digest, layer.image, layer.devices, layer.served)
        return layer

    def content(self, layer: Local) -> bytes:
        return (self.place / "run/layers" / layer.digest / "content").read_bytes()

    def copies(self) -> set[str]:
        cache = self.place / "lib/cache"
        return {str(path) for kind in ("images", "indexes") for path in (cache / kind).iterdir()}

    def index(self, layer: Local) -> str:
        return str(self.place / "lib/cache/indexes" / Path(layer.devices[0]).name)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(tmp_path)
    await made.start()
    yield made
    made.mounts.teardown()
    await made.layers.close(leave_nothing=True)


async def test_what_no_mount_needs_goes_and_comes_back(host: Host) -> None:
    for name in ("one", "two", "three"):
        await host.add(name)
    one, two = await host.mount("one"), await host.mount("two")
    assert host.mounts.images() == {one.image, two.image}
    three = await host.provide("three")  # its create fails before the mount
    assert {three.image, host.index(three)} <= host.copies()
    host.mounts.release(two.digest)
    await host.layers.unmount_idle()
    assert host.copies() == {one.image, host.index(one)}
    assert host.content(one) == (host.place / "one/content").read_bytes()
    assert host.content(await host.mount("two")) == (host.place / "two/content").read_bytes()
    assert host.content(await host.mount("three")) == (host.place / "three/content").read_bytes()


async def test_what_an_earlier_daemon_left_mounted_stays(host: Host) -> None:
    for name in ("one", "two"):
        await host.add(name)
    one = await host.mount("one")
    await host.provide("two")
    assert host.layers._blobd is not None
    process = host.layers._blobd._process
    host.mounts.close()
    await host.layers.close(leave_nothing=False)
    await host.start(grace_s=1000.0)  # another daemon in the same places
    host.layers._blobd._process = process  # for the clean-up to reap it
    await host.layers.unmount_idle()
    assert one.image in host.copies()
    assert host.index(one) in host.copies()
    assert host.content(one) == (host.place / "one/content").read_bytes()
