"""Flat files of layers, read back; what the kernel makes of them is in system/test_flat_mounted."""

from __future__ import annotations

import errno
import os
import stat
import struct
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from dsecd.host import erofs, sparse
from dsecd.images import flat
from dsecd.images.erofs import encode
from dsecd.images.local import Local
from libdsec.errors import DSecError, Exhausted, Internal, NotFound, Unavailable, Unsupported
from tests.unit.erofs_reader import BLOCK, Reader
from tests.unit.flat_layers import make_layer, many_blobs, of_files, two_versions
from tests.unit.image_trees import Build, everything, trees

MIB = 1 << 20


def check(local: Local, path: Path) -> list[tuple[str, int, int]]:
    """Fail unless the flat file is the layer to every byte; return its device table."""
    whole = path.read_bytes()
    assert len(whole) % (2 * MIB) == 0
    superblock = erofs.inspect(path)  # the checksum, too
    image = whole[: superblock.size_bytes]
    reader, before = Reader(image), Reader(Path(local.image).read_bytes())
    assert not any(reader.unused())
    assert [device[:2] for device in reader.devices] == [device[:2] for device in before.devices]
    end, there, blobs = superblock.size_bytes, {}, {}
    for (name, blocks, address), device in zip(reader.devices, local.devices, strict=True):
        assert address * BLOCK >= end
        assert not whole[end : address * BLOCK].strip(b"\0")
        end = (address + blocks) * BLOCK
        there[name] = whole[address * BLOCK : end]
        blobs[name] = Path(device).read_bytes()
    assert len(whole) - end < 2 * MIB
    assert not whole[end:].strip(b"\0")
    assert reader.files.keys() == before.files.keys()
    for name, file in reader.files.items():
        if stat.S_ISREG(file.mode) and file.size < 1 << 30:
            assert reader.content(name, there) == before.content(name, blobs)
    return reader.devices


def patched(local: Local, number: int, field: int, value: int) -> Local:
    """Return the layer with another number in a slot: 64 is its length, 68 its address."""
    image = bytearray(Path(local.image).read_bytes())
    struct.pack_into("<I", image, 1024 + 128 * (1 + number) + field, value)
    struct.pack_into("<I", image, 1028, 0)
    struct.pack_into("<I", image, 1028, erofs.crc32c(image[1024:4096]))
    path = Path(local.image).with_suffix(".patched")
    path.write_bytes(image)
    return Local(local.digest, str(path), local.devices)


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def test_everything_is_in_one_file(tmp_path: Path) -> None:
    _, local = make_layer(tmp_path, everything)
    to = tmp_path / "flat"
    assert flat.flatten(local, to) == to.stat().st_size == flat.plan(local).size_bytes
    assert stat.S_IMODE(to.stat().st_mode) == 0o444
    check(local, to)
    assert not list(tmp_path.glob(".*"))


@settings(max_examples=40, suppress_health_check=list(HealthCheck))
@given(build=trees())
def test_any_layer_is_the_same_in_one_file(build: Build) -> None:
    with tempfile.TemporaryDirectory() as folder:
        _, local = make_layer(Path(folder), build)
        flat.flatten(local, Path(folder) / "flat")
        check(local, Path(folder) / "flat")


def test_a_layer_without_content_has_no_blobs(tmp_path: Path) -> None:
    _, local = make_layer(tmp_path, of_files())
    assert local.devices == ()
    assert flat.flatten(local, tmp_path / "flat") == 2 * MIB
    check(local, tmp_path / "flat")


def test_layers_that_share_a_blob_have_it_each(tmp_path: Path) -> None:
    (_, first), (_, second) = two_versions(tmp_path)
    assert first.devices[0] == second.devices[0]
    assert len(second.devices) == 2
    for number, local in enumerate((first, second)):
        flat.flatten(local, tmp_path / f"flat{number}")
        check(local, tmp_path / f"flat{number}")


def test_three_hundred_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a layer of ours has: those behind the 64th are never named by an address."""
    monkeypatch.setattr(encode, "MAX_BLOBS", 300)
    _, local = many_blobs(tmp_path, 300)
    assert len(local.devices) == 300
    flat.flatten(local, tmp_path / "flat")
    check(local, tmp_path / "flat")


def test_devices_without_an_address_get_one(tmp_path: Path) -> None:
    """Images of older versions have none, and no file that is named by one."""
    _, local = many_blobs(tmp_path, 3)
    with_addresses = flat.plan(local)
    for number in range(3):
        local = patched(local, number, 68, 0)
    assert flat.plan(local) == with_addresses
    flat.flatten(local, tmp_path / "flat")
    table = erofs.slots(tmp_path / "flat", erofs.inspect(tmp_path / "flat"))
    assert tuple(slot.address for slot in table) == with_addresses.addresses


def test_holes_stay_holes(tmp_path: Path) -> None:
    _, local = make_layer(tmp_path, of_files(os.urandom(8 * MIB), bytes(8 * MIB)))
    blob = Path(local.devices[0])
    with blob.open("r+b") as file:
        sparse.punch(file.fileno(), MIB, 6 * MIB)
    flat.flatten(local, tmp_path / "flat")
    check(local, tmp_path / "flat")
    assert taken(tmp_path / "flat") < 2 * MIB + 256 * 1024


def test_it_takes_no_more_of_the_disk_than_is_said(tmp_path: Path) -> None:
    _, local = make_layer(tmp_path, of_files(os.urandom(3 * MIB + 5)))
    flat.flatten(local, tmp_path / "flat")
    said = flat.plan(local).data_bytes
    assert said - 4096 <= taken(tmp_path / "flat") <= said + 64 * 1024


def test_where_the_kernel_cannot_copy_between_files_it_sends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, local = many_blobs(tmp_path, 3)

    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(sparse, "_PIECE", 5000)
    flat.flatten(local, tmp_path / "flat")
    check(local, tmp_path / "flat")


def test_it_replaces_what_was_there(tmp_path: Path) -> None:
    _, local = make_layer(tmp_path, of_files(b"new"))
    (tmp_path / "flat").write_bytes(b"cut short")
    flat.flatten(local, tmp_path / "flat")
    check(local, tmp_path / "flat")


def test_a_layer_too_large_for_one_device_is_refused(tmp_path: Path) -> None:
    _, local = many_blobs(tmp_path, 3)
    large = patched(local, 1, 64, 0xFFFFFFF0)
    with pytest.raises(Unsupported, match=r"too large for a virtual machine: \d{14} bytes"):
        flat.plan(large)


def test_devices_that_overlap_are_damage(tmp_path: Path) -> None:
    _, local = many_blobs(tmp_path, 3)
    address = flat.plan(local).addresses[2]
    with pytest.raises(Internal, match="device 3 lies over others"):
        flat.plan(patched(local, 2, 68, address - 1))


class _After(threading.Event):
    """Set after it was asked so many times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self._left = times

    def is_set(self) -> bool:
        self._left -= 1
        return self._left < 0


def test_stopped_it_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, local = make_layer(tmp_path, of_files(os.urandom(MIB)))
    monkeypatch.setattr(sparse, "_PIECE", 64 << 10)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(flat.Stopped):
        flat.flatten(local, tmp_path / "flat", _After(5))
    assert sorted(tmp_path.iterdir()) == before
    flat.flatten(local, tmp_path / "flat", threading.Event())


def _cut(local: Local) -> None:
    os.truncate(local.devices[0], 4096)


def _drop(local: Local) -> None:
    Path(local.devices[0]).unlink()


@pytest.mark.parametrize(
    ("harm", "error", "text"),
    [(_cut, Internal, "4096 bytes instead of 1048576"), (_drop, NotFound, "is gone; import")],
)
def test_a_damaged_blob_is_named(
    tmp_path: Path, harm: Callable[[Local], None], error: type[DSecError], text: str
) -> None:
    _, local = make_layer(tmp_path, of_files(os.urandom(MIB)))
    harm(local)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=f"{local.devices[0]} of layer {local.digest[:12]}.*{text}"):
        flat.flatten(local, tmp_path / "flat")
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("code", "served", "error", "text"),
    [
        (errno.ENOSPC, False, Exhausted, r"disk full while writing .*flat, which takes \d+ bytes"),
        (errno.EIO, False, Internal, "is damaged"),
        (errno.EIO, True, Unavailable, "cannot be fetched"),
    ],
)
def test_a_copy_that_fails_leaves_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    served: bool,
    error: type[DSecError],
    text: str,
) -> None:
    _, whole = make_layer(tmp_path, of_files(os.urandom(MIB)))
    local = Local(whole.digest, whole.image, whole.devices, served)
    copy = os.copy_file_range

    def failing(source: int, to: int, length: int, start: int, at: int) -> int:
        if start:
            raise OSError(code, os.strerror(code))
        return copy(source, to, min(length, 64 << 10), start, at)

    monkeypatch.setattr(os, "copy_file_range", failing)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=text):
        flat.flatten(local, tmp_path / "flat")
    assert sorted(tmp_path.iterdir()) == before


def test_the_devices_must_be_those_of_the_image(tmp_path: Path) -> None:
    _, local = make_layer(tmp_path, of_files(b"content"))
    with pytest.raises(Internal, match="needs 1 blob devices, 0 are given"):
        flat.plan(Local(local.digest, local.image))
