"""Empty disks for virtual machines; a guest's view of one is in the tests of the guest."""

from __future__ import annotations

import os
import subprocess
import threading
from pathlib import Path

import pytest

from dsecd.host import sparse
from dsecd.host.ext4 import blank_ext4
from libdsec.errors import InvalidArgument, Unsupported

GIB = 1 << 30


def taken(path: Path) -> int:
    return path.stat().st_blocks * 512


def asked(path: Path, question: str) -> str:
    command = ["debugfs", "-R", question, str(path)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def test_it_is_whole_and_has_the_directories_of_an_upper(tmp_path: Path) -> None:
    path = blank_ext4(tmp_path, GIB)
    assert path.stat().st_size == GIB
    assert taken(path) <= 160 << 10
    checked = subprocess.run(["e2fsck", "-f", "-n", str(path)], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    entries = [line.split() for line in asked(path, "ls -l /").splitlines() if line.strip()]
    assert {(entry[-1], entry[1], entry[3], entry[4]) for entry in entries} == {
        (".", "40700", "0", "0"),
        ("..", "40700", "0", "0"),
        ("u", "40755", "0", "0"),
        ("w", "40755", "0", "0"),
        ("spool", "40700", "0", "0"),
    }


def test_nothing_is_left_for_the_guest_to_initialise(tmp_path: Path) -> None:
    command = ["dumpe2fs", str(blank_ext4(tmp_path, GIB))]
    told = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "has_journal" not in told
    assert "Reserved block count:     0\n" in told
    groups = [line for line in told.splitlines() if line.startswith("Group ") and "Blocks" in line]
    assert len(groups) == 8
    assert all("ITABLE_ZEROED" in group for group in groups)


def test_a_large_one_is_small_too(tmp_path: Path) -> None:
    path = blank_ext4(tmp_path, 64 * GIB)
    assert path.stat().st_size == 64 * GIB
    assert taken(path) <= 512 << 10


def test_it_is_made_once_and_the_same_everywhere(tmp_path: Path) -> None:
    first = blank_ext4(tmp_path / "one", 64 << 20)
    inode = first.stat().st_ino
    assert blank_ext4(tmp_path / "one", 64 << 20) == first
    assert first.stat().st_ino == inode
    assert blank_ext4(tmp_path / "two", 64 << 20).read_bytes() == first.read_bytes()
    assert [path.name for path in first.parent.iterdir()] == [first.name]


def test_several_threads_may_make_it(tmp_path: Path) -> None:
    threads = [threading.Thread(target=blank_ext4, args=(tmp_path, 16 << 20)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [path.name for path in tmp_path.iterdir()] == [f"{16 << 20}.ext4"]


@pytest.mark.parametrize("size", [0, (16 << 20) - 4096, GIB + 1, 17 << 40])
def test_other_sizes_are_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(InvalidArgument, match="multiple of 4096, from 16 MiB to 16 TiB"):
        blank_ext4(tmp_path, size)


def test_without_its_tools_it_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match=r"mkfs\.ext4 is not installed \(package e2fsprogs\)"):
        blank_ext4(tmp_path, 16 << 20)
    monkeypatch.undo()
    for name, said in {"mkfs.ext4": "Bad option(s)", "debugfs": "no such inode"}.items():
        tools = tmp_path / name.replace(".", "-")
        tools.mkdir()
        for tool in ("mkfs.ext4", "debugfs"):
            fails = f"echo '{said}' >&2; exit {int(tool == 'mkfs.ext4')}" if tool == name else ":"
            (tools / tool).write_text(f"#!/bin/sh\n{fails}\n")
            (tools / tool).chmod(0o755)
        with monkeypatch.context() as patch:
            patch.setenv("PATH", f"{tools}:/bin")
            with pytest.raises(Unsupported, match=rf"{name} failed: {said[:3]}.*1\.47"):
                blank_ext4(tmp_path / "disks", 16 << 20)
    assert not list((tmp_path / "disks").iterdir())


def test_copies_are_equal_and_as_small(tmp_path: Path) -> None:
    source = blank_ext4(tmp_path, 64 << 20)
    sparse.copy_sparse(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert taken(tmp_path / "copy") <= taken(source)
    with pytest.raises(FileExistsError):
        sparse.copy_sparse(source, tmp_path / "copy")
    assert (tmp_path / "copy").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("across", [False, True])
def test_copies_have_the_data_between_holes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, across: bool
) -> None:
    source = tmp_path / "source"
    with source.open("wb") as file:
        for at in (0, 1 << 20, (3 << 20) - 17):
            file.seek(at)
            file.write(os.urandom(10_000))
        file.truncate(8 << 20)
    if across:
        refused = OSError(18, "Invalid cross-device link")

        def refuse(*_: object) -> int:
            raise refused

        monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(sparse, "_PIECE", 4097)
    sparse.copy_sparse(source, tmp_path / "copy")
    assert (tmp_path / "copy").read_bytes() == source.read_bytes()
    assert taken(tmp_path / "copy") <= taken(source)


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = blank_ext4(tmp_path, 16 << 20)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space"):
        sparse.copy_sparse(source, tmp_path / "copy")
    assert not (tmp_path / "copy").exists()
