"""Pools of warm workers, and the calls that are made in them.

A pool belongs to one owner and one environment (layers, imports, limits), so a worker never sees
two tenants. It grows while calls wait, up to what the configuration allows; a worker that is idle
for `idle_s` ends, and earlier when another pool waits for its place or the host is short of memory:
the reclaimer leaves workers alone, for they are in use as far as it knows. Waiting calls of a pool
are served in their order; a place that gets free goes to the pool with the fewest workers.

Pools are not durable: their workers are sandboxes of the engine's own, which a restart of the
daemon ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine, Iterator
from typing import Any

import msgspec

from dsecd import log
from dsecd.backends.fncall_stream import Lost
from dsecd.config import FnCall
from dsecd.engine.fncall_calls import (
    asked_of,
    check,
    environment_of,
    outcome_of,
    result_of,
)
from dsecd.engine.fncall_known import KnownCalls
from dsecd.engine.fncall_worker import Environment, Worker
from dsecd.engine.manager import Manager
from dsecd.engine.waiter import completed
from libdsec.errors import DSecError, Exhausted, Internal, Unavailable
from libdsec.model import DSecFnCallArgs, FnCallResult

logger = logging.getLogger("dsecd.fncall")
_SWEEP_S = 1.0
_PATIENCE_S = 0.05
_REST_S = 1.0  # after a worker could not be made, where others serve
_SHORT_IDLE_S = 5.0  # instead of `idle_s`, when the host is short of memory
_QUEUED_BYTES = 256 << 20  # that calls of all pools bring along while they wait


class _Pool:
    """The workers of one environment, and the calls that wait for one.

    Up to `eager` workers are begun as soon as calls wait: with two for each processor one is
    restored while the other runs. More are of use only where calls do not use the processor, and
    these wait for long.
    """

    def __init__(self, environment: Environment, eager: int) -> None:
        self.environment, self._eager = environment, eager
        self.live: set[Worker] = set()
        self.idle: list[Worker] = []  # of these
        self.starting = 0
        self.rests_until = 0.0  # loop time: until then those that there are must do
        self.waiting: deque[asyncio.Future[Worker]] = deque()
        self.late: set[asyncio.Future[Worker]] = set()  # of these, for more than `_PATIENCE_S`

    @property
    def workers(self) -> int:
        """How many there are, those that are being made included."""
        return len(self.live) + self.starting

    def hungry(self, now: float) -> bool:
        """Whether a call waits that a worker should be made for."""
        if self.workers and now < self.rests_until:
            return False
        eager = self.workers < self._eager
        return (len(self.waiting) if eager else len(self.late)) > self.starting

    def take_waiting(self) -> Iterator[asyncio.Future[Worker]]:
        """Take the calls that still wait from the queue, the first first."""
        while self.waiting:
            place = self.waiting.popleft()
            self.late.discard(place)
            if not place.done():
                yield place

    def leave(self, place: asyncio.Future[Worker]) -> None:
        """This call waits no more."""
        self.late.discard(place)
        with contextlib.suppress(ValueError):
            self.waiting.remove(place)


class Pools:
    """All pools of one engine."""

    def __init__(self, manager: Manager, config: FnCall) -> None:
        self._manager, self._config = manager, config
        self._eager = 2 * manager.admission.host.cpus
        self._pools: dict[bytes, _Pool] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._sweeper: asyncio.Task[Any] | None = None
        self._known = KnownCalls()
        self._queued_bytes = 0
        self._closed = False

    def numbers(self) -> dict[str, float]:
        """Return how many workers and waiting calls there are, for metrics."""
        pools = self._pools.values()
        return {
            "pools": float(len(pools)),
            "workers": float(sum(pool.workers for pool in pools)),
            "idle": float(sum(len(pool.idle) for pool in pools)),
            "waiting": float(sum(len(pool.waiting) for pool in pools)),
        }

    async def run(self, owner: str, args: DSecFnCallArgs) -> FnCallResult:
        """Make one call. Cancelling it kills the call, unless it has a key: see `give_up`.

        Raises `InvalidArgument`, `Exhausted` when too many wait, `Unsupported` when the layers have
        no Python that starts, `Unavailable` when its worker was lost, `AlreadyExists` for a key
        that another call has, and what making a sandbox raises.
        """
        check(args)
        if args.key is None:
            return await self._run(owner, args)
        return await self._known.once(owner, args.key, args, lambda: self._run(owner, args))

    def give_up(self, owner: str, args: DSecFnCallArgs) -> None:
        """Nobody wants the result any more; a client that was lost may come back for it."""
        if args.key is not None:
            self._known.give_up(owner, args.key)

    async def _run(self, owner: str, args: DSecFnCallArgs) -> FnCallResult:
        registry = self._manager.registry
        try:
            result = await self._made(owner, args)
        except DSecError as error:
            registry.fncalls.add(error.code)
            raise
        registry.fncalls.add(outcome_of(result))
        registry.fncall_queued_s.observe(result.queued_s)
        registry.fncall_run_s.observe(result.run_s)
        return result

    async def _made(self, owner: str, args: DSecFnCallArgs) -> FnCallResult:
        began = asyncio.get_running_loop().time()
        pool, asked = self._pool(owner, args), asked_of(args)
        worker = await self._take(pool, len(asked.body))
        queued = asyncio.get_running_loop().time() - began
        kills = self._manager.refresh_oom(worker.sandbox)
        try:
            answer = await worker.call(asked)
        except Lost as error:
            self._drop(pool, worker, str(error))
            raise Unavailable(f"{error}; the call may be made again") from error
        result = result_of(answer, queued)
        if not result.ok:
            result.oom_killed = self._manager.refresh_oom(worker.sandbox) > kills
        return result

    # --- pools ----------------------------------------------------------------------------------

    def _pool(self, owner: str, args: DSecFnCallArgs) -> _Pool:
        environment = environment_of(owner, args)
        key = msgspec.msgpack.encode(environment)
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(environment, self._eager)
        return pool

    async def _take(self, pool: _Pool, size: int) -> Worker:
        if self._closed:
            raise Unavailable("dsecd is shutting down")
        if pool.idle:
            return pool.idle.pop()
        if len(pool.waiting) >= self._config.queued:
            raise Exhausted(f"{self._config.queued} calls of this pool wait already; try later")
        if self._queued_bytes + size > _QUEUED_BYTES:
            raise Exhausted(f"calls that wait hold {self._queued_bytes >> 20} MiB; try later")
        place: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        pool.waiting.append(place)
        self._queued_bytes += size
        self._grow()
        impatience = asyncio.get_running_loop().call_later(_PATIENCE_S, self._late, pool, place)
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and not place.exception():
                self._give_back(pool, place.result())
            raise
        finally:
            impatience.cancel()
            self._queued_bytes -= size
            pool.leave(place)

    def _late(self, pool: _Pool, place: asyncio.Future[Worker]) -> None:
        if not place.done():
            pool.late.add(place)
            self._grow()

    def _give_back(self, pool: _Pool, worker: Worker) -> None:
        """The worker is ready for the next call."""
        if worker not in pool.live:
            return
        for place in pool.take_waiting():
            place.set_result(worker)
            return
        worker.idle_since = asyncio.get_running_loop().time()
        pool.idle.append(worker)
        self._grow()  # another pool may wait for this one's place

    def _drop(self, pool: _Pool, worker: Worker, why: str) -> None:
        """The worker serves no more: the next call that needs one has another made."""
        if worker not in pool.live:
            return
        self._remove(pool, worker, why)
        self._manager.registry.fncall_dropped.add()
        log.event(logger, logging.INFO, "worker dropped", worker=worker.sandbox.id, why=why)
        self._grow()

    def _remove(self, pool: _Pool, worker: Worker, why: str) -> None:
        pool.live.discard(worker)
        if worker in pool.idle:
            pool.idle.remove(worker)
        worker.end(why)

    def _grow(self) -> None:
        """Begin workers for calls that wait, the pool with the fewest first."""
        if self._closed:
            return
        self._sweeper = self._sweeper or self._spawn(self._sweep())
        now = asyncio.get_running_loop().time()
        while hungry := [p for p in self._pools.values() if self._may_grow(p) and p.hungry(now)]:
            pool = min(hungry, key=lambda p: p.workers)
            ended = None
            if sum(p.workers for p in self._pools.values()) >= self._config.workers:
                victim = self._longest_idle()
                if victim is None:
                    return
                self._remove(*victim, "its place was wanted")
                ended = victim[1]
            pool.starting += 1
            self._spawn(self._start(pool, ended))

    def _may_grow(self, pool: _Pool) -> bool:
        return pool.workers < self._config.workers_each

    def _longest_idle(self) -> tuple[_Pool, Worker] | None:
        idle = [(pool, worker) for pool in self._pools.values() for worker in pool.idle]
        if not idle:
            return None
        return min(idle, key=lambda each: each[1].idle_since)

    async def _start(self, pool: _Pool, ended: Worker | None) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                if ended is not None:
                    await completed(ended.sandbox.gone)  # its memory is admitted again then
                worker = await Worker.start(self._manager, pool.environment)
        except Exception as error:
            pool.starting -= 1
            self._refuse(pool, self._why(error))
            return
        except asyncio.CancelledError:
            pool.starting -= 1
            raise
        pool.starting -= 1
        pool.live.add(worker)
        worker.tell(
            on_ready=lambda: self._give_back(pool, worker),
            on_lost=lambda why: self._drop(pool, worker, why),
        )
        self._give_back(pool, worker)

    def _why(self, error: Exception) -> DSecError:
        """Return what callers are told of a worker that could not be made."""
        if isinstance(error, DSecError):
            return error
        if isinstance(error, TimeoutError):
            return Unavailable(f"no worker was ready in {self._config.start_timeout_s:g} s")
        if isinstance(error, Lost):
            return Unavailable(f"a worker did not start: {error}")
        logger.error("a worker did not start", exc_info=error)
        return Internal(f"a worker did not start: {error!r}; see the daemon's log")

    def _refuse(self, pool: _Pool, error: DSecError) -> None:
        """No worker could be made: the calls that wait learn it, unless others will serve them."""
        log.event(logger, logging.WARNING, "no worker", why=error.message)
        if pool.workers:
            pool.rests_until = asyncio.get_running_loop().time() + _REST_S
        else:
            for place in pool.take_waiting():
                place.set_exception(type(error)(error.message, **error.detail))
        self._grow()  # another pool may have the place

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name="fncall")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep(self) -> None:
        """End workers that nobody wanted for a while, forget empty pools, try again to grow."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            idle_s = self._config.idle_s
            if self._manager.admission.above_target_bytes():
                idle_s = min(idle_s, _SHORT_IDLE_S)
            oldest = asyncio.get_running_loop().time() - idle_s
            for key, pool in list(self._pools.items()):
                for worker in [w for w in pool.idle if w.idle_since < oldest]:
                    self._remove(pool, worker, "idle")
                if not pool.workers and not pool.waiting:
                    del self._pools[key]
            self._grow()

    async def close(self) -> None:
        """Begin to end every worker; the manager frees them."""
        self._closed = True
        self._known.close()
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self._pools.values():
            for place in pool.take_waiting():
                place.set_exception(Unavailable("dsecd is shutting down"))
            for worker in tuple(pool.live):
                self._remove(pool, worker, "dsecd was stopped")
        self._pools.clear()
