"""Flat files of layers in the kernel: each shows what the layer with its devices shows."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from dsecd import fastpath
from dsecd.host import sparse, syscalls
from dsecd.host.ext4 import blank_ext4
from dsecd.host.volume import close_volume, open_volume
from dsecd.images import flat
from dsecd.images.chunks import ChunkWriter
from dsecd.images.erofs import encode
from dsecd.images.flat_cache import FlatLayers
from dsecd.images.local import Local
from dsecd.images.model import Node
from libdsec.errors import Exhausted
from tests.system.test_images_erofs_mounted import compare, xattrs
from tests.unit.flat_layers import make_layer, many_blobs, of_files, two_versions
from tests.unit.image_trees import Build, everything, trees

pytestmark = pytest.mark.root
FIELDS = (
    *("st_ino", "st_mode", "st_nlink", "st_uid", "st_gid", "st_rdev", "st_size", "st_blocks"),
    *("st_atime_ns", "st_mtime_ns", "st_ctime_ns"),
)


@contextlib.contextmanager
def mounted(image: Path, devices: tuple[str, ...] = ()) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(dir=image.parent) as point:
        fd = fastpath.mount_erofs(image, devices)
        try:
            fastpath.move_mount(fd, point)
        finally:
            os.close(fd)
        try:
            yield Path(point)
        finally:
            fastpath.umount(point)


def shown(top: Path) -> dict[str, tuple[object, ...]]:
    """Return what the kernel shows of each entry: every field of stat, attributes, content."""
    found: dict[str, tuple[object, ...]] = {}
    for folder, folders, files in os.walk(top):
        for name in [".", *folders, *files]:
            path = Path(folder) / name
            status = path.lstat()
            content: object = None
            if stat.S_ISREG(status.st_mode):
                content = hashlib.sha256(path.read_bytes()).digest()
            elif stat.S_ISLNK(status.st_mode):
                content = path.readlink()
            found[os.path.relpath(path, top)] = (
                *(getattr(status, field) for field in FIELDS),
                xattrs(os.fsencode(path)),
                content,
            )
    return found


def check(root: Node, local: Local) -> None:
    """Fail unless the flat file shows the tree, and just what the image with its devices shows."""
    to = Path(local.image).with_suffix(".flat")
    flat.flatten(local, to)
    with mounted(to) as top:
        compare(root, top)
        with mounted(Path(local.image), local.devices) as usual:
            assert shown(top) == shown(usual)


def test_everything_is_shown_as_it_was(tmp_path: Path) -> None:
    def build(sink: ChunkWriter) -> Node:
        root = everything(sink)
        del root.children[b"huge"]  # of 5 GiB: all is read here
        return root

    check(*make_layer(tmp_path, build))


def test_images_that_name_the_blob_of_every_chunk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(encode, "_FLAT_BYTES", 0)
    check(*many_blobs(tmp_path, 5))


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(build=trees())
def test_any_tree_is_shown_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, build: Build
) -> None:
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as folder:
        check(*make_layer(Path(folder), build))


def test_layers_that_share_a_blob(tmp_path: Path) -> None:
    for root, local in two_versions(tmp_path):
        check(root, local)


def test_three_hundred_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode, "MAX_BLOBS", 300)
    check(*many_blobs(tmp_path, 300))


def test_holes_in_blobs_are_zeros(tmp_path: Path) -> None:
    _, local = make_layer(tmp_path, of_files(b"x" * 4096, b"y" * (1 << 20), b"end"))
    with Path(local.devices[0]).open("r+b") as blob:
        sparse.punch(blob.fileno(), 0, 4096)
    flat.flatten(local, tmp_path / "flat")
    with mounted(tmp_path / "flat") as top:
        assert (top / "0").read_bytes() == bytes(4096)
        assert (top / "1").read_bytes() == b"y" * (1 << 20)
        assert (top / "2").read_bytes() == b"end"


async def test_a_disk_without_room_is_left_as_it_was(tmp_path: Path) -> None:
    """And one where the room is only seen to be missing while the copy is made."""
    _, local = make_layer(tmp_path, of_files(os.urandom(8 << 20)))
    small = tmp_path / "small"
    small.mkdir()
    syscalls.mount("tmpfs", str(small), "tmpfs", 0, "size=4m")
    try:
        layers = FlatLayers(small / "layers", reserve_bytes=0)
        layers.start()
        needed = flat.plan(local).data_bytes
        with pytest.raises(Exhausted, match=f"needs {needed} bytes as one file"):
            await layers.provide(local)
        with pytest.raises(Exhausted, match=f"disk full .* which takes {needed} bytes"):
            flat.flatten(local, small / "flat")
        assert [entry.name for entry in small.rglob("*")] == ["layers", "boot"]
    finally:
        fastpath.umount(small)


@pytest.mark.needs("loop_devices", "btrfs")
def test_a_file_system_that_shares_blocks_copies_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    volume = open_volume(tmp_path / "state", tmp_path / "run/volume", 1 << 30, ("btrfs",))
    try:
        folder = volume.directory
        root, local = make_layer(folder, of_files(os.urandom(64 << 20)))
        os.sync()
        before = volume.free_bytes()
        to = folder / "flat"
        flat.flatten(local, to)
        os.sync()
        assert before - volume.free_bytes() < 4 << 20
        with mounted(to) as top:
            compare(root, top)
    finally:
        close_volume(volume)


@pytest.mark.needs("loop_devices")
def test_a_blank_disk_in_use_grows_by_what_is_written(tmp_path: Path) -> None:
    disk, point = tmp_path / "disk", tmp_path / "point"
    point.mkdir()
    sparse.copy_sparse(blank_ext4(tmp_path, 1 << 30), disk)
    before = disk.stat().st_blocks * 512
    subprocess.run(["mount", "-o", "loop", str(disk), str(point)], check=True)
    try:
        assert {path.name for path in point.iterdir()} == {"u", "w", "spool"}
        (point / "u/file").write_bytes(b"x" * (1 << 20))
    finally:
        subprocess.run(["umount", str(point)], check=True)
    assert disk.stat().st_blocks * 512 - before < (1 << 20) + (256 << 10)
