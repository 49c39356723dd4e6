"""What needs no mount: the mount table's format and the superblock's checksum."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from dsecd.host import erofs, mountinfo
from dsecd.host.layers import fit_for_images
from dsecd.images.chunks import Placement
from dsecd.images.erofs.layout import build_image
from dsecd.images.model import directory
from libdsec.errors import Internal, NotFound, Unsupported

TABLE = r"""22 27 0:20 / /proc rw,relatime shared:5 - proc proc rw
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 27 0:40 /sub /mnt/a\040b\134c rw master:1 - btrfs /dev/loop\0400 rw,subvol=/sub
32 31 0:41 / /mnt/a\040b\134c/deep ro - overlay overlay ro,lowerdir=/x
broken line
"""


def test_mountinfo_lines_are_taken_apart() -> None:
    proc, root, odd, deep = mountinfo.parse(TABLE)
    assert (proc.shared, root.shared, odd.shared) == (True, False, False)
    assert odd.point == "/mnt/a b\\c"
    assert odd.source == "/dev/loop 0"
    assert odd.root == "/sub"
    assert "subvol=/sub" in odd.options
    assert deep.type == "overlay"


def test_the_innermost_mount_holds_a_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mountinfo, "mounts", lambda: list(mountinfo.parse(TABLE)))
    assert mountinfo.holding("/mnt/a b\\c/deep/er").type == "overlay"
    assert mountinfo.holding("/mnt/a b\\c/deeper").type == "btrfs"
    assert mountinfo.holding("/procx").type == "ext4"
    assert mountinfo.holding("/").type == "ext4"


def test_a_state_directory_on_overlayfs_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mountinfo, "mounts", lambda: list(mountinfo.parse(TABLE)))
    fit_for_images(Path("/var/lib/dsec"))
    with pytest.raises(Unsupported, match=r"lies on overlay.*paths\.state"):
        fit_for_images(Path("/mnt/a b\\c/deep/state"))


def test_crc32c_has_its_published_value() -> None:
    assert erofs.crc32c(b"123456789") ^ 0xFFFFFFFF == 0xE3069283  # RFC 3720, appendix B.4


@pytest.fixture
def image(tmp_path: Path) -> Path:
    root = directory()
    root.children = {b"%0100d" % n: directory() for n in range(100)}
    made = tmp_path / "image"
    made.write_bytes(build_image(root, Placement([], {})).data)
    return made


def test_a_whole_image_says_its_size(image: Path) -> None:
    assert erofs.inspect(image) == erofs.Superblock(image.stat().st_size, 0)


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (lambda whole: whole[:2000], "truncated"),
        (lambda whole: whole[:1100], "only 1100 bytes"),
        (lambda whole: whole[:-4096], "truncated"),
        (lambda whole: whole[:1030] + b"\xff" + whole[1031:], "checksum"),
        (lambda whole: bytes(len(whole)), "no EROFS image"),
    ],
)
def test_a_damaged_image_is_named(image: Path, damage: Callable[[bytes], bytes], why: str) -> None:
    image.write_bytes(damage(image.read_bytes()))
    with pytest.raises(Internal, match=f"{image} is damaged: .*{why}.*import it again"):
        erofs.inspect(image)


def test_a_missing_image_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="image is gone; import the layer again"):
        erofs.inspect(tmp_path / "image")
