"""Another network policy for a sandbox that runs."""

from __future__ import annotations

import msgspec

from dsecd.backends.abc import Handle
from dsecd.engine.lifecycle import ALIVE
from dsecd.engine.manager import Manager
from dsecd.engine.policies import Account
from dsecd.engine.sandbox import Sandbox
from dsecd.engine.snapshots import exclusive
from libdsec.model import SandboxInfo, UpdateNetwork


async def update_network(manager: Manager, args: UpdateNetwork) -> SandboxInfo:
    """Put other rules in force and return the sandbox with its new notes.

    Raises `InvalidArgument` for a policy that says something new beyond the network, `WrongState`
    for a sandbox without a network, `Unsupported` with `strict`; the former rules then stay.
    """
    async with exclusive(manager, args.id) as (sandbox, handle):
        account = await manager.policies.changed(
            sandbox.backend, sandbox.account, args, args.strict
        )
        await _replace(manager, sandbox, handle, account)
    manager.events.emit(sandbox.id, "policy", unenforced=str(len(account.notes)))
    return sandbox.info()


async def _replace(manager: Manager, sandbox: Sandbox, handle: Handle, account: Account) -> None:
    former = sandbox.account

    async def journal(now: Handle) -> None:
        sandbox.account = account  # one row holds the handle and the policy that is bound by it
        await sandbox.save(manager.journal, now)

    try:
        await sandbox.backend.update_network(handle, account.compiled.net, journal)
    except BaseException:
        sandbox.account = former
        if sandbox.state in ALIVE:
            manager.journal.post(sandbox.row("running"))
        raise
    sandbox.account = account
    manager.admission.give_back(sandbox.spec)
    sandbox.spec = msgspec.structs.replace(sandbox.spec, policy=account.compiled)
    manager.admission.count(sandbox.spec)  # its first rules cost descriptors
