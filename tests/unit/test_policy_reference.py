"""The reference model: what typed rules mean, and that it agrees with a second reading."""

from __future__ import annotations

import ipaddress
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dsecd.policy import globs, language, reference
from dsecd.policy.compile import Compiled, compile_policy
from dsecd.policy.reference import Opening
from libdsec.errors import InvalidArgument
from tests.unit import policy_cases as cases


def compiled(value: dict[str, Any]) -> Compiled:
    return compile_policy(language.from_object(value), cases.CATALOGUE)


def attempt(value: dict[str, Any]) -> Compiled | None:
    """Return None for a policy that is refused: it opens nothing."""
    try:
        return compiled(value)
    except InvalidArgument:
        return None


def net(value: Compiled, kind: Any, address: str, port: int) -> str:
    return reference.decide_net(value.net, kind, ipaddress.ip_address(address), port)


def test_an_empty_policy_is_closed_but_for_loopback() -> None:
    closed = compiled({})
    assert net(closed, "tcp", "198.51.100.7", 443) == "deny"
    assert net(closed, "icmp", "2620::1", 0) == "deny"
    for own in ("127.0.0.1", "127.9.9.9", "::1", "0.0.0.0", "::", "::ffff:127.0.0.1"):
        assert net(closed, "tcp", own, 80) == "allow"
    assert not reference.decide_name(closed.net, "pypi.org").answered


def test_deny_wins_over_a_longer_prefix() -> None:
    rules = compiled({"network": {"services": {"192.0.2.0/24": False, "*": True}}})
    assert net(rules, "tcp", "192.0.2.1", 1) == "deny"
    assert net(rules, "tcp", "192.0.3.1", 1) == "allow"


def test_a_mapped_address_is_the_ipv4_address() -> None:
    rules = compiled({"network": {"services": {"::/0": True, "192.0.2.0/24": True}}})
    assert net(rules, "tcp", "::ffff:192.0.2.1", 80) == "allow"
    assert net(rules, "tcp", "::ffff:192.0.3.1", 80) == "deny"  # ::/0 does not cover it


@pytest.mark.parametrize("address", ["64:ff9b::a01:203", "2002:a01:203::1", "2002:a01:203:5::9"])
def test_a_denied_ipv4_network_is_not_reached_through_ipv6(address: str) -> None:
    rules = compiled({"network": {"default": "allow", "rules": [{"deny": "10.0.0.0/8"}]}})
    assert net(rules, "udp", address, 53) == "deny"


def test_an_allowed_name_opens_its_ports_only() -> None:
    decision = reference.decide_name(
        compiled({"network": {"services": {"pypi": True}}}).net, "pypi.org"
    )
    assert decision.openings == (Opening("tcp", 443, 443),)


def test_openings_are_what_is_allowed_less_what_is_denied() -> None:
    rules = [
        {"allow": "*.corp.example", "ports": ["1-100"], "protocol": "tcp"},
        {"deny": "*.corp.example", "ports": [22, "90-200"]},
    ]
    decision = reference.decide_name(compiled({"network": {"rules": rules}}).net, "a.corp.example")
    assert decision.openings == (Opening("tcp", 1, 21), Opening("tcp", 23, 89))


def test_entered_addresses_are_open_unless_denied() -> None:
    policy = compiled({"network": {"services": {"pypi": True, "10.0.0.0/8": False}}}).net
    public, private = ipaddress.ip_address("198.51.100.7"), ipaddress.ip_address("10.1.2.3")
    entered = {public: [Opening("tcp", 443, 443)], private: [Opening("tcp", 443, 443)]}
    assert reference.decide_net(policy, "tcp", public, 443, entered) == "allow"
    assert reference.decide_net(policy, "tcp", public, 444, entered) == "deny"
    assert reference.decide_net(policy, "udp", public, 443, entered) == "deny"
    assert reference.decide_net(policy, "tcp", private, 443, entered) == "deny"


def test_an_open_policy_refuses_denied_names_only() -> None:
    policy = compiled({"extends": "open", "network": {"services": {"npm": False}}}).net
    assert not reference.decide_name(policy, "registry.yarnpkg.com").answered
    assert reference.decide_name(policy, "example.net").answered
    assert reference.decide_net(policy, "tcp", ipaddress.ip_address("10.1.1.1"), 80) == "deny"
    assert (
        reference.decide_net(policy, "tcp", ipaddress.ip_address("169.254.169.254"), 80) == "deny"
    )


def test_names_only_keep_private_addresses_when_the_rule_says_so() -> None:
    rules = [{"allow": "a.corp.example", "private": True}, {"allow": "b.corp.example"}]
    policy = compiled({"network": {"rules": rules}}).net
    assert reference.decide_name(policy, "a.corp.example").private
    assert not reference.decide_name(policy, "b.corp.example").private


def test_a_hidden_path_is_closed_with_all_beneath() -> None:
    files = compiled(
        {"files": {"hide": ["/a/b"], "rules": [{"paths": ["/a/b*"], "allow": ["read"]}]}}
    ).files
    for access in ("read", "write", "execute"):
        assert reference.decide_file(files, access, "/a/b/c") == "deny"
        assert reference.decide_file(files, access, "/a/bb") == "allow"


def test_a_directory_above_a_protected_path_cannot_be_renamed() -> None:
    files = compiled({"files": {"rules": [{"paths": ["/w/tests/**/x"], "deny": ["write"]}]}}).files
    assert reference.decide_rename(files, "/w", "/v") == "deny"
    assert reference.decide_rename(files, "/w/tests", "/v") == "deny"
    assert reference.decide_rename(files, "/w/other", "/v") == "allow"
    assert reference.decide_rename(files, "/v", "/w/tests/x") == "deny"


def test_what_cannot_be_read_gets_no_name_under_which_it_can() -> None:
    rules = [{"paths": ["/w/s", "/**/*.key"], "deny": ["read"]}]
    files = compiled({"files": {"rules": rules}}).files
    for source in ("/w/s", "/w/a.key"):
        assert reference.decide_file(files, "write", source) == "allow"
        assert reference.decide_rename(files, source, "/w/t") == "deny"
        assert reference.decide_link(files, source, "/w/t") == "deny"
    assert reference.decide_link(files, "/w/a.key", "/w/b.key") == "allow"  # nor under that one
    assert reference.decide_link(files, "/w/t", "/w/a.key") == "allow"
    assert reference.decide_rename(files, "/w/t", "/w/a.key") == "allow"


def test_a_link_opens_no_more_than_the_name_before() -> None:
    rules = [{"paths": ["/w/run"], "deny": ["execute"]}, {"paths": ["/w/kept"], "deny": ["write"]}]
    files = compiled({"files": {"rules": rules}}).files
    assert reference.decide_link(files, "/w/run", "/w/x") == "deny"
    assert reference.decide_link(files, "/w/kept", "/w/x") == "deny"
    assert reference.decide_link(files, "/w/x", "/w/kept") == "deny"
    assert reference.decide_link(files, "/w/x", "/w/y") == "allow"


def test_system_calls_are_decided_by_their_rules() -> None:
    system = compiled(
        {
            "ioctls": {"default": "deny", "allow": ["TIOCGWINSZ"]},
            "mounts": {"default": "deny", "rules": [{"allow": "tmpfs", "at": "/mnt/**"}]},
            "unix": {"deny": ["/run/docker.sock", "@secret*"]},
            "vsock": {"allow": ["2:1024-2000"], "deny": ["*:1500"]},
        }
    ).system
    assert reference.decide_ioctl(system, 0x5413) == "allow"
    assert reference.decide_ioctl(system, 0x1_0000_5413) == "allow"  # the kernel sees 32 bits
    assert reference.decide_ioctl(system, 0x5414) == "deny"
    assert reference.decide_mount(system, "tmpfs", "/mnt/x") == "allow"
    assert reference.decide_mount(system, "tmpfs", "/home") == "deny"
    assert reference.decide_mount(system, "bind", "/mnt/x") == "deny"
    assert reference.decide_unix(system, "/run/docker.sock") == "deny"
    assert reference.decide_unix(system, "/run/other.sock") == "allow"
    assert reference.decide_unix(system, "@secrets") == "deny"
    assert reference.decide_vsock(system, 2, 1024) == "allow"
    assert reference.decide_vsock(system, 2, 1500) == "deny"
    assert reference.decide_vsock(system, 3, 1024) == "deny"


def plain(policy: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in policy.items() if key != "extends"}


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES.map(plain), cases.SOME_ADDRESSES)
def test_the_model_agrees_with_a_second_reading(
    policy: dict[str, Any], addresses: list[str]
) -> None:
    rules = attempt(policy)
    if rules is None:
        reject()
    written = language.from_object(policy)
    for address in addresses:
        for kind in cases.KINDS:
            for port in cases.PORTS if kind in ("tcp", "udp") else (0,):
                asked = (kind, address, port)
                assert (net(rules, *asked) == "allow") == cases.naive_net(written, *asked), asked
    for path in cases.PATHS:
        for access in cases.ACCESSES:
            verdict = reference.decide_file(rules.files, access, path)  # type: ignore[arg-type]
            assert (verdict == "allow") == cases.naive_file(written, access, path), (access, path)


def openness(rules: Compiled, name: str) -> set[tuple[str, int]]:
    """Return which of the generated kinds and ports a name opens."""
    decision = reference.decide_name(rules.net, name)
    assert decision.answered == bool(decision.openings) or rules.net.default == "allow"
    return {
        (opening.protocol, port)
        for opening in decision.openings
        for port in (cases.PORTS if opening.protocol != "icmp" else (0,))
        if opening.first_port <= port <= opening.last_port
    }


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES.map(plain))
def test_names_agree_with_a_second_reading(policy: dict[str, Any]) -> None:
    policy.get("network", {}).pop("default", None)
    rules = attempt(policy)
    if rules is None:
        reject()
    written = language.from_object(policy)
    for name in cases.NAMES:
        expected = {
            (kind, port)
            for kind in ("tcp", "udp", "icmp")
            for port in (cases.PORTS if kind != "icmp" else (0,))
            if cases.naive_name(written, name, kind, port)
        }
        assert openness(rules, name) == expected, name


def allowed(rules: Compiled | None, addresses: list[str], ports: list[int]) -> set[object]:
    """Return everything among these and in the universe that is allowed."""
    if rules is None:
        return set()
    found: set[object] = {
        (kind, address, port)
        for address in addresses
        for kind in cases.KINDS
        for port in ports
        if net(rules, kind, address, port) == "allow"
    }
    for name in cases.NAMES:
        decision = reference.decide_name(rules.net, name)
        found |= {(name, "answered", decision.answered), (name, "private", decision.private)}
        found |= {(name, *each) for each in openness(rules, name)}
    found -= {(name, word, False) for name in cases.NAMES for word in ("answered", "private")}
    return found | files_allowed(rules) | calls_allowed(rules)


def files_allowed(rules: Compiled) -> set[object]:
    found: set[object] = {
        (path, access)
        for path in cases.PATHS
        for access in cases.ACCESSES
        if reference.decide_file(rules.files, access, path) == "allow"
    }
    return found | {
        ("rename", path, other)
        for path in cases.PATHS
        for other in cases.PATHS[:3]
        if reference.decide_rename(rules.files, path, other) == "allow"
    }


def calls_allowed(rules: Compiled) -> set[object]:
    system = rules.system
    verdicts: dict[object, str] = {
        ("mount", kind, path): reference.decide_mount(system, kind, path)
        for path in cases.PATHS
        for kind in cases.MOUNTS
    }
    for request in (0x5401, 0x5413, 0x541B, 0x5421, 0x40049409, 7):
        verdicts[("ioctl", request)] = reference.decide_ioctl(system, request)
    for name in ("/run/x.sock", "/run/d/y", "@x", "@xy", "@z/z"):
        verdicts[("unix", name)] = reference.decide_unix(system, name)
    for cid, port in ((2, 5), (2, 1024), (3, 5), (3, 1024), (3, 2001)):
        verdicts[("vsock", cid, port)] = reference.decide_vsock(system, cid, port)
    return {question for question, verdict in verdicts.items() if verdict == "allow"}


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES, cases.DENIALS, cases.SOME_ADDRESSES, cases.SOME_PORTS)
def test_adding_a_denial_never_allows_more(
    policy: dict[str, Any], denial: tuple[str, Any], addresses: list[str], ports: list[int]
) -> None:
    before = attempt(policy)
    if before is None:
        reject()
    after = attempt(cases.with_denial(policy, denial))
    assert allowed(after, addresses, ports) <= allowed(before, addresses, ports)


@given(st.sampled_from(cases.PATTERNS), st.sampled_from(cases.PATTERNS))
def test_a_pattern_within_another_covers_no_more(inner: str, outer: str) -> None:
    if globs.within(inner, outer):
        for path in cases.PATHS:
            assert globs.covers(outer, path) or not globs.covers(inner, path)
