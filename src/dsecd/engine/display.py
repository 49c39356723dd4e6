"""The screen of a sandbox, through the engine: whoever looks at it or types keeps it awake."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator

from dsecd import log
from dsecd.backends.abc import Display
from dsecd.engine.lifecycle import ALIVE
from dsecd.engine.manager import Manager
from dsecd.engine.pausing import thaw
from libdsec.errors import Unsupported, WrongState


@contextlib.asynccontextmanager
async def seen(manager: Manager, name: str) -> AsyncIterator[Display]:
    """Enter a sandbox by its screen; a paused one goes on.

    Raises `NotFound`, `WrongState`, `Unsupported` for one that has none.
    """
    sandbox = manager.enter(name)
    try:
        async with sandbox.lock():
            await thaw(manager, sandbox)
        if sandbox.state not in ALIVE:
            raise WrongState(f"sandbox {name} is {sandbox.state}", state=sandbox.state)
        if sandbox.display is None:
            raise Unsupported(
                f"sandboxes of the {sandbox.backend.name} backend have no display: use a full VM",
                reason="backend",
            )
        with log.about(sandbox.id):
            yield sandbox.display
    finally:
        manager.leave(sandbox)
