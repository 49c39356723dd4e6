"""Pools of warm workers, and the calls that are made in them.

A pool belongs to one owner and one environment (layers, imports, limits), so a worker never sees
two tenants. It grows while calls wait, up to what the configuration allows; a worker that is idle
for `idle_s` ends, and earlier when another pool waits for its place. Waiting calls of a pool are
served in their order; a place that gets free goes to the pool with the fewest workers.

Pools are not durable: their workers are sandboxes of the engine's own, which a restart of the
daemon ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections import deque
from collections.abc import Iterator
from typing import Any

import msgspec

from dsecd import log
from dsecd.config import FnCall
from dsecd.engine.fncall_worker import Lost, Worker
from dsecd.engine.manager import Manager
from libdsec.errors import DSecError, Exhausted, InvalidArgument, Unavailable
from libdsec.model import DSecContainerRunArgs, DSecFnCallArgs, FnCallResult

logger = logging.getLogger("dsecd.fncall")
LABEL = "dsec.fncall"  # on each worker
_LIMIT = 3 << 20  # bytes of an answer's parts: it travels in one frame of the wire
_SWEEP_S = 1.0


class _Pool:
    """The workers of one owner and environment."""

    def __init__(self, owner: str, args: DSecContainerRunArgs, imports: list[str]) -> None:
        self.owner, self.args, self.imports = owner, args, imports
        self.idle: list[Worker] = []
        self.workers = 0  # idle, at work, and being made
        self.starting = 0
        self.waiting: deque[asyncio.Future[Worker]] = deque()

    @property
    def hungry(self) -> bool:
        """Whether more calls wait than workers are being made for them."""
        return len(self.waiting) > self.starting


class Pools:
    """All pools of one engine."""

    def __init__(self, manager: Manager, config: FnCall) -> None:
        self._manager, self._config = manager, config
        self._pools: dict[bytes, _Pool] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Task[None] | None = None
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
        """Make one call. Cancelling it ends the worker it runs in.

        Raises `InvalidArgument`, `Exhausted` when too many wait, `Unsupported` when the layers have
        no Python that starts, `Unavailable` when its worker was lost, what making a sandbox raises.
        """
        _check(args)
        began = asyncio.get_running_loop().time()
        pool = self._pool(owner, args)
        worker = await self._take(pool)
        queued = asyncio.get_running_loop().time() - began
        try:
            result = await self._call(worker, args)
        except BaseException as error:
            self._drop(pool, worker, "its call was given up or failed")
            if isinstance(error, Lost):
                raise Unavailable(f"{error}; the call may be made again") from error
            raise
        self._give_back(pool, worker)
        result.queued_s = queued
        return result

    async def _call(self, worker: Worker, args: DSecFnCallArgs) -> FnCallResult:
        output = args.output_limit_kb << 10
        kills = self._manager.refresh_oom(worker.sandbox)
        head = {
            "entry": args.entry, "argv": args.argv, "files": list(args.files),
            "outputs": args.outputs, "env": args.env, "wall_s": args.timeout_s,
            "cpu_s": args.cpu_limit_s, "files_bytes": args.files_limit_mb << 20,
            "output_bytes": output, "answer_bytes": _LIMIT, "network": False,
        }  # fmt: skip
        given = b"" if args.input is None else msgspec.json.encode(args.input)
        blobs = [args.code.encode(), given, *args.files.values()]
        answer, parts, total = await worker.call(head, blobs, _LIMIT)
        if "error" in answer:
            raise Lost(str(answer["error"])[-2000:])
        result = _result(answer, parts, total)
        if not result.ok:
            result.oom_killed = self._manager.refresh_oom(worker.sandbox) > kills
        return result

    # --- pools ----------------------------------------------------------------------------------

    def _pool(self, owner: str, args: DSecFnCallArgs) -> _Pool:
        wanted = DSecContainerRunArgs(
            container_image=args.container_image,
            workspace=args.workspace,
            toolkits=args.toolkits,
            memory_limit_mb=args.memory_limit_mb,
            pids_limit=args.pids_limit,
            disk_limit_mb=16,
            upper="memory",
            labels={LABEL: "worker"},
        )
        key = msgspec.msgpack.encode((owner, wanted, args.imports))
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(owner, wanted, args.imports)
        return pool

    async def _take(self, pool: _Pool) -> Worker:
        if self._closed:
            raise Unavailable("dsecd is shutting down")
        while pool.idle:
            worker = pool.idle.pop()
            if worker.sandbox.state == "running":
                return worker
            self._drop(pool, worker, "it died")
        if len(pool.waiting) >= self._config.queued:
            raise Exhausted(f"{self._config.queued} calls of this pool wait already; try later")
        place: asyncio.Future[Worker] = asyncio.get_running_loop().create_future()
        pool.waiting.append(place)
        self._grow()
        try:
            return await place
        except asyncio.CancelledError:
            if place.done() and not place.cancelled() and not place.exception():
                self._give_back(pool, place.result())
            raise
        finally:
            with contextlib.suppress(ValueError):
                pool.waiting.remove(place)

    def _give_back(self, pool: _Pool, worker: Worker) -> None:
        if worker.sandbox.state != "running" or self._closed:
            self._drop(pool, worker, "it died")
            return
        for place in _open(pool):
            place.set_result(worker)
            return
        worker.idle_since = asyncio.get_running_loop().time()
        pool.idle.append(worker)
        self._grow()  # another pool may wait for this one's place

    def _drop(self, pool: _Pool, worker: Worker, why: str) -> None:
        worker.end(why)
        pool.workers -= 1
        self._grow()

    def _grow(self) -> None:
        """Begin workers for calls that wait, the pool with the fewest first."""
        if self._closed:
            return
        self._sweeper = self._sweeper or self._spawn(self._sweep())
        while hungry := [p for p in self._pools.values() if p.hungry and self._may_grow(p)]:
            pool = min(hungry, key=lambda p: p.workers)
            if sum(p.workers for p in self._pools.values()) >= self._config.workers:
                victim = self._longest_idle()
                if victim is None:
                    return
                victim[1].end("its place was wanted")
                victim[0].workers -= 1
            pool.workers += 1
            pool.starting += 1
            self._spawn(self._start(pool))

    def _may_grow(self, pool: _Pool) -> bool:
        return pool.workers < self._config.workers_each

    def _longest_idle(self) -> tuple[_Pool, Worker] | None:
        idle = [(pool, worker) for pool in self._pools.values() for worker in pool.idle]
        if not idle:
            return None
        pool, worker = min(idle, key=lambda each: each[1].idle_since)
        pool.idle.remove(worker)
        return pool, worker

    async def _start(self, pool: _Pool) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                worker = await Worker.start(self._manager, pool.owner, pool.args, pool.imports)
        except (DSecError, TimeoutError) as error:
            pool.starting -= 1
            pool.workers -= 1
            self._refuse(pool, error)
            return
        except BaseException:
            pool.starting -= 1
            pool.workers -= 1
            raise
        pool.starting -= 1
        self._give_back(pool, worker)

    def _refuse(self, pool: _Pool, error: DSecError | TimeoutError) -> None:
        """No worker could be made: one call learns it, all if there is none to wait for."""
        if isinstance(error, TimeoutError):
            error = Unavailable(f"no worker was ready in {self._config.start_timeout_s:g} s")
        log.event(logger, logging.WARNING, "no worker", why=error.message)
        for place in _open(pool):
            place.set_exception(type(error)(error.message, **error.detail))
            if pool.workers:
                break
        self._grow()

    def _spawn(self, work: Any) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(work, name="fncall")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _sweep(self) -> None:
        """End workers that nobody wanted for a while, and forget empty pools."""
        while True:
            await asyncio.sleep(_SWEEP_S)
            oldest = asyncio.get_running_loop().time() - self._config.idle_s
            for key, pool in list(self._pools.items()):
                for worker in [w for w in pool.idle if w.idle_since < oldest]:
                    pool.idle.remove(worker)
                    pool.workers -= 1
                    worker.end("idle")
                if not pool.workers and not pool.waiting:
                    del self._pools[key]

    async def close(self) -> None:
        """Begin to end every worker; the manager frees them."""
        self._closed = True
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for pool in self._pools.values():
            for place in _open(pool):
                place.set_exception(Unavailable("dsecd is shutting down"))
            for worker in pool.idle:
                worker.end("dsecd was stopped")
        self._pools.clear()


def _open(pool: _Pool) -> Iterator[asyncio.Future[Worker]]:
    """Take the calls that still wait from the queue, the first first."""
    while pool.waiting:
        place = pool.waiting.popleft()
        if not place.done():
            yield place


def _result(answer: dict[str, Any], parts: list[bytes], total: float) -> FnCallResult:
    started, ran = float(answer.get("started_s", 0.0)), float(answer.get("run_s", 0.0))
    try:
        return FnCallResult(
            value_json=parts[0],
            exit_code=answer.get("exit_code"),
            signal=answer.get("signal"),
            timed_out=bool(answer.get("timed_out")),
            output_truncated=bool(answer.get("truncated")),
            stdout=parts[1],
            stderr=parts[2],
            files=dict(zip(answer.get("files", []), parts[3:], strict=True)),
            started_s=started,
            run_s=ran,
            restored_s=max(0.0, total - started - ran),
        )
    except (IndexError, ValueError, TypeError) as error:
        raise Lost(f"the zygote's answer is not understood: {error}") from error


def _require(condition: bool, field: str, message: str) -> None:
    if not condition:
        raise InvalidArgument(f"{field}: {message}", field=field)


def _check(args: DSecFnCallArgs) -> None:
    module, _, name = args.entry.rpartition(":")
    _require(name.isidentifier(), "entry", "a function's name, or module:function")
    _require(
        bool(args.code) + bool(module) + bool(args.argv) == 1, "code",
        "give exactly one of code, an entry of the form module:function, and argv",
    )  # fmt: skip
    for field in ("timeout_s", "cpu_limit_s"):
        value = getattr(args, field)
        _require(math.isfinite(value) and 0 < value <= 86400, field, "above 0, at most 86,400 s")
    _require(1 <= args.files_limit_mb <= 1 << 20, "files_limit_mb", "1 MiB to 1 TiB")
    _require(1 <= args.output_limit_kb <= 1024, "output_limit_kb", "1 KiB to 1 MiB")
    _require(len(args.files) <= 1000, "files", "at most 1,000")
    _require(len(args.outputs) <= 100, "outputs", "at most 100")
    for field in ("files", "outputs"):
        for path in getattr(args, field):
            good = path and not path.startswith("/") and "\0" not in path
            plain = ".." not in path.split("/") and not path.endswith("/")
            _require(bool(good and plain), field, f"{path!r} is not a relative path to a file")
    for module in args.imports:
        parts = module.split(".")
        _require(all(map(str.isidentifier, parts)), "imports", f"{module!r} is not a module")
    for word in (*args.argv, *args.env, *args.env.values()):
        _require("\0" not in word, "argv", "arguments and variables hold no NUL")
