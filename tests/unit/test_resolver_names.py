"""Which names are answered and what they open: against the reference model, and by example."""

from __future__ import annotations

import dns.name
import hypothesis
import hypothesis.strategies as st
import msgspec
import pytest

from dsecd.policy import reference
from dsecd.policy.rules import LAST_PORT, NameRule, NetPolicy
from dsecd.resolver.names import NameTable, Opening, plain

LABELS = st.sampled_from(["a", "b", "pypi", "org", "xn--bcher-kva"])
NAMES = st.lists(LABELS, min_size=1, max_size=5).map(".".join)
PATTERNS = st.one_of(st.just("*"), NAMES, NAMES.map("*.{}".format))
PORTS = st.sampled_from([0, 1, 22, 53, 80, 442, 443, 444, 65534, LAST_PORT])


@st.composite
def rules(draw: st.DrawFn) -> NameRule:
    """Rules as the compiler makes them: what allows is never of `any`, icmp has all ports."""
    verdict = draw(st.sampled_from(["allow", "deny"]))
    kinds = ["tcp", "udp", "icmp"] + (["any"] if verdict == "deny" else [])
    protocol = draw(st.sampled_from(kinds))
    whole = protocol in ("any", "icmp")
    first, last = (0, LAST_PORT) if whole else sorted((draw(PORTS), draw(PORTS)))
    return NameRule(
        verdict=verdict, pattern=draw(PATTERNS), protocol=protocol,
        first_port=first, last_port=last, private=draw(st.booleans()),
    )  # fmt: skip


POLICIES = st.builds(
    NetPolicy,
    names=st.lists(rules(), max_size=6).map(tuple),
    default=st.sampled_from(["deny", "deny", "allow"]),
    check_names=st.booleans(),
).filter(lambda policy: not (policy.check_names and policy.default == "allow"))


@hypothesis.given(POLICIES, NAMES)
@hypothesis.settings(max_examples=250)
def test_the_table_agrees_with_the_reference_model(policy: NetPolicy, name: str) -> None:
    ruling = NameTable(policy).judge(name)
    expected = reference.decide_name(policy, name)
    assert ruling.answered == expected.answered
    assert [msgspec.structs.astuple(opening) for opening in ruling.openings] == [
        msgspec.structs.astuple(opening) for opening in expected.openings
    ]
    if ruling.answered:
        assert ruling.private == expected.private


@hypothesis.given(POLICIES, NAMES, rules())
@hypothesis.settings(max_examples=100)
def test_a_denial_never_opens(policy: NetPolicy, name: str, rule: NameRule) -> None:
    denial = msgspec.structs.replace(rule, verdict="deny")
    before = NameTable(policy).judge(name)
    after = NameTable(msgspec.structs.replace(policy, names=(*policy.names, denial))).judge(name)
    assert after.answered <= before.answered
    for opening in after.openings:
        assert any(
            opening.protocol == wider.protocol
            and wider.first_port <= opening.first_port
            and opening.last_port <= wider.last_port
            for wider in before.openings
        )


def allow(pattern: str, first: int = 443, last: int = 443) -> NameRule:
    return NameRule(
        verdict="allow", pattern=pattern, protocol="tcp", first_port=first, last_port=last
    )


@pytest.mark.parametrize(
    ("name", "answered"),
    [
        ("pypi.org", False),  # not the apex
        ("a.pypi.org", True),
        ("a.b.c.pypi.org", True),
        ("evilpypi.org", False),
        ("pypi.org.evil.example", False),
        ("org", False),
        ("", False),
    ],
)
def test_a_wildcard_covers_what_is_below_it(name: str, answered: bool) -> None:
    assert NameTable(NetPolicy(names=(allow("*.pypi.org"),))).judge(name).answered is answered


def test_closed_policies_answer_nothing() -> None:
    assert not NameTable(NetPolicy()).judge("pypi.org").answered


def test_what_the_sandbox_chose_of_a_name() -> None:
    table = NameTable(NetPolicy(names=(allow("*.a.org"), allow("*.x.a.org"), allow("n.x.a.org"))))
    assert table.judge("p.q.a.org").chosen == "p.q"
    assert table.judge("p.q.x.a.org").chosen == "p.q"
    assert table.judge("n.x.a.org").chosen == ""
    everything = NameTable(NetPolicy(names=(allow("*.a.org"), allow("*"))))
    assert everything.judge("p.a.org").chosen == ""


def test_a_denial_of_ports_leaves_the_others() -> None:
    deny = NameRule(verdict="deny", pattern="*", protocol="tcp", first_port=22, last_port=22)
    table = NameTable(NetPolicy(names=(allow("a.org", 0, LAST_PORT), deny)))
    assert table.judge("a.org").openings == (
        Opening("tcp", 0, 21),
        Opening("tcp", 23, LAST_PORT),
    )


def test_labels_are_compared_as_they_are_on_the_wire() -> None:
    """In text, the first of these looks like a name below pypi.org, the second like its apex."""
    for labels in ((b"evil.pypi", b"org"), (b"pypi.org",), (b"a\0", b"org"), (b"a\\", b"org"), ()):
        assert plain(labels) == ""
    assert plain((b"PyPI", b"oRG")) == "pypi.org"
    assert plain((b"_dmarc", b"xn--bcher-kva", b"example")) == "_dmarc.xn--bcher-kva.example"
    assert plain(("\u212a".encode(), b"org")) == ""  # KELVIN SIGN is no k
    assert plain((b"pypi", b"org\n")) == ""


@hypothesis.given(st.lists(st.binary(min_size=1, max_size=63), max_size=3))
def test_plain_names_have_one_spelling(labels: list[bytes]) -> None:
    text = plain(labels)
    assert not text or dns.name.from_text(text + ".") == dns.name.Name((*labels, b""))
