"""CPU classes as files of the cpu controller.

A sandbox's group competes with its siblings, which are all other sandboxes; the daemon's directory
as a whole competes with the rest of the host by the default weight. What is best effort is
`cpu.idle`: it then runs when no sibling wants to, and is preempted at once. SCHED_IDLE or nice of
the processes inside would only sort them among themselves.
"""

from __future__ import annotations

from typing import NamedTuple

from dsecd.host.kernelfs import KernelFiles
from libdsec.model import CpuClass

_FACTOR = {"latency_sensitive": 8.0, "standard": 1.0, "best_effort": 0.01}
IDLE = "cpu.idle"


class CpuFiles(NamedTuple):
    """What a hierarchy calls them; `even` is the weight of a new group."""

    weight: str
    even: int
    quota: str
    burst: str


V1 = CpuFiles("cpu.shares", 1024, "cpu.cfs_quota_us", "cpu.cfs_burst_us")
V2 = CpuFiles("cpu.weight", 100, "cpu.max", "cpu.max.burst")


def set_class(
    files: KernelFiles, group: str, names: CpuFiles, cpu_class: CpuClass
) -> tuple[str, ...]:
    """Give `group` a class; returns what of it the kernel does not have. Raises `OSError`."""
    missing = []
    idle = cpu_class == "best_effort"
    if files.exists(f"{group}/{IDLE}"):
        files.write(f"{group}/{IDLE}", str(int(idle)))
    elif idle:
        missing.append("best_effort: a small weight only, the kernel has no cpu.idle (Linux 5.15)")
        idle = False
    if not idle:  # the weight of an idle group cannot be set: EINVAL
        weight = max(1, round(names.even * _FACTOR[cpu_class]))
        files.write(f"{group}/{names.weight}", str(weight))
    sensitive = cpu_class == "latency_sensitive"
    if files.exists(f"{group}/{names.burst}"):
        # what is not used of one period's quota may be used later, at most as much again
        burst = _quota_us(files, f"{group}/{names.quota}") if sensitive else 0
        files.write(f"{group}/{names.burst}", str(burst))
    elif sensitive:
        missing.append("latency_sensitive: no bursts, the kernel has no burst quota (Linux 5.14)")
    return tuple(missing)


def _quota_us(files: KernelFiles, path: str) -> int:
    first = files.read(path).split()[0]
    return int(first) if first.isdigit() else 0  # "max" or -1: no quota, nothing to save up
