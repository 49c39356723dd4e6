"""The template that every sandbox's /dev and CPU files are cloned from: `<runtime>/tree`.

It is a small tmpfs of its own, because /run is often mounted nodev and a device node cloned from
there would not open. It is made once per host and outlives the daemon; sandboxes hold clones of
its directories, so it may even be replaced while they run.

    dev/            null zero full random urandom tty, links, empty pts/ shm/ mqueue/
    dev+<names>/    the same with nodes that only the monitors of virtual machines get
    cpu/<n>/        cpuinfo and sys/ as a machine with n CPUs shows them

Affinity alone does not make software count right: sysconf(3) reads /sys/devices/system/cpu/online
and then /proc/stat before it asks for the affinity, and many programs parse /proc/cpuinfo.
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dsecd.host import mountinfo, syscalls
from dsecd.host.plan import Bind
from libdsec.errors import Unsupported

_VERSION = "1"  # a tree of another version is replaced
_MS_PRIVATE = 1 << 18
_DEVICES = {
    "null": (1, 3), "zero": (1, 5), "full": (1, 7), "random": (1, 8), "urandom": (1, 9),
    "tty": (5, 0),
}  # fmt: skip
_EXTRA = {"kvm": (10, 232), "net/tun": (10, 200)}
_LINKS = {
    "fd": "/proc/self/fd",
    "stdin": "/proc/self/fd/0",
    "stdout": "/proc/self/fd/1",
    "stderr": "/proc/self/fd/2",
    "ptmx": "pts/ptmx",
}
_DIRECTORIES = ("pts", "shm", "mqueue")


@dataclass(frozen=True)
class Tree:
    """A built tree. All paths are the host's."""

    path: Path
    host_cpus: int

    @property
    def dev(self) -> str:
        """`ContainerPlan.dev_tree`."""
        return str(self.path / "dev")

    def dev_with(self, devices: tuple[str, ...]) -> str:
        """Return a /dev that has `devices` (of `_EXTRA`), too; it is made at the first use."""
        if not devices:
            return self.dev
        path = self.path / "+".join(["dev", *(name.replace("/", "-") for name in devices)])
        if not path.exists():
            new = path.with_name(f"{path.name}.new")
            _make_dev(new, _DEVICES | {name: _EXTRA[name] for name in devices})
            new.rename(path)
        return str(path)

    def cpu_count(self, cpu_cores: float) -> int:
        """Return the whole number of CPUs that a limit of `cpu_cores` shows."""
        return max(1, min(self.host_cpus, math.ceil(cpu_cores)))

    def cpu_binds(self, cpu_cores: float) -> tuple[Bind, ...]:
        """Return what shows that many CPUs: over /proc/cpuinfo and /sys, both read-only.

        The files are made at the first use of a count. /sys inside is this small tree only: the
        host's sysfs is not in a sandbox.
        """
        count = self.cpu_count(cpu_cores)
        view = self.path / "cpu" / str(count)
        if not (view / "cpuinfo").exists():
            _make_view(view, count, Path("/proc/cpuinfo").read_text())
        return (
            Bind(str(view / "cpuinfo"), "/proc/cpuinfo"),
            Bind(str(view / "sys"), "/sys"),
        )


def build(runtime: str | Path) -> Tree:
    """Return the tree below `runtime`, making what is missing. Raises `Unsupported`.

    A second daemon start finds it mounted and leaves it as it is.
    """
    path = Path(runtime) / "tree"
    path.mkdir(parents=True, exist_ok=True)
    tree = Tree(path, os.cpu_count() or 1)
    if mountinfo.at(path) is not None:
        if _complete(path):
            return tree
        syscalls.umount(str(path))
    try:
        flags = syscalls.MS_NOSUID | syscalls.MS_NOEXEC
        syscalls.mount("dsec-tree", str(path), "tmpfs", flags, "mode=755,size=16m")
        syscalls.mount("", str(path), "", _MS_PRIVATE)
        _fill(path)
    except OSError as error:
        remove(runtime)
        raise Unsupported(
            f"cannot build the device tree {path}: {error.strerror}", reason=str(error)
        ) from error
    return tree


def remove(runtime: str | Path) -> None:
    """Unmount the tree and remove its directory; sandboxes keep their clones."""
    path = Path(runtime) / "tree"
    while mountinfo.at(path) is not None:
        syscalls.umount(str(path))
    if path.is_dir():
        path.rmdir()


def _complete(path: Path) -> bool:
    """Return whether the mounted tree is whole and of this version; the mark is written last."""
    try:
        return (path / "version").read_text() == _VERSION
    except OSError:
        return False


def _fill(path: Path) -> None:
    _make_dev(path / "dev", _DEVICES)
    _directory(path / "cpu")
    _file(path / "version", _VERSION)


def _make_dev(dev: Path, devices: Mapping[str, tuple[int, int]]) -> None:
    _directory(dev)
    for name, (major, minor) in devices.items():
        node = dev / name
        _directory(node.parent)
        node.unlink(missing_ok=True)  # of a daemon that was killed half way
        os.mknod(node, 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        node.chmod(0o666)  # mknod obeys the umask
    for name, target in _LINKS.items():
        (dev / name).unlink(missing_ok=True)
        (dev / name).symlink_to(target)
    for name in _DIRECTORIES:
        _directory(dev / name)


def _directory(path: Path, mode: int = 0o755) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    return path


def _file(path: Path, text: str, mode: int = 0o444) -> None:
    path.write_text(text)
    path.chmod(mode)


def _make_view(view: Path, count: int, host_cpuinfo: str) -> None:
    """Write the files of a machine with `count` CPUs; cpuinfo comes last and marks it done."""
    last = count - 1
    every = f"0-{last}" if last else "0"
    cpus = _directory(view / "sys/devices/system/cpu")
    for name, text in {
        "online": every, "possible": every, "present": every, "offline": "",
        "kernel_max": str(last),
    }.items():  # fmt: skip
        _file(cpus / name, f"{text}\n")
    for cpu in range(count):
        topology = _directory(cpus / f"cpu{cpu}/topology")
        for name, text in {
            "core_id": str(cpu), "physical_package_id": "0", "core_cpus_list": str(cpu),
            "thread_siblings_list": str(cpu), "package_cpus_list": every,
            "core_siblings_list": every,
        }.items():  # fmt: skip
            _file(topology / name, f"{text}\n")
    nodes = _directory(view / "sys/devices/system/node")
    for name in ("online", "possible", "has_cpu", "has_memory"):
        _file(nodes / name, "0\n")
    _file(_directory(nodes / "node0") / "cpulist", f"{every}\n")
    for name in ("fs/cgroup", "class/net", "kernel", "block", "bus"):
        _directory(view / "sys" / name)
    _file(view / "cpuinfo.new", cpuinfo(host_cpuinfo, count))
    (view / "cpuinfo.new").rename(view / "cpuinfo")


def cpuinfo(host: str, count: int) -> str:
    """Return the host's /proc/cpuinfo cut to `count` processors, numbered from 0."""
    blocks = [b for b in host.split("\n\n") if b.lstrip().startswith("processor")]
    chosen = []
    for number, block in enumerate(blocks[:count]):
        for key, value in {
            "processor": number, "core id": number, "apicid": number, "initial apicid": number,
            "siblings": count, "cpu cores": count, "physical id": 0,
        }.items():  # fmt: skip
            block = re.sub(rf"(?m)^({key}\s*:).*$", rf"\g<1> {value}", block)
        chosen.append(block.strip("\n"))
    return "".join(f"{block}\n\n" for block in chosen)
