"""Control groups: which driver this host needs, found by trying.

`detect` looks where the controllers are and then makes, limits and removes a trial sandbox. What
the drivers offer is described at `Driver` in `cgroup_model`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from dsecd.host import mountinfo
from dsecd.host.cgroup_base import TreeDriver
from dsecd.host.cgroup_hybrid import HybridDriver
from dsecd.host.cgroup_model import Driver, OomWatch, SandboxCgroup, Slot, Usage
from dsecd.host.cgroup_slots import SlotPool
from dsecd.host.cgroup_v2 import NEEDED, UnifiedDriver
from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import DSecError, Unavailable, Unsupported

__all__ = [
    "Driver", "HybridDriver", "OomWatch", "SandboxCgroup", "Slot", "SlotPool", "TreeDriver",
    "UnifiedDriver", "Usage", "detect", "memory_members",
]  # fmt: skip


def detect(
    root: str = "/sys/fs/cgroup",
    name: str = "dsec",
    slots: int = 64,
    files: KernelFiles | None = None,
) -> TreeDriver:
    """Return the driver for this host, tried once; `name` is our directory in each hierarchy.

    `slots` v1 sets are kept ready where controllers are v1. Raises `Unsupported` with the reason.
    """
    chosen = files or KernelFiles()
    driver = _choose(root, name, slots, chosen)
    try:
        driver.trial()
    except OSError as error:
        raise Unsupported(
            f"control groups below {root} cannot be used: {error.strerror} ({error.filename}). "
            "In a systemd unit set Delegate=yes and let cgroup.root name an empty directory in it",
            reason=str(error),
        ) from error
    except DSecError as error:
        raise Unsupported(f"control groups: {error.message}", reason=error.message) from error
    return driver


def _choose(root: str, name: str, slots: int, files: KernelFiles) -> TreeDriver:
    v2 = next(
        (path for path in (root, f"{root}/unified") if files.exists(f"{path}/cgroup.controllers")),
        None,
    )
    if v2 is None:
        raise Unsupported(
            f"no cgroup v2 hierarchy at {root} or {root}/unified; mount one (type cgroup2)",
            reason="no cgroup v2 hierarchy",
        )
    offered = set(files.read(f"{v2}/cgroup.controllers").split())
    if offered.issuperset(NEEDED):
        return UnifiedDriver(files, v2, name)
    v1 = {c: f"{root}/{c}" for c in NEEDED if files.exists(f"{root}/{c}/cgroup.procs")}
    missing = [c for c in NEEDED if c not in v1]
    if missing:
        raise Unsupported(
            f"cgroup controllers {', '.join(missing)} are neither on the v2 hierarchy {v2} nor "
            f"mounted below {root}",
            reason=f"controllers missing: {', '.join(missing)}",
        )
    return HybridDriver(files, v2, v1, name, slots)


def memory_members(pid: int) -> Path:
    """Return the file by which a process joins the cgroup that the memory of `pid` is charged to.

    Raises `OSError`, `Unavailable`.
    """
    found = members_of(Path(f"/proc/{pid}/cgroup").read_text(), mountinfo.mounts())
    if found is None:
        raise Unavailable(f"the cgroup of process {pid} is not below a mounted hierarchy")
    return found


def members_of(text: str, mounts: Iterable[mountinfo.Mount]) -> Path | None:
    """Return it for the text of a /proc/PID/cgroup (cgroups(7)); v1 where memory is on v1. Pure."""
    places: dict[str, str] = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        places |= dict.fromkeys(controllers.split(","), path)
    v1 = "memory" in places
    place = Path(places["memory"] if v1 else places.get("", "/"))
    for mount in mounts:
        of_memory = mount.type == "cgroup" and "memory" in mount.options
        if (of_memory if v1 else mount.type == "cgroup2") and place.is_relative_to(mount.root):
            return Path(mount.point, place.relative_to(mount.root), "cgroup.procs")
    return None
