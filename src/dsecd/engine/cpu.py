"""Another CPU class for a sandbox that lives."""

from __future__ import annotations

from dsecd.engine.lifecycle import ALIVE
from dsecd.engine.manager import Manager
from libdsec.errors import WrongState
from libdsec.model import SandboxInfo, SetCpuClass


async def set_cpu_class(manager: Manager, args: SetCpuClass) -> SandboxInfo:
    """Change it while the sandbox runs, or stands still. Raises `NotFound`, `WrongState`.

    Journalled first: a daemon that dies in between leaves it to the next one.
    """
    sandbox = manager.get(args.id)
    async with sandbox.lock():
        if sandbox.state not in ALIVE or sandbox.handle is None:
            raise WrongState(f"sandbox {args.id} is {sandbox.state}", state=sandbox.state)
        former, sandbox.cpu_class = sandbox.cpu_class, args.cpu_class
        try:
            await manager.journal.write(sandbox.row("running"))
            if sandbox.state not in ALIVE:
                raise WrongState(f"sandbox {args.id} is {sandbox.state}", state=sandbox.state)
            sandbox.cpu_notes = await sandbox.backend.set_cpu_class(sandbox.handle, args.cpu_class)
        except BaseException:
            sandbox.cpu_class = former
            if sandbox.state in ALIVE:
                manager.journal.post(sandbox.row("running"))
            raise
    return sandbox.info()
