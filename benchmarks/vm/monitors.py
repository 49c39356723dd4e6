"""What machines hold of the host's memory, seen at their monitors (proc_pid_smaps(5))."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterable
from pathlib import Path

from dsec_bench import cgroups

LAYER = "/vm/layer"  # where a jail shows the layers
NAME = "qemu-system"


def monitors(group: str) -> list[int]:
    """Return the monitors in the cgroup `group` and below."""
    found = []
    for pid in cgroups.processes_in(group):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().startswith(NAME):
                found.append(pid)
    return found


def guest_bytes(pid: int) -> int:
    """Return what the host holds of a guest's memory, which is a file of its monitor's alone."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    return 0


def private_bytes(pid: int) -> int:
    """Return what only this process maps."""
    rows = (line.split() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(row[1]) for row in rows if row[0].startswith("Private_")) * 1024


def own_bytes(text: str, shared: str = LAYER) -> int:
    """Return the shares (Pss) in a smaps file, without mappings whose path has `shared`. Pure."""
    total, counts = 0, True
    for line in text.splitlines():
        name, _, rest = line.partition(":")
        if name == "Pss" and counts:
            total += int(rest.split()[0]) * 1024
        elif " " in name:  # address, permissions and so on, up to the device's colon
            counts = shared not in line
    return total


def cached_bytes(files: Iterable[Path]) -> int:
    """Return what of `files` is in the page cache, mapped or not (fincore(1))."""
    names = [str(file) for file in files]
    if not names:
        return 0
    command = ["fincore", "--bytes", "--noheadings", "--output", "RES", *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return sum(map(int, done.stdout.split()))


def held_bytes(pids: Iterable[int], layers: Iterable[Path]) -> int:
    """Return what monitors hold, and what the host's page cache has of the layers, once."""
    total = cached_bytes(layers)
    for pid in pids:
        with contextlib.suppress(OSError):  # it ended just now
            total += own_bytes(Path(f"/proc/{pid}/smaps").read_text())
    return total
