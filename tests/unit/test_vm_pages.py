"""Memory that stands copy-on-write on a file, told apart and copied: of this process."""

from __future__ import annotations

import mmap
import os
from pathlib import Path

import pytest

from dsecd.host.vm_pages import PAGE, own_bytes, take_pages
from libdsec.errors import Unavailable

PAGES = 64
# /proc/PID/map_files is for CAP_CHECKPOINT_RESTORE
root = pytest.mark.root


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A file with data, a hole, and data."""
    path = tmp_path / "base"
    with path.open("wb") as file:
        file.write(b"a" * PAGE * 4)
        file.truncate(PAGES * PAGE)
        file.seek((PAGES - 1) * PAGE)
        file.write(b"z" * PAGE)
    return path


def mapped(path: Path) -> mmap.mmap:
    with path.open("rb") as file:
        return mmap.mmap(
            file.fileno(), PAGES * PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
        )


@root
def test_only_pages_that_were_written_are_its_own(base: Path) -> None:
    with mapped(base) as memory:
        assert memory[: PAGES * PAGE].count(b"a") == 4 * PAGE  # read: in memory, and the file's
        assert own_bytes(os.getpid(), base) == 0
        for page in (1, 2, 40):
            memory[page * PAGE] = ord("m")
        assert own_bytes(os.getpid(), base) == 3 * PAGE


@root
def test_a_copy_is_what_the_process_sees(base: Path, tmp_path: Path) -> None:
    before = base.read_bytes()
    with mapped(base) as memory:
        memory[PAGE : PAGE + 4] = b"mine"
        memory[40 * PAGE : 41 * PAGE] = b"m" * PAGE
        memory[0] = 0
        take_pages(os.getpid(), base, tmp_path / "copy")
        copy = tmp_path / "copy"
        assert copy.read_bytes() == memory[:]
        assert copy.stat().st_blocks * 512 < PAGES * PAGE // 2, "holes stay"
    assert base.read_bytes() == before


def test_one_that_has_no_memory_there_is_an_error(base: Path, tmp_path: Path) -> None:
    with pytest.raises(Unavailable):
        own_bytes(os.getpid(), base)
    with pytest.raises(Unavailable):
        take_pages(os.getpid(), base, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
