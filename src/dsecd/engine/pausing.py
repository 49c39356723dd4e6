"""Pause and resume.

A paused sandbox stands still and its memory is paged out, unless its backend saves it elsewhere.
Whoever calls into it has it resumed: the call is sent at once and waits with its agent, so nothing
is queued here. All who ask for that meanwhile share one resumption. Both ways are taken under the
sandbox's lock, beside checkpoints and packs; paging out is not, so that a call that arrives during
it does not wait for its end.

A sandbox that its caller paused has no idle timeout until it is resumed; one that the daemon paused
for being idle keeps it. Its maximum lifetime runs on in any case.
"""

from __future__ import annotations

import asyncio
import logging

from dsecd import log
from dsecd.backends.abc import Handle
from dsecd.engine.backends import require
from dsecd.engine.journal import PausedBy
from dsecd.engine.lifecycle import ALIVE
from dsecd.engine.manager import Manager
from dsecd.engine.sandbox import Sandbox
from dsecd.engine.waiter import completed, each
from libdsec.errors import DSecError, InvalidArgument, to_wire
from libdsec.model import Paused, Resumed

logger = logging.getLogger("dsecd.engine")
PARALLEL = 8  # of the sandboxes of one job
STEP_BYTES = 32 << 20  # paged out before it is asked whether the sandbox is still paused
POOR_SHARE = 0.125  # of a step: less, and there is no more to get


async def pause(
    manager: Manager, name: str, target_bytes: int | None = None, by: PausedBy = "caller"
) -> Paused:
    """Pause a sandbox, and page out until `target_bytes` of its memory are left.

    One that is paused already is paged out further. `by` "idle" does nothing to a sandbox with an
    open call. Raises `NotFound`, `WrongState`, `Unsupported`.
    """
    sandbox = manager.get(name)
    require(sandbox.backend, "pause")
    if target_bytes is not None and target_bytes < 0:
        raise InvalidArgument("target_bytes: 0 or more, or none", field="target_bytes")
    handle = _alive(sandbox)
    before = sandbox.backend.warmth(handle).memory_bytes
    # the engine's own work: a caller that goes away leaves no sandbox half frozen
    freezing = asyncio.create_task(_freeze(manager, sandbox, by))
    await completed(freezing)
    freezing.result()
    return await _shrink(manager, sandbox, before, target_bytes or 0)


async def resume(manager: Manager, name: str) -> Sandbox:
    """Resume a sandbox; returns when it answers. Raises `NotFound`, `WrongState`."""
    sandbox = manager.enter(name)
    try:
        waking = wake(manager, sandbox)
        await completed(waking)
        waking.result()
        sandbox.require_alive()
    finally:
        manager.leave(sandbox)
    return sandbox


def wake(manager: Manager, sandbox: Sandbox) -> asyncio.Task[None]:
    """Begin to resume a sandbox, if it is not running; the task fails if that does."""
    if sandbox.waking is None or sandbox.waking.done():
        sandbox.waking = asyncio.create_task(_wake(manager, sandbox))
        sandbox.waking.add_done_callback(_report)
    return sandbox.waking


def asleep(sandbox: Sandbox) -> bool:
    """Whether a call into it has to `wake` it, or to hear whether that succeeds."""
    waking = sandbox.waking is not None and not sandbox.waking.done()
    return waking or sandbox.state == "paused"


async def _wake(manager: Manager, sandbox: Sandbox) -> None:
    async with sandbox.lock():
        await thaw(manager, sandbox)


def _report(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.error("cannot resume: %r", task.exception())


async def thaw(manager: Manager, sandbox: Sandbox) -> None:
    """Resume a sandbox if it is paused; its lock is held."""
    if sandbox.state != "paused":
        return
    assert sandbox.handle is not None
    begun = asyncio.get_running_loop().time()
    by, sandbox.paused_by = sandbox.paused_by, ""
    sandbox.move("resume")  # at once: a call may be answered before we hear of the thaw
    try:
        await sandbox.backend.resume(sandbox.handle, lambda now: sandbox.save(manager.journal, now))
    except BaseException:
        if sandbox.state in ALIVE:
            sandbox.move("pause")
            sandbox.paused_by = by
        raise
    if sandbox.state not in ALIVE:
        return  # it was stopped, or died, meanwhile
    now = asyncio.get_running_loop().time()
    sandbox.idle_since = now
    manager.rearm(sandbox)
    manager.registry.resumes.add()
    manager.registry.resume_s.observe(now - begun)
    manager.events.emit(sandbox.id, "resumed")


async def _freeze(manager: Manager, sandbox: Sandbox, by: PausedBy) -> None:
    async with sandbox.lock():
        handle = _alive(sandbox)
        if by == "idle" and (sandbox.calls or sandbox.state == "paused"):
            return
        if sandbox.state == "paused":
            sandbox.paused_by = by
            manager.journal.post(sandbox.row("running"))
            return
        entered, sandbox.paused_by = sandbox.entered, by
        try:
            with log.about(sandbox.id):
                await sandbox.backend.pause(handle, lambda now: sandbox.save(manager.journal, now))
        except BaseException:
            sandbox.paused_by = ""
            raise
        sandbox.require_alive()
        sandbox.move("pause")
    manager.registry.pauses.add(by)
    manager.events.emit(sandbox.id, "paused", by=by)
    if sandbox.entered != entered:
        wake(manager, sandbox)  # a call came while it froze, and waits


async def _shrink(manager: Manager, sandbox: Sandbox, before: int, target_bytes: int) -> Paused:
    """Page out step by step, for as long as it stays paused; returns what that gave."""
    backend, handle = sandbox.backend, _alive(sandbox)
    now, notes = backend.warmth(handle).memory_bytes, list[str]()
    pages = backend.capabilities.trim and not backend.capabilities.pause_frees
    while sandbox.state == "paused" and now > target_bytes and pages:
        step = min(now - target_bytes, STEP_BYTES)
        freed = await backend.trim(handle, step)
        if sandbox.state != "paused":
            break
        now = backend.warmth(handle).memory_bytes
        if freed < step * POOR_SHARE:
            break
    handle = _alive(sandbox)
    if sandbox.state != "paused":
        notes.append("a call resumed it meanwhile")
    elif now > target_bytes and pages and not manager.admission.reading().swap_total_bytes:
        notes.append("the host has no swap: only what files hold could go (reclaim.swap)")
    elif now > target_bytes > 0 and pages:
        notes.append("no more of its memory could go")
    usage = await backend.usage(handle)
    return Paused(
        id=sandbox.id,
        memory_before_bytes=before,
        memory_bytes=usage.memory_bytes,
        memory_swapped_bytes=usage.memory_swapped_bytes,
        notes=notes,
    )


def _alive(sandbox: Sandbox) -> Handle:
    sandbox.require_alive()
    assert sandbox.handle is not None
    return sandbox.handle


# --- a whole job --------------------------------------------------------------------------------


async def pause_many(
    manager: Manager, labels: dict[str, str], target_bytes: int | None
) -> list[Paused]:
    """Pause all sandboxes that carry `labels`, a few at a time."""

    async def one(sandbox: Sandbox) -> Paused:
        try:
            return await pause(manager, sandbox.id, target_bytes)
        except DSecError as error:
            return Paused(id=sandbox.id, error=to_wire(error))

    return await each(_job(manager, labels), one, PARALLEL)


async def resume_many(manager: Manager, labels: dict[str, str]) -> list[Resumed]:
    """Resume all sandboxes that carry `labels`, a few at a time."""

    async def one(sandbox: Sandbox) -> Resumed:
        try:
            await resume(manager, sandbox.id)
        except DSecError as error:
            return Resumed(id=sandbox.id, error=to_wire(error))
        return Resumed(id=sandbox.id)

    return await each(_job(manager, labels), one, PARALLEL)


def _job(manager: Manager, labels: dict[str, str]) -> list[Sandbox]:
    if not labels:
        raise InvalidArgument("labels: at least one is required", field="labels")
    return [s for s in manager.select(labels, with_ended=False) if s.state in ALIVE]
