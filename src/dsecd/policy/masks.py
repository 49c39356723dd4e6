"""Which files of /proc a sandbox does not see, and which it cannot write.

The sandbox's proc belongs to the host's user namespace, and host root does not exist inside:
what gives nothing to "others" is closed to everybody in there, root with all its capabilities
included (capabilities(7) act on inodes whose owner is mapped). Masking such a file again would only
cost: each mask is two mounts in every sandbox, about 20 µs of its life. So a mask is laid where the
mode of a file lets others in, which is looked up on the host at start. /proc/sys is always locked:
what may be written there is decided by namespace, not by mode.
"""

from __future__ import annotations

from dataclasses import dataclass

from dsecd.host import procfs

# path: why
MASKED: dict[str, str] = {
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
    "/proc/timer_list": "addresses and processes of the host",
    "/proc/timer_stats": "processes of the host",
}

READ_ONLY: dict[str, str] = {
    "/proc/acpi": "writes reach firmware",
    "/proc/bus": "pci configuration space",
    "/proc/fs": "control files of mounted file systems",
    "/proc/irq": "interrupt routing",
    "/proc/scsi": "writes remove devices (CVE-2017-16539)",
    "/proc/sys": "kernel parameters",
    "/proc/sysrq-trigger": "reboots the host",
}

BY_NAMESPACE = frozenset({"/proc/sys"})  # permission by the owner of a namespace, whatever the mode


@dataclass(frozen=True)
class Masks:
    """What to put over a new sandbox's /proc on this host: `ContainerPlan.masked`, `.read_only`."""

    masked: tuple[str, ...]
    read_only: tuple[str, ...]


def for_host(root: str = "/") -> Masks:
    """Return the masks that this host needs; decided once, at start.

    `root` holds another /proc for tests.
    """
    return Masks(
        masked=tuple(path for path in MASKED if procfs.open_to_others(path, root)),
        read_only=tuple(
            path
            for path in READ_ONLY
            if (path in BY_NAMESPACE and procfs.existing((path,), root))
            or procfs.writable_by_others(path, root)
        ),
    )
