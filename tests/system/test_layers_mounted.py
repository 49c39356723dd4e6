"""Layers are mounted once, from the file, and survive the daemon."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dsecd import fastpath
from dsecd.host import mountinfo, syscalls
from dsecd.host.layers import LayerMounts, fit_for_images
from dsecd.images.collect import collect
from dsecd.images.importing import import_layer
from dsecd.images.library import Library, open_library
from dsecd.images.local import Direct, Local
from libdsec.errors import Internal, NotFound, Unsupported, WrongState

pytestmark = pytest.mark.root
CLONE_NEWNS = 0x20000


class Host:
    """A library and its mounts, wired as a backend wires them."""

    def __init__(self, library: Library, state: Path, runtime: Path) -> None:
        self.library = library
        self.direct = Direct(state / "store")
        self.mounts = LayerMounts(runtime / "layers")
        self.mounts.start()

    async def add(self, name: str, tree: Path) -> Local:
        made = await import_layer(self.library, name, str(tree))
        return await self.direct.provide(made.manifest)

    async def acquire(self, name: str) -> Local:
        layer = await self.direct.provide((await self.library.resolve(name)).manifest)
        self.mount(layer)
        return layer

    def mount(self, layer: Local) -> None:
        self.mounts.acquire(layer.digest, layer.image, layer.devices)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    (root / "etc/release").write_text("one\n")
    (root / "blob").write_bytes(os.urandom(200_000))
    return root


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with open_library(tmp_path / "state") as library:
        made = Host(library, tmp_path / "state", tmp_path / "run")
        yield made
        made.mounts.teardown()
    assert not [mount for mount in mountinfo.mounts() if mount.point.startswith(str(tmp_path))]
    assert not (tmp_path / "run/layers").exists()


def loops(directory: Path) -> list[str]:
    """Return the loop devices on files below `directory`."""
    found = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(directory) in line]


def erofs_mounts(root: Path) -> list[mountinfo.Mount]:
    return [
        mount
        for mount in mountinfo.mounts()
        if mount.type == "erofs" and mount.point.startswith(str(root))
    ]


async def test_a_layer_is_mounted_once_and_without_a_loop_device(
    host: Host, tree: Path, tmp_path: Path
) -> None:
    await host.add("base/x:1", tree)
    layer = await host.acquire("base/x:1")
    assert await host.acquire("base/x:1") == layer
    (mount,) = erofs_mounts(tmp_path)
    assert mount.point == str(tmp_path / "run/layers" / layer.digest)
    assert {"ro", "nodev"} <= set(mount.options)
    assert not mount.shared
    assert loops(tmp_path) == []
    assert (Path(mount.point) / "etc/release").read_text() == "one\n"
    assert host.mounts.users(layer.digest) == 2
    with pytest.raises(WrongState, match="2 sandboxes"):
        host.mounts.drop(layer.digest)
    host.mounts.release(layer.digest)
    host.mounts.release(layer.digest)
    host.mounts.drop(layer.digest)
    assert erofs_mounts(tmp_path) == []


async def test_an_idle_layer_goes_after_the_grace(host: Host, tree: Path) -> None:
    now = 0.0
    host.mounts.teardown()
    host.mounts = LayerMounts(host.mounts._root, grace_s=60, clock=lambda: now)
    host.mounts.start()
    layer = await host.add("x:1", tree)
    host.mount(layer)
    now = 1000.0
    assert host.mounts.collect() == []
    host.mounts.release(layer.digest)
    now = 1059.0
    assert host.mounts.collect() == []
    now = 1060.0
    assert host.mounts.collect() == [layer.digest]
    assert host.mounts.mounted() == 0


async def test_a_restart_finds_the_mounts_again(host: Host, tree: Path, tmp_path: Path) -> None:
    layer = await host.add("x:1", tree)
    await host.acquire("x:1")
    (mount,) = erofs_mounts(tmp_path)
    host.mounts.close()
    assert erofs_mounts(tmp_path) == [mount]

    host.mounts = LayerMounts(tmp_path / "run/layers", grace_s=0)
    assert host.mounts.start() == [layer.digest]
    Path(layer.image).rename(tmp_path / "elsewhere")  # not needed: it is mounted
    host.mount(layer)
    assert erofs_mounts(tmp_path) == [mount]
    lower = host.mounts.lower(layer.digest)
    assert lower.private
    os.close(lower.fd)
    host.mounts.release(layer.digest)
    assert host.mounts.collect() == [layer.digest]
    assert erofs_mounts(tmp_path) == []


def in_other_namespace(work: Callable[[], None]) -> None:
    """Run `work` in a child with a mount namespace of its own, as the spawner is."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            syscalls.call("unshare", CLONE_NEWNS)
            syscalls.call("mount", b"none", b"/", None, 1 << 18 | 1 << 14, None)
            work()
            code = 0
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def use_as_lower(fd: int, userns: int) -> None:
    """What the spawner does with a descriptor: clone it, else take it as it is; map; read."""
    try:
        mine = fastpath.open_tree(f"/proc/self/fd/{fd}", clone=True)
    except OSError:
        mine = fd
    fastpath.idmap_mount(mine, userns)
    assert os.stat("etc/release", dir_fd=mine).st_uid == 1 << 28
    handle = os.open("etc/release", os.O_RDONLY, dir_fd=mine)
    assert os.read(handle, 10) == b"one\n"


async def test_the_spawner_can_use_a_lower_before_and_after_a_restart(
    host: Host, tree: Path, tmp_path: Path
) -> None:
    layer = await host.add("x:1", tree)
    await host.acquire("x:1")
    userns = fastpath.make_userns(1 << 28, (1 << 28) + 65535)
    try:
        for _ in range(2):  # twice: one sandbox must not spoil it for the next
            with host.mounts.lowers([layer.digest]) as fds:
                in_other_namespace(lambda fds=fds: use_as_lower(fds[0], userns))
        host.mounts.close()
        host.mounts.start()
        host.mount(layer)
        for _ in range(2):
            with host.mounts.lowers([layer.digest]) as fds:
                in_other_namespace(lambda fds=fds: use_as_lower(fds[0], userns))
    finally:
        os.close(userns)


async def test_many_acquires_leave_no_descriptor(host: Host, tree: Path) -> None:
    layer = await host.add("x:1", tree)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(20):
        await host.acquire("x:1")
        with host.mounts.lowers([layer.digest, layer.digest]):
            pass
        host.mounts.release(layer.digest)
        host.mounts.drop(layer.digest)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


async def test_missing_and_damaged_files_are_said_clearly(host: Host, tree: Path) -> None:
    layer = await host.add("x:1", tree)
    named = await host.library.resolve("x:1")
    image, (blob,) = Path(layer.image), map(Path, layer.devices)
    with pytest.raises(Internal, match="needs 1 blob devices, 2 are given"):
        host.mounts.acquire(layer.digest, image, [blob, blob])
    for file in (image, blob):
        file.chmod(0o600)
        whole = file.read_bytes()
        file.write_bytes(whole[:-4096])
        with pytest.raises(Internal, match=f"{file} .*is damaged.*import it again"):
            await host.direct.provide(named.manifest)
        file.write_bytes(whole)
    head = image.read_bytes()
    image.write_bytes(head[:1100] + b"\xff" + head[1101:])
    with pytest.raises(Internal, match=r"checksum is wrong.*import it again"):
        host.mount(layer)
    image.write_bytes(head)
    await host.acquire("x:1")  # control
    host.mounts.release(layer.digest)
    host.mounts.drop(layer.digest)
    for file in (blob, image):
        file.unlink()
        with pytest.raises(NotFound, match="import the layer again"):
            await host.direct.provide(named.manifest)
    with pytest.raises(NotFound, match="import the layer again"):
        host.mount(layer)
    assert host.mounts.mounted() == 0


async def test_a_layer_that_somebody_unmounted_is_dropped_in_peace(
    host: Host, tree: Path, tmp_path: Path
) -> None:
    layer = await host.add("x:1", tree)
    await host.acquire("x:1")
    syscalls.umount(str(tmp_path / "run/layers" / layer.digest))
    host.mounts.release(layer.digest)
    host.mounts.drop(layer.digest)
    assert await host.acquire("x:1") == layer


async def test_an_image_on_tmpfs_is_refused(host: Host, tree: Path, tmp_path: Path) -> None:
    layer = await host.add("x:1", tree)
    memory = tmp_path / "memory"
    memory.mkdir()
    syscalls.mount("tmpfs", str(memory), "tmpfs")
    try:
        shutil.copy(layer.image, memory / "image")
        with pytest.raises(Unsupported, match="lies on tmpfs"):
            host.mounts.acquire(layer.digest, memory / "image", layer.devices)
        with pytest.raises(Unsupported, match="lies on tmpfs"):
            fit_for_images(memory)
    finally:
        syscalls.umount(str(memory))


async def test_a_removal_cannot_break_a_create_from_it(host: Host, tree: Path) -> None:
    """Fault: removing a layer while another sandbox is being created from it breaks the create."""
    await host.add("x:1", tree)
    held = await host.acquire("x:1")  # a create has begun
    await host.library.remove("x:1")
    for _ in range(2):
        await collect(host.library.store, used=host.mounts.digests(), grace_s=0, wait_s=0)
    with pytest.raises(WrongState):
        host.mounts.drop(held.digest)
    with host.mounts.lowers([held.digest]) as fds:
        handle = os.open("blob", os.O_RDONLY, dir_fd=fds[0])
        assert os.pread(handle, 200_000, 0) == (tree / "blob").read_bytes()
        os.close(handle)
    host.mounts.release(held.digest)
    host.mounts.drop(held.digest)
    for _ in range(2):
        await collect(host.library.store, grace_s=0, wait_s=0)
    assert not Path(held.image).exists()
