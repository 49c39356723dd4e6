"""A pool of dsec-spawner processes that make and destroy containers.

The daemon's memory and descriptors would make every clone expensive, so small C processes do
it (docs/decisions/0001-spawner.md). Each takes one creation at a time over a SOCK_SEQPACKET pair;
destructions go to processes of their own, so that the removal of a large tree never holds up a
creation. On hosts with v1 controllers a creator sits in the groups ("slot") of its next child.

Everything happens on the event loop; nothing here blocks it or starts a thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsecd.host.plan import (
    OP_CREATE,
    OP_DESTROY,
    OP_REROOT,
    OP_STAGE,
    ContainerPlan,
    DestroyPlan,
    RerootPlan,
)
from dsecd.host.settle import settle
from dsecd.host.worker import Call, Worker, step_error
from dsecd.host.worker import Slot as Slot
from libdsec.errors import DSecError, Unavailable

_log = logging.getLogger(__name__)
_RESTART_DELAY_S = 0.2
# Entering a slot can hold the kernel's cgroup lock for a grace period of 8 ms, which the first
# command of a sandbox needs: while others are free, a creator stays until that has run.
_REST_S = 0.05
_RESTART_DELAY_MAX_S = 5.0


@dataclass(frozen=True)
class Spawned:
    """A new container: its pid on the host, its pidfd (the caller closes it), µs of each step."""

    pid: int
    pidfd: int
    micros: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Rerooted:
    """Another root of a container: its mount namespace and upper (the caller closes both).

    `linked`: the plan's `linked` was right, there are such files.
    """

    mount_ns: int
    upper: int
    micros: dict[str, int] = field(default_factory=dict)
    linked: bool = False


class SpawnerPool:
    """`count` creators and half as many destroyers, all under the system call filter `base_filter`.

    Re-rootings have a process of their own, too: what the kernel allocates for one must not be
    charged to the groups of a creator's next child.

    `shell` is a descriptor of the platform's shell, which the caller keeps open; -1: none.
    `by_path`: this kernel's overlayfs takes no descriptors (feature "overlay_lower_fd").
    `take_slot` and `return_slot` (v1 hosts) give and take back the groups that creators sit in. A
    process that dies is replaced; the calls it held fail with `Unavailable`.
    """

    def __init__(
        self,
        binary: str,
        count: int,
        *,
        init: str,
        base_filter: bytes,
        by_path: bool = False,
        shell: int = -1,
        take_slot: Callable[[], Slot] | None = None,
        return_slot: Callable[[Slot], None] | None = None,
    ) -> None:
        self._binary, self._init, self._count = binary, init, count
        self._base_filter, self.by_path, self._shell = base_filter, by_path, shell
        self._take_slot, self._return_slot = take_slot, return_slot
        self._creators: list[Worker] = []
        self._destroyers: list[Worker] = []
        self._rerooters: list[Worker] = []
        self._free: list[Worker] = []
        self._taken: dict[int, Worker] = {}  # by id() of the slot promised to a caller
        self._waiting: deque[asyncio.Future[Worker]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead: list[Worker] = []
        self._closed = False
        self._delay_s = _RESTART_DELAY_S

    # --- life ---------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start every process. Raises `Internal` naming the step that a spawner failed at."""
        try:
            for _ in range(self._count):
                await self._add(self._creators)
            for _ in range(max(1, self._count // 2)):
                await self._add(self._destroyers)
            await self._add(self._rerooters)
        except BaseException:
            await self.close()
            raise

    async def _add(self, group: list[Worker]) -> None:
        worker = Worker(
            self._binary, self._init, self._base_filter, self._on_lost, self.by_path, self._shell
        )
        group.append(worker)
        reply, _ = await worker.ready
        if reply.error:
            group.remove(worker)
            await worker.stop()
            raise step_error("start of the spawner", reply.error, reply.step)
        if group is self._creators:
            await self._stage_next(worker)
            self._release(worker)

    async def close(self) -> None:
        """End every process; containers live on. Staged slots are given back."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        groups = (self._creators, self._destroyers, self._rerooters, self._dead)
        workers = [worker for group in groups for worker in group]
        await asyncio.gather(*self._tasks, *(w.stop() for w in workers), return_exceptions=True)
        for worker in workers:
            self._drop_slot(worker)
        for future in self._waiting:
            if not future.done():
                future.set_exception(Unavailable("the daemon is stopping"))
        for group in (*groups, self._free):
            group.clear()
        self._waiting.clear()

    def _on_lost(self, worker: Worker) -> None:
        groups = (self._creators, self._destroyers)
        group = next((each for each in groups if worker in each), self._rerooters)
        if worker in group:
            group.remove(worker)
        if worker in self._free:
            self._free.remove(worker)
        self._drop_slot(worker)
        self._dead.append(worker)
        if not self._closed:
            _log.error("a spawner process died; starting another")
            self._run(self._replace(group))

    async def _replace(self, group: list[Worker]) -> None:
        await asyncio.sleep(self._delay_s)
        self._dead = [worker for worker in self._dead if not worker.reaped()]
        try:
            await self._add(group)
            self._delay_s = _RESTART_DELAY_S
        except (DSecError, OSError) as error:
            _log.error("the spawner does not start: %s", error)
            self._delay_s = min(2 * self._delay_s, _RESTART_DELAY_MAX_S)
            self._run(self._replace(group))

    def _run(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # --- creators -----------------------------------------------------------------------------

    def _release(self, worker: Worker) -> None:
        """Give a creator to the next caller in line."""
        if worker.lost:
            return
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(worker)
                return
        self._free.append(worker)

    async def _acquire(self) -> Worker:
        if self._closed:
            raise Unavailable("the daemon is stopping")
        if self._free:
            return self._free.pop()  # the one used last: its caches are warm
        future: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self._release(future.result())
            raise

    async def _stage_next(self, worker: Worker) -> None:
        """Move a creator into the slot of its next child, off the path of any creation."""
        if self._take_slot is not None:
            await self._stage(worker, self._take_slot())

    async def _stage(self, worker: Worker, slot: Slot) -> None:
        before, worker.slot = worker.slot, slot
        try:
            reply, _ = await worker.call(OP_STAGE, slot.procs_paths)
            if reply.error:
                raise step_error("entering the next slot", reply.error, reply.step)
        except DSecError:
            self._drop_slot(worker)
            raise
        finally:
            self._give_back(before)

    async def _leave(self, worker: Worker, slot: Slot) -> None:
        """Go to the groups above `slot`, which a container has taken over."""
        above = [str(Path(path).parent.parent / "cgroup.procs") for path in slot.procs_paths]
        try:
            await worker.call(OP_STAGE, above)
        except DSecError as error:
            _log.error("a spawner cannot leave its slot: %s", error)
        finally:
            self._release(worker)

    def _drop_slot(self, worker: Worker) -> None:
        slot, worker.slot = worker.slot, None
        self._give_back(slot)

    def _give_back(self, slot: Slot | None) -> None:
        if slot is not None:
            self._taken.pop(id(slot), None)
            if self._return_slot is not None:
                self._return_slot(slot)

    def _restage(self, worker: Worker, take_slot: Callable[[], Slot]) -> None:
        """Move a creator on, then let it serve again; callbacks, for a task would cost more."""
        if self._closed:
            return
        try:
            worker.slot = take_slot()
            call = worker.call(OP_STAGE, worker.slot.procs_paths)
        except DSecError as error:
            self._not_staged(worker, error)
        else:
            call.add_done_callback(functools.partial(self._restaged, worker))

    def _restaged(self, worker: Worker, call: Call) -> None:
        error = call.exception()
        if error is None:
            reply, _ = call.result()
            if reply.error:
                error = step_error("entering the next slot", reply.error, reply.step)
        if error is None:
            self._release(worker)
        else:
            self._not_staged(worker, error)

    def _not_staged(self, worker: Worker, error: BaseException) -> None:
        """The next creation through this worker asks again, and reports what it meets."""
        _log.error("no slot for the next container: %s", error)
        self._drop_slot(worker)
        self._release(worker)

    # --- what the engine calls ----------------------------------------------------------------

    async def reserve(self) -> Slot | None:
        """Return the slot whose creator is now kept for the caller; None on hosts without slots.

        The caller builds its plan for that slot at once and passes it to `create`, or gives
        it back with `cancel`.
        """
        if self._take_slot is None:
            return None
        worker = await self._acquire()
        try:
            if worker.slot is None:
                await self._stage_next(worker)
        except BaseException:
            self._release(worker)
            raise
        assert worker.slot is not None
        self._taken[id(worker.slot)] = worker
        return worker.slot

    def cancel(self, slot: Slot | None) -> None:
        """Give back what `reserve` returned."""
        worker = self._taken.pop(id(slot), None)
        if worker is not None:
            self._release(worker)

    async def create(
        self, plan: ContainerPlan, fds: Sequence[int], slot: Slot | None = None
    ) -> Spawned:
        """Make the container of `plan`; `fds` as `ContainerPlan` says, they stay the caller's.

        `slot` comes from `reserve`; any other slot works too, at the price of entering it now. On
        success it belongs to the container, in every other case to the pool again. Raises
        `Exhausted` or `Internal` naming the step that failed, with nothing left behind. A cancelled
        call is finished and undone before it raises `CancelledError`: nothing is half-known.
        """
        worker = self._taken.pop(id(slot), None) if slot is not None else None
        if worker is None:
            worker = await self._acquire()
            try:
                if slot is not None and worker.slot is not slot:
                    await self._stage(worker, slot)
            except BaseException:
                self._release(worker)
                raise
        try:
            call = worker.call(OP_CREATE, plan, fds)
        except BaseException:
            self._release(worker)
            raise
        return await self._finish(worker, plan, call, slot)

    async def _finish(
        self,
        worker: Worker,
        plan: ContainerPlan,
        call: Call,
        slot: Slot | None,
    ) -> Spawned:
        """Wait for the spawner; what a cancelled caller will not get is taken down first."""
        if await settle(call):
            await settle(self._run(self._undo_cancelled(worker, plan, call)))
            raise asyncio.CancelledError
        reply, fds = call.result()
        if reply.error:
            self._release(worker)  # the slot is still its own
            raise step_error(f"creating {plan.sandbox}", reply.error, reply.step, reply.where)
        self._hand_over(worker, slot)
        return Spawned(reply.pid, fds[0], reply.micros)

    def _hand_over(self, worker: Worker, slot: Slot | None) -> None:
        """The child lives in the slot now; the creator moves on before it serves again."""
        worker.slot = None
        if self._take_slot is not None:
            if 2 * len(self._free) >= self._count:
                loop = asyncio.get_running_loop()
                loop.call_later(_REST_S, self._restage, worker, self._take_slot)
            else:
                self._restage(worker, self._take_slot)
        elif slot is not None:
            self._run(self._leave(worker, slot))
        else:
            self._release(worker)

    async def _undo_cancelled(
        self,
        worker: Worker,
        plan: ContainerPlan,
        call: Call,
    ) -> None:
        """The caller is gone but the spawner was at work: take down what it made."""
        with contextlib.suppress(DSecError):
            reply, fds = await call
            if reply.error:
                self._release(worker)
                return
            held = worker.slot
            self._hand_over(worker, held)
            try:
                await self.destroy(
                    DestroyPlan(
                        sandbox=plan.sandbox,
                        cgroup=plan.cgroup,
                        runtime_dir=plan.runtime_dir,
                        upper_dir=plan.upper_dir,
                    ),
                    *fds,
                )
            finally:
                _close(fds)
                self._give_back(held)  # used again when nobody is left in it

    async def destroy(self, plan: DestroyPlan, *fds: int) -> bool:
        """Kill and remove the container of `plan`; safe to repeat. `fds` stay the caller's.

        Returns `SpawnReply.clean`. Raises `Internal` naming the step, for instance when a process
        does not die in time.
        """
        if not self._destroyers:
            raise Unavailable("no spawner process runs")
        worker = min(self._destroyers, key=lambda each: each.pending)
        reply, _ = await worker.call(OP_DESTROY, plan, fds)
        if reply.error:
            raise step_error(f"destroying {plan.sandbox}", reply.error, reply.step)
        return reply.clean

    async def reroot(self, plan: RerootPlan, fds: Sequence[int]) -> Rerooted:
        """Build the root of `plan` for a live container; `fds` as `RerootPlan` says.

        The container does not change until its PID 1 gets the result (`backends.agent.swap_root`),
        which must be before its next command. Raises `Exhausted` or `Internal` naming the step that
        failed, with nothing left behind. A cancelled call is finished and undone.
        """
        if not self._rerooters:
            raise Unavailable("no spawner process runs")
        call = self._rerooters[0].call(OP_REROOT, plan, fds)
        if await settle(call):
            await settle(self._run(self._undo_reroot(plan, call)))
            raise asyncio.CancelledError
        reply, made = call.result()
        if reply.error:
            raise step_error(f"re-rooting {plan.sandbox}", reply.error, reply.step, reply.where)
        return Rerooted(made[0], made[1], reply.micros, reply.linked)

    async def _undo_reroot(self, plan: RerootPlan, call: Call) -> None:
        with contextlib.suppress(DSecError):
            reply, made = await call
            _close(made)
            if plan.upper_dir and not reply.error:
                await self.destroy(DestroyPlan(sandbox=plan.sandbox, upper_dir=plan.upper_dir))


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)
