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

PYTHON = Path("/usr/bin/python3")
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
        shutil.copy2(Path(found).resolve(), root / "usr/bin" / Path(name).name)
        for library in _libraries(found):
            _copy_library(root, library)
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/sh\n")
    (root / "etc/group").write_text("root:x:0:\n")
    (root / "etc/os-release").write_text("ID=dsec-bench\n")  # systemd-nspawn asks for it


def _copy_library(root: Path, library: Path) -> None:
    # /lib, /lib64 and /usr/lib are one directory in this root
    inner = [part for part in library.parts[1:] if part not in ("usr", "lib", "lib64")]
    target = root.joinpath("usr/lib", *inner)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(library.resolve(), target)


@contextmanager
def small_root(python: bool = False) -> Iterator[Path]:
    """Yield a directory with a few of the host's own programs; it goes with the context.

    With `python` it has the host's, compiled, with the whole standard library, as `PYTHON`.
    """
    with TemporaryDirectory(prefix=own_group("-root-"), dir=TEMPORARY) as name:
        root = Path(name) / "root"
        root.mkdir()
        _fill(root, (*PROGRAMS, str(PYTHON)) if python else PROGRAMS)
        if python:
            _add_library(root)
        yield root


def _add_library(root: Path) -> None:
    """Copy Python's standard library, what it loads, and compile it."""
    library = Path(_asked("import sysconfig; print(sysconfig.get_path('stdlib'))"))
    target = root / library.relative_to("/")
    left_out = shutil.ignore_patterns("dist-packages", "site-packages", "test", "__pycache__")
    shutil.copytree(library, target, symlinks=True, ignore=left_out)
    for module in (library / "lib-dynload").glob("*.so"):
        for needed in _libraries(str(module)):
            _copy_library(root, needed)
    # a file date in the layer is not the host's: what is compiled is not compared with it
    options = ["-q", "-s", str(root), "--invalidation-mode", "unchecked-hash", str(target)]
    subprocess.run([PYTHON, "-m", "compileall", *options], check=True, capture_output=True)


def _asked(program: str) -> str:
    done = subprocess.run([PYTHON, "-I", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.strip()
