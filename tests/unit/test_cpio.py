"""Archives of the initramfs, read back by busybox and field by field."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.images import cpio
from dsecd.images.initramfs import initramfs
from libdsec.errors import InvalidArgument

BUSYBOX = "/bin/busybox"
NAMES = ("inode", "mode", "uid", "gid", "links", "time", "size", "major", "minor", "device_major",
         "device_minor", "name_size", "check")  # fmt: skip


def parsed(data: bytes) -> Iterator[tuple[str, dict[str, int], bytes]]:
    """Yield name, header and content of every entry, as buffer-format.rst has them."""
    at = 0
    while True:
        assert data[at : at + 6] == b"070701"
        numbers = (int(data[at + 6 + 8 * i : at + 14 + 8 * i], 16) for i in range(len(NAMES)))
        header = dict(zip(NAMES, numbers, strict=True))
        name = data[at + 110 : at + 110 + header["name_size"] - 1].decode()
        assert data[at + 110 + header["name_size"] - 1] == 0
        begin = at + (110 + header["name_size"] + 3) // 4 * 4
        if name == "TRAILER!!!":
            assert begin == len(data)
            return
        yield name, header, data[begin : begin + header["size"]]
        at = begin + (header["size"] + 3) // 4 * 4


def everything() -> bytes:
    return cpio.archive(
        (
            cpio.directory("dev", 0o711),
            cpio.character_device("dev/console", 5, 1),
            cpio.directory("bin"),
            cpio.file("bin/tool", b"#!/bin/sh\n", 0o4755),
            cpio.symlink("bin/link", "tool"),
            cpio.file("empty", b""),
        )
    )


def test_busybox_lists_what_was_written() -> None:
    done = subprocess.run(
        [BUSYBOX, "cpio", "-tv"], input=everything(), capture_output=True, check=True
    )
    # permissions and owner, size or device, date and hour, name
    rows = [line.split() for line in done.stdout.decode().splitlines()]
    assert [(row[0], row[-1]) for row in rows] == [
        ("drwx--x--x", "dev"),
        ("crw-------", "dev/console"),
        ("drwxr-xr-x", "bin"),
        ("-rwsr-xr-x", "bin/tool"),
        ("lrwxrwxrwx", "tool"),
        ("-rw-r--r--", "empty"),
    ]
    assert rows[4][-3:] == ["bin/link", "->", "tool"]


def test_busybox_unpacks_it(tmp_path: Path) -> None:
    data = cpio.archive(
        (
            cpio.directory("a"),
            cpio.directory("a/b", 0o700),
            cpio.file("a/b/file", b"content", 0o640),
            cpio.symlink("a/link", "b/file"),
        )
    )
    subprocess.run([BUSYBOX, "cpio", "-i"], input=data, cwd=tmp_path, check=True)
    assert (tmp_path / "a/link").read_bytes() == b"content"
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "a/b/file").stat().st_mode & 0o777 == 0o640


def test_headers_say_what_the_entries_are() -> None:
    found = {name: (header, content) for name, header, content in parsed(everything())}
    header, content = found["dev/console"]
    assert (header["mode"], header["device_major"], header["device_minor"]) == (0o20600, 5, 1)
    assert content == b""
    assert found["bin/link"][1] == b"tool"
    assert found["bin/tool"][0]["mode"] == 0o104755
    # one inode twice would be a hard link
    assert len({header["inode"] for header, _ in found.values()}) == len(found)
    assert {header["time"] for header, _ in found.values()} == {0}


@given(st.dictionaries(st.from_regex(r"[a-zäß._-]{3,40}", fullmatch=True), st.binary(max_size=40)))
def test_any_files_come_back(files: dict[str, bytes]) -> None:
    data = cpio.archive(cpio.file(name, content) for name, content in files.items())
    assert len(data) % 4 == 0
    assert {name: content for name, _, content in parsed(data)} == files


@pytest.mark.parametrize("name", ["", "/init", "a//b", "../x", "dev/", "a\0b", "."])
def test_names_that_mean_another_place_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="relative to the root"):
        cpio.archive([cpio.directory("a"), cpio.file(name, b"")])


@pytest.mark.parametrize("name", ["TRAILER!!!", "n" * 4096])
def test_names_that_the_format_cannot_hold_are_refused(name: str) -> None:
    with pytest.raises(InvalidArgument, match="no room"):
        cpio.archive([cpio.file(name, b"")])


def test_an_entry_before_its_directory_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="comes before its directory 'dev'"):
        cpio.archive([cpio.character_device("dev/null", 1, 3), cpio.directory("dev")])


def test_the_initramfs_holds_agent_shell_and_console() -> None:
    data = initramfs(b"agent", b"shell")
    assert data == initramfs(b"agent", b"shell")
    found = {name: (header["mode"], content) for name, header, content in parsed(data)}
    assert found["init"] == (0o100755, b"agent")
    assert found["shell"] == (0o100755, b"shell")
    assert found["dev/console"] == (0o20600, b"")
    assert {name for name, (mode, _) in found.items() if mode == 0o40755} == {"dev", "proc", "sys"}
