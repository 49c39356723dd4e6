"""A pool of v1 groups for hosts whose controllers are v1.

Three mkdirs cost 165–390 µs, and writing cgroup.procs costs up to 8 ms (an RCU grace period), so
neither belongs in the path of a create. Slots are made ahead; a spawner moves itself into one while
it is idle and its next child inherits it. A slot is used again once its processes are gone.

Page cache stays charged to whoever read it first. It is not thrown away between lives, because it
holds the shared layers; only what exceeds `TRIM_BYTES` is reclaimed (0.6 ms for 85 MB), so that the
next sandbox with a small limit does not pay for it. What remains is this life's baseline.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dsecd.host import cgroup_cpu
from dsecd.host.cgroup_model import Slot
from dsecd.host.kernelfs import KernelFiles, fields
from dsecd.host.plan import FileWrite
from libdsec.errors import Exhausted, Internal, NotFound

TRIM_BYTES = 32 << 20
_MADE_PER_TURN = 8  # then other coroutines get the loop: 8 slots are 1.5–3 ms
_LOOKS_PER_TURN = 64
_FAST_S, _SLOW_S = 0.01, 1.0  # between looks at slots that drain
_FAST_LOOKS = 50  # processes killed with their sandbox leave within milliseconds
_log = logging.getLogger(__name__)
# never below memory.limit_in_bytes, says the kernel: lowered after it, and lifted before it
MEMORY_AND_SWAP = "memory.memsw.limit_in_bytes"


class SlotPool:
    """Ready, held and draining slots. `start()` before use, inside the event loop."""

    def __init__(
        self, files: KernelFiles, parents: dict[str, str], size: int, trim_bytes: int = TRIM_BYTES
    ) -> None:
        """`parents` maps cpu, memory and pids to our directory in each hierarchy."""
        self._files = files
        self._parents = parents
        self._size = size
        self._trim_bytes = trim_bytes
        # whether or not there is swap now: it may come while sandboxes live
        root = Path(parents["memory"]).parent
        self.counts_swap = files.exists(f"{root}/{MEMORY_AND_SWAP}")
        self._ready: deque[Slot] = deque()
        self._held: dict[str, Slot] = {}
        self._draining: deque[Slot] = deque()
        self._unclaimed: dict[str, Slot] = {}
        self._next = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_when = 0.0

    @property
    def ready(self) -> int:
        """How many slots wait."""
        return len(self._ready)

    @property
    def draining(self) -> int:
        """How many still hold processes that are leaving."""
        return len(self._draining)

    @property
    def _low(self) -> bool:
        """Whether more slots should be made: below half, so that what is lent may come back."""
        return 2 * len(self._ready) <= self._size

    def prepare(self) -> None:
        """Make our parent directories. Raises `OSError`."""
        for path in self._parents.values():
            if not self._files.exists(path):
                self._files.mkdir(path)

    def start(self) -> None:
        """Take over what an earlier daemon left and begin to refill.

        Empty slots are recycled at once. Those with processes wait for `adopt`; after
        `end_recovery` the rest is drained.
        """
        self.prepare()
        for name in self._listed():
            slot = self._slot(name)
            slot.classed = True  # for all we know
            self._complete(slot)
            if self._pids(slot):
                self._unclaimed[name] = slot
            else:
                self._draining.append(slot)
        self._wake.set()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="cgroup-slots")

    def acquire(self) -> Slot:
        """Return an empty slot; its limits may be an earlier life's. Never waits.

        Raises `Exhausted`.
        """
        try:
            slot = self._ready.popleft() if self._ready else self._make()
        except OSError as error:
            raise Exhausted(f"cannot make a cgroup slot: {error.strerror}") from error
        self._held[slot.name] = slot
        if self._low:
            self._wake.set()
        return slot

    def release(self, slot: Slot) -> None:
        """Give `slot` back; it is ready again when its last process is gone."""
        if self._held.pop(slot.name, None) is None:
            raise Internal(f"slot {slot.name} released twice")
        slot.waits = 0
        self._draining.append(slot)
        if self._low:
            self._wake.set()
        else:
            self._look_in(_FAST_S)  # with its neighbours: its processes take a moment anyway

    def adopt(self, name: str) -> Slot:
        """Hold the slot of a sandbox that outlived the last daemon. Raises `NotFound`."""
        slot = self._unclaimed.pop(name, None)
        if slot is None:
            raise NotFound(f"no slot {name} waits to be adopted")
        tag = self._files.tagged(slot.directories["memory"])
        slot.residue_bytes, slot.oom_kills = _parse_tag(tag)
        self._held[name] = slot
        return slot

    def end_recovery(self) -> None:
        """Drain every slot that nobody adopted."""
        self._draining.extend(self._unclaimed.values())
        self._unclaimed.clear()
        self._wake.set()

    def holders(self) -> dict[str, tuple[int, ...]]:
        """Return by slot the host pids inside; slots without any are left out."""
        found = {name: self._pids(self._slot(name)) for name in self._listed()}
        return {name: pids for name, pids in found.items() if pids}

    def kernel_bytes(self, slot: Slot) -> int:
        """Return kernel memory charged to `slot`, all its lives; 0 where the file is gone."""
        return _kernel_bytes(self._files, slot.directories["memory"])

    def trial(self, limits: Callable[[Slot], tuple[FileWrite, ...]]) -> None:
        """Make a slot, write its limits and remove it, to know that this host lets us.

        Raises `OSError`.
        """
        slot = self.make_trial()
        try:
            for write in limits(slot):
                self._files.write(write.path, write.value)
        finally:
            self.discard_trial(slot)

    def make_trial(self) -> Slot:
        """Make a slot outside the pool. Raises `OSError`; undo with `discard_trial`."""
        slot = self._slot(f"trial-{os.getpid()}")
        try:
            self._complete(slot)
        except OSError:
            self.discard_trial(slot)
            raise
        return slot

    def discard_trial(self, slot: Slot) -> None:
        """Remove what `make_trial` made."""
        for path in slot.directories.values():
            with suppress(OSError):
                self._files.rmdir(path)

    async def close(self) -> None:
        """Stop refilling and remove every slot without processes, then the parents if empty."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for slot in [*self._ready, *self._draining, *self._unclaimed.values()]:
            await self._remove(slot)
        self._ready.clear()
        self._unclaimed.clear()
        self._draining.clear()
        self.discard()

    def discard(self) -> None:
        """Remove our parent directories where they are empty."""
        for path in self._parents.values():
            with suppress(OSError):
                self._files.rmdir(path)

    # --- background -----------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._drain()
                await self._fill()
            except OSError as error:
                _log.warning("cgroup slots: %s", error)
                await asyncio.sleep(_SLOW_S)
                self._wake.set()

    def _look_in(self, delay_s: float) -> None:
        """Wake the background in `delay_s`, or earlier if that was arranged before."""
        loop = asyncio.get_running_loop()
        when = loop.time() + delay_s
        if self._timer is not None:
            if self._timer_when <= when:
                return
            self._timer.cancel()
        self._timer_when = when
        self._timer = loop.call_at(when, self._on_time)

    def _on_time(self) -> None:
        self._timer = None
        self._wake.set()

    async def _drain(self) -> None:
        for _ in range(min(len(self._draining), _LOOKS_PER_TURN)):
            slot = self._draining.popleft()
            if self._occupied(slot):
                slot.waits += 1
                self._draining.append(slot)
                continue
            try:
                await self._recycle(slot)
            except BaseException:
                self._draining.append(slot)  # cancelled or refused: it is still ours
                raise
        if self._draining:
            fast = any(slot.waits < _FAST_LOOKS for slot in self._draining)
            self._look_in(_FAST_S if fast else _SLOW_S)

    async def _fill(self) -> None:
        if not self._low:
            return
        made = 0
        while len(self._ready) < self._size:
            self._ready.append(self._make())
            made += 1
            if made % _MADE_PER_TURN == 0:
                await asyncio.sleep(0)

    async def _recycle(self, slot: Slot) -> None:
        """Reclaim what is too much, take the baseline, make it ready.

        Limits stay until the next life sets its own, but for the CPU quota, because the spawner
        that waits in the slot would be throttled by it, and for that of memory with swap. With no
        process left all that is charged is residue, so one counter is the whole baseline.
        """
        memory = slot.directories["memory"]
        cpu = slot.directories["cpu"]
        if slot.classed:
            cgroup_cpu.set_class(self._files, cpu, cgroup_cpu.V1, "standard")
            slot.classed = False
        self._files.write(f"{cpu}/cpu.cfs_quota_us", "-1")
        if self.counts_swap:
            self._files.write(f"{memory}/{MEMORY_AND_SWAP}", "-1")
        usage = self._usage(memory)
        if usage > self._trim_bytes:
            await asyncio.to_thread(self._trim, memory)
            usage = self._usage(memory)
        kills = fields(self._files.read(f"{memory}/memory.oom_control")).get("oom_kill", 0)
        slot.residue_bytes, slot.oom_kills = usage, kills
        self._files.tag(memory, f"{usage} {kills}")
        self._ready.append(slot)

    def _usage(self, memory: str) -> int:
        return self._files.number(f"{memory}/memory.usage_in_bytes")

    def _trim(self, memory: str) -> None:
        """Reclaim down to `trim_bytes` by setting a limit for a moment; the group is empty."""
        with suppress(OSError):  # EBUSY: the rest cannot be reclaimed (a tmpfs still mounted)
            self._files.write(f"{memory}/memory.limit_in_bytes", str(self._trim_bytes))
        self._files.write(f"{memory}/memory.limit_in_bytes", "-1")

    # --- the groups -----------------------------------------------------------------------

    def _slot(self, name: str) -> Slot:
        return Slot(name, {c: f"{parent}/{name}" for c, parent in self._parents.items()})

    def _make(self) -> Slot:
        """Make one slot. Raises `OSError`; undoes a half success."""
        while True:
            slot = self._slot(f"slot-{self._next}")
            self._next += 1
            if not any(self._files.exists(path) for path in slot.directories.values()):
                break
        try:
            self._complete(slot)
        except OSError:
            for path in slot.directories.values():
                with suppress(OSError):
                    self._files.rmdir(path)
            raise
        return slot

    def _complete(self, slot: Slot) -> None:
        """Make those of the slot's groups that are missing (co-mounted hierarchies share one)."""
        for path in slot.directories.values():
            try:
                self._files.mkdir(path)
            except FileExistsError:
                continue

    def _listed(self) -> list[str]:
        """Return the names of slots in any hierarchy, also of half-made ones."""
        names: set[str] = set()
        for parent in self._parents.values():
            if self._files.exists(parent):
                names.update(self._files.directories(parent))
        return sorted(name for name in names if name.startswith("slot-"))

    def _pids(self, slot: Slot) -> tuple[int, ...]:
        found: set[int] = set()
        for path in slot.directories.values():
            with suppress(FileNotFoundError):
                found.update(int(line) for line in self._files.read(f"{path}/cgroup.procs").split())
        return tuple(sorted(found))

    def _occupied(self, slot: Slot) -> bool:
        """Return whether any process, also a dying one, is in the slot: in one group, in all."""
        return self._files.number(f"{slot.directories['pids']}/pids.current") > 0

    async def _remove(self, slot: Slot) -> None:
        """Remove the groups; a group that still has processes stays for the next daemon.

        Emptied first: a removed memory group whose page cache stays charged lives on unseen.
        """
        for controller, path in slot.directories.items():
            try:
                if controller == "memory" and not self._pids(slot):
                    await asyncio.to_thread(self._files.write, f"{path}/memory.force_empty", "0")
                self._files.rmdir(path)
            except FileNotFoundError:
                continue
            except OSError as error:
                if error.errno != errno.EBUSY:
                    _log.warning("cannot remove cgroup %s: %s", path, error.strerror)


def _kernel_bytes(files: KernelFiles, memory: str) -> int:
    """Return kernel memory charged to a v1 group; 0 where the file is gone (removed upstream)."""
    try:
        return int(files.read(f"{memory}/memory.kmem.usage_in_bytes"))
    except OSError:
        return 0


def _parse_tag(text: str) -> tuple[int, int]:
    parts = text.split()
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        return 0, 0
    return int(parts[0]), int(parts[1])
