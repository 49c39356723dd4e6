"""Control groups: which driver this host needs, found by trying.

`detect` looks where the controllers are and then makes, limits and removes a trial sandbox. What
the drivers offer is described at `Driver` in `cgroup_model`.
"""

from __future__ import annotations

from dsecd.host.cgroup_base import TreeDriver
from dsecd.host.cgroup_hybrid import HybridDriver
from dsecd.host.cgroup_model import Driver, OomWatch, SandboxCgroup, Slot, Usage
from dsecd.host.cgroup_slots import SlotPool
from dsecd.host.cgroup_v2 import NEEDED, UnifiedDriver
from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import DSecError, Unsupported

__all__ = [
    "Driver", "HybridDriver", "OomWatch", "SandboxCgroup", "Slot", "SlotPool", "TreeDriver",
    "UnifiedDriver", "Usage", "detect",
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
