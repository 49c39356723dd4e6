"""Other network rules for a sandbox that runs: what changes, what stays, what a restart knows."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd.backends.abc import Handle, Save
from dsecd.config import Policy as Settings
from dsecd.engine import recovery
from dsecd.policy import language, questions
from dsecd.policy.compile import compile_policy
from dsecd.policy.language import Policy
from dsecd.policy.rules import NetPolicy
from dsecd.policy.update import FIXED, flattened, with_network
from libdsec import model
from libdsec.errors import Exhausted, InvalidArgument, NotFound, Unsupported, WrongState
from tests.unit.engine_fixtures import Bench, bench
from tests.unit.policy_backend import PolicyBackend
from tests.wire_client import WireClient

PYPI = {"pypi": True}
NPM = {"npm": True}
HIDING = {"network": {"services": PYPI}, "files": {"hide": ["/answers"]}}


class RefusingBackend(PolicyBackend):
    """One whose kernel has no room left, before or after the handle is journalled."""

    journalled = False

    async def update_network(self, handle: Handle, policy: NetPolicy, save: Save) -> None:
        if self.journalled:
            await save(handle)
        raise Exhausted("no room for the policy", limit="policies")


async def update(client: WireClient, sandbox: str, **fields: Any) -> model.SandboxInfo:
    args = model.UpdateNetwork(id=sandbox, **fields)
    return await client.call("sandbox.update_network", args, kind=model.SandboxInfo)


async def shown(client: WireClient, sandbox: str) -> model.SandboxPolicy:
    ref = model.SandboxRef(id=sandbox)
    return await client.call("sandbox.policy", ref, kind=model.SandboxPolicy)


def bound(b: Bench, sandbox: str, question: str) -> str:
    """Return what the policy that the backend has says."""
    found = b.backend.sandboxes[sandbox]
    assert found.net is not None
    spec = found.spec.policy
    assert spec is not None
    return questions.ask(msgspec.structs.replace(spec, net=found.net), question.split()).verdict


# --- the language


def policy(**tables: Any) -> Policy:
    return language.from_object(tables)


def test_only_the_network_is_taken() -> None:
    present = policy(extends="grader", files={"hide": ["/answers"]})
    found = with_network(present, policy(network={"services": PYPI}))
    assert found.network.services == PYPI
    before, after = compile_policy(present), compile_policy(found)
    assert (before.files, before.system) == (after.files, after.system)
    assert before.net != after.net


def test_a_policy_about_the_network_alone_is_taken_as_it_is() -> None:
    given = policy(extends="swe", network={"services": {"npm": False}})
    assert with_network(policy(extends="open"), given) is given


def test_a_preset_goes_with_the_files_of_another() -> None:
    found = compile_policy(with_network(policy(extends="grader"), policy(extends="swe")))
    assert found.net == compile_policy(policy(extends="swe")).net
    assert found.files == compile_policy(policy(extends="grader")).files


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("files", {"hide": ["/x"]}),
        ("ioctls", {"deny": [1]}),
        ("mounts", {"default": "deny"}),
        ("unix", {"deny": ["@x"]}),
        ("vsock", {"allow": ["2"]}),
    ],
)
def test_what_else_is_said_must_be_so_already(table: str, said: dict[str, Any]) -> None:
    assert table in FIXED
    given = policy(**{table: said})
    with pytest.raises(InvalidArgument, match=f"^{table}: only the network"):
        with_network(Policy(), given)
    assert with_network(given, policy(network={"services": PYPI}, **{table: said})).network


@pytest.mark.parametrize("preset", ["sealed", "grader", "swe", "open"])
def test_a_preset_written_out_means_the_same(preset: str) -> None:
    extended = policy(extends=preset, network={"services": {"pypi": True}})
    one, other = compile_policy(extended), compile_policy(flattened(extended))
    assert (one.net, one.files, one.system) == (other.net, other.files, other.system)


# --- the engine


async def test_the_rules_are_replaced() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        name = (await client.create("k", policy=HIDING)).id
        events = client.open("events.subscribe", model.EventFilter(sandbox=name))
        await client.call("sandbox.list", model.ListArgs())
        spec = b.service.manager.live[name].spec
        assert bound(b, name, "name pypi.org") == "allow"
        info = await update(client, name, network_rules=NPM)
        assert info.notes == []
        assert bound(b, name, "name pypi.org") == "deny"
        assert bound(b, name, "name www.npmjs.com") == "allow"
        event = await events.item(model.Event)
        assert (event.kind, event.detail) == ("policy", {"unenforced": "0"})
        after = b.service.manager.live[name].spec
        assert after.policy is not None
        assert spec.policy is not None
        assert (after.policy.files, after.policy.system) == (spec.policy.files, spec.policy.system)
        places = [row.place for row in (await shown(client, name)).rows]
        assert "network.services.npm" in places
        assert "files.hide[0]" in places
        assert "network.services.pypi" not in places


async def test_what_is_refused_leaves_the_former_rules() -> None:
    backend = PolicyBackend(missing=["bpf_cgroup"])
    async with bench(backend=backend) as b:
        client = await b.client()
        name = (await client.create("k", policy="sealed", network="nat")).id
        with pytest.raises(Unsupported, match="strict"):
            await update(client, name, network_rules=PYPI, strict=True)
        with pytest.raises(InvalidArgument, match="files: only the network"):
            await update(client, name, policy=HIDING)
        with pytest.raises(InvalidArgument, match="give policy or network_rules"):
            await update(client, name)
        with pytest.raises(InvalidArgument, match="unknown service"):
            await update(client, name, network_rules={"pipy": True})
        assert bound(b, name, "name pypi.org") == "deny"
        info = await update(client, name, network_rules=PYPI)
        assert any("network.services.pypi" in note for note in info.notes)
        assert bound(b, name, "name pypi.org") == "allow"


async def test_a_sandbox_without_a_network_gets_none() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        name = (await client.create("k", policy="sealed")).id
        with pytest.raises(WrongState, match="no network"):
            await update(client, name, network_rules=PYPI)
        assert (await shown(client, name)).policy == {"extends": "sealed"}
        with pytest.raises(NotFound):
            await update(client, "s0-n0-1-0abcd", network_rules=PYPI)


async def test_a_sandbox_that_had_no_policy_may_get_one() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        name = (await client.create("k", network="nat")).id
        assert (await shown(client, name)) == model.SandboxPolicy(network="nat")
        await update(client, name, network_rules={})
        assert b.backend.sandboxes[name].net == NetPolicy()
        assert (await shown(client, name)).rows


@pytest.mark.parametrize("journalled", [False, True])
async def test_a_backend_that_fails_leaves_the_former_rules(journalled: bool) -> None:
    backend = RefusingBackend()
    backend.journalled = journalled
    async with bench(backend=backend) as b:
        client = await b.client()
        name = (await client.create("k", policy="swe")).id
        before = await shown(client, name)
        with pytest.raises(Exhausted):
            await update(client, name, network_rules=NPM)
        assert await shown(client, name) == before
        await b.close(keep=True)
        await b.start()
        assert await shown(await b.client(), name) == before


async def test_updates_at_once_come_one_after_another() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        name = (await client.create("k", policy="swe")).id
        rules = [{f"192.0.2.{number}": True} for number in range(20)]
        await asyncio.gather(*(update(client, name, network_rules=each) for each in rules))
        sandbox = b.service.manager.live[name]
        assert sandbox.account is not None
        assert b.backend.sandboxes[name].net == sandbox.account.compiled.net


async def test_a_branch_has_the_rules_of_now() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        info = await client.create("k", policy=HIDING)
        assert (await client.get(info.id)).args.policy == HIDING
        await update(client, info.id, network_rules={})
        args = (await client.get(info.id)).args
        made = await client.call(
            "sandbox.create", model.CreateArgs(key="branch", args=args), kind=model.SandboxInfo
        )
        assert bound(b, made.id, "name pypi.org") == "deny"
        assert bound(b, made.id, "read /answers") == "deny"
        assert (await client.create("k", policy=HIDING)).id == info.id  # the key's own request


# --- restarts


async def test_a_restart_knows_the_policy_in_force(tmp_path: Path) -> None:
    catalogue = tmp_path / "services.toml"
    catalogue.write_text('[inside]\nhosts = ["one.example"]\n')
    backend = PolicyBackend(missing=["apparmor", "bpf_lsm"])
    async with bench(backend=backend, policy=Settings(catalogue=str(catalogue))) as b:
        client = await b.client()
        created = await client.create("a", policy={"unix": {"deny": ["@x"]}})
        name = (await client.create("b", policy="swe")).id
        updated = await update(client, name, network_rules={"inside": True})
        before = [await shown(client, each) for each in (created.id, name)]
        assert created.notes
        # an operator that forgets a service, and a daemon that could do more
        catalogue.write_text("")
        await b.close(keep=True)
        backend.missing = []
        await b.start()
        client = await b.client()
        after = [await shown(client, each) for each in (created.id, name)]
        assert after[1] == before[1]
        assert after[0].policy == before[0].policy
        states = [[row.state for row in each.rows] for each in (before[0], after[0])]
        assert states[0] == states[1], "what was not applied then is not in force now"
        assert (await client.get(name)).notes == updated.notes
        assert bound(b, name, "name one.example") == "allow"
        with pytest.raises(InvalidArgument, match="unknown service"):
            await update(client, name, network_rules={"inside": True})


async def test_a_mechanism_of_a_later_daemon_protects_no_earlier_sandbox() -> None:
    rules = {"files": {"rules": [{"paths": ["/a"], "deny": ["read"]}]}}
    backend = PolicyBackend(applied=["seccomp", "netns"])
    async with bench(backend=backend) as b:
        created = await (await b.client()).create("k", policy=rules)
        assert len(created.notes) == 1
        await b.close(keep=True)
        backend.capabilities = PolicyBackend().capabilities
        await b.start()
        client = await b.client()
        assert (await client.get(created.id)).notes == created.notes
        assert (await client.create("new", policy=rules)).notes == []


async def test_a_policy_that_cannot_be_read_any_more_costs_no_sandbox() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        name = (await client.create("k", policy="swe")).id
        manager = b.service.manager
        row = manager.live[name].row("running")
        row.policy = msgspec.msgpack.encode({"policy": {"version": 2}})
        await manager.journal.write(row)
        await b.close(keep=True)
        await b.start()
        found = await (await b.client()).get(name)
        assert (found.state, found.notes) == ("running", [recovery.UNREAD])
