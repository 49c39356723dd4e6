"""Queries and replies as bytes, against dnspython's reading of them."""

from __future__ import annotations

import ipaddress

import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import hypothesis
import hypothesis.strategies as st
import pytest

from dsecd.resolver.messages import Answer
from dsecd.resolver.names import plain
from dsecd.resolver.queries import BadQuery, parse_query, reply

LABELS = st.one_of(st.binary(min_size=1, max_size=63), st.from_regex(rb"\A[a-zA-Z0-9-]{1,20}\Z"))


@st.composite
def names(draw: st.DrawFn) -> dns.name.Name:
    labels = draw(st.lists(LABELS, max_size=6))
    while sum(len(label) + 1 for label in labels) > 254:
        labels.pop()
    return dns.name.Name((*labels, b""))


QUERIES = st.builds(
    dns.message.make_query,
    names(),
    st.sampled_from(["A", "AAAA", "TXT", "HTTPS", "ANY"]),
    use_edns=st.sampled_from([False, 0]),
    payload=st.sampled_from([0, 512, 1232, 65535]),
    options=st.sampled_from([None, [dns.edns.GenericOption(10, b"12345678")]]),
)
ANSWERS = st.builds(
    Answer,
    rcode=st.sampled_from([dns.rcode.NOERROR, dns.rcode.NXDOMAIN, dns.rcode.SERVFAIL]),
    ttl_s=st.just(1.0),
    chain=st.lists(names(), max_size=12).map(tuple),
    addresses=st.lists(st.ip_addresses(), max_size=32, unique=True).map(tuple),
)


@hypothesis.given(QUERIES, ANSWERS, st.booleans())
@hypothesis.settings(max_examples=200)
def test_dnspython_reads_the_same(sent: dns.message.Message, answer: Answer, stream: bool) -> None:
    query = parse_query(sent.to_wire())
    question = sent.question[0]
    assert (query.name, query.rdtype) == (plain(question.name.labels[:-1]), question.rdtype)
    assert query.payload == (sent.payload if sent.edns >= 0 else None)
    assert query.text() == question.name.to_text()
    version = {1: 4, 28: 6}.get(question.rdtype)
    kept = tuple(a for a in answer.addresses if a.version == version)
    answer = Answer(rcode=answer.rcode, ttl_s=1, chain=answer.chain, addresses=kept)
    wire = reply(query, answer, 77, stream=stream)
    read = dns.message.from_wire(wire, one_rr_per_rrset=True)
    assert sent.is_response(read) or answer.rcode  # same id and question
    assert read.question[0].name.labels == question.name.labels
    assert read.rcode() == answer.rcode
    assert read.edns == sent.edns
    assert read.flags & dns.flags.RA
    if read.flags & dns.flags.TC:
        assert not stream
        assert not read.answer
        return
    assert len(wire) <= (65535 if stream else max(512, min(1232, query.payload or 512)))
    owners = [question.name, *answer.chain]
    for owner, target, rrset in zip(owners, answer.chain, read.answer, strict=False):
        assert (rrset.name, rrset[0].target, rrset.ttl) == (owner, target, 77)
    addresses = read.answer[len(answer.chain) :]
    assert [ipaddress.ip_address(rrset[0].address) for rrset in addresses] == list(kept)
    assert all(rrset.name == owners[-1] and rrset.ttl == 77 for rrset in addresses)


@hypothesis.given(QUERIES, st.data())
@hypothesis.settings(max_examples=200)
def test_what_is_taken_for_a_query_is_one(sent: dns.message.Message, data: st.DataObject) -> None:
    """Of changed bytes: nothing but `BadQuery` is raised, and dnspython agrees with what passes."""
    wire = bytearray(sent.to_wire())
    for _ in range(data.draw(st.integers(1, 4))):
        wire[data.draw(st.integers(2, len(wire) - 1))] = data.draw(st.integers(0, 255))
    del wire[data.draw(st.sampled_from([len(wire), len(wire) - 1, 12])) :]
    try:
        query = parse_query(bytes(wire))
    except BadQuery:
        return
    try:
        read = dns.message.from_wire(bytes(wire))
    except dns.exception.DNSException:
        hypothesis.assume(query.payload is not None)  # options of EDNS are not looked at
        return
    question = read.question[0]
    assert (query.name, query.rdtype) == (plain(question.name.labels[:-1]), question.rdtype)


def test_names_of_the_greatest_length() -> None:
    longest = dns.name.Name((b"a" * 63, b"b" * 63, b"c" * 63, b"d" * 61, b""))
    query = parse_query(dns.message.make_query(longest, "A").to_wire())
    assert len(query.name) == 253
    wire = bytearray(dns.message.make_query(longest, "A").to_wire())
    wire[12 + 192] = 62  # the last label is one longer
    wire[12 + 193 : 12 + 193] = b"d"
    with pytest.raises(BadQuery):
        parse_query(bytes(wire))
