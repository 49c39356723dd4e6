"""Saving what a sandbox did, through the engine: it must run, and is not idle meanwhile."""

from __future__ import annotations

from dsecd import log
from dsecd.engine.manager import Manager
from libdsec.errors import WrongState
from libdsec.model import PackArgs, Packed


async def pack_diff(manager: Manager, args: PackArgs) -> Packed:
    """Return the layer made of the sandbox's changes. Raises `NotFound`, `WrongState`."""
    sandbox = manager.enter(args.id)
    try:
        if sandbox.handle is None:
            raise WrongState(f"sandbox {args.id} is {sandbox.state}", state=sandbox.state)
        with log.about(sandbox.id):
            packed = await manager.backend.pack_diff(sandbox.handle, args)
    finally:
        manager.leave(sandbox)
    manager.events.emit(sandbox.id, "packed", name=packed.name, digest=packed.digest)
    return packed
