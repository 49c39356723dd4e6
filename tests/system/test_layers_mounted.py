"""Layers are mounted once, from the file, and survive the daemon."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dsecd import fastpath
from dsecd.host import mountinfo, syscalls
from dsecd.host.layers import LayerMounts
from dsecd.images.store import Layer, LayerStore
from libdsec.errors import Internal, NotFound, Unsupported, WrongState

pytestmark = pytest.mark.root
CLONE_NEWNS = 0x20000


class Library:
    """A store and its mounts, wired as a backend wires them."""

    def __init__(self, state: Path, runtime: Path) -> None:
        self.mounts = LayerMounts(runtime / "layers")
        self.store = LayerStore(state / "layers", lambda digest: self.mounts.users(digest))

    def start(self) -> None:
        self.store.start()
        self.mounts.start()

    def acquire(self, name: str) -> Layer:
        layer = self.store.resolve(name)
        self.mounts.acquire(layer.digest, layer.path)
        return layer


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "etc").mkdir(parents=True)
    (root / "etc/release").write_text("one\n")
    (root / "blob").write_bytes(os.urandom(200_000))
    return root


@pytest.fixture
def library(tmp_path: Path) -> Iterator[Library]:
    made = Library(tmp_path / "state", tmp_path / "run")
    made.start()
    yield made
    made.mounts.teardown()
    assert not [mount for mount in mountinfo.mounts() if mount.point.startswith(str(tmp_path))]
    assert not (tmp_path / "run/layers").exists()


def loops(directory: Path) -> list[str]:
    """Return the loop devices on files below `directory`."""
    found = subprocess.run(["losetup", "-a"], capture_output=True, text=True, check=True).stdout
    return [line for line in found.splitlines() if str(directory) in line]


def erofs_mounts(library_root: Path) -> list[mountinfo.Mount]:
    return [
        mount
        for mount in mountinfo.mounts()
        if mount.type == "erofs" and mount.point.startswith(str(library_root))
    ]


async def test_a_layer_is_mounted_once_and_without_a_loop_device(
    library: Library, tree: Path, tmp_path: Path
) -> None:
    await library.store.import_("base/x:1", tree)
    layer = library.acquire("base/x:1")
    assert library.acquire("base/x:1") == layer
    (mount,) = erofs_mounts(tmp_path)
    assert mount.point == str(tmp_path / "run/layers" / layer.digest)
    assert {"ro", "nodev"} <= set(mount.options)
    assert not mount.shared
    assert loops(tmp_path) == []
    assert (Path(mount.point) / "etc/release").read_text() == "one\n"
    assert library.mounts.users(layer.digest) == 2
    with pytest.raises(WrongState, match="2 sandboxes"):
        library.store.remove("base/x:1", library.mounts.drop)
    library.mounts.release(layer.digest)
    library.mounts.release(layer.digest)
    library.store.remove("base/x:1", library.mounts.drop)
    assert erofs_mounts(tmp_path) == []


async def test_an_idle_layer_goes_after_the_grace(tree: Path, library: Library) -> None:
    now = 0.0
    library.mounts.teardown()
    library.mounts = LayerMounts(library.mounts._root, grace_s=60, clock=lambda: now)
    library.mounts.start()
    layer = await library.store.import_("x:1", tree)
    library.mounts.acquire(layer.digest, layer.path)
    now = 1000.0
    assert library.mounts.collect() == []
    library.mounts.release(layer.digest)
    now = 1059.0
    assert library.mounts.collect() == []
    now = 1060.0
    assert library.mounts.collect() == [layer.digest]
    assert library.mounts.mounted() == 0


async def test_a_restart_finds_the_mounts_again(
    library: Library, tree: Path, tmp_path: Path
) -> None:
    layer = await library.store.import_("x:1", tree)
    library.acquire("x:1")
    (mount,) = erofs_mounts(tmp_path)
    library.mounts.close()
    assert erofs_mounts(tmp_path) == [mount]

    library.mounts = LayerMounts(tmp_path / "run/layers", grace_s=0)
    assert library.mounts.start() == [layer.digest]
    layer.path.rename(tmp_path / "elsewhere")  # not needed: it is mounted
    library.mounts.acquire(layer.digest, layer.path)
    assert erofs_mounts(tmp_path) == [mount]
    lower = library.mounts.lower(layer.digest)
    assert lower.private
    os.close(lower.fd)
    library.mounts.release(layer.digest)
    assert library.mounts.collect() == [layer.digest]
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
    library: Library, tree: Path, tmp_path: Path
) -> None:
    layer = await library.store.import_("x:1", tree)
    library.acquire("x:1")
    userns = fastpath.make_userns(1 << 28, (1 << 28) + 65535)
    try:
        for _ in range(2):  # twice: one sandbox must not spoil it for the next
            with library.mounts.lowers([layer.digest]) as fds:
                in_other_namespace(lambda fds=fds: use_as_lower(fds[0], userns))
        library.mounts.close()
        library.mounts.start()
        library.mounts.acquire(layer.digest, layer.path)
        for _ in range(2):
            with library.mounts.lowers([layer.digest]) as fds:
                in_other_namespace(lambda fds=fds: use_as_lower(fds[0], userns))
    finally:
        os.close(userns)


async def test_many_acquires_leave_no_descriptor(library: Library, tree: Path) -> None:
    layer = await library.store.import_("x:1", tree)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(20):
        library.acquire("x:1")
        with library.mounts.lowers([layer.digest, layer.digest]):
            pass
        library.mounts.release(layer.digest)
        library.mounts.drop(layer.digest)
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


async def test_missing_and_damaged_images_are_said_clearly(library: Library, tree: Path) -> None:
    layer = await library.store.import_("x:1", tree)
    layer.path.chmod(0o600)
    whole = layer.path.read_bytes()
    layer.path.write_bytes(whole[:-4096])
    with pytest.raises(Internal, match=r"truncated.*import it again"):
        library.acquire("x:1")
    layer.path.write_bytes(whole)
    with pytest.raises(Internal, match="needs 0 blob devices"):
        library.mounts.acquire(layer.digest, layer.path, [layer.path])
    layer.path.unlink()
    with pytest.raises(NotFound, match="import the layer again"):
        library.mounts.acquire(layer.digest, layer.path)
    assert library.mounts.mounted() == 0


async def test_a_layer_that_somebody_unmounted_is_dropped_in_peace(
    library: Library, tree: Path, tmp_path: Path
) -> None:
    layer = await library.store.import_("x:1", tree)
    library.acquire("x:1")
    syscalls.umount(str(tmp_path / "run/layers" / layer.digest))
    library.mounts.release(layer.digest)
    library.mounts.drop(layer.digest)
    assert library.acquire("x:1") == layer


async def test_a_state_directory_on_tmpfs_is_refused(tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    syscalls.mount("tmpfs", str(state), "tmpfs")
    try:
        with pytest.raises(Unsupported, match="lies on tmpfs"):
            Library(state, tmp_path / "run").start()
    finally:
        syscalls.umount(str(state))


async def test_a_removal_cannot_break_a_create_from_it(library: Library, tree: Path) -> None:
    """Fault: removing a layer while another sandbox is being created from it breaks the create."""
    layer = await library.store.import_("x:1", tree)
    held = library.acquire("x:1")  # a create has begun
    with pytest.raises(WrongState):
        library.store.remove("x:1", library.mounts.drop)
    with library.mounts.lowers([held.digest]) as fds:
        assert os.stat("etc/release", dir_fd=fds[0]).st_size == 4
    library.mounts.release(layer.digest)
