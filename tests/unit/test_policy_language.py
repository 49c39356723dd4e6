"""The language: one form in Python, TOML and JSON; errors name the place; the schema is current."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.policy import catalogue, language, presets
from dsecd.policy.compile import compile_policy
from dsecd.policy.language import Network, NetworkRule, Policy
from libdsec.errors import InvalidArgument
from tests.unit import policy_cases as cases

SCHEMA = Path(__file__).resolve().parents[2] / "docs/policy.schema.json"
TEXT = st.text(max_size=20)


def test_three_forms_say_the_same() -> None:
    toml = """
    extends = "swe"
    [network]
    services = { pypi = true, npm = false }
    [[network.rules]]
    allow = "*.example.com"
    ports = [443, "8000-8010"]
    """
    expected = Policy(
        extends="swe",
        network=Network(
            services={"pypi": True, "npm": False},
            rules=[NetworkRule(allow="*.example.com", ports=[443, "8000-8010"])],
        ),
    )
    assert language.from_toml(toml) == expected
    assert language.from_json(language.to_json(expected)) == expected
    assert language.from_object(expected) == expected


def test_network_rules_of_listing_1() -> None:
    policy = language.from_network_rules({"npm": False, "pypi": True})
    assert policy == Policy(network=Network(services={"npm": False, "pypi": True}))
    patterns = {rule.pattern: rule.verdict for rule in compile_policy(policy).net.names}
    assert patterns["pypi.org"] == "allow"
    assert patterns["registry.yarnpkg.com"] == "deny"


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES)
def test_forms_survive_a_round_trip(value: dict[str, Any]) -> None:
    policy = language.from_object(value)
    assert language.from_object(policy) == policy
    assert language.from_json(language.to_json(policy)) == policy
    assert language.from_toml(language.to_toml(policy)) == policy


@settings(max_examples=cases.EXAMPLES)
@given(TEXT, st.dictionaries(TEXT, st.booleans(), max_size=3), st.lists(TEXT, max_size=3))
def test_any_text_survives_a_round_trip(
    name: str, services: dict[str, bool], hide: list[str]
) -> None:
    policy = language.from_object(
        {"name": name, "network": {"services": services}, "files": {"hide": hide}}
    )
    assert language.from_toml(language.to_toml(policy)) == policy
    assert language.from_json(language.to_json(policy)) == policy


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_presets_survive_a_round_trip(name: str) -> None:
    policy = presets.PRESETS[name]
    assert language.from_toml(language.to_toml(policy)) == policy
    assert policy.name == name


@pytest.mark.parametrize(
    ("value", "place"),
    [
        ({"network": {"rules": [{}, {"alow": "pypi"}]}}, "network.rules[1]"),
        ({"network": {"rules": [{"allow": "a.b", "ports": [True]}]}}, "network.rules[0].ports[0]"),
        ({"network": {"rules": [{"allow": "a.b", "ports": [65536]}]}}, "network.rules[0].ports[0]"),
        ({"files": {"rules": [{"paths": ["/a"], "deny": ["hide"]}]}}, "files.rules[0].deny[0]"),
        ({"ioctls": {"allow": [-1]}}, "ioctls.allow[0]"),
        ({"extends": "relaxed"}, "extends"),
        ({"version": 2}, "version"),
        ({"files": {"hide": ["/\ud800"]}}, "policy"),
        ({1: 2}, "policy"),
        ([], "policy"),
        (None, "policy"),
    ],
)
def test_malformed_policies_name_the_place(value: Any, place: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        language.from_object(value)
    assert caught.value.detail["field"] == place
    assert str(caught.value).startswith(f"{place}: ")


@pytest.mark.parametrize("text", ["x ==", "[network", "a = 1", "network = 3", "[" * 5000, "\0"])
def test_malformed_toml_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        language.from_toml(text)


@pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100000, '{"name": "\\ud800"}', b"\xff"])
def test_malformed_json_is_refused(text: str | bytes) -> None:
    with pytest.raises(InvalidArgument):
        language.from_json(text)


def test_a_huge_policy_is_refused_before_it_is_read() -> None:
    for read in (language.from_json, language.from_toml):
        with pytest.raises(InvalidArgument, match="at most"):
            read(" " * (language.MAX_BYTES + 1))


@given(st.binary(max_size=60))
def test_bytes_are_a_policy_or_an_error(data: bytes) -> None:
    for read in (language.from_json, language.from_toml):
        try:
            read(data)
        except InvalidArgument:
            continue


def test_the_published_schema_is_current() -> None:
    """To renew it: write `language.schema()` and a newline into docs/policy.schema.json."""
    assert SCHEMA.read_bytes() == language.schema() + b"\n"
    assert json.loads(SCHEMA.read_text())["$ref"] == "#/$defs/Policy"


def test_the_shipped_catalogue_has_what_the_presets_name() -> None:
    shipped = catalogue.shipped()
    assert {"pypi", "npm", "github", "debian", "go"} <= set(shipped)
    assert set(presets.SWE_SERVICES) <= set(shipped)
    assert all(service.title for service in shipped.values())


def test_the_operators_catalogue_comes_first() -> None:
    services = catalogue.extended('[pypi]\nhosts = ["pypi.corp.example"]\nprivate = true\n')
    policy = compile_policy(language.from_network_rules({"pypi": True, "go": True}), services)
    names = {rule.pattern: rule.private for rule in policy.net.names}
    assert names["pypi.corp.example"] is True
    assert "pypi.org" not in names
    assert names["proxy.golang.org"] is False


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[Pypi]\nhosts = ['a.b']", "catalogue.Pypi: a service's name"),
        ("[x]", "catalogue.x: give at least one"),
        ("[x]\nhosts = ['*']", "catalogue.x: \\* is not a host"),
        ("[x]\nhosts = ['localhost']", "catalogue.x: .* a domain has a dot"),
        ("[x]\nnetworks = ['10.0.0.1/8']", "catalogue.x: .*write 10.0.0.0/8"),
        ("[x]\nhosts = ['a.b']\nports = ['x']", "catalogue.x: 'x' is not a port"),
        ("[x]\nhost = ['a.b']", "unknown field"),
        ("[x", "catalogue: "),
    ],
)
def test_a_bad_catalogue_names_the_service(text: str, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        catalogue.parse(text)
