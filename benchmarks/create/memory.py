"""How much memory the host has in use that it could not give back.

``MemTotal - MemFree - (Buffers + Cached - Shmem)`` after the reclaimable dentries and inodes
were dropped: page cache of files does not count, since it is shared and can be dropped; tmpfs
(Shmem), page tables, kernel stacks, slab objects that are pinned, per-cpu memory and every
process's own pages do. Whatever a sandbox costs is in there, seen or unseen by cgroups:
dsec-init, namespaces, mounts, the cgroup directories, sockets and the growth of dsecd and its
spawners.
"""

from __future__ import annotations

import time
from pathlib import Path

from dsec_bench.machine import meminfo

DROP_SLAB = "2"  # Documentation/admin-guide/sysctl/vm.rst: reclaimable slab objects
SAMPLES = 5


def _drop() -> None:
    Path("/proc/sys/vm/drop_caches").write_text(DROP_SLAB)


def used_bytes(table: dict[str, int]) -> int:
    """Return the memory in use of a `meminfo` table. Pure."""
    cache = table["Buffers"] + table["Cached"] - table["Shmem"]
    return table["MemTotal"] - table["MemFree"] - cache


def settled_bytes(pause_s: float = 0.2) -> int:
    """Return the smallest of a few readings: what is freed late (RCU, work queues) must not count.

    Raises OSError where the caches may not be dropped.
    """
    readings = []
    for _ in range(SAMPLES):
        _drop()
        time.sleep(pause_s)
        readings.append(used_bytes(meminfo()))
    return min(readings)
