"""Swap of the daemon's own on this kernel: made, adopted, removed; nobody else's is touched."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dsecd.host import swap, syscalls, zram
from dsecd.host.kernelfs import KernelFiles
from dsecd.host.swap import Swap, Wanted
from libdsec.errors import Unsupported

FILES = KernelFiles()
SIZE = 16 << 20

pytestmark = [pytest.mark.vm, pytest.mark.root]
needs_zram = pytest.mark.skipif(bool(zram.missing(FILES)), reason=zram.missing(FILES) or "there")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory on a disk: tmpfs and overlayfs take no swap files."""
    path = Path("/var/tmp") / f"dsec-test-swap-{os.getpid()}-{uuid.uuid4().hex[:6]}"
    path.mkdir()
    before = zram.numbers(), swap.active(FILES).keys()
    yield path
    Swap(Wanted(kind="off"), path / "record", path).close(leave_nothing=True)
    left = sorted(entry.name for entry in path.iterdir())
    path.rmdir() if not left else None
    assert not left
    assert (zram.numbers(), swap.active(FILES).keys()) == before


def make(place: Path, kind: swap.Kind, algorithm: str = "") -> Swap:
    return Swap(Wanted(kind=kind, size_bytes=SIZE, algorithm=algorithm), place / "record", place)


@needs_zram
def test_a_zram_device_is_made_and_removed(place: Path) -> None:
    made = make(place, "zram")
    made.start()
    assert made.path in swap.active(FILES)
    assert swap.active(FILES)[made.path] == 0
    made.close(leave_nothing=True)
    assert made.path == ""


@needs_zram
def test_a_later_daemon_takes_it_over(place: Path) -> None:
    """After kill -9 nothing but the record tells whose it is."""
    first = make(place, "auto" if not swap.active(FILES) else "zram")
    first.start()
    path = first.path
    first.close(leave_nothing=False)  # sandboxes live on
    assert path in swap.active(FILES)
    second = make(place, "zram")
    second.start()
    assert second.path == path
    assert list(swap.active(FILES)).count(path) == 1
    second.close(leave_nothing=True)
    assert path not in swap.active(FILES)


@needs_zram
def test_a_killed_daemon_may_have_got_no_further_than_the_header(place: Path) -> None:
    first = make(place, "zram")
    first.start()
    syscalls.call("swapoff", os.fsencode(first.path))
    second = make(place, "zram")
    second.start()
    assert second.path == first.path
    assert second.path in swap.active(FILES)
    second.close(leave_nothing=True)


@needs_zram
def test_a_device_of_somebody_else_is_never_touched(place: Path) -> None:
    """One with a swap space that has another UUID, as after a reboot that left the record."""
    number = zram.add(FILES)
    try:
        zram.configure(FILES, number, SIZE, "")
        other = uuid.uuid4()
        Path(zram.device(number)).write_bytes(swap.header(SIZE, other.bytes))
        record = swap.Record(str(uuid.uuid4()), "zram")
        (place / "record").write_bytes(msgspec.json.encode(record))
        made = make(place, "off")
        made.start()
        assert made.path == ""
        assert swap.identity(zram.device(number)) == str(other)
    finally:
        zram.remove(FILES, number)


@needs_zram
def test_an_unknown_algorithm_is_refused_and_leaves_nothing(place: Path) -> None:
    with pytest.raises(Unsupported, match="swap_algorithm"):
        make(place, "zram", "none-such").start()


def test_a_file_is_made_and_removed(place: Path) -> None:
    made = make(place, "file")
    made.start()
    assert str(place / "swap") in swap.active(FILES)
    assert (place / "swap").stat().st_mode & 0o777 == 0o600
    made.close(leave_nothing=True)
    assert not (place / "swap").exists()


def test_off_makes_nothing(place: Path) -> None:
    made = make(place, "off")
    made.start()
    assert made.path == ""
    assert "off" in made.remark
