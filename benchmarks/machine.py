"""What machine a report was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "CPU part")):
            return line.partition(":")[2].strip()
    return platform.machine()


def meminfo() -> dict[str, int]:
    """Return /proc/meminfo in bytes, by name (proc_meminfo(5))."""
    table: dict[str, int] = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        table[name] = int(words[0]) * (1024 if len(words) > 1 else 1)
    return table


def cgroup_layout() -> str:
    """Return "v2", "v1" or "hybrid": which cgroup hierarchies this process is in."""
    lines = Path("/proc/self/cgroup").read_text().split()
    v2 = any(line.startswith("0::") for line in lines)
    v1 = any(not line.startswith("0::") for line in lines)
    if v1:
        return "hybrid" if v2 else "v1"
    return "v2"


def describe() -> dict[str, Any]:
    """Return what a reader needs to judge the figures: CPU, memory, kernel, load, cgroups."""
    names = platform.freedesktop_os_release() if Path("/etc/os-release").exists() else {}
    return {
        "cpu": _cpu_model(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(meminfo()["MemTotal"] / (1 << 30), 1),
        "kernel": platform.release(),
        "system": names.get("PRETTY_NAME", platform.system()),
        "python": platform.python_version(),
        "cgroup": cgroup_layout(),
        "load_at_start": [round(value, 2) for value in os.getloadavg()],
    }
