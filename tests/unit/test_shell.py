"""The platform's shell: a sealed copy that runs by descriptor and loads no code of a sandbox."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from dsecd.host.shell import DEFAULT, open_shell
from libdsec.errors import Unsupported

needed = pytest.mark.skipif(not Path(DEFAULT).exists(), reason=f"{DEFAULT} is not installed")


@needed
def test_the_copy_runs_and_cannot_be_changed() -> None:
    fd = open_shell(DEFAULT)
    try:
        path = f"/proc/self/fd/{fd}"
        done = subprocess.run([path, "-p", "-c", "exit 7"], pass_fds=[fd], check=False)
        assert done.returncode == 7
        assert os.fstat(fd).st_mode & 0o777 == 0o555
        for change in (lambda: os.pwrite(fd, b"x", 0), lambda: os.ftruncate(fd, 0)):
            with pytest.raises(PermissionError):
                change()
    finally:
        os.close(fd)


@needed
def test_the_copy_names_no_directory_of_modules() -> None:
    fd = open_shell(DEFAULT)
    try:
        copy, original = os.pread(fd, 1 << 27, 0), Path(DEFAULT).read_bytes()
    finally:
        os.close(fd)
    assert len(copy) == len(original)
    for path in (b"/etc/nsswitch.conf", b"/gconv/", b"/gconv\0"):
        assert path in original
        assert path not in copy


@pytest.mark.parametrize("content", [b"", b"#!/bin/sh\n", b"\x7fELF\x01" + bytes(100)])
def test_what_is_no_static_program_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "shell").write_bytes(content)
    with pytest.raises(Unsupported, match="not statically linked"):
        open_shell(str(tmp_path / "shell"))


def test_a_program_with_a_loader_and_none_at_all_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match="not statically linked"):
        open_shell("/bin/cat")
    with pytest.raises(Unsupported, match="No such file"):
        open_shell(str(tmp_path / "absent"))
