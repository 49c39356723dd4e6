"""Policies of requests: read, compiled once, explained honestly, refused when strict."""

from __future__ import annotations

import asyncio
import re
import threading
from pathlib import Path
from typing import Any

import pytest

from dsecd.config import Policy as Settings
from dsecd.engine import policies
from dsecd.engine.policies import Policies, read
from dsecd.host import apt
from dsecd.policy import catalogue, language, questions
from dsecd.policy.compile import compile_policy
from dsecd.policy.mechanisms import NEEDS
from dsecd.policy.presets import PRESETS
from libdsec import model
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.model import DSecContainerRunArgs
from tests.unit.engine_fixtures import bench
from tests.unit.policy_backend import PolicyBackend


def asked(**fields: Any) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(container_image="x", **fields)


def account(**fields: Any) -> policies.Account:
    found = Policies(Settings(), PolicyBackend()).get(asked(**fields))
    assert found is not None
    return found


def says(found: policies.Account, question: str) -> str:
    return questions.ask(found.compiled, question.split()).verdict


# --- reading


def test_no_policy_is_none() -> None:
    assert read(asked()) is None
    assert Policies(Settings(), PolicyBackend()).get(asked(network="nat"), strict=True) is None


def test_network_rules_of_listing_1() -> None:
    found = account(network_rules={"npm": False, "pypi": True})
    assert says(found, "name pypi.org") == "allow"
    assert says(found, "name registry.yarnpkg.com") == "deny"
    assert says(found, "tcp 192.0.2.1 443") == "deny"


def test_empty_is_closed() -> None:
    found = account(network_rules={})
    assert says(found, "name pypi.org") == "deny"
    assert found.source.network == "none"


def test_network_rules_are_services_of_the_policy() -> None:
    found = account(policy="swe", network_rules={"npm": False, "huggingface": True})
    assert says(found, "name registry.yarnpkg.com") == "deny"
    assert says(found, "name huggingface.co") == "allow"
    assert says(found, "name pypi.org") == "allow"
    same = {"network": {"services": {"pypi": True}}}
    assert read(asked(policy=same, network_rules={"pypi": True})) == read(asked(policy=same))


def test_a_clash_names_the_service() -> None:
    given = {"network": {"services": {"pypi": True}}}
    with pytest.raises(InvalidArgument, match=r"network_rules\.pypi: the policy says the opposite"):
        read(asked(policy=given, network_rules={"pypi": False}))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("swee", "'swee' is none of the presets grader, open, sealed, swe"),
        ({"network": {"servces": {}}}, "servces"),
        ({"network": {"services": {"pipy": True}}}, "unknown service"),
        ({"network": {"rules": [{"allow": "10.0.0.1/8"}]}}, r"network\.rules\[0\]"),
    ],
)
def test_what_is_wrong_is_named(given: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        account(policy=given)


@pytest.mark.parametrize(
    ("fields", "network"),
    [
        ({"policy": "sealed"}, "none"),
        ({"policy": "sealed", "network": "nat"}, "nat"),
        ({"policy": "swe"}, "nat"),
        ({"network_rules": {"npm": False}}, "none"),
        ({"network_rules": {"192.0.2.0/24": True}}, "nat"),
        ({"policy": {"network": {"default": "allow"}}}, "nat"),
    ],
)
def test_what_is_open_needs_a_network(fields: dict[str, Any], network: str) -> None:
    assert account(**fields).source.network == network


# --- the operator's files


def test_the_operators_catalogue_comes_first(tmp_path: Path) -> None:
    file = tmp_path / "services.toml"
    file.write_text('[inside]\nhosts = ["git.corp.example"]\n[npm]\nhosts = ["npm.corp.example"]\n')
    made = Policies(Settings(catalogue=str(file)), PolicyBackend())
    found = made.get(asked(network_rules={"inside": True, "npm": True}))
    assert found is not None
    assert says(found, "name git.corp.example") == "allow"
    assert says(found, "name npm.corp.example") == "allow"
    assert says(found, "name www.npmjs.com") == "deny"


def test_debian_is_also_where_this_hosts_apt_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apt, "hosts", lambda: ["mirror.example.net", "10.0.0.1", "proxy"])
    found = account(network_rules={"debian": True})
    assert says(found, "name mirror.example.net") == "allow"
    assert says(found, "name security.debian.org") == "allow"
    assert found.compiled.net.rules == ()


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "cannot read"), ("[x]\nhost = 1", "host"), ("[x]\nhosts = ['a b']", "a b")],
)
def test_a_broken_catalogue_is_named(tmp_path: Path, content: str | None, message: str) -> None:
    file = tmp_path / "services.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidArgument, match=message) as caught:
        Policies(Settings(catalogue=str(file)), PolicyBackend())
    assert str(file) in caught.value.message


def test_a_default_holds_for_who_gives_none(tmp_path: Path) -> None:
    file = tmp_path / "default.toml"
    file.write_text('extends = "swe"\n[files]\nhide = ["/answers"]\n')
    for name in ("swe", str(file)):
        made = Policies(Settings(default=name), PolicyBackend())
        found = made.get(asked())
        assert found is not None
        assert says(found, "name pypi.org") == "allow"
        other = made.get(asked(policy="sealed"))
        assert other is not None
        assert says(other, "name pypi.org") == "deny"


@pytest.mark.parametrize("content", [None, "extends = 5", "[network.services]\npipy = true"])
def test_a_broken_default_is_named(tmp_path: Path, content: str | None) -> None:
    file = tmp_path / "default.toml"
    if content is not None:
        file.write_text(content)
    with pytest.raises(InvalidArgument) as caught:
        Policies(Settings(default=str(file)), PolicyBackend())
    assert str(file) in caught.value.message


# --- once, and beside the loop


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The thread of each compilation."""
    threads: list[int] = []
    compile_policy = policies.compile_policy

    def counted(*given: Any) -> Any:
        threads.append(threading.get_ident())
        return compile_policy(*given)

    monkeypatch.setattr(policies, "compile_policy", counted)
    return threads


async def test_a_burst_compiles_once_and_not_on_the_event_loop(threads: list[int]) -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        made = [client.create(f"k{i}", network_rules={"pypi": True}) for i in range(50)]
        await asyncio.gather(*made)
        await client.create("again", network_rules={"pypi": True})
        specs = [sandbox.spec for sandbox in b.service.manager.live.values()]
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()
    assert len({id(spec.policy) for spec in specs}) == 1


async def test_a_short_policy_is_compiled_at_once_and_a_long_one_is_not(
    threads: list[int],
) -> None:
    made = Policies(Settings(), PolicyBackend())
    for rules in (1, 2, policies.SHORT_BYTES // 10):  # the first has the host probed
        await made.ready(asked(network_rules={f"192.0.2.{n % 256}/32": True for n in range(rules)}))
        await made.ready(asked(network_rules={f"h{n}.example": True for n in range(rules)}))
    here = threading.get_ident()
    assert [thread == here for thread in threads] == [False, True, True, True, False, False]


async def test_an_error_is_everybodys_and_is_not_kept() -> None:
    made = Policies(Settings(), PolicyBackend())
    tries = [made.ready(asked(policy="nonsense")) for _ in range(5)]
    found = await asyncio.gather(*tries, return_exceptions=True)
    assert all(isinstance(error, InvalidArgument) for error in found)
    assert await made.ready(asked(policy="sealed")) is not None


async def test_policies_that_nobody_asks_for_are_forgotten() -> None:
    made = Policies(Settings(), PolicyBackend())
    first = made.get(asked(network_rules={"192.0.2.1": True}))
    for number in range(policies.KEPT):
        made.get(asked(network_rules={f"10.0.{number >> 8}.{number & 255}": True}))
    assert len(made._known) == policies.KEPT
    again = made.get(asked(network_rules={"192.0.2.1": True}))
    assert again is not first
    assert again == first


# --- nothing is silently unenforced

# mechanism: a policy that none but it can enforce, of those that are left when the others go
ONLY: dict[str, tuple[dict[str, Any], set[str]]] = {
    "netns": ({}, {"seccomp"}),
    "bpf_cgroup": ({"network": {"services": {"192.0.2.0/24": True}}}, {"seccomp"}),
    "resolver": ({"network": {"services": {"pypi": True}}}, {"seccomp", "bpf_cgroup"}),
    "relay": (
        {"network": {"check_names": True, "services": {"pypi": True}}}, {"seccomp", "bpf_cgroup"},
    ),
    "seccomp": ({"ioctls": {"deny": ["TCGETS"]}}, {"netns"}),
    "mounts": ({"files": {"rules": [{"paths": ["/a"], "deny": ["write"]}]}}, {"seccomp", "netns"}),
    "landlock": (
        {"files": {"default": "deny", "rules": [{"paths": ["/a"], "allow": ["read"]}]}},
        {"seccomp", "netns"},
    ),
    "apparmor": (
        {"files": {"rules": [{"paths": ["/a"], "deny": ["read"]}]}}, {"seccomp", "netns"},
    ),
    "bpf_lsm": ({"unix": {"deny": ["@x"]}}, {"seccomp", "netns"}),
}  # fmt: skip


def test_there_is_a_case_for_every_mechanism() -> None:
    assert set(ONLY) == set(NEEDS)


@pytest.mark.parametrize("how", ["not applied", "refused here"])
@pytest.mark.parametrize("mechanism", sorted(NEEDS))
async def test_without_a_mechanism_reply_and_explain_say_so_and_strict_refuses(
    mechanism: str, how: str
) -> None:
    policy, others = ONLY[mechanism]
    able = {*others, mechanism}
    if how == "not applied":
        backend = PolicyBackend(applied=others)
    else:
        backend = PolicyBackend(applied=able, missing=NEEDS[mechanism])
    async with bench(backend=PolicyBackend(applied=able)) as b:
        client = await b.client()
        before = await client.create("k", policy=policy)
    async with bench(backend=backend) as b:
        client = await b.client()
        info = await client.create("k", policy=policy)
        assert len(info.notes) > len(before.notes)
        (note, *_) = [note for note in info.notes if note not in before.notes]
        assert f"{mechanism} is not" in note
        assert how in note
        rows = await client.call(
            "policy.explain", model.PolicyArgs(policy=policy), kind=list[model.PolicyRow]
        )
        assert sum(row.state != "enforced" for row in rows) == len(info.notes)
        shown = await client.call(
            "sandbox.policy", model.SandboxRef(id=info.id), kind=model.SandboxPolicy
        )
        assert shown.rows == rows
        sandboxes = set(backend.sandboxes)
        with pytest.raises(Unsupported, match="strict") as caught:
            await client.create("s", policy=policy, strict=True)
        assert caught.value.detail["rules"]
        assert set(backend.sandboxes) == sandboxes, "nothing was made"
        assert b.service.manager.admission.sandboxes == 1
        assert (await client.create("s", policy=policy)).state == "running"  # the key is free


async def test_strict_makes_what_is_enforced() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        for number, policy in enumerate(("sealed", "grader", "swe", "open")):
            info = await client.create(f"k{number}", policy=policy, strict=True)
            assert info.notes == []
            assert b.backend.sandboxes[info.id].spec.policy is not None


async def test_a_namespace_that_a_link_leads_out_of_closes_nothing() -> None:
    """A closed policy with ``network="nat"``: there netns is no protection."""
    async with bench(backend=PolicyBackend(missing=["bpf_cgroup"])) as b:
        client = await b.client()
        assert (await client.create("a", policy="sealed", strict=True)).notes == []
        open_later = await client.create("b", policy="sealed", network="nat")
        assert any("network.default" in note for note in open_later.notes)
        with pytest.raises(Unsupported):
            await client.create("c", policy="sealed", network="nat", strict=True)


async def test_many_are_refused_as_one() -> None:
    async with bench(backend=PolicyBackend(applied=())) as b:
        client = await b.client()
        args = asked(policy="swe", strict=True)
        call = client.open("sandbox.create_many", model.CreateManyArgs(keys=["a", "b"], args=args))
        with pytest.raises(Unsupported, match="strict"):
            await call.answer()
        assert b.backend.sandboxes == {}


# --- operations that make nothing


async def test_check_and_test() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        args = model.PolicyArgs(policy={"network": {"services": {"192.0.2.0/24": True}}})
        found = await client.call("policy.check", args, kind=model.PolicySummary)
        assert (found.entries, found.network, found.addresses, found.names) == (1, "nat", 1, 0)
        closed = model.PolicyArgs(network_rules={"pypi": False})
        assert (await client.call("policy.check", closed, kind=model.PolicySummary)).network == (
            "none"
        )
        with pytest.raises(InvalidArgument, match="give policy or network_rules"):
            await client.call("policy.check", model.PolicyArgs())
        test = model.PolicyTest(policy="swe", questions=["name pypi.org", "tcp 192.0.2.1 443"])
        answers = await client.call("policy.test", test, kind=list[model.PolicyAnswer])
        assert [answer.verdict for answer in answers] == ["allow", "deny"]
        assert answers[0].because == ["swe: network.services.pypi (allow pypi)"]
        assert (answers[1].because, answers[1].table) == ([], "network")
        with pytest.raises(InvalidArgument, match="none of tcp"):
            await client.call("policy.test", model.PolicyTest(policy="swe", questions=["fly me"]))


# --- the documentation


def test_the_examples_of_the_documentation_are_good() -> None:
    text = (Path(__file__).parents[2] / "docs/policy.md").read_text()
    example, services = re.findall(r"```toml\n(.*?)```", text, re.DOTALL)
    found = compile_policy(language.from_toml(example))
    assert questions.ask(found, ["name", "huggingface.co"]).verdict == "allow"
    assert set(catalogue.parse(services)) == {"inside"}
    for name in PRESETS:
        assert f"| `{name}` |" in text
    for mechanism in NEEDS:
        assert f"| `{mechanism}` |" in text
