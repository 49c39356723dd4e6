"""The few numbers of the host that admission looks at: memory, tasks, disk, pressure."""

from __future__ import annotations

import os
import resource
from pathlib import Path

from dsecd.host import pressure
from dsecd.model import Reading

# Share of 10 s in which *every* task waited for memory: the host is thrashing, and one more
# sandbox makes it worse for all (proc(5), Documentation/accounting/psi.rst).
CRITICAL_FULL_PERCENT = 20.0


class Vitals:
    """Reads the host; `state` is the directory whose free space counts."""

    def __init__(self, state: Path) -> None:
        self.cpus = os.cpu_count() or 1
        self.files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        self._state = state
        self._tasks_max = int(Path("/proc/sys/kernel/pid_max").read_text())

    def read(self) -> Reading:
        """Return the present state of the host."""
        memory = pressure.memory()
        stall = pressure.read("memory")
        critical = ""
        if stall is not None and stall.full.avg10 > CRITICAL_FULL_PERCENT:
            critical = f"all tasks wait for memory {stall.full.avg10:.0f}% of the time"
        # "0.10 0.20 0.30 running/total last-pid"
        tasks = int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
        disk = os.statvfs(self._state)
        return Reading(
            memory_total_bytes=memory.total_bytes,
            memory_available_bytes=memory.available_bytes,
            swap_total_bytes=memory.swap_total_bytes,
            swap_free_bytes=memory.swap_free_bytes,
            tasks=tasks,
            tasks_max=self._tasks_max,
            disk_free_bytes=disk.f_bavail * disk.f_frsize,
            critical=critical,
        )


def protect_from_oom() -> bool:
    """Have the kernel choose victims among sandboxes when the host runs out of memory.

    Lowering the score needs CAP_SYS_RESOURCE; returns whether it worked. Spawners raise it again
    for what runs in sandboxes.
    """
    try:
        Path("/proc/self/oom_score_adj").write_text("-900")
    except OSError:
        return False
    return True


def raise_open_files() -> int:
    """Raise RLIMIT_NOFILE as far as this process may; returns the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
