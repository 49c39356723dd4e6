"""Trials of limits and reclaim: control groups, pressure, DAMON, swap."""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dsecd.host import procfs, syscalls
from dsecd.host.cgroup import SandboxCgroup, TreeDriver, detect
from dsecd.host.kernelfs import fields
from dsecd.host.probe import Trial
from libdsec.errors import Unsupported

_CLONE_INTO_CGROUP = 0x200000000
_WAIT_S = 5.0


@contextmanager
def _group() -> Iterator[tuple[TreeDriver, SandboxCgroup]]:
    """A cgroup of our own for one trial, gone afterwards."""
    driver = detect(name=f"dsec-probe-{os.getpid()}", slots=0)
    cgroup = driver.make("trial", 0)
    try:
        yield driver, cgroup
    finally:
        cgroup.close()
        driver.files.rmdir(cgroup.path)
        driver.discard()


@contextmanager
def _member(cgroup: SandboxCgroup) -> Iterator[int]:
    """The pid of a sleeping child cloned straight into `cgroup`; killed and reaped afterwards."""
    pid = clone_into(cgroup.fd)
    if pid == 0:
        try:
            signal.pause()
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def clone_into(fd: int) -> int:
    """fork(2), but the child starts in the cgroup `fd` (clone3, CLONE_INTO_CGROUP)."""
    args = struct.pack("=11Q", _CLONE_INTO_CGROUP, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, 0, 0, fd)
    return syscalls.call("clone3", args, len(args))


def _cgroup(scratch: Path) -> str:
    with _group() as (driver, _):
        return f"{driver.kind}: {', '.join(sorted(driver.controllers))}"


def _cgroup_v2(scratch: Path) -> str:
    with _group() as (driver, _):
        if driver.kind != "v2":
            raise Unsupported("v2", reason="the controllers are on v1 hierarchies")
    return ""


def _clone_into_cgroup(scratch: Path) -> str:
    with _group() as (driver, cgroup), _member(cgroup) as pid:
        if pid not in driver.pids(cgroup):
            raise Unsupported("clone3", reason="the child did not start in the cgroup")
    return ""


def _cgroup_kill(scratch: Path) -> str:
    with _group() as (driver, cgroup):
        pid = clone_into(cgroup.fd)
        if pid == 0:
            try:
                signal.pause()
            finally:
                os._exit(1)
        driver.files.write(f"{cgroup.path}/cgroup.kill", "1")
        os.waitpid(pid, 0)
    return ""


def _cgroup_freeze(scratch: Path) -> str:
    with _group() as (driver, cgroup), _member(cgroup):
        driver.files.write(f"{cgroup.path}/cgroup.freeze", "1")
        deadline = time.monotonic() + _WAIT_S
        while not fields(driver.files.read(f"{cgroup.path}/cgroup.events")).get("frozen"):
            if time.monotonic() > deadline:
                raise Unsupported("freeze", reason=f"not frozen after {_WAIT_S:.0f} s")
            time.sleep(0.001)
        driver.files.write(f"{cgroup.path}/cgroup.freeze", "0")
    return ""


def _memory_reclaim(scratch: Path) -> str:
    with _group() as (driver, cgroup):
        if driver.kind != "v2":
            raise Unsupported("reclaim", reason="memory.reclaim needs the v2 memory controller")
        path = f"{cgroup.path}/memory.reclaim"
        if not driver.files.exists(path):
            raise Unsupported("reclaim", reason="the kernel has no memory.reclaim (5.19)")
    return ""


def _cpu_idle(scratch: Path) -> str:
    with _group() as (driver, cgroup):
        if driver.slots is None:
            driver.files.write(f"{cgroup.path}/cpu.idle", "1")
            return ""
        slot = driver.slots.make_trial()
        try:
            driver.files.write(f"{slot.directories['cpu']}/cpu.idle", "1")
        finally:
            driver.slots.discard_trial(slot)
    return ""


def _psi(scratch: Path) -> str:
    for resource in ("cpu", "memory", "io"):
        Path("/proc/pressure", resource).read_text()
    return ""


def _psi_triggers(scratch: Path) -> str:
    fd = os.open("/proc/pressure/memory", os.O_RDWR | os.O_CLOEXEC)
    try:
        os.write(fd, b"some 200000 2000000\0")
    finally:
        os.close(fd)
    return "windows of 2 s"


def _damon(scratch: Path) -> str:
    """Only looked at: a kdamond may belong to somebody else."""
    base = Path("/sys/kernel/mm/damon/admin/kdamonds")
    running = int((base / "nr_kdamonds").read_text())
    return "free" if running == 0 else f"in use: {running} kdamonds are not ours"


def _swap(scratch: Path) -> str:
    if procfs.swap_active():
        return ""
    if Path("/sys/class/zram-control").is_dir() or Path("/sys/block/zram0").exists():
        raise Unsupported("swap", reason="no swap is active; the kernel offers zram")
    raise Unsupported("swap", reason="no swap is active and the kernel has no zram loaded")


def _oom_protection(scratch: Path) -> str:
    """In a child: what it lowers ends with it."""
    Path("/proc/self/oom_score_adj").write_text("-900")
    return ""


def _process_madvise(scratch: Path) -> str:
    """Page out one page of our own, as reclaim of a frozen sandbox does."""
    page = ctypes.create_string_buffer(8192)
    start = (ctypes.addressof(page) + 4095) & ~4095
    vector = struct.pack("=QQ", start, 4096)
    fd = os.pidfd_open(os.getpid())
    syscalls.call("process_madvise", fd, vector, 1, 21, 0)  # MADV_PAGEOUT
    os.close(fd)
    return ""


def _gpu(scratch: Path) -> str:
    if not any(Path("/dev").glob("nvidia[0-9]*")):
        raise Unsupported("no /dev/nvidia*: no driver has a device", reason="no device")
    raise Unsupported("devices are not passed to workers yet", reason="not built")


TRIALS = (
    Trial("cgroup", "limits of memory, CPU and processes", _cgroup),
    Trial("cgroup_v2_controllers", "limits without a pool of v1 groups", _cgroup_v2),
    Trial("clone_into_cgroup", "starting a sandbox inside its cgroup", _clone_into_cgroup),
    Trial("cgroup_kill", "ending every process of a sandbox at once", _cgroup_kill),
    Trial("cgroup_freeze", "pausing a sandbox", _cgroup_freeze),
    Trial("cpu_idle", "best-effort sandboxes that yield to all others", _cpu_idle),
    Trial("memory_reclaim", "shrinking idle sandboxes", _memory_reclaim),
    Trial("process_madvise", "shrinking idle sandboxes on v1 hosts", _process_madvise),
    Trial("psi", "admission under pressure", _psi),
    Trial("psi_triggers", "noticing pressure without polling", _psi_triggers),
    Trial("damon", "finding cold memory", _damon),
    Trial("oom_protection", "sparing dsecd when the host runs out of memory", _oom_protection),
    Trial("gpu", "pools of function calls on GPUs", _gpu),
    Trial("swap", "paging out paused sandboxes", _swap),
)
