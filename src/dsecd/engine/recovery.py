"""The start of a daemon after another one: what the journal says against what is there.

Order: every journalled sandbox that was running is offered to the backend; those alive are
re-adopted with their clocks. Only then the rest is destroyed, for the living may need what the dead
had (a branch its origin's files). A create that was under way is destroyed, too, because its caller
got no answer and will ask again; then the backend sweeps whatever carries our names and belongs to
nobody. Bounded concurrency: 500 sandboxes must be back in under 3 s, and the kernel's side of it is
serial.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time

import msgspec

from dsecd import log
from dsecd.backends.abc import HANDLE_VERSION, Backend, Handle
from dsecd.engine.journal import Row
from dsecd.engine.lifecycle import FINAL
from dsecd.engine.manager import Manager
from dsecd.engine.policies import Account
from dsecd.engine.request import Kind, compile_spec
from dsecd.engine.sandbox import Sandbox
from dsecd.engine.waiter import each
from libdsec.errors import DSecError, InvalidArgument
from libdsec.model import State

logger = logging.getLogger("dsecd.recovery")
PARALLEL = 32
UNREAD = "its policy was made by another version of dsecd: it is in force, but cannot be shown"


async def recover(manager: Manager) -> tuple[int, int]:
    """Bring the engine to the state of the host. Returns (re-adopted, freed)."""
    begun = time.monotonic()
    rows = manager.journal.rows()
    present = [row for row in rows if row.state != "ended"]
    alive = await each(present, functools.partial(_readopt_one, manager), PARALLEL)
    dead = [row for row, lives in zip(present, alive, strict=True) if not lives]
    await each(dead, functools.partial(_free_one, manager), PARALLEL)
    kept = len(present) - len(dead)
    for row in sorted(rows, key=lambda row: row.ended_at or 0.0):
        if row.state == "ended":
            _remember(manager, row)
    swept = await manager.backends.sweep(frozenset(manager.live))
    for what in swept:
        log.event(logger, logging.WARNING, "removed a left-over", what=what)
    freed = len(present) - kept
    if rows or swept:
        log.event(
            logger, logging.INFO, "recovered", readopted=kept, freed=freed, swept=len(swept),
            ms=round((time.monotonic() - begun) * 1e3, 1),
        )  # fmt: skip
    return kept, freed


async def _readopt_one(manager: Manager, row: Row) -> bool:
    """Re-adopt a sandbox if it lives."""
    handle = _handle(row)
    if handle is None or row.state != "running" or row.own:
        return False
    with log.about(row.id):
        try:
            return await _readopt(manager, row, handle)
        except Exception:
            logger.exception("cannot re-adopt; the sandbox is freed")
            return False


async def _free_one(manager: Manager, row: Row) -> None:
    """Free what a dead sandbox, or one that was being made, has left."""
    handle = _handle(row)
    if handle is None:  # nothing to free it by: sweep finds what it left
        manager.journal.drop(row.id)
        return
    with log.about(row.id):
        reason = await _free(manager, handle)
        if row.state == "intent" or row.own:
            manager.journal.drop(row.id)
            return
        sandbox = _sandbox(manager, row)
        sandbox.state, sandbox.reason, sandbox.ended_at = "failed", reason, time.time()
        manager.journal.post(sandbox.row("ended"))
        _settle(sandbox)
        manager.adopt(sandbox)
        manager.events.emit(row.id, "failed", reason=sandbox.reason)


async def _free(manager: Manager, handle: Handle) -> str:
    """Destroy once; what does not go now is left to `sweep`, which reports it.

    So is what a backend made that this daemon has not: nobody else can read the handle, but all of
    it carries the sandbox's id. Returns why the sandbox is no more.
    """
    backend = manager.backends.of(handle)
    if backend is None:
        why = manager.backends.absent.get(handle.backend, "it is not configured any more")
        log.event(
            logger, logging.ERROR, "ended, for its backend is not there", backend=handle.backend,
            why=why,
        )  # fmt: skip
        return f"dsecd was started without its backend, {handle.backend}: {why}"
    try:
        await backend.destroy(handle)
    except Exception:
        logger.exception("cannot free the left-overs of %s", handle.sandbox)
    return "found dead when dsecd started"


async def _readopt(manager: Manager, row: Row, handle: Handle) -> bool:
    backend = manager.backends.of(handle)
    if backend is None:
        return False
    account = await _account(manager, row, backend)  # before: from `recover` on it may die
    instance = await backend.recover(handle)
    if instance is None:
        return False
    sandbox = _sandbox(manager, row, account)
    sandbox.hold(instance)
    sandbox.address, sandbox.address6 = row.address, row.address6
    sandbox.state = "paused" if instance.paused else "running"
    sandbox.paused_by = row.paused_by if instance.paused else ""
    sandbox.cpu_class = row.cpu_class or row.args.cpu_class
    _settle(sandbox)
    manager.adopt(sandbox)
    now = asyncio.get_running_loop().time()
    born = now - max(0.0, time.time() - row.created_at)
    sandbox.started, sandbox.idle_s = born, row.idle_s
    manager.start_clocks(sandbox, born)
    sandbox.oom_kills = backend.oom_kills(instance.handle)
    if instance.handle != handle:  # it finished what an earlier daemon had begun
        await manager.journal.write(sandbox.row("running", claimed=row.claimed))
    if row.paused_by and not instance.paused:  # it was resumed last, and that was not written yet
        manager.journal.post(sandbox.row("running", claimed=row.claimed))
    if row.cpu_class is not None or sandbox.cpu_class != "standard":
        await _set_cpu_class(manager, sandbox)
    if not row.claimed:
        manager.abandon(sandbox, manager.config.limits.unclaimed_grace_s)
    manager.events.emit(row.id, "readopted")
    return True


async def _set_cpu_class(manager: Manager, sandbox: Sandbox) -> None:
    """Again: the last daemon may have ended before it came to it."""
    assert sandbox.handle is not None
    try:
        handle, cpu_class = sandbox.handle, sandbox.cpu_class
        sandbox.cpu_notes = await sandbox.backend.set_cpu_class(handle, cpu_class)
    except DSecError as error:
        sandbox.cpu_notes = (error.message,)


def _remember(manager: Manager, row: Row) -> None:
    sandbox = _sandbox(manager, row)
    final: State = "failed" if row.final == "failed" else "stopped"
    sandbox.state, sandbox.reason, sandbox.ended_at = final, row.reason, row.ended_at
    _settle(sandbox)
    manager.adopt(sandbox)


def _sandbox(manager: Manager, row: Row, account: Account | None = None) -> Sandbox:
    found = manager.backends.find(row.backend)
    kind = Kind(backend=found.name if found else row.backend, vm=row.vm)
    backend = found or manager.backends.own  # of what ended without its own, none is asked again
    spec = compile_spec(row.id, row.args, account, kind)
    sandbox = Sandbox(row.id, row.key, row.owner, row.args, spec, backend, kind)
    sandbox.sealed, sandbox.own = row.sealed, row.own
    sandbox.node = manager.config.node
    sandbox.created_at, sandbox.notes, sandbox.account = row.created_at, row.notes, account
    return sandbox


async def _account(manager: Manager, row: Row, backend: Backend) -> Account | None:
    """Return the policy of a sandbox; what is in force does not depend on our understanding it."""
    if not row.policy:
        return None
    try:
        return await manager.policies.restored(backend, row.policy)
    except InvalidArgument as error:
        log.event(logger, logging.ERROR, "policy not understood", sandbox=row.id, why=error.message)
        if UNREAD not in row.notes:
            row.notes.append(UNREAD)
        return None


def _settle(sandbox: Sandbox) -> None:
    """Nobody waits for the create of a recovered sandbox; ended ones hold nothing."""
    sandbox.ready.set_result(None)
    if sandbox.state in FINAL:
        sandbox.gone.set_result(None)


def _handle(row: Row) -> Handle | None:
    try:
        handle = msgspec.msgpack.decode(row.handle, type=Handle)
    except msgspec.DecodeError:
        return None
    if handle.version != HANDLE_VERSION:
        log.event(
            logger, logging.ERROR, "journalled by another version", sandbox=row.id,
            version=handle.version,
        )  # fmt: skip
        return None
    return handle
