"""The loop that has idle sandboxes give memory back; `resources.reclaim` decides.

A round comes each period, and at once when the kernel says that tasks wait for memory. It looks at
no more than `LOOKED_AT` sandboxes, the coldest first, so that thousands of them do not hold up the
event loop. A call into a sandbox that came after the decision wins: it is not touched then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterable

from dsecd import log
from dsecd.config import Reclaim
from dsecd.engine import pausing
from dsecd.engine.manager import Manager
from dsecd.engine.sandbox import Sandbox
from dsecd.host.pressure import Trigger
from dsecd.model import Reading
from dsecd.resources import reclaim
from dsecd.resources.reclaim import Decision, History, Host, Policy, Round, Subject
from libdsec.errors import DSecError, Unsupported

logger = logging.getLogger("dsecd.reclaim")
LOOKED_AT = 128  # in one round: 3-4 file reads each
STALL_S = 0.2  # of 2 s: tasks wait for memory
APART_S = 1.0  # between two rounds, however the pressure
BUSY = 0.05  # of a CPU: processes of a sandbox that use more are at work, called for or not


class Reclaimer:
    """Made for one manager; `start` in the event loop, `close` at its end."""

    def __init__(self, manager: Manager, config: Reclaim) -> None:
        self._manager, self._config = manager, config
        able = manager.backends.capabilities().values()
        self._policy = Policy(
            target=config.target_percent / 100,
            when="always" if config.when == "always" else "pressure",
            trim_after_s=config.trim_after_s,
            pause_after_s=config.pause_after_s if any(one.pause for one in able) else 0.0,
            rest_s=config.rest_s,
        )
        self._history = History()
        self._cpu: dict[str, tuple[float, float]] = {}  # when, CPU seconds at that time
        self._poor: dict[str, float] = {}  # when a look found nothing to give
        self._wake = asyncio.Event()
        self._short = self._going = False
        self._trigger: Trigger | None = None
        self._task: asyncio.Task[None] | None = None
        self._said = ""
        self.need_bytes = 0
        self._relief_bytes = 0

    def start(self) -> None:
        """Begin, unless the configuration or the backends have it otherwise."""
        able = self._manager.backends.capabilities().values()
        if self._config.when == "off" or not any(one.trim for one in able):
            log.event(logger, logging.INFO, "reclaim is off", when=self._config.when)
            return
        try:
            self._trigger = Trigger("memory", STALL_S, self._pressed)
        except Unsupported as error:
            logger.warning("pressure is only seen each period: %s", error.message)
        self._manager.admission.bound_by(self._policy.target, self._relief)
        self._task = asyncio.get_running_loop().create_task(self._run(), name="reclaim")

    async def close(self) -> None:
        if self._trigger is not None:
            self._trigger.close()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _pressed(self) -> None:
        self._short = True
        self._wake.set()

    def _relief(self) -> int:
        """What idle sandboxes could give at once, as far as was seen; asking hurries a round."""
        self._wake.set()
        return self._relief_bytes

    async def _run(self) -> None:
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._config.period_s):
                    await self._wake.wait()
            self._wake.clear()
            try:
                await self.round()
            except Exception:
                logger.exception("a round of reclaim failed")
            await asyncio.sleep(min(APART_S, self._config.period_s))

    async def round(self) -> Round:
        """Look, decide, and do it."""
        reading, short = self._manager.admission.reading(), self._short
        self._short = False
        host = Host(
            total_bytes=reading.memory_total_bytes,
            available_bytes=reading.memory_available_bytes,
            short=short,
        )
        subjects = self._look() if self._near(reading) or short else []
        found = reclaim.decide(host, subjects, self._policy, self._going)
        self._going, self.need_bytes = found.going, found.need_bytes
        self._relief_bytes = self._estimate(subjects)
        self._report(found)
        for decision in found.decisions:
            await self._execute(decision)
        self._history.keep(self._manager.live)
        return found

    def _near(self, reading: Reading) -> bool:
        """Whether the target may soon be passed: what sandboxes could give must be known then."""
        if self._policy.when == "always" or self._going:
            return True
        used = reading.memory_total_bytes - reading.memory_available_bytes
        near = self._policy.target - 2 * self._policy.margin
        return used > reading.memory_total_bytes * near

    # --- looking --------------------------------------------------------------------------------

    def _look(self) -> list[Subject]:
        """Return the coldest sandboxes as they are now; those not looked at yet come first."""
        now = asyncio.get_running_loop().time()
        live = self._manager.live.values()
        idle = [s for s in live if s.state == "running" and not s.calls and _gives(s)]
        idle.sort(key=lambda s: (self._seen(s, now), s.idle_since))
        subjects = [self._subject(sandbox, now) for sandbox in idle[:LOOKED_AT]]
        for subject in subjects:
            if not subject.in_use and reclaim.gain_bytes(subject) < reclaim.MIN_GAIN_BYTES:
                self._poor[subject.id] = now
        for known in (self._cpu, self._poor):
            for name in known.keys() - self._manager.live.keys():
                del known[name]
        return subjects

    def _seen(self, sandbox: Sandbox, now: float) -> bool:
        """Whether it was asked, or had nothing to give, since it became idle: others first."""
        past = self._history.past(sandbox.id, now)
        asked = past is not None and now - past.ago_s > sandbox.idle_since
        return asked or self._poor.get(sandbox.id, -1.0) > sandbox.idle_since

    def _subject(self, sandbox: Sandbox, now: float) -> Subject:
        assert sandbox.handle is not None
        warmth = sandbox.backend.warmth(sandbox.handle)
        before = self._cpu.get(sandbox.id)
        self._cpu[sandbox.id] = now, warmth.cpu_usage_s
        busy = before is None or warmth.cpu_usage_s - before[1] > BUSY * (now - before[0])
        return Subject(
            id=sandbox.id,
            memory_bytes=warmth.memory_bytes,
            idle_s=now - sandbox.idle_since,
            cpu_class=sandbox.cpu_class,
            in_use=busy,
            pausable=sandbox.backend.capabilities.pause,
            stall_percent=warmth.memory_stalled,
            past=self._history.past(sandbox.id, now),
        )

    def _estimate(self, subjects: Iterable[Subject]) -> int:
        cold = (s for s in subjects if not s.in_use and s.idle_s >= self._policy.trim_after_s)
        return sum(max(0, reclaim.gain_bytes(subject)) for subject in cold)

    # --- doing ----------------------------------------------------------------------------------

    async def _execute(self, decision: Decision) -> None:
        manager, registry = self._manager, self._manager.registry
        sandbox = manager.live.get(decision.sandbox)
        if sandbox is None or sandbox.state != "running" or sandbox.handle is None or sandbox.calls:
            return
        before = sandbox.backend.warmth(sandbox.handle).memory_bytes
        why, freed = decision.reason, 0
        try:
            if decision.action == "pause":
                # of one that stands still all may go: it is not looked at again until it runs
                paused = await pausing.pause(manager, sandbox.id, by="idle")
                freed = max(0, before - paused.memory_bytes)
            else:
                freed = await sandbox.backend.trim(sandbox.handle, decision.memory_bytes)
        except DSecError as error:
            why = f"{why}; {error.message}"
        now = asyncio.get_running_loop().time()
        self._history.note(decision.sandbox, now, before, decision.memory_bytes, freed)
        self._relief_bytes = max(0, self._relief_bytes - decision.memory_bytes)
        registry.reclaims.add(decision.action)
        registry.reclaim_asked.add(amount=decision.memory_bytes)
        registry.reclaim_freed.add(amount=freed)
        log.event(
            logger, logging.INFO, decision.action, sandbox=decision.sandbox,
            asked_bytes=decision.memory_bytes, freed_bytes=freed, reason=why,
        )  # fmt: skip

    def _report(self, found: Round) -> None:
        """Log why a round does what it does; the same reason for doing nothing only once."""
        said = "" if found.decisions else found.reason.partition(";")[2] or found.reason
        if found.decisions or said != self._said:
            log.event(
                logger, logging.INFO if found.need_bytes else logging.DEBUG, "round",
                decisions=len(found.decisions), need_bytes=found.need_bytes, reason=found.reason,
            )  # fmt: skip
        self._said = said


def _gives(sandbox: Sandbox) -> bool:
    """Whether its backend can take memory of it."""
    return sandbox.backend.capabilities.trim
