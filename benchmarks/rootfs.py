"""A root file system of the host's own programs, where no base layer is at hand."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dsec_bench.cgroups import own_group
from dsec_bench.leftovers import TEMPORARY

PROGRAMS = ("true", "sh", "cat", "sleep")
DIRECTORIES = ("proc", "dev", "sys", "tmp", "run", "etc", "root", "usr/bin", "usr/lib", "var/tmp")


class RootfsError(Exception):
    """No root can be had; the message says what to do."""


def _libraries(program: str) -> Iterator[Path]:
    """Yield what the dynamic loader maps for `program`, the loader included (ldd(1))."""
    done = subprocess.run(["ldd", program], capture_output=True, text=True)
    for word in done.stdout.split():
        if word.startswith("/"):
            yield Path(word)


def _fill(root: Path, programs: Sequence[str]) -> None:
    for name in DIRECTORIES:
        (root / name).mkdir(parents=True, exist_ok=True)
    (root / "bin").symlink_to("usr/bin")
    for name in ("lib", "lib64"):
        (root / name).symlink_to("usr/lib")
    for name in programs:
        found = shutil.which(name)
        if found is None:
            raise RootfsError(f"the host has no {name}; give --rootfs")
        shutil.copy2(Path(found).resolve(), root / "usr/bin" / name)
        for library in _libraries(found):
            # /lib, /lib64 and /usr/lib are one directory in this root
            inner = [part for part in library.parts[1:] if part not in ("usr", "lib", "lib64")]
            target = root.joinpath("usr/lib", *inner)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(library.resolve(), target)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/os-release").write_text("ID=dsec-bench\n")  # systemd-nspawn asks for it


@contextmanager
def small_root() -> Iterator[Path]:
    """Yield a directory with a few of the host's own programs; it goes with the context."""
    with TemporaryDirectory(prefix=own_group("-root-"), dir=TEMPORARY) as name:
        root = Path(name) / "root"
        root.mkdir()
        _fill(root, PROGRAMS)
        yield root
