"""What a layer holds is what the source held, and kill -9 of an import leaves nothing for long."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsecd.host.layers import LayerMounts
from dsecd.images import collect as garbage
from dsecd.images.chunks import decode_index, verify_blob
from dsecd.images.importing import import_layer
from dsecd.images.library import Library, Named, open_library
from dsecd.images.local import Direct
from dsecd.images.stores.verify import read_verified
from libdsec.errors import InvalidArgument

pytestmark = pytest.mark.root
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw=ep, version 2


@pytest.fixture
async def library(tmp_path: Path) -> AsyncIterator[Library]:
    async with open_library(tmp_path / "state") as made:
        yield made


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[LayerMounts]:
    made = LayerMounts(tmp_path / "run")
    made.start()
    yield made
    made.teardown()


async def mount(mounts: LayerMounts, layer: Named, state: Path) -> None:
    local = await Direct(state / "store").provide(layer.manifest)
    mounts.acquire(layer.digest, local.image, local.devices)


def make_tree(root: Path) -> None:
    """One of everything a layer can hold, and what it cannot."""
    (root / "d/empty").mkdir(parents=True)
    (root / "d/f").write_text("content\n")
    os.chown(root / "d/f", 1234, 65534)
    (root / "d/setuid").write_bytes(b"x" * 10_000)
    (root / "d/setuid").chmod(0o4755)
    os.setxattr(root / "d/setuid", "user.note", b"\0binary")
    (root / "d/cap").write_bytes(b"y" * 5000)
    os.setxattr(root / "d/cap", "security.capability", CAPABILITY)
    (root / "d/link").symlink_to("../nowhere")
    os.link(root / "d/f", root / "hard")
    os.mkfifo(root / "fifo", 0o600)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    Path(os.fsdecode(os.fsencode(root) + b"/n\xffame\n")).write_bytes(b"z")
    with (root / "sparse").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"end")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
    for path in (*root.rglob("*"), root):
        os.utime(path, ns=(10**18 + 123_456_789, 10**18 + 123_456_789), follow_symlinks=False)


def describe(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a tree that a sandbox could see, but for what has no place in a layer."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        if stat.S_ISCHR(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            continue
        regular = stat.S_ISREG(status.st_mode)
        names = [name for name in os.listxattr(path, follow_symlinks=False)]  # noqa: C416
        found[str(path.relative_to(root))] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns,
            status.st_nlink if regular else 0, path.read_bytes() if regular else b"",
            path.readlink() if path.is_symlink() else None,
            {name: os.getxattr(path, name, follow_symlinks=False) for name in names},
        )  # fmt: skip
    return found


async def test_a_tree_arrives_whole_from_directory_tar_and_image(
    library: Library, mounts: LayerMounts, tmp_path: Path
) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    make_tree(root)
    tar, image = tmp_path / "tree.tar.gz", tmp_path / "tree.erofs"
    command = ["tar", "--format=pax", "--xattrs", "--xattrs-include=*", "-C", str(root)]
    subprocess.run([*command, "-czf", str(tar), "."], check=True, capture_output=True)  # noqa: ASYNC221
    expected = describe(root)
    (root / "null").unlink()  # an image's devices stay: see below
    os.utime(root, ns=(10**18 + 123_456_789, 10**18 + 123_456_789))
    command = ["mkfs.erofs", "--quiet", "--preserve-mtime", "--exclude-path=socket"]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(1 << 33)}  # else times become 0
    subprocess.run([*command, str(image), str(root)], check=True, env=environment)  # noqa: ASYNC221
    digests = set()
    for name, source in (("dir:1", root), ("tar:1", tar), ("image:1", image)):
        layer = await import_layer(library, name, str(source))
        await mount(mounts, layer, tmp_path / "state")
        seen = describe(tmp_path / "run" / layer.digest)
        assert seen == expected, name
        assert len(seen) == 12
        mounts.release(layer.digest)
        digests.add(layer.digest)
    assert len(digests) == 1


async def test_an_image_from_elsewhere_keeps_devices_and_must_be_whole(
    library: Library, mounts: LayerMounts, tmp_path: Path
) -> None:
    root, image = tmp_path / "tree", tmp_path / "tree.erofs"
    root.mkdir()
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    (root / "f").write_bytes(os.urandom(100_000))
    (root / "short").write_bytes(b"content of a short file")
    subprocess.run(["mkfs.erofs", "--quiet", str(image), str(root)], check=True)  # noqa: ASYNC221
    layer = await import_layer(library, "x:1", str(image))
    await mount(mounts, layer, tmp_path / "state")
    assert stat.S_ISCHR((tmp_path / "run" / layer.digest / "null").stat().st_mode)
    mounts.release(layer.digest)
    whole = image.read_bytes()
    image.write_bytes(whole[:-10])
    with pytest.raises(InvalidArgument, match="truncated"):
        await import_layer(library, "y:1", str(image))
    inode = whole.index(b"content of a short file") - 32  # tail-packed: the bytes follow the inode
    image.write_bytes(whole[:inode] + b"\xff" * 32 + whole[inode + 32 :])
    with pytest.raises(InvalidArgument, match=r"tree\.erofs is damaged"):
        await import_layer(library, "y:1", str(image))


# --- kill -9 ---

IMPORT = """
import asyncio, sys
from pathlib import Path
from dsecd.images.importing import import_layer
from dsecd.images.library import open_library
async def main():
    async with open_library(Path(sys.argv[1])) as library:
        print("open", flush=True)
        await import_layer(library, "x:1", sys.argv[2])
asyncio.run(main())
"""


def importer(state: Path, source: Path) -> subprocess.Popen[str]:
    """Start an import in a process of its own and wait until it has begun."""
    argv = [sys.executable, "-c", IMPORT, str(state), str(source)]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.readline() == "open\n"
    return process


def make_files(root: Path) -> None:
    root.mkdir()
    for number in range(300):
        (root / f"f{number}").write_bytes(os.urandom(100_000))


async def verify(library: Library, layer: Named) -> None:
    """Read all of a layer. Raises `Internal` when something is damaged."""
    store, manifest = library.store, layer.manifest
    await read_verified(store, f"images/{manifest.image}", manifest.image)
    for blob in manifest.blobs:
        index = decode_index(await store.read(f"indexes/{blob.id}"), blob.id)
        with Path(store.source(f"blobs/{blob.id}").path).open("rb") as file:
            verify_blob(index, blob.id, file.read)


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.2, 0.4])
async def test_kill_9_of_an_import_leaves_nothing_for_long(tmp_path: Path, delay_s: float) -> None:
    state, source = tmp_path / "state", tmp_path / "tree"
    await asyncio.to_thread(make_files, source)
    process = await asyncio.to_thread(importer, state, source)
    await asyncio.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    async with open_library(state) as again:
        assert list((state / "builds").iterdir()) == []
        assert [entry async for entry in again.store.list("leases/")] == []
        for layer in await again.list():  # it may have been finished: then it is whole
            await verify(again, layer)
            await again.remove(layer.digest)
        for _ in range(3):
            await garbage.collect(again.store, grace_s=0, wait_s=0)
        for prefix in ("blobs/", "indexes/", "images/", "layers/", "names/", "trash/"):
            assert [entry.key async for entry in again.store.list(prefix)] == []
        await import_layer(again, "x:1", str(source))


async def test_an_import_of_another_process_is_left_alone(tmp_path: Path) -> None:
    state, source = tmp_path / "state", tmp_path / "tree"
    await asyncio.to_thread(make_files, source)
    process = await asyncio.to_thread(importer, state, source)
    while process.poll() is None:
        async with open_library(state) as meanwhile:  # a daemon that starts
            await garbage.collect(meanwhile.store, grace_s=0, wait_s=0)
        await asyncio.sleep(0.01)
    assert process.returncode == 0
    async with open_library(state) as library:
        layer = await library.resolve("x:1")
        assert layer.manifest.content_bytes == 30_000_000
        await verify(library, layer)


async def test_two_processes_import_one_tree(tmp_path: Path) -> None:
    state, source = tmp_path / "state", tmp_path / "tree"
    await asyncio.to_thread(make_files, source)
    process = await asyncio.to_thread(importer, state, source)
    async with open_library(state) as library:
        ours = await import_layer(library, "y:1", str(source))
        assert await asyncio.to_thread(process.wait) == 0
        theirs = await library.resolve("x:1")
        assert theirs.manifest == ours.manifest
        await verify(library, ours)
        assert time.time() - theirs.created_at < 60
