"""Saving what a sandbox did, through the engine: it must run, and is not idle meanwhile.

One of these at a time per sandbox: each stands on what the one before it left.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from dsecd import log
from dsecd.backends.abc import Handle
from dsecd.engine.backends import require
from dsecd.engine.manager import Manager
from dsecd.engine.pausing import thaw
from dsecd.engine.sandbox import Sandbox
from libdsec.errors import WrongState
from libdsec.model import Checkpoint, PackArgs, Packed


async def pack_diff(manager: Manager, args: PackArgs) -> Packed:
    """Return the layer made of the sandbox's changes. Raises `NotFound`, `WrongState`."""
    require(manager.get(args.id).backend, "pack")
    async with exclusive(manager, args.id) as (sandbox, handle):
        packed = await sandbox.backend.pack_diff(handle, args)
    manager.events.emit(sandbox.id, "packed", name=packed.name, digest=packed.digest)
    return packed


async def checkpoint(manager: Manager, name: str) -> Checkpoint:
    """Remember the sandbox's files. Raises `NotFound`, `WrongState`, `Exhausted`."""
    require(manager.get(name).backend, "checkpoints")
    async with exclusive(manager, name) as (sandbox, handle):
        made = await sandbox.backend.checkpoint(
            handle, lambda now: sandbox.save(manager.journal, now)
        )
    manager.events.emit(sandbox.id, "checkpoint", checkpoint=made.id, method=made.method)
    return made


async def rollback(manager: Manager, name: str, checkpoint_id: str) -> Checkpoint:
    """End the sandbox's processes and put its files back. Raises `NotFound`, `WrongState`."""
    require(manager.get(name).backend, "checkpoints")
    async with exclusive(manager, name) as (sandbox, handle):
        made = await sandbox.backend.rollback(
            handle, checkpoint_id, lambda now: sandbox.save(manager.journal, now)
        )
    manager.events.emit(sandbox.id, "rollback", checkpoint=made.id)
    return made


async def delete_checkpoint(manager: Manager, name: str, checkpoint_id: str) -> None:
    """Forget a checkpoint and free what only it needed. Raises `NotFound`, `WrongState`."""
    require(manager.get(name).backend, "checkpoints")
    async with exclusive(manager, name) as (sandbox, handle):
        await sandbox.backend.delete_checkpoint(
            handle, checkpoint_id, lambda now: sandbox.save(manager.journal, now)
        )
    manager.events.emit(sandbox.id, "checkpoint_deleted", checkpoint=checkpoint_id)


@contextlib.asynccontextmanager
async def exclusive(manager: Manager, name: str) -> AsyncIterator[tuple[Sandbox, Handle]]:
    """Enter a sandbox, one at a time; a paused one goes on. Raises `NotFound`, `WrongState`."""
    sandbox = manager.enter(name)
    try:
        async with sandbox.lock():
            await thaw(manager, sandbox)
            if sandbox.handle is None or sandbox.state != "running":
                raise WrongState(f"sandbox {name} is {sandbox.state}", state=sandbox.state)
            with log.about(sandbox.id):
                yield sandbox, sandbox.handle
    finally:
        manager.leave(sandbox)
