"""A pool of dsec-spawner processes that make and destroy containers.

The daemon's memory and descriptors would make every clone expensive, so small C processes do
it (docs/decisions/0001-spawner.md). Each takes one creation at a time over a SOCK_SEQPACKET pair;
destructions go to processes of their own, so that the removal of a large tree never holds up a
creation. On hosts with v1 controllers a creator sits in the groups ("slot") of its next child.

Everything happens on the event loop; nothing here blocks it or starts a thread.
"""

from __future__ import annotations

import array
import asyncio
import contextlib
import errno
import functools
import logging
import os
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

import msgspec

from dsecd.host.plan import (
    OP_CREATE,
    OP_DESTROY,
    OP_STAGE,
    PLAN_MAX,
    ContainerPlan,
    DestroyPlan,
    SpawnReply,
)
from dsecd.host.settle import settle
from libdsec.errors import DSecError, Exhausted, Internal, InvalidArgument, Unavailable

_log = logging.getLogger(__name__)
_Call: TypeAlias = asyncio.Future[tuple[SpawnReply, int]]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(tuple[int, SpawnReply])
_FULL = frozenset(
    (errno.ENOSPC, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.EAGAIN, errno.EDQUOT)
)
_REPLY_MAX = 8192  # bytes
_ONE_FD = socket.CMSG_SPACE(4)
_RECV_FLAGS = socket.MSG_CMSG_CLOEXEC
_SEND_BUFFER = 1 << 20  # bytes; the kernel caps it at net.core.wmem_max
_RESTART_DELAY_S = 0.2
_RESTART_DELAY_MAX_S = 5.0


class Slot(Protocol):
    """A pre-made set of v1 groups; `procs_paths` are its cgroup.procs files."""

    @property
    def procs_paths(self) -> tuple[str, ...]: ...


@dataclass(frozen=True)
class Spawned:
    """A new container: its pid on the host, its pidfd (the caller closes it), µs of each step."""

    pid: int
    pidfd: int
    micros: dict[str, int] = field(default_factory=dict)


def step_error(what: str, code: int, step: str) -> DSecError:
    """Return the error for a step of the spawner that failed with errno `code`."""
    message = f"{what}: step {step!r} failed: {os.strerror(code)}"
    detail = {"step": step, "errno": errno.errorcode.get(code, str(code))}
    return (Exhausted if code in _FULL else Internal)(message, **detail)


class _Worker:
    """One spawner process and the calls it has not answered yet."""

    def __init__(
        self, binary: str, init: str, base_filter: bytes, on_lost: Callable[[_Worker], None]
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_lost = on_lost
        self._calls: dict[int, _Call] = {}
        self._next = 1
        self.slot: Slot | None = None
        self.lost = False
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, os.fdopen(os.memfd_create("filter"), "wb", buffering=0) as filter_file:
            filter_file.write(base_filter)
            for end in (ours, theirs):
                end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _SEND_BUFFER)
            ours.setblocking(False)
            self._socket = ours
            self._process = subprocess.Popen(
                [binary, str(theirs.fileno()), init, str(filter_file.fileno())],
                pass_fds=[theirs.fileno(), filter_file.fileno()],
                stdin=subprocess.DEVNULL,
                start_new_session=True,  # a ^C on the daemon's terminal is not for it
                env={},
                cwd="/",
            )
        self.ready = self._loop.create_future()
        self._calls[0] = self.ready  # its first message answers a call that nobody made
        self._loop.add_reader(ours.fileno(), self._on_readable)

    @property
    def pending(self) -> int:
        return len(self._calls)

    def call(self, op: int, plan: object, fds: Sequence[int] = ()) -> _Call:
        """Send one message; the future gives the reply and the descriptor beside it (or -1)."""
        number = self._next
        self._next += 1
        message = _encoder.encode((number, op, plan))
        if len(message) > PLAN_MAX:
            raise InvalidArgument(f"a plan of {len(message)} bytes exceeds {PLAN_MAX}")
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        try:
            self._socket.sendmsg([message], rights)
        except OSError as error:
            raise Unavailable(f"the spawner cannot be reached: {error.strerror}") from error
        future = self._calls[number] = self._loop.create_future()
        return future

    def _on_readable(self) -> None:
        while True:
            try:
                data, rights, _, _ = self._socket.recvmsg(_REPLY_MAX, _ONE_FD, _RECV_FLAGS)
            except BlockingIOError:
                return
            except OSError:
                data, rights = b"", []
            if not data:
                self._on_eof()
                return
            fd = int.from_bytes(rights[0][2], sys.byteorder) if rights else -1
            number, reply = _decoder.decode(data)
            future = self._calls.pop(number)
            if not future.cancelled():
                future.set_result((reply, fd))
            elif fd >= 0:
                os.close(fd)
            if not self._calls:
                return

    def _on_eof(self) -> None:
        """The process died, which it never does by itself while we hold the socket."""
        if self.lost:
            return
        self.close()
        for future in self._calls.values():
            if not future.done():
                future.set_exception(Unavailable("the spawner process died; see the kernel's log"))
        self._calls.clear()
        self._on_lost(self)

    def close(self) -> None:
        """Close the socket, which ends the process. Calls not answered are dropped."""
        if self.lost:
            return
        self.lost = True
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()

    def reaped(self) -> bool:
        """Return whether the process has ended; never blocks."""
        return self._process.poll() is not None

    async def stop(self) -> None:
        """Close and reap; kills the process when a plan holds it for too long."""
        self.close()
        for _ in range(200):
            if self.reaped():
                return
            await asyncio.sleep(0.005)
        self._process.kill()
        while not self.reaped():  # noqa: ASYNC110  (no event tells: no thread, no child watcher)
            await asyncio.sleep(0.005)


class SpawnerPool:
    """`count` creators and half as many destroyers, all under the system call filter `base_filter`.

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
        take_slot: Callable[[], Slot] | None = None,
        return_slot: Callable[[Slot], None] | None = None,
    ) -> None:
        self._binary, self._init, self._count = binary, init, count
        self._base_filter = base_filter
        self._take_slot, self._return_slot = take_slot, return_slot
        self._creators: list[_Worker] = []
        self._destroyers: list[_Worker] = []
        self._free: list[_Worker] = []
        self._taken: dict[int, _Worker] = {}  # by id() of the slot promised to a caller
        self._waiting: deque[asyncio.Future[_Worker]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()
        self._dead: list[_Worker] = []
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
        except BaseException:
            await self.close()
            raise

    async def _add(self, group: list[_Worker]) -> None:
        worker = _Worker(self._binary, self._init, self._base_filter, self._on_lost)
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
        workers = [*self._creators, *self._destroyers, *self._dead]
        await asyncio.gather(*self._tasks, *(w.stop() for w in workers), return_exceptions=True)
        for worker in workers:
            self._drop_slot(worker)
        for future in self._waiting:
            if not future.done():
                future.set_exception(Unavailable("the daemon is stopping"))
        for group in (self._creators, self._destroyers, self._free, self._dead):
            group.clear()
        self._waiting.clear()

    def _on_lost(self, worker: _Worker) -> None:
        group = self._creators if worker in self._creators else self._destroyers
        if worker in group:
            group.remove(worker)
        if worker in self._free:
            self._free.remove(worker)
        self._drop_slot(worker)
        self._dead.append(worker)
        if not self._closed:
            _log.error("a spawner process died; starting another")
            self._run(self._replace(group))

    async def _replace(self, group: list[_Worker]) -> None:
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

    def _release(self, worker: _Worker) -> None:
        """Give a creator to the next caller in line."""
        if worker.lost:
            return
        while self._waiting:
            future = self._waiting.popleft()
            if not future.done():
                future.set_result(worker)
                return
        self._free.append(worker)

    async def _acquire(self) -> _Worker:
        if self._closed:
            raise Unavailable("the daemon is stopping")
        if self._free:
            return self._free.pop()  # the one used last: its caches are warm
        future: asyncio.Future[_Worker] = asyncio.get_running_loop().create_future()
        self._waiting.append(future)
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and not future.exception():
                self._release(future.result())
            raise

    async def _stage_next(self, worker: _Worker) -> None:
        """Move a creator into the slot of its next child, off the path of any creation."""
        if self._take_slot is not None:
            await self._stage(worker, self._take_slot())

    async def _stage(self, worker: _Worker, slot: Slot) -> None:
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

    async def _leave(self, worker: _Worker, slot: Slot) -> None:
        """Go to the groups above `slot`, which a container has taken over."""
        above = [str(Path(path).parent.parent / "cgroup.procs") for path in slot.procs_paths]
        try:
            await worker.call(OP_STAGE, above)
        except DSecError as error:
            _log.error("a spawner cannot leave its slot: %s", error)
        finally:
            self._release(worker)

    def _drop_slot(self, worker: _Worker) -> None:
        slot, worker.slot = worker.slot, None
        self._give_back(slot)

    def _give_back(self, slot: Slot | None) -> None:
        if slot is not None:
            self._taken.pop(id(slot), None)
            if self._return_slot is not None:
                self._return_slot(slot)

    def _restage(self, worker: _Worker, take_slot: Callable[[], Slot]) -> None:
        """Move a creator on, then let it serve again; callbacks, for a task would cost more."""
        try:
            worker.slot = take_slot()
            call = worker.call(OP_STAGE, worker.slot.procs_paths)
        except DSecError as error:
            self._not_staged(worker, error)
        else:
            call.add_done_callback(functools.partial(self._restaged, worker))

    def _restaged(self, worker: _Worker, call: _Call) -> None:
        error = call.exception()
        if error is None:
            reply, _ = call.result()
            if reply.error:
                error = step_error("entering the next slot", reply.error, reply.step)
        if error is None:
            self._release(worker)
        else:
            self._not_staged(worker, error)

    def _not_staged(self, worker: _Worker, error: BaseException) -> None:
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
        worker: _Worker,
        plan: ContainerPlan,
        call: _Call,
        slot: Slot | None,
    ) -> Spawned:
        """Wait for the spawner; what a cancelled caller will not get is taken down first."""
        if await settle(call):
            await settle(self._run(self._undo_cancelled(worker, plan, call)))
            raise asyncio.CancelledError
        reply, pidfd = call.result()
        if reply.error:
            self._release(worker)  # the slot is still its own
            raise step_error(f"creating {plan.sandbox}", reply.error, reply.step)
        self._hand_over(worker, slot)
        return Spawned(reply.pid, pidfd, reply.micros)

    def _hand_over(self, worker: _Worker, slot: Slot | None) -> None:
        """The child lives in the slot now; the creator moves on before it serves again."""
        worker.slot = None
        if self._take_slot is not None:
            self._restage(worker, self._take_slot)
        elif slot is not None:
            self._run(self._leave(worker, slot))
        else:
            self._release(worker)

    async def _undo_cancelled(
        self,
        worker: _Worker,
        plan: ContainerPlan,
        call: _Call,
    ) -> None:
        """The caller is gone but the spawner was at work: take down what it made."""
        with contextlib.suppress(DSecError):
            reply, pidfd = await call
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
                    pidfd,
                )
            finally:
                os.close(pidfd)
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
