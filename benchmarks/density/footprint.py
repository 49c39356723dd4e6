"""What the host holds in memory for all sandboxes of one daemon, at one moment.

Of what their groups are charged with: anonymous memory, swap cache and shared memory (the lists of
`memory.stat`), and the kernel's own. Not what files have in the page cache: all share it, and the
host can drop it. What was paged out to zram is in memory as well, compressed, in the pages that the
device took, and so is its table. All zram devices of the host count: swap goes to any of them.
"""

from __future__ import annotations

import contextlib
import resource
from dataclasses import dataclass
from pathlib import Path

from dsec_bench.cgroups import CgroupError, hierarchies
from dsec_bench.machine import meminfo

BLOCK = Path("/sys/block")
ENTRY_BYTES = 16  # of a zram device's table, for each page (struct zram_table_entry)
LISTED = ("active_anon", "inactive_anon", "unevictable")


@dataclass(frozen=True, slots=True)
class Host:
    """All zram devices: what was written to them, and the memory that it takes; MemAvailable."""

    stored_bytes: int
    zram_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Footprint:
    """What sandboxes are charged with, what files have of it, what of theirs is in swap.

    The rest is the host's change since some moment before: what zram stores, what that takes, and
    what became unavailable; others on the host have their part in these.
    """

    charged_bytes: int
    cached_bytes: int
    swapped_bytes: int
    stored_bytes: int
    zram_bytes: int
    gone_bytes: int

    @property
    def held_bytes(self) -> int:
        """What sandboxes hold of the memory, compressed or not."""
        return self.charged_bytes + self.zram_bytes


def memory_group(name: str) -> Path:
    """Return the group of all sandboxes of the daemon `name` in the hierarchy that has the memory
    controller. Raises CgroupError."""
    for root in hierarchies():
        if (root / name / "memory.stat").exists():
            return root / name
    raise CgroupError(f"no hierarchy accounts for the memory of {name}")


def read(group: Path, before: Host) -> Footprint:
    """Return the footprint as it is now; `group` is `memory_group`'s. Raises OSError."""
    table = _fields((group / "memory.stat").read_text())
    v1 = "total_rss" in table
    prefix = "total_" if v1 else ""  # v1 has the group's own, and then that with all below it
    kernel = _number(group / "memory.kmem.usage_in_bytes") if v1 else table.get("kernel", 0)
    cached = table["total_cache"] if v1 else table["file"]
    swapped = table.get("total_swap", 0) if v1 else _number(group / "memory.swap.current")
    now = host()
    return Footprint(
        charged_bytes=sum(table[prefix + name] for name in LISTED) + kernel,
        cached_bytes=cached - table[prefix + "shmem"],
        swapped_bytes=swapped,
        stored_bytes=now.stored_bytes - before.stored_bytes,
        zram_bytes=now.zram_bytes - before.zram_bytes,
        gone_bytes=before.available_bytes - now.available_bytes,
    )


def host(block: Path = BLOCK) -> Host:
    """Return the host's own part of it (blockdev/zram.rst, mm_stat)."""
    stored = used = 0
    for device in block.glob("zram*"):
        with contextlib.suppress(OSError):  # it was removed just now
            counts = (device / "mm_stat").read_text().split()
            pages = int((device / "disksize").read_text()) // resource.getpagesize()
            stored += int(counts[0])
            used += int(counts[2]) + pages * ENTRY_BYTES
    return Host(stored, used, meminfo()["MemAvailable"])


def _fields(text: str) -> dict[str, int]:
    pairs = (line.split() for line in text.splitlines())
    return {name: int(value) for name, value in pairs}


def _number(path: Path) -> int:
    """Return 0 for a file that this kernel does not have."""
    with contextlib.suppress(FileNotFoundError):
        return int(path.read_text())
    return 0
