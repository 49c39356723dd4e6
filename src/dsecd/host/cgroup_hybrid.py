"""The driver for hosts whose controllers are v1 beside a v2 hierarchy without any.

Limits and memory accounting come from a v1 slot; CPU time, freezing, killing, pressure and BPF
from the v2 directory, which is fresh for every sandbox.
"""

from __future__ import annotations

from contextlib import suppress

from dsecd.host import cgroup_cpu, pageout
from dsecd.host.cgroup_base import TreeDriver
from dsecd.host.cgroup_model import (
    INIT_PIDS,
    OomCallback,
    OomWatch,
    SandboxCgroup,
    Slot,
    Usage,
    cpu_quota_us,
)
from dsecd.host.cgroup_oom import EventfdWatch
from dsecd.host.cgroup_slots import MEMORY_AND_SWAP, SlotPool
from dsecd.host.kernelfs import KernelFiles, fields
from dsecd.host.plan import FileWrite
from libdsec.errors import Internal
from libdsec.model import CpuClass

NEEDED = ("cpu", "memory", "pids")


class HybridDriver(TreeDriver):
    """`slots` is always there."""

    kind = "hybrid"
    slots: SlotPool

    def __init__(
        self, files: KernelFiles, v2: str, v1: dict[str, str], name: str, slots: int
    ) -> None:
        """`v2` is the root of the v2 hierarchy, `v1` maps each controller to its root."""
        super().__init__(files, f"{v2}/{name}", name)
        self.slots = SlotPool(files, {c: f"{v1[c]}/{name}" for c in NEEDED}, slots)
        self.controllers = frozenset(NEEDED)

    def prepare(self) -> None:
        self.tree.prepare()
        self.slots.prepare()

    def start(self) -> None:
        self.prepare()
        self.slots.start()

    async def close(self) -> None:
        await self.slots.close()
        await super().close()

    def attempt(self, cgroup: SandboxCgroup) -> None:
        self.slots.trial(lambda slot: self.limits(slot, 64 << 20, 1.0, 16))

    def limits(
        self, target: Slot | SandboxCgroup, memory_bytes: int, cpu_cores: float, pids: int
    ) -> tuple[FileWrite, ...]:
        if not isinstance(target, Slot):
            raise Internal("on a hybrid host limits belong to a slot")
        memory, cpu = target.directories["memory"], target.directories["cpu"]
        writes = [
            FileWrite(f"{memory}/memory.limit_in_bytes", str(memory_bytes)),
            FileWrite(f"{cpu}/cpu.cfs_quota_us", str(cpu_quota_us(cpu_cores))),
            FileWrite(f"{target.directories['pids']}/pids.max", str(pids + INIT_PIDS)),
        ]
        if self.slots.counts_swap:
            # memory plus swap, so this leaves no swap: with it a sandbox would thrash, not OOM
            writes.insert(1, FileWrite(f"{memory}/{MEMORY_AND_SWAP}", str(memory_bytes)))
        return tuple(writes)

    def usage(self, cgroup: SandboxCgroup, slot: Slot | None = None) -> Usage:
        """Memory is what this life touched: anonymous and shared memory, and page cache and kernel
        memory above what the slot's earlier lives left. The kernel folds its per-CPU counts in
        when they pass 64 pages for each CPU (mm/memcontrol.c), so that much is not seen yet.
        """
        with suppress(OSError):
            cpu = self.cpu_usage_s(cgroup.path)
            if slot is None:
                return Usage(cpu_usage_s=cpu)
            return self._slot_usage(slot, cpu)
        return Usage()

    def _slot_usage(self, slot: Slot, cpu_usage_s: float) -> Usage:
        memory = slot.directories["memory"]
        stat = fields(self.files.read(f"{memory}/memory.stat"))
        shmem = stat.get("shmem", 0)
        cache = max(0, stat.get("cache", 0) - shmem)
        own = max(0, cache + self.slots.kernel_bytes(slot) - slot.residue_bytes)
        pids = int(self.files.read(f"{slot.directories['pids']}/pids.current"))
        mapped = stat.get("rss", 0) + shmem
        # from a disk what is paged out stays in memory, too, mapped by nobody and counted as
        # neither, until the kernel wants the pages: it then drops them without any writing
        listed = stat.get("active_anon", 0) + stat.get("inactive_anon", 0)
        return Usage(
            memory_bytes=mapped + own,
            swapped_bytes=stat.get("swap", 0) + max(0, listed - mapped),
            cache_bytes=min(cache, own),
            cpu_usage_s=cpu_usage_s,
            pids=max(0, pids - INIT_PIDS),
            oom_kills=self._kills(slot),
        )

    def trim(self, cgroup: SandboxCgroup, want_bytes: int) -> None:
        """v1 has nothing that is safe while the sandbox runs: a lowered limit may kill in it."""
        left = want_bytes
        for pid in self.command_pids(cgroup):
            if left <= 0:
                break
            left -= pageout.pageout(pid, left)

    def set_cpu_class(
        self, cgroup: SandboxCgroup, slot: Slot | None, cpu_class: CpuClass
    ) -> tuple[str, ...]:
        if slot is None:
            raise Internal("on a hybrid host the CPU class belongs to a slot")
        slot.classed = True  # the next life begins as any other
        group = slot.directories["cpu"]
        return cgroup_cpu.set_class(self.files, group, cgroup_cpu.V1, cpu_class)

    def oom_kills(self, cgroup: SandboxCgroup, slot: Slot | None = None) -> int:
        return self._kills(slot) if slot is not None else 0

    def _kills(self, slot: Slot) -> int:
        try:
            text = self.files.read(f"{slot.directories['memory']}/memory.oom_control")
        except OSError:
            return 0
        return max(0, fields(text).get("oom_kill", 0) - slot.oom_kills)

    def watch_oom(
        self, cgroup: SandboxCgroup, slot: Slot | None, callback: OomCallback
    ) -> OomWatch:
        if slot is None:
            raise Internal("on a hybrid host the out-of-memory watch needs the sandbox's slot")
        memory = slot.directories["memory"]
        try:
            return EventfdWatch(self.files, memory, lambda: self._kills(slot), callback)
        except OSError as error:
            raise Internal(f"cannot watch {memory} for OOM: {error.strerror}") from error
