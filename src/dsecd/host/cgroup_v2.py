"""The driver for hosts whose cpu, memory and pids controllers are on the v2 hierarchy."""

from __future__ import annotations

import errno
from contextlib import suppress

from dsecd.host import cgroup_cpu
from dsecd.host.cgroup_base import TreeDriver
from dsecd.host.cgroup_model import (
    CPU_PERIOD_US,
    INIT_PIDS,
    OomCallback,
    OomWatch,
    SandboxCgroup,
    Slot,
    Usage,
    cpu_quota_us,
)
from dsecd.host.cgroup_oom import EventsHub, EventsWatch
from dsecd.host.kernelfs import KernelFiles, fields
from dsecd.host.plan import FileWrite
from libdsec.errors import Internal
from libdsec.model import CpuClass

NEEDED = ("cpu", "memory", "pids")


class UnifiedDriver(TreeDriver):
    """Limits are files of the sandbox's own directory; no slots."""

    kind = "v2"

    def __init__(self, files: KernelFiles, root: str, name: str) -> None:
        super().__init__(files, f"{root}/{name}", name)
        self._root = root
        self._hub = EventsHub()
        self._swap = False
        self.controllers = frozenset(NEEDED)
        self.slots = None

    def prepare(self) -> None:
        """Make our directory with controllers enabled down to it. Raises `OSError`."""
        self._enable(self._root)
        self.tree.prepare()
        self._enable(self.tree.parent)

    def _enable(self, directory: str) -> None:
        """Hand the controllers that are not yet on to the children of `directory`."""
        path = f"{directory}/cgroup.subtree_control"
        on = set(self.files.read(path).split())
        missing = [name for name in NEEDED if name not in on]
        if missing:
            self.files.write(path, " ".join(f"+{name}" for name in missing))

    def make(self, sandbox_id: str, owner_uid: int) -> SandboxCgroup:
        cgroup = super().make(sandbox_id, owner_uid)
        # absent without CONFIG_SWAP or with swapaccount=0; the same for every directory
        self._swap = self._swap or self.files.exists(f"{cgroup.path}/memory.swap.max")
        return cgroup

    def find(self, sandbox_id: str) -> SandboxCgroup | None:
        cgroup = super().find(sandbox_id)
        if cgroup is not None:
            swap = f"{cgroup.path}/memory.swap.max"
            self._swap = self._swap or self.files.exists(swap)
            if self._swap:
                with suppress(OSError):  # it ends just now
                    self.files.write(swap, "0")  # a daemon killed during `trim` left it open
        return cgroup

    def limits(
        self, target: Slot | SandboxCgroup, memory_bytes: int, cpu_cores: float, pids: int
    ) -> tuple[FileWrite, ...]:
        if isinstance(target, Slot):
            raise Internal("a v2 host has no slots")
        path = target.path
        writes = [
            FileWrite(f"{path}/memory.max", str(memory_bytes)),
            FileWrite(f"{path}/cpu.max", f"{cpu_quota_us(cpu_cores)} {CPU_PERIOD_US}"),
            FileWrite(f"{path}/pids.max", str(pids + INIT_PIDS)),
        ]
        if self._swap:
            # the limit is the limit: with swap a sandbox would thrash the disk instead of an OOM
            writes.insert(1, FileWrite(f"{path}/memory.swap.max", "0"))
        return tuple(writes)

    def usage(self, cgroup: SandboxCgroup, slot: Slot | None = None) -> Usage:
        try:
            stat = fields(self.files.read(f"{cgroup.path}/memory.stat"))
            return Usage(
                memory_bytes=int(self.files.read(f"{cgroup.path}/memory.current")),
                swapped_bytes=self._swapped(cgroup.path),
                cache_bytes=max(0, stat.get("file", 0) - stat.get("shmem", 0)),
                cpu_usage_s=self.cpu_usage_s(cgroup.path),
                pids=max(0, int(self.files.read(f"{cgroup.path}/pids.current")) - INIT_PIDS),
                oom_kills=self.oom_kills(cgroup),
            )
        except OSError:
            return Usage()

    def _swapped(self, path: str) -> int:
        with suppress(OSError):  # a kernel without swap accounting
            return self.files.number(f"{path}/memory.swap.current")
        return 0

    def trim(self, cgroup: SandboxCgroup, want_bytes: int) -> None:
        """`memory.reclaim`: the kernel takes the coldest, and as much as it finds (EAGAIN)."""
        path = cgroup.path
        if self._swap:  # none for the sandbox itself, see `limits`; what is out may stay out
            self.files.write(f"{path}/memory.swap.max", "max")
        try:
            self.files.write(f"{path}/memory.reclaim", str(want_bytes))
        except OSError as error:
            if error.errno != errno.EAGAIN:
                raise
        finally:
            if self._swap:
                self.files.write(f"{path}/memory.swap.max", "0")

    def set_cpu_class(
        self, cgroup: SandboxCgroup, slot: Slot | None, cpu_class: CpuClass
    ) -> tuple[str, ...]:
        return cgroup_cpu.set_class(self.files, cgroup.path, cgroup_cpu.V2, cpu_class)

    def oom_kills(self, cgroup: SandboxCgroup, slot: Slot | None = None) -> int:
        with suppress(OSError):
            return fields(self.files.read(f"{cgroup.path}/memory.events")).get("oom_kill", 0)
        return 0

    def watch_oom(
        self, cgroup: SandboxCgroup, slot: Slot | None, callback: OomCallback
    ) -> OomWatch:
        path = f"{cgroup.path}/memory.events"
        try:
            return EventsWatch(self._hub, path, lambda: self.oom_kills(cgroup), callback)
        except OSError as error:
            raise Internal(f"cannot watch {path}: {error.strerror}") from error

    def start(self) -> None:
        """Nothing runs in the background on v2."""

    async def close(self) -> None:
        self._hub.close()
        await super().close()
