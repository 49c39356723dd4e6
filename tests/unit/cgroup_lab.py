"""A recording twin of the kernel's cgroup files, and drivers over it."""

from __future__ import annotations

import errno
import math
import os
from pathlib import Path

from dsecd.host.cgroup import HybridDriver, SandboxCgroup, Slot, UnifiedDriver, detect
from dsecd.host.kernelfs import KernelFiles

V2_FILES = {
    "cgroup.controllers": "", "cgroup.procs": "", "cgroup.threads": "",
    "cgroup.subtree_control": "",
    "cgroup.kill": "", "cgroup.freeze": "0\n", "cgroup.events": "populated 0\nfrozen 0\n",
    "cpu.stat": "usage_usec 2500000\nuser_usec 1\n",
}  # fmt: skip
V2_CONTROLLED = {
    "memory.max": "max\n", "memory.swap.max": "max\n", "memory.current": "5000\n",
    "memory.stat": "anon 1000\nfile 3000\nshmem 500\n", "memory.events": "oom 1\noom_kill 2\n",
    "cpu.max": "max 100000\n", "cpu.max.burst": "0\n", "cpu.weight": "100\n", "cpu.idle": "0\n",
    "pids.max": "max\n", "pids.current": "4\n",
}  # fmt: skip
V1_FILES = {
    "memory": {
        "cgroup.procs": "", "memory.limit_in_bytes": "-1\n", "memory.memsw.limit_in_bytes": "-1\n",
        "memory.usage_in_bytes": "0\n", "memory.max_usage_in_bytes": "0\n",
        "memory.kmem.usage_in_bytes": "0\n",
        "memory.stat": "cache 0\nrss 0\nshmem 0\n", "memory.force_empty": "",
        "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0\n",
    },
    "cpu": {
        "cgroup.procs": "", "cpu.cfs_quota_us": "-1\n", "cpu.cfs_burst_us": "0\n",
        "cpu.shares": "1024\n", "cpu.idle": "0\n",
    },
    "pids": {"cgroup.procs": "", "pids.max": "max\n", "pids.current": "0\n"},
}  # fmt: skip


class TwinFiles(KernelFiles):
    """Directories on disk that fill themselves as cgroupfs does; writes are also recorded."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root = root
        self.writes: list[tuple[str, str]] = []
        self.owners: dict[str, int] = {}
        self.tags: dict[str, str] = {}
        self.fail: dict[str, int] = {}  # last component of a written path: errno
        v2 = root if kind == "v2" else root / "unified"
        self._v2 = v2
        if kind == "hybrid":
            for controller in V1_FILES:
                self._populate(root / controller)
        self._populate(v2)
        (v2 / "cgroup.controllers").write_text("cpu memory pids\n" if kind == "v2" else "\n")
        self.kind = kind

    def _populate(self, path: Path) -> None:
        path.mkdir(parents=True, exist_ok=True)
        files = dict(V2_FILES)
        if path.is_relative_to(self._v2) and not any(
            path.is_relative_to(self.root / c) for c in V1_FILES
        ):
            files |= V2_CONTROLLED if self._v2 == self.root else {}
        else:
            files = V1_FILES[path.relative_to(self.root).parts[0]]
        for name, text in files.items():
            (path / name).write_text(text)

    def mkdir(self, path: str) -> None:
        super().mkdir(path)
        self._populate(Path(path))

    def rmdir(self, path: str) -> None:
        directory = Path(path)
        if (directory / "cgroup.procs").read_text().strip():
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        if any(entry.is_dir() for entry in directory.iterdir()):
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY), path)
        for entry in directory.iterdir():
            entry.unlink()
        directory.rmdir()

    def write(self, path: str, value: str) -> None:
        if code := self.fail.get(Path(path).name):
            raise OSError(code, os.strerror(code), path)
        if path.endswith("limit_in_bytes"):
            self._check_limits(Path(path), value)
        self.writes.append((str(Path(path).relative_to(self.root)), value))
        Path(path).write_text(value)
        if path.endswith("cgroup.freeze"):
            Path(path).with_name("cgroup.events").write_text(f"populated 1\nfrozen {value}\n")

    def _check_limits(self, path: Path, value: str) -> None:
        """Refuse a limit of memory above that of memory and swap (mem_cgroup_resize_max)."""
        names = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        now = {name: path.with_name(name).read_text() for name in names} | {path.name: value}
        memory, both = (float(now[name]) if int(now[name]) >= 0 else math.inf for name in names)
        if memory > both:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))

    def chown(self, path: str, uid: int) -> None:
        self.owners[path] = uid

    def tag(self, path: str, value: str) -> None:
        self.tags[path] = value

    def tagged(self, path: str) -> str:
        return self.tags.get(path, "")


def detected(files: TwinFiles, slots: int = 2) -> UnifiedDriver | HybridDriver:
    driver = detect(str(files.root), "dsec-test", slots, files)
    assert isinstance(driver, UnifiedDriver | HybridDriver)
    return driver


def placed(files: TwinFiles) -> tuple[HybridDriver, Slot, SandboxCgroup]:
    """Return a driver that was started, and a sandbox's slot and directory of it."""
    driver = detected(files)
    assert isinstance(driver, HybridDriver)
    driver.start()
    slot = driver.slots.acquire()
    cgroup = driver.make("a", 1)
    cgroup.close()
    return driver, slot, cgroup


def read(directory: str, *names: str) -> list[str]:
    return [Path(directory, name).read_text().strip() for name in names]
