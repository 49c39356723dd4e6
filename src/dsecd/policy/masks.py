"""Which files of /proc a sandbox does not see, and which it cannot write.

The sandbox's proc belongs to the host's user namespace, so files of mode 0400 are closed to root
inside already; those that have crashed or leaked a host, or that give a view of it to every user,
are hidden all the same, because the uid check is then not the only thing that stands before them.
Each mask is a mount on the creation path (about 8 µs), which is why the list is not longer.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsecd.host import procfs

# path: why
MASKED: dict[str, str] = {
    "/proc/acpi": "writes reach firmware",
    "/proc/asound": "host hardware",
    "/proc/kallsyms": "symbols of the kernel",
    "/proc/kcore": "memory of the host",
    "/proc/key-users": "users of the host's keyrings",
    "/proc/keys": "keyrings of the host",
    "/proc/kmsg": "the host's log, and reading takes it away",
    "/proc/kpagecgroup": "reading it with grep -r crashed a production kernel",
    "/proc/kpagecount": "physical pages",
    "/proc/kpageflags": "physical pages",
    "/proc/latency_stats": "timing of other sandboxes",
    "/proc/sched_debug": "every process of the host",
    "/proc/scsi": "writes remove devices (CVE-2017-16539)",
    "/proc/timer_list": "addresses and processes of the host",
    "/proc/timer_stats": "processes of the host",
}

READ_ONLY: dict[str, str] = {
    "/proc/bus": "pci configuration space",
    "/proc/fs": "control files of mounted file systems",
    "/proc/irq": "interrupt routing",
    "/proc/sys": "kernel parameters",
    "/proc/sysrq-trigger": "reboots the host",
}


@dataclass(frozen=True)
class Masks:
    """What to put over a new sandbox's /proc on this host: `ContainerPlan.masked`, `.read_only`."""

    masked: tuple[str, ...]
    read_only: tuple[str, ...]


def for_host(root: str = "/") -> Masks:
    """Return the masks whose target exists on this host; decided once, at start.

    `root` holds another /proc for tests.
    """
    return Masks(
        masked=procfs.existing(tuple(MASKED), root),
        read_only=procfs.existing(tuple(READ_ONLY), root),
    )
