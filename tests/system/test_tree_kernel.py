"""The device tree: usable devices, made once, found again, and gone when removed."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.host import mountinfo, tree

pytestmark = [pytest.mark.root, pytest.mark.needs("root", "tmpfs")]


@pytest.fixture
def runtime(test_name: str) -> Iterator[Path]:
    path = Path("/run", test_name)
    path.mkdir()
    yield path
    tree.remove(path)
    path.rmdir()


def test_devices_work_and_links_point_inside(runtime: Path) -> None:
    dev = Path(tree.build(runtime).dev)
    with (dev / "urandom").open("rb") as file:
        assert file.read(4)
    (dev / "null").write_bytes(b"x")
    for name in ("null", "zero", "full", "random", "urandom", "tty"):
        mode = (dev / name).stat().st_mode
        assert stat.S_ISCHR(mode)
        assert stat.S_IMODE(mode) == 0o666
    assert (dev / "ptmx").readlink() == Path("pts/ptmx")
    assert (dev / "fd").readlink() == Path("/proc/self/fd")
    assert {p.name for p in dev.iterdir() if p.is_dir() and not p.is_symlink()} == {
        "pts", "shm", "mqueue",
    }  # fmt: skip


def test_devices_of_monitors_are_in_a_tree_of_their_own(runtime: Path) -> None:
    built = tree.build(runtime)
    assert built.dev_with(()) == built.dev
    path = built.dev_with(("kvm", "net/tun"))
    assert tree.build(runtime).dev_with(("kvm", "net/tun")) == path
    for name, number in (("kvm", (10, 232)), ("net/tun", (10, 200)), ("null", (1, 3))):
        found = Path(path, name).stat()
        assert (found.st_rdev, stat.S_IMODE(found.st_mode)) == (os.makedev(*number), 0o666)
    assert Path(path, "pts").is_dir()
    assert not Path(built.dev, "net").exists()
    assert not Path(built.dev, "kvm").exists()


def test_built_once_and_found_by_the_next_daemon(runtime: Path) -> None:
    first = tree.build(runtime)
    (runtime / "tree/cpu/marker").touch()
    assert tree.build(runtime) == first
    assert (runtime / "tree/cpu/marker").exists()
    mounts = [m for m in mountinfo.mounts() if m.point == str(runtime / "tree")]
    assert len(mounts) == 1
    assert not mounts[0].shared


def test_half_built_or_old_tree_is_replaced(runtime: Path) -> None:
    tree.build(runtime)
    (runtime / "tree/version").unlink()
    (runtime / "tree/dev/null").unlink()
    built = tree.build(runtime)
    assert (Path(built.dev) / "null").exists()
    mounts = [m for m in mountinfo.mounts() if m.point == str(runtime / "tree")]
    assert len(mounts) == 1


def test_cpu_counts_follow_the_limit(runtime: Path) -> None:
    """`nproc` and cpu counts showed the host, so builds started 64 jobs in a small sandbox."""
    built = tree.build(runtime)
    assert built.cpu_count(0.5) == 1
    assert built.cpu_count(1e6) == os.cpu_count()
    cpuinfo, sys = built.cpu_binds(0.3)
    assert Path(cpuinfo.source).read_text().count("processor\t") == 1
    script = (
        f"mount --bind {cpuinfo.source} /proc/cpuinfo && mount --bind {sys.source} /sys && "
        "getconf _NPROCESSORS_ONLN && getconf _NPROCESSORS_CONF && "
        "python3 -c 'import os; print(os.cpu_count())' && grep -c ^processor /proc/cpuinfo"
    )
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False
    )
    assert done.stdout.split() == ["1"] * 4, done.stderr
