"""The operations about policies: those of a request that is not made, and those of sandboxes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from dsecd.api.local import LocalCall
from dsecd.engine import network
from dsecd.engine.backends import Backends
from dsecd.engine.manager import Manager
from dsecd.engine.policies import Account, Policies
from dsecd.policy import questions
from dsecd.policy.compile import Compiled
from libdsec import model
from libdsec.errors import InvalidArgument

MAX_QUESTIONS = 1000


def entries(manager: Manager) -> list[tuple[str, Any, Callable[..., Any], bool]]:
    """Return the rows of the table of operations."""
    operations = PolicyOperations(manager)
    return [
        ("policy.check", model.PolicyArgs, operations.check, False),
        ("policy.explain", model.PolicyArgs, operations.explain, False),
        ("policy.test", model.PolicyTest, operations.test, False),
        ("sandbox.policy", model.SandboxRef, operations.of_sandbox, True),
        ("sandbox.update_network", model.UpdateNetwork, operations.update_network, False),
    ]


class PolicyOperations:
    """The operations, bound to one engine."""

    def __init__(self, manager: Manager) -> None:
        self._manager = manager

    async def check(self, call: LocalCall, args: model.PolicyArgs) -> model.PolicySummary:
        return await check(self._manager.policies, args)

    async def explain(self, call: LocalCall, args: model.PolicyArgs) -> list[model.PolicyRow]:
        return await explain(self._manager.policies, self._manager.backends, args)

    async def test(self, call: LocalCall, args: model.PolicyTest) -> list[model.PolicyAnswer]:
        return await test(self._manager.policies, args)

    def of_sandbox(self, call: LocalCall, args: model.SandboxRef) -> model.SandboxPolicy:
        sandbox = self._manager.get(args.id)
        account, mode = sandbox.account, sandbox.spec.network
        if account is None:
            return model.SandboxPolicy(network=mode)
        policy = msgspec.to_builtins(account.source.policy)
        return model.SandboxPolicy(network=mode, policy=policy, rows=rows(account))

    async def update_network(self, call: LocalCall, args: model.UpdateNetwork) -> model.SandboxInfo:
        return await network.update_network(self._manager, args)


async def check(policies: Policies, args: model.PolicyArgs) -> model.PolicySummary:
    """Return the numbers of a policy. Raises `InvalidArgument`."""
    compiled, network = await policies.compiled(args)
    net, files, system = compiled.net, compiled.files, compiled.system
    return model.PolicySummary(
        entries=len(compiled.lines),
        network=network,
        addresses=len(net.rules),
        names=len(net.names),
        files=len(files.rules) + len(files.hidden),
        system=sum(map(len, (system.ioctls, system.mounts, system.unix, system.vsock))),
    )


async def explain(
    policies: Policies, backends: Backends, args: model.PolicyArgs
) -> list[model.PolicyRow]:
    """Return what becomes of a policy in a sandbox of a backend on this host.

    Raises `InvalidArgument`, `Unsupported` for a backend that this host has not.
    """
    account = await policies.ready(args, backend=backends.get(args.backend))
    return [] if account is None else rows(account)


async def test(policies: Policies, args: model.PolicyTest) -> list[model.PolicyAnswer]:
    """Return what a policy says to each question. Raises `InvalidArgument`."""
    if len(args.questions) > MAX_QUESTIONS:
        raise InvalidArgument(
            f"questions: {len(args.questions)}, at most {MAX_QUESTIONS} are answered at once",
            field="questions",
        )
    compiled, _ = await policies.compiled(args)
    # each is asked of every entry
    return await asyncio.to_thread(lambda: [_answer(compiled, each) for each in args.questions])


def _answer(compiled: Compiled, question: str) -> model.PolicyAnswer:
    answer = questions.ask(compiled, question.split())
    return model.PolicyAnswer(
        question=question,
        verdict=answer.verdict,
        table=answer.table,
        because=list(answer.because),
    )


def rows(account: Account) -> list[model.PolicyRow]:
    """Return what becomes of each entry, in the structs of the wire."""
    return msgspec.convert(account.rows, list[model.PolicyRow], from_attributes=True)
