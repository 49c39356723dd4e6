"""Creates, watches and ends sandboxes. The only writer of their state.

One create: admission → `prepare` (pools) → journal *intent* → `create` → journal *running* →
answer. A kill of the daemon between any two of these is repaired by `recovery`. Work for one
sandbox is one task that belongs to the engine, never to a connection: a caller that vanishes
changes nothing except that the sandbox is then unclaimed, and ends after a grace period unless the
same key is asked for again.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterable

from dsecd import log
from dsecd.backends.abc import Instance
from dsecd.config import Config
from dsecd.engine.admission import Admission, Host
from dsecd.engine.backends import Backends
from dsecd.engine.events import Bus
from dsecd.engine.grants import granted, spent
from dsecd.engine.journal import Journal
from dsecd.engine.lifecycle import ALIVE, FINAL
from dsecd.engine.policies import Policies
from dsecd.engine.request import Kind, check_key, check_offered, compile_spec, settle
from dsecd.engine.sandbox import Sandbox
from dsecd.engine.timer import Timer
from dsecd.engine.waiter import completed, report_to
from dsecd.images.tool import Report, unreported
from dsecd.metrics import Registry
from dsecd.model import Death, make_id
from libdsec.errors import (
    AlreadyExists,
    DSecError,
    Internal,
    NotFound,
    Timeout,
    Unavailable,
    WrongState,
)
from libdsec.model import DSecContainerRunArgs

logger = logging.getLogger("dsecd.engine")
Step = Callable[[str], None]
DESTROY_RETRY_S = (0.2, 30.0)  # first and longest wait between attempts


def no_step(name: str) -> None:
    """Called at each point where a crash must be repairable; tests put a crash there."""


class Manager:
    """The engine of one daemon."""

    def __init__(
        self,
        config: Config,
        backends: Backends,
        journal: Journal,
        host: Host,
        registry: Registry,
        step: Step = no_step,
    ) -> None:
        self.config, self.backends, self.journal = config, backends, journal
        self.registry = registry
        able, reserve = backends.capabilities(), config.reclaim.reserve_new_mb << 20
        self.admission = Admission(config.limits, host, able, reserve)
        self.policies = Policies(config.policy, backends.own)
        self.events = Bus(on_drop=registry.events_dropped.add)
        self.live: dict[str, Sandbox] = {}
        self.ended: OrderedDict[str, Sandbox] = OrderedDict()
        self.creating = 0
        self.epoch = journal.next_epoch()
        self._serial = 0
        self._by_key: dict[tuple[str, str], Sandbox] = {}
        self._timer = Timer(self._look)
        self._gate = asyncio.Semaphore(config.limits.concurrent_creates)
        self._step = step
        self._closing = False

    # --- create ---------------------------------------------------------------------------------

    async def create(
        self,
        owner: str,
        key: str,
        kind: Kind,
        args: DSecContainerRunArgs,
        report: Report = unreported,
    ) -> Sandbox:
        """Return the running sandbox of `key`, made now or before.

        `report` is told how far a pull of its image is. Cancelling this wait cancels nothing by
        itself: see `abandon`. Raises what admission, the request's check or the backend raise; a
        failed create frees its key.
        """
        await self.policies.ready(args, args.strict, self.backends.get(kind.backend))
        sandbox = self.request(owner, key, kind, args)
        sandbox.report = report
        sandbox.waiters += 1
        sandbox.claim_deadline = None
        try:
            await completed(sandbox.ready)
        finally:
            sandbox.waiters -= 1
            sandbox.report = unreported
        sandbox.ready.result()
        return sandbox

    def request(self, owner: str, key: str, kind: Kind, args: DSecContainerRunArgs) -> Sandbox:
        """Begin the create of `key`, or return the sandbox that has it, in whatever state."""
        backend = self.backends.get(kind.backend)
        kind = settle(kind, backend)
        known = self._by_key.get((owner, key))
        if known is not None:
            if not known.asked(kind, args):
                raise AlreadyExists(f"key {key!r} was used for a different request", id=known.id)
            return known
        check_key(key)
        if self._closing:
            raise Unavailable("dsecd is shutting down")
        name = make_id(self.config.shard, self.config.node, self.epoch, self._serial)
        account = self.policies.get(args, args.strict, backend)
        spec = granted(compile_spec(name, args, account, kind), args, backend)
        check_offered(spec, backend, self.live)
        self.admission.take(spec, self.creating)
        self._serial += 1
        sandbox = Sandbox(name, key, owner, args, spec, backend, kind)
        sandbox.node = self.config.node
        sandbox.idle_s = args.ttl_running_stop or self.config.limits.default_idle_s or None
        sandbox.account = account
        self.live[name] = sandbox
        self._by_key[owner, key] = sandbox
        self.creating += 1
        sandbox.task = asyncio.get_running_loop().create_task(self._build(sandbox))
        return sandbox

    async def _build(self, sandbox: Sandbox) -> None:
        log.sandbox.set(sandbox.id)
        error: DSecError | None = None
        try:
            if not sandbox.backend.located(sandbox.spec):
                await self._pull(sandbox)
            async with self._gate:
                if sandbox.state == "creating":
                    async with asyncio.timeout(sandbox.create_s(self.config.limits)):
                        await self._make(sandbox)
        except DSecError as caught:
            error = caught
        except TimeoutError:
            error = Timeout(f"not running after {sandbox.create_s(self.config.limits):g} s")
        except Exception as caught:
            logger.exception("create failed unexpectedly")
            error = Internal(f"create failed: {caught!r}")
        self.creating -= 1
        sandbox.spec = spent(sandbox.spec)
        if error is not None:
            self._build_failed(sandbox, error)
        elif sandbox.state == "creating":
            self._built(sandbox)
            return
        else:  # given up, or died, while it was being made
            self._build_failed(sandbox, WrongState(sandbox.reason, state=sandbox.state))
        await self._free(sandbox)

    async def _pull(self, sandbox: Sandbox) -> None:
        """Have a registry's image imported. That may take minutes, in which others are made."""
        sandbox.pull = asyncio.ensure_future(sandbox.backend.pull(sandbox.spec, sandbox.tell))
        try:
            await sandbox.pull
        except asyncio.CancelledError:
            if sandbox.state == "creating":  # else it was stopped meanwhile
                raise
        finally:
            sandbox.pull = None

    async def _make(self, sandbox: Sandbox) -> None:
        backend = sandbox.backend
        if not backend.located(sandbox.spec):
            await backend.locate(sandbox.spec)
        sandbox.handle = handle = backend.prepare(sandbox.id, sandbox.spec)
        try:
            self._step("prepared")
            await self.journal.write(sandbox.row("intent", claimed=False))
        except BaseException:
            backend.release(handle)
            sandbox.handle = None
            raise
        self._step("intent")
        instance = await backend.create(handle, sandbox.spec)
        self._install(sandbox, instance)
        if sandbox.cpu_class != "standard":
            sandbox.cpu_notes = await backend.set_cpu_class(instance.handle, sandbox.cpu_class)
        if instance.steps_us:
            log.event(logger, logging.DEBUG, "steps", **instance.steps_us)
        self._step("created")
        await self.journal.write(sandbox.row("running", claimed=sandbox.waiters > 0))
        self._step("running")

    def _install(self, sandbox: Sandbox, instance: Instance) -> None:
        sandbox.hold(instance)
        sandbox.address, sandbox.address6 = instance.address, instance.address6
        sandbox.notes += [note for note in instance.notes if note not in sandbox.notes]

    def _built(self, sandbox: Sandbox) -> None:
        now = asyncio.get_running_loop().time()
        sandbox.move("ready")
        sandbox.idle_since = now
        self.start_clocks(sandbox, now)
        self.registry.creates.add()
        self.registry.create_s.observe(now - sandbox.started)
        sandbox.ready.set_result(None)
        self.events.emit(sandbox.id, "created")
        log.event(logger, logging.INFO, "created", ms=round((now - sandbox.started) * 1e3, 2))
        if sandbox.waiters == 0 and sandbox.claim_deadline is None:
            self.abandon(sandbox, self.config.limits.unclaimed_grace_s)

    def _build_failed(self, sandbox: Sandbox, error: DSecError) -> None:
        self.registry.failures.add(error.code)
        if self._by_key.get((sandbox.owner, sandbox.key)) is sandbox:
            del self._by_key[sandbox.owner, sandbox.key]  # a retry with this key tries again
        if sandbox.state == "creating":
            sandbox.reason = f"create failed: {error.message}"
            sandbox.move("fail")
            self.registry.stops.add("create_failed")
        sandbox.error = error  # answered once what it left is gone
        log.event(logger, logging.WARNING, "create failed", code=error.code, why=error.message)

    def start_clocks(self, sandbox: Sandbox, born: float) -> None:
        """Arm idle timeout and maximum lifetime; `born` is the loop time of the creation."""
        limits = self.config.limits
        asked = sandbox.args.max_lifetime_s
        bounds = [bound for bound in (asked, limits.max_lifetime_s) if bound]
        sandbox.lifetime_end = born + min(bounds) if bounds else None
        self.rearm(sandbox)

    def rearm(self, sandbox: Sandbox) -> None:
        """The sandbox's deadline may have moved to an earlier time."""
        deadline = sandbox.deadline()
        if deadline is not None:
            self._timer.watch(sandbox.id, deadline[0])

    async def create_many(
        self, owner: str, keys: list[str], kind: Kind, args: DSecContainerRunArgs
    ) -> AsyncGenerator[tuple[str, Sandbox | DSecError], None]:
        """Yield each key with its sandbox or error, in order of completion."""
        done: asyncio.Queue[tuple[str, Sandbox | DSecError]] = asyncio.Queue()
        made: list[Sandbox] = []
        await self.policies.ready(args, args.strict, self.backends.get(kind.backend))
        for key in keys:
            try:
                sandbox = self.request(owner, key, kind, args)
            except DSecError as error:
                done.put_nowait((key, error))
                continue
            sandbox.waiters += 1
            sandbox.claim_deadline = None
            made.append(sandbox)
            sandbox.ready.add_done_callback(report_to(done, key, sandbox))
        try:
            for _ in keys:
                yield await done.get()
        finally:
            for sandbox in made:
                sandbox.waiters -= 1

    def abandon(self, sandbox: Sandbox, grace_s: float) -> None:
        """Nobody got the answer to this create: end it unless its key is asked again in time."""
        if sandbox.waiters or sandbox.claims or not sandbox.wanted:
            return
        if grace_s <= 0:
            self.begin_stop(sandbox, "the caller gave the create up")
            return
        sandbox.claim_deadline = asyncio.get_running_loop().time() + grace_s
        if sandbox.state in ALIVE:
            self.journal.post(sandbox.row("running", claimed=False))
        self.rearm(sandbox)

    # --- look up, use ---------------------------------------------------------------------------

    def by_key(self, owner: str, key: str) -> Sandbox | None:
        """Return the sandbox that has this idempotency key."""
        return self._by_key.get((owner, key))

    def get(self, name: str) -> Sandbox:
        """Return a client's sandbox, live or recently ended. Raises `NotFound`."""
        sandbox = self.live.get(name) or self.ended.get(name)
        if sandbox is None or sandbox.own:
            raise NotFound(f"no sandbox {name!r} on this host", id=name)
        return sandbox

    def enter(self, name: str) -> Sandbox:
        """Begin a client's call: see `leave`, `pausing.wake`. Raises `NotFound`, `WrongState`."""
        sandbox = self.get(name)
        self.use(sandbox)
        return sandbox

    def use(self, sandbox: Sandbox) -> None:
        """Begin a call into a sandbox, perhaps one of the engine's own. Raises `WrongState`."""
        sandbox.require_alive()
        sandbox.calls += 1
        sandbox.entered += 1
        if sandbox.claim_deadline is not None:  # its answer arrived after all
            sandbox.claim_deadline = None
            sandbox.claims += 1

    def leave(self, sandbox: Sandbox) -> None:
        """End a call that `enter` began: the idle clock starts with the last one."""
        sandbox.calls -= 1
        if sandbox.calls == 0:
            sandbox.idle_since = asyncio.get_running_loop().time()
            if sandbox.idle_s is not None and sandbox.state in ALIVE:
                self._timer.watch(sandbox.id, sandbox.idle_since + sandbox.idle_s)

    def set_timeout(self, sandbox: Sandbox, idle_s: float | None) -> None:
        """Give a new idle timeout, counted from now."""
        sandbox.require_alive()
        sandbox.idle_s = idle_s
        sandbox.idle_since = asyncio.get_running_loop().time()
        self.journal.post(sandbox.row("running"))
        self.rearm(sandbox)

    def select(self, labels: dict[str, str], with_ended: bool) -> Iterable[Sandbox]:
        """Yield the clients' sandboxes that carry all of `labels`."""
        for pool in (self.live, self.ended) if with_ended else (self.live,):
            for sandbox in pool.values():
                if not sandbox.own and sandbox.carries(labels):
                    yield sandbox

    # --- end ------------------------------------------------------------------------------------

    def begin_stop(self, sandbox: Sandbox, reason: str) -> None:
        """Start ending a sandbox; nothing happens to one that ends already."""
        if not sandbox.wanted:
            return
        building = sandbox.state == "creating"
        sandbox.move("stop")
        sandbox.reason = reason
        if building:  # the build task sees the state and frees
            if sandbox.pull is not None:
                sandbox.pull.cancel()
            return
        sandbox.task = asyncio.get_running_loop().create_task(self._free(sandbox))

    async def stop(self, name: str, reason: str = "stopped by request") -> Sandbox:
        """End a sandbox and wait until its resources are free. Idempotent.

        Raises `NotFound`, and `Timeout` when the host takes longer than `limits.stop_timeout_s`;
        the work then goes on by itself.
        """
        sandbox = self.get(name)
        self.begin_stop(sandbox, reason)
        if not await completed(sandbox.gone, self.config.limits.stop_timeout_s):
            raise Timeout(f"sandbox {name} is still being stopped", id=name)
        return sandbox

    async def _free(self, sandbox: Sandbox) -> None:
        """Give everything back, however often it takes; then the sandbox is no longer live."""
        log.sandbox.set(sandbox.id)
        if sandbox.channel is not None:
            channel, sandbox.channel = sandbox.channel, None
            channel.close()
        handle, (delay, longest) = sandbox.handle, DESTROY_RETRY_S
        while handle is not None:
            try:
                await sandbox.backend.destroy(handle)
                break
            except Exception as error:
                log.event(logger, logging.ERROR, "destroy failed, will retry", why=repr(error))
                sandbox.answer_failure()
                await asyncio.sleep(delay)
                delay = min(delay * 2, longest)
        self._step("destroyed")
        if sandbox.state == "stopping":
            sandbox.move("freed")
            self.events.emit(sandbox.id, "stopped", reason=sandbox.reason)
            self.registry.stops.add("stopped")
        self._bury(sandbox, had_row=handle is not None)

    def _bury(self, sandbox: Sandbox, had_row: bool) -> None:
        sandbox.answer_failure()
        self._timer.forget(sandbox.id)
        if self.live.pop(sandbox.id, None) is not None:
            self.admission.give_back(sandbox.spec)
        if had_row:
            self.journal.post(sandbox.row("ended"))
        self.remember(sandbox)
        sandbox.task = None
        if not sandbox.gone.done():
            sandbox.gone.set_result(None)
        log.event(logger, logging.INFO, sandbox.state, reason=sandbox.reason)

    def remember(self, sandbox: Sandbox) -> None:
        """Keep an ended sandbox for a while, to answer why it ended; not the engine's own."""
        if sandbox.own:
            self._forget(sandbox)
            return
        limits = self.config.limits
        self.ended[sandbox.id] = sandbox
        oldest = (sandbox.ended_at or 0.0) - limits.ended_kept_s
        while self.ended:
            first = next(iter(self.ended.values()))
            if len(self.ended) <= limits.ended_kept and (first.ended_at or 0.0) >= oldest:
                break
            self.ended.popitem(last=False)
            self._forget(first)

    def _forget(self, sandbox: Sandbox) -> None:
        self.journal.drop(sandbox.id)
        if self._by_key.get((sandbox.owner, sandbox.key)) is sandbox:
            del self._by_key[sandbox.owner, sandbox.key]

    # --- what happens by itself -----------------------------------------------------------------

    def died(self, name: str, death: Death) -> None:
        """A backend's sandbox is gone: its callers learn it now, not at their next call."""
        sandbox = self.live.get(name)
        if sandbox is None or sandbox.state in FINAL or sandbox.state == "stopping":
            return
        building = sandbox.state == "creating"
        sandbox.reason = death.reason
        sandbox.move("fail")
        self.registry.stops.add("failed")
        self.events.emit(name, "failed", reason=death.reason)
        log.event(logger, logging.WARNING, "died", sandbox=name, reason=death.reason)
        if not building:
            sandbox.task = asyncio.get_running_loop().create_task(self._free(sandbox))

    def oom(self, name: str, kills: int) -> None:
        """The kernel killed a process of the sandbox for its memory limit."""
        sandbox = self.live.get(name)
        if sandbox is None or kills <= sandbox.oom_kills:
            return
        new = kills - sandbox.oom_kills
        sandbox.oom_kills = kills
        self.registry.oom.add(amount=new)
        self.events.emit(name, "oom", kills=str(new))
        log.event(logger, logging.WARNING, "out of memory", sandbox=name, kills=new)

    def denied(self, name: str, detail: dict[str, str]) -> None:
        """The policy of a sandbox refused something."""
        if name in self.live:
            self.events.emit(name, "denied", **detail)

    def refresh_oom(self, sandbox: Sandbox) -> int:
        """Return the number of OOM kills so far, read now."""
        if sandbox.handle is not None and sandbox.backend.capabilities.oom:
            self.oom(sandbox.id, sandbox.backend.oom_kills(sandbox.handle))
        return sandbox.oom_kills

    def _look(self, name: str) -> float | None:
        """The timer asks: end the sandbox if its time has come, else say when to ask again."""
        sandbox = self.live.get(name)
        if sandbox is None or not sandbox.wanted:
            return None
        deadline = sandbox.deadline()
        if deadline is None:
            return None
        when, reason = deadline
        if when > asyncio.get_running_loop().time() + 0.001:
            return when
        self.events.emit(name, "expired", reason=reason)
        self.begin_stop(sandbox, reason)
        return None

    # --- the daemon's own end -------------------------------------------------------------------

    def adopt(self, sandbox: Sandbox) -> None:
        """Enter a sandbox that recovery found (live) or remembers (ended)."""
        self._by_key[sandbox.owner, sandbox.key] = sandbox
        if sandbox.state in FINAL:
            self.remember(sandbox)
        else:
            self.live[sandbox.id] = sandbox
            self.admission.count(sandbox.spec)

    async def close(self, keep: bool) -> None:
        """End the engine. `keep`: running sandboxes that can stay for the next daemon."""
        self._closing = True
        self._timer.close()
        for sandbox in list(self.live.values()):
            if not (keep and sandbox.backend.capabilities.survives_daemon):
                self.begin_stop(sandbox, "dsecd was stopped")
        tasks = [s.task for s in self.live.values() if s.task is not None]
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=self.config.stop.timeout_s)
            for task in late:
                task.cancel()
            await asyncio.gather(*late, return_exceptions=True)
            if late:
                logger.error("%d sandboxes were not freed; the next start frees them", len(late))
        for sandbox in self.live.values():
            if sandbox.channel is not None:
                sandbox.channel.close()
        self.events.close()
        await self.backends.close()
        self.journal.close()
