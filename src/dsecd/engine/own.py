"""Sandboxes of the engine's own: graders, workers of function calls.

No client can name one (`Manager.get`), none is re-adopted after a restart of the daemon, and none
is paused or trimmed while it is in use.
"""

from __future__ import annotations

import secrets

from dsecd.engine.manager import Manager
from dsecd.engine.request import Kind
from dsecd.engine.sandbox import Sandbox
from libdsec.model import DSecContainerRunArgs


async def create(
    manager: Manager, owner: str, purpose: str, kind: Kind, args: DSecContainerRunArgs
) -> Sandbox:
    """Return a new running sandbox, in use until `end`. Raises what making a sandbox raises."""
    key = f"{purpose}-{secrets.token_hex(16)}"
    await manager.policies.ready(args, args.strict, manager.backends.get(kind.backend))
    sandbox = manager.request(owner, key, kind, args)
    sandbox.own = True  # before anything of it is journalled
    try:
        await manager.create(owner, key, kind, args)
        manager.use(sandbox)
    except BaseException:
        manager.begin_stop(sandbox, f"{purpose}: given up")
        raise
    return sandbox


def end(manager: Manager, sandbox: Sandbox, reason: str) -> None:
    """Begin to end what `create` returned; once."""
    manager.leave(sandbox)
    manager.begin_stop(sandbox, reason)
