"""Who wrote how much to the disk.

The kernel counts, per process, the bytes of pages of a disk's file system that it made dirty
(`write_bytes` of /proc/PID/io, proc(5)); what its ended children wrote is added to a parent. tmpfs
is not counted, and neither are the file system's own tables, of which many small files make more.
The device's counter has all of that, but also what anybody else writes: it is told beside it.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

SECTOR = 512  # of /sys/dev/block/*/stat, whatever the device has
SECTORS_WRITTEN = 6


def own_written() -> int:
    """Return the bytes that this process and its ended children wrote."""
    return _write_bytes(os.getpid())


def _write_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/io").read_text().splitlines():
        if line.startswith("write_bytes:"):
            return int(line.split()[1])
    return 0


def written(pids: Iterable[int]) -> dict[int, int]:
    """Return the bytes that each process wrote; those that are gone are left out."""
    found = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            found[pid] = _write_bytes(pid)
    return found


def growth(before: Mapping[int, int], after: Mapping[int, int]) -> int:
    """Return what was written between two looks at `written`. Pure."""
    return sum(count - before.get(pid, 0) for pid, count in after.items())


def descendants(pid: int) -> set[int]:
    """Return `pid` and all processes that descend from it."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError):
                parent = (entry / "stat").read_text().rpartition(")")[2].split()[1]
                children.setdefault(int(parent), []).append(int(entry.name))
    found, pending = set(), [pid]
    while pending:
        one = pending.pop()
        found.add(one)
        pending += children.get(one, [])
    return found


def device_written(directory: Path) -> int | None:
    """Return the bytes written to the device below `directory` so far, None without a device."""
    device = directory.stat().st_dev
    stat = Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat")
    try:
        return int(stat.read_text().split()[SECTORS_WRITTEN]) * SECTOR
    except OSError:
        return None


def settle() -> None:
    """Have everything written that is dirty, so that it is no burden for what comes next."""
    os.sync()


def occupied(directory: Path) -> int:
    """Return the bytes that the files below `directory` take on the disk."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = (Path(folder) / name).lstat()
                seen[status.st_dev, status.st_ino] = status.st_blocks * SECTOR
    return sum(seen.values())
