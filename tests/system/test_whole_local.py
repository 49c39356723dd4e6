"""Layers of a remote store whose chunks are all in the cache: mounted without dsec-blobd."""

from __future__ import annotations

import contextlib
import errno
import random
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from dsecd import fastpath
from dsecd.backends import container_layers
from dsecd.backends.container_layers import ContainerLayers
from dsecd.backends.spec import Spec
from dsecd.config import Cache, Config, Paths, Store
from dsecd.host import preaccess, probe
from dsecd.host.layers import LayerMounts
from dsecd.images.blobd.client import Blobd
from dsecd.images.importing import import_layer
from dsecd.images.library import open_library
from dsecd.images.local import Local
from libdsec.errors import Unsupported
from tests.system.blobd_service import in_thread, kill, until

pytestmark = [pytest.mark.root, pytest.mark.needs("erofs_file", "fuse")]
FILES = {f"f{n}": random.Random(n).randbytes(300_000 + n) for n in range(6)}


def spec(name: str) -> Spec:
    return Spec(
        image=name, memory_bytes=1, cpu_cores=1, pids=1, disk_bytes=1, upper="memory",
        network="none", user="", workdir="", env={}, hostname="h",
        no_new_privileges=True, output_limit=1, spool_limit=1,
    )  # fmt: skip


class Host:
    """One host's state, whatever daemon serves it."""

    def __init__(self, root: Path, on_demand: Literal["fuse", "pre-access"] = "fuse") -> None:
        self.root = root
        self.started: list[subprocess.Popen[bytes]] = []
        self.config = Config(
            paths=Paths(runtime=str(root / "run"), state=str(root / "lib")),
            store=Store(url=str(root / "store")),
            cache=Cache(use="always", on_demand=on_demand),
        )
        (root / "run").mkdir(exist_ok=True)
        (root / "lib").mkdir(exist_ok=True)

    @contextlib.asynccontextmanager
    async def daemon(self, leave_nothing: bool = True) -> AsyncIterator[Daemon]:
        mounts = LayerMounts(self.root / "run/layers", grace_s=0.0)
        mounts.start()
        layers = ContainerLayers(self.config, mounts)
        try:
            await layers.start()
            yield Daemon(layers, mounts)
        finally:
            if leave_nothing:
                mounts.teardown()
            else:
                mounts.close()
            if layers._blobd is not None and layers._blobd._process is not None:
                self.started.append(layers._blobd._process)
            await layers.close(leave_nothing)


class Daemon:
    def __init__(self, layers: ContainerLayers, mounts: LayerMounts) -> None:
        self.layers, self.mounts = layers, mounts

    @property
    def blobd(self) -> Blobd:
        assert self.layers._blobd is not None
        return self.layers._blobd

    async def mount(self, name: str) -> Local:
        (local,) = (await self.layers.locate(spec(name))).layers
        self.mounts.acquire(local.digest, local.image, local.devices, local.served)
        return local

    async def unmount(self, local: Local) -> None:
        self.mounts.release(local.digest)
        await self.layers.unmount_idle()
        assert local.digest not in self.mounts.attached()

    async def check(self, local: Local, names: tuple[str, ...] = tuple(FILES)) -> None:
        point = self.mounts._layers[local.digest].point
        for name in names:
            assert await in_thread((point / name).read_bytes) == FILES[name]


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    tree = tmp_path / "tree"
    tree.mkdir()
    for name, content in FILES.items():
        (tree / name).write_bytes(content)
    host = Host(tmp_path)
    async with open_library(tmp_path / "builder", str(tmp_path / "store")) as library:
        await import_layer(library, "base/a:1", str(tree))
        (tree / "own").write_bytes(b"x" * 100_000)
        await import_layer(library, "base/b:1", str(tree))  # shares the blob of the first
    yield host
    for process in host.started:
        process.wait()


async def test_a_whole_layer_is_mounted_on_the_cache_at_its_next_mount(host: Host) -> None:
    async with host.daemon() as daemon:
        local = await daemon.mount("base/a:1")
        assert local.served
        await daemon.check(local)
        await daemon.unmount(local)

        local = await daemon.mount("base/a:1")
        assert not local.served
        assert {Path(device).parent.name for device in local.devices} == {"blobs"}
        reads = (await daemon.blobd.stats())["reads"]
        await daemon.check(local)
        assert (await daemon.blobd.stats())["reads"] == reads
        assert await daemon.blobd.holds() == [local.digest]
        await daemon.layers.unmount_idle()
        assert await daemon.blobd.holds() == [local.digest]  # it is used
        await daemon.unmount(local)
        assert await daemon.blobd.holds() == []
        assert await daemon.blobd.blobs() == []


async def test_a_part_of_a_layer_is_served(host: Host) -> None:
    async with host.daemon() as daemon:
        local = await daemon.mount("base/a:1")
        await daemon.check(local, ("f0",))
        await daemon.unmount(local)
        local = await daemon.mount("base/a:1")
        assert local.served
        await daemon.check(local)
        await daemon.unmount(local)


async def test_a_served_layer_and_a_whole_one_share_a_blob(host: Host) -> None:
    async with host.daemon() as daemon:
        one = await daemon.mount("base/a:1")
        await daemon.check(one)
        await daemon.unmount(one)
        one = await daemon.mount("base/a:1")
        two = await daemon.mount("base/b:1")  # a blob of its own is missing
        assert (one.served, two.served) == (False, True)
        await daemon.unmount(one)
        assert await daemon.blobd.holds() == []
        await daemon.check(two)
        one = await daemon.mount("base/a:1")
        await daemon.unmount(two)
        await daemon.check(one)
        assert set(await daemon.blobd.blobs()) == {Path(one.devices[0]).name}
        await daemon.unmount(one)


async def test_what_was_held_and_never_mounted_is_released(host: Host) -> None:
    async with host.daemon() as daemon:
        local = await daemon.mount("base/a:1")
        await daemon.check(local)
        await daemon.unmount(local)
        (local,) = (await daemon.layers.locate(spec("base/a:1"))).layers
        assert await daemon.blobd.holds() == [local.digest]
        await daemon.layers.unmount_idle()
        assert await daemon.blobd.holds() == []
        assert daemon.layers.recall(spec("base/a:1"), aged=True) is None  # else mounted unheld


async def test_what_was_located_serves_the_create_however_long_it_took(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A burst had a create fail: the moment ended between the question and the use."""
    async with host.daemon() as daemon:
        monkeypatch.setattr(container_layers, "LOCATED_S", 3600.0)
        found = await daemon.layers.locate(spec("base/a:1"))
        assert daemon.layers.recall(spec("base/a:1")) is found
        monkeypatch.setattr(container_layers, "LOCATED_S", -1.0)
        found = await daemon.layers.locate(spec("base/a:1"))
        assert daemon.layers.recall(spec("base/a:1")) is None
        assert daemon.layers.recall(spec("base/a:1"), aged=True) is found
        await daemon.layers.unmount_idle()


async def test_a_hold_outlives_dsecd_and_both_processes(host: Host) -> None:
    async with host.daemon() as daemon:
        local = await daemon.mount("base/a:1")
        await daemon.check(local)
        await daemon.unmount(local)
    async with host.daemon(leave_nothing=False) as daemon:
        local = await daemon.mount("base/a:1")
        assert not local.served
    async with host.daemon(leave_nothing=False) as daemon:  # the sandbox is known from the journal
        daemon.mounts.acquire(local.digest, local.image, local.devices, local.served)
        await daemon.layers.unmount_idle()
        assert await daemon.blobd.holds() == [local.digest]
        hello = daemon.blobd.hello
        for pid in (hello.keeper, hello.pid):
            kill(pid)
        await daemon.check(local)
        await until(lambda: daemon.blobd.hello.pid != hello.pid)
        assert await daemon.blobd.holds() == [local.digest]
        daemon.mounts.release(local.digest)
    async with host.daemon() as daemon:  # nobody claims it
        await daemon.layers.unmount_idle()
        assert local.digest not in daemon.mounts.attached()
        assert await daemon.blobd.holds() == []


async def test_a_mount_that_stays_keeps_its_hold(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with host.daemon() as daemon:
        local = await daemon.mount("base/a:1")
        await daemon.check(local)
        await daemon.unmount(local)
        local = await daemon.mount("base/a:1")
        daemon.mounts.release(local.digest)
        with monkeypatch.context() as patch:
            patch.setattr("dsecd.host.layers.fastpath.umount", fail)
            with pytest.raises(OSError, match="busy"):
                await daemon.layers.unmount_idle()
        await daemon.layers.unmount_idle()
        assert await daemon.blobd.holds() == [local.digest]
        point = host.root / "run/layers" / local.digest
        fastpath.umount(str(point))
        point.rmdir()
        await daemon.layers.unmount_idle()
        assert await daemon.blobd.holds() == []


def fail(point: Path) -> None:
    raise OSError(errno.EBUSY, "busy")


# --- pre-access: mounted on the cache, whole or not -------------------------------------------


@pytest.fixture
def watching(host: Host) -> Iterator[Host]:
    watching = Host(host.root, "pre-access")
    yield watching
    for process in watching.started:
        process.wait()


@pytest.mark.needs("pre_access")
async def test_pre_access_mounts_a_layer_of_which_nothing_is_there(watching: Host) -> None:
    async with watching.daemon() as daemon:
        local = await daemon.mount("base/a:1")
        assert not local.served
        blob = Path(local.devices[0]).name
        await daemon.check(local, ("f1",))
        assert not (await daemon.blobd.stat(blob)).whole
        await daemon.check(local)
        await daemon.unmount(local)
        assert await daemon.blobd.holds() == []
        assert await daemon.blobd.blobs() == []


@pytest.mark.needs("pre_access")
async def test_a_watched_layer_outlives_dsecd(watching: Host, host: Host) -> None:
    async with watching.daemon(leave_nothing=False) as daemon:
        local = await daemon.mount("base/a:1")
    # also one that does not want it any more
    async with host.daemon(leave_nothing=False) as daemon:
        daemon.mounts.acquire(local.digest, local.image, local.devices, local.served)
        hello = daemon.blobd.hello
        for pid in (hello.keeper, hello.pid):
            kill(pid)
        await daemon.check(local)
        await until(lambda: daemon.blobd.hello.pid != hello.pid)
    async with host.daemon() as daemon:
        await daemon.layers.unmount_idle()
        assert await daemon.blobd.holds() == []


@pytest.mark.needs("pre_access")
@pytest.mark.parametrize("next_one", ["pre-access", "fuse"])
async def test_what_nobody_watched_is_not_given_to_others(
    watching: Host, host: Host, next_one: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with watching.daemon(leave_nothing=False) as daemon:
        local = await daemon.mount("base/a:1")
        pids = (daemon.blobd.hello.keeper, daemon.blobd.hello.pid)
    for pid in pids:
        kill(pid)
    for process in watching.started:
        await in_thread(process.wait)
    point = watching.root / "run/layers" / local.digest
    assert await in_thread((point / "f0").read_bytes) == bytes(len(FILES["f0"]))  # as warned
    after = watching if next_one == "pre-access" else host
    async with after.daemon() as daemon:
        assert "stop them" in caplog.text
        daemon.mounts.acquire(local.digest, local.image, local.devices, local.served)  # recovery
        await daemon.check(local)
        again = await daemon.mount("base/a:1")
        await daemon.check(again)
        daemon.mounts.release(local.digest)
        await daemon.unmount(again)


async def test_pre_access_is_refused_with_the_reason(
    watching: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    lacking = probe.Feature("pre_access", False, "Linux < 6.14", "x")
    with monkeypatch.context() as patch:
        patch.setattr("dsecd.backends.container_layers.probe.feature", lambda _: lacking)
        with pytest.raises(Unsupported, match=r'pre-access.*Linux < 6.14.*"fuse"'):
            async with watching.daemon():
                pass
    if probe.feature("pre_access").available:
        with pytest.raises(Unsupported):
            preaccess.try_on(Path("/dev/shm"))


async def test_a_dsec_blobd_of_an_earlier_version_serves(host: Host) -> None:
    async with host.daemon() as daemon:
        local = await daemon.mount("base/a:1")
        await daemon.check(local)
        await daemon.unmount(local)
        hello = daemon.blobd.hello
        daemon.blobd._hello = msgspec.structs.replace(
            hello, capabilities=hello.capabilities - {"hold"}
        )
        local = await daemon.mount("base/a:1")
        assert local.served
        await daemon.check(local)
        await daemon.unmount(local)
