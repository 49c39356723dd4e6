"""Secrets in the engine: granted to the backend once, hidden everywhere else."""

from __future__ import annotations

import ipaddress

import msgspec
import pytest

from dsecd.backends.abc import Handle, Instance
from dsecd.backends.spec import Spec
from dsecd.doors.reach import Reach
from dsecd.policy.compile import compile_policy
from dsecd.policy.language import from_object
from dsecd.policy.rules import NetPolicy
from dsecd.secrets.secret import Header, Secret
from libdsec.errors import AlreadyExists, InvalidArgument, Unsupported
from tests.unit.engine_fixtures import bench
from tests.unit.policy_backend import PolicyBackend

HOST = "api.example.com"
VALUE = "Bearer tok-0123456789abcdef"
SECRETS = {HOST: {"Authorization": VALUE}}
ALLOWED = {"network": {"rules": [{"allow": HOST}]}}


class SecretsBackend(PolicyBackend):
    """Notes the secrets that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = msgspec.structs.replace(self.capabilities, secrets=True)
        self.given: list[tuple[Secret, ...]] = []

    async def create(self, handle: Handle, spec: Spec) -> Instance:
        self.given.append(spec.secrets)
        return await super().create(handle, spec)


async def test_only_the_backend_gets_the_values() -> None:
    backend = SecretsBackend()
    async with bench(backend=backend) as b:
        client = await b.client()
        made = await client.create("k", policy=ALLOWED, secrets=SECRETS)
        assert backend.given == [(Secret(HOST, (Header("Authorization", VALUE),)),)]
        found = await client.get(made.id)
        assert found.args is not None
        assert found.args.secrets == {HOST: {"Authorization": "***"}}
        assert b.service is not None
        sandbox = b.service.manager.get(made.id)
        assert sandbox.spec.secrets == ()
        await client.close()
        await b.close(keep=True)
        for path in (b.root / "lib").iterdir():
            assert VALUE.encode() not in path.read_bytes()


async def test_a_key_tells_other_values_apart_and_a_restart_does_not_change_that() -> None:
    backend = SecretsBackend()
    async with bench(backend=backend) as b:
        client = await b.client()
        made = await client.create("k", policy=ALLOWED, secrets=SECRETS)
        for _ in range(2):
            again = await client.create("k", policy=ALLOWED, secrets=SECRETS)
            assert again.id == made.id
            for other in ({HOST: {"Authorization": "Bearer other"}}, {}):
                with pytest.raises(AlreadyExists):
                    await client.create("k", policy=ALLOWED, secrets=other)
            await client.close()
            await b.close(keep=True)
            await b.start()
            client = await b.client()
        assert len(backend.given) == 1


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({}, "give a policy"),
        ({"policy": {"network": {}}}, "does not allow api.example.com at tcp port 443"),
        (
            {"policy": {"network": {"rules": [{"allow": HOST, "ports": [80]}]}}},
            "does not allow api.example.com at tcp port 443",
        ),
        ({"policy": ALLOWED, "secrets": {HOST: {"Authorization": "***"}}}, "give its value again"),
    ],
)
async def test_a_secret_is_for_a_host_that_the_policy_opens(
    fields: dict[str, object], why: str
) -> None:
    async with bench(backend=SecretsBackend()) as b:
        client = await b.client()
        with pytest.raises(InvalidArgument, match=why) as caught:
            await client.create("k", **({"secrets": SECRETS} | fields))
        assert VALUE not in caught.value.message


async def test_a_backend_without_a_proxy_says_so() -> None:
    async with bench(backend=PolicyBackend()) as b:
        client = await b.client()
        with pytest.raises(Unsupported, match="secrets are not offered"):
            await client.create("k", policy=ALLOWED, secrets=SECRETS)


def policy(*rules: dict[str, object], **more: object) -> NetPolicy:
    return compile_policy(from_object({"network": {"rules": list(rules), **more}})).net


def test_a_rule_that_denies_an_address_holds_for_the_proxy_too() -> None:
    reach = Reach(policy({"allow": HOST}, {"deny": "198.51.100.0/24"}, {"deny": "2001:db8::/32",
                  "protocol": "udp"}))  # fmt: skip
    ruling = reach.ruling(HOST)
    assert ruling is not None
    assert not ruling.private
    assert reach.ruling("www.example.com") is None
    found = [ipaddress.ip_address(text) for text in ("198.51.100.7", "203.0.113.1", "2001:db8::1")]
    assert reach.allowed(found) == ["203.0.113.1", "2001:db8::1"]


def test_an_open_policy_reaches_all_that_it_does_not_deny() -> None:
    reach = Reach(policy({"deny": "evil.example.org"}, default="allow"))
    assert reach.ruling(HOST) is not None
    assert reach.ruling("evil.example.org") is None
