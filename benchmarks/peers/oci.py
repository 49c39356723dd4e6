"""The OCI runtime bundle that crun, runc and runsc are given. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What docker and podman leave to root in a container; also what their runtimes mask.
CAPABILITIES = (
    "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
    "CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP",
    "CAP_SETUID", "CAP_SYS_CHROOT",
)  # fmt: skip
MASKED = (
    "/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list",
    "/proc/timer_stats", "/proc/sched_debug", "/proc/scsi",
)  # fmt: skip
READ_ONLY = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")

MEMORY_BYTES = 256 << 20
CPUS = 1.0
PIDS = 1024
_PERIOD_US = 100_000


def _mounts() -> list[dict[str, Any]]:
    """Return the mounts a program needs to run unmodified; no /sys and no cgroup file system."""
    quiet = ["nosuid", "noexec"]
    return [
        {"destination": "/proc", "type": "proc", "source": "proc"},
        {
            "destination": "/dev",
            "type": "tmpfs",
            "source": "tmpfs",
            "options": ["nosuid", "strictatime", "mode=755", "size=65536k"],
        },
        {
            "destination": "/dev/pts",
            "type": "devpts",
            "source": "devpts",
            "options": [*quiet, "newinstance", "ptmxmode=0666", "mode=0620"],
        },
        {
            "destination": "/dev/shm",
            "type": "tmpfs",
            "source": "shm",
            "options": [*quiet, "nodev", "mode=1777", "size=65536k"],
        },
    ]


def configuration(argv: Sequence[str], cgroup_namespace: bool = True) -> dict[str, Any]:
    """Return config.json of a sandbox that runs `argv` as root and is limited like ours.

    The namespaces are those of a DSec sandbox without the user namespace, and there is no seccomp
    filter: the peer does less, which is to its advantage.
    """
    namespaces = ["pid", "mount", "ipc", "uts", "network"]
    if cgroup_namespace:
        namespaces.append("cgroup")
    return {
        "ociVersion": "1.0.2",
        "hostname": "sandbox",
        "root": {"path": "rootfs", "readonly": False},
        "process": {
            "terminal": False,
            "user": {"uid": 0, "gid": 0},
            "args": list(argv),
            "env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
            "cwd": "/",
            "capabilities": {
                kind: list(CAPABILITIES) for kind in ("bounding", "effective", "permitted")
            },
            "noNewPrivileges": True,
        },
        "mounts": _mounts(),
        "linux": {
            "namespaces": [{"type": name} for name in namespaces],
            "maskedPaths": list(MASKED),
            "readonlyPaths": list(READ_ONLY),
            "resources": {
                "memory": {"limit": MEMORY_BYTES},
                "cpu": {"quota": int(CPUS * _PERIOD_US), "period": _PERIOD_US},
                "pids": {"limit": PIDS},
            },
        },
    }
