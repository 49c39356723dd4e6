"""What is believed of upstreams, and what they see: hostile servers over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import random
import socket
from collections.abc import Iterable

import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import hypothesis
import hypothesis.strategies as st
import pytest

from dsecd.resolver import (
    Caching,
    Forwarder,
    Lookups,
    Timing,
    Upstream,
    messages,
    queries,
    upstreams,
)
from dsecd.resolver.messages import Answer, BadAnswer, Truncated
from dsecd.resolver.upstream import STRAYS_MOST, mixed_case
from libdsec.errors import InvalidArgument, Unavailable
from tests.unit.resolver_upstream import FakeUpstream, address, record, response

A, AAAA = dns.rdatatype.A, dns.rdatatype.AAAA
QUICK = Timing(try_s=0.3, total_s=2.0, rounds=2)


def forwarder(*servers: FakeUpstream | Upstream, timing: Timing = QUICK) -> Forwarder:
    places = [s.place if isinstance(s, FakeUpstream) else s for s in servers]
    return Forwarder(places, timing=timing)


def texts(answer: Answer) -> list[str]:
    return [str(found) for found in answer.addresses]


async def test_an_answer_and_what_the_upstream_sees() -> None:
    async with FakeUpstream(address("1.1.1.1", "1.1.1.2", ttl=77)).serving() as server:
        asker = forwarder(server)
        for _ in range(12):
            answer = await asker.ask("files.pythonhosted.org", A)
            assert sorted(texts(answer)) == ["1.1.1.1", "1.1.1.2"]
            assert answer.ttl_s == 77
        assert (await asker.ask("pypi.org", AAAA)).addresses == ()
    assert len({query.id for query, _ in server.asked}) > 8
    assert len(set(server.ports)) > 8
    spelt = {query.question[0].name.labels for query, _ in server.asked}
    assert len(spelt) > 8  # letters of random case
    query = server.asked[0][0]
    assert query.flags == dns.flags.RD
    assert (query.edns, query.payload, query.options) == (0, messages.PAYLOAD, ())


async def test_a_truncated_answer_is_asked_for_over_tcp() -> None:
    def behave(query: dns.message.Message, stream: bool) -> Iterable[bytes]:
        if not stream:
            return [response(query, flags=dns.flags.TC).to_wire()]
        many = [f"1.1.{n}.1" for n in range(200)]
        found = response(query, record(query.question[0].name, "A", *many))
        return [found.to_wire(max_size=65535)]

    async with FakeUpstream(behave).serving() as server:
        answer = await forwarder(server).ask("a.org", A)
    assert len(answer.addresses) == messages.ADDRESSES_MOST
    assert [stream for _, stream in server.asked] == [False, True]


async def test_a_server_that_changes_the_case_is_asked_over_tcp() -> None:
    def behave(query: dns.message.Message, stream: bool) -> Iterable[bytes]:
        wire = response(query, record(query.question[0].name, "A", "1.1.1.1")).to_wire()
        return [wire if stream else wire[:12] + wire[12:].lower()]

    async with FakeUpstream(behave).serving() as server:
        asker = forwarder(server)
        while not server.asked or not server.asked[-1][1]:  # unless the case was lower by chance
            assert texts(await asker.ask("files.pythonhosted.org", A))


async def test_spoofed_datagrams_are_ignored_and_a_flood_of_them_leads_to_tcp() -> None:
    strays = 3

    def behave(query: dns.message.Message, stream: bool) -> Iterable[bytes]:
        true = response(query, record(query.question[0].name, "A", "1.1.1.1")).to_wire()
        spoof = response(query, record(query.question[0].name, "A", "6.6.6.6")).to_wire()
        wrong = (query.id + 1).to_bytes(3, "big")[-2:] + spoof[2:]
        return [true] if stream else [*([wrong, b"", b"x"] * strays)[:strays], true]

    async with FakeUpstream(behave).serving() as server:
        asker = forwarder(server)
        assert texts(await asker.ask("a.org", A)) == ["1.1.1.1"]
        assert not server.asked[-1][1]
        strays = STRAYS_MOST + 8
        assert texts(await asker.ask("a.org", A)) == ["1.1.1.1"]
        assert server.asked[-1][1]


async def test_somebody_else_cannot_answer_from_another_port() -> None:
    def behave(query: dns.message.Message, stream: bool) -> Iterable[bytes]:
        spoof = response(query, record(query.question[0].name, "A", "6.6.6.6")).to_wire()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as other:
            other.sendto(spoof, ("127.0.0.1", server.ports[-1]))
        return [response(query, record(query.question[0].name, "A", "1.1.1.1")).to_wire()]

    async with FakeUpstream(behave).serving() as server:
        assert texts(await forwarder(server).ask("a.org", A)) == ["1.1.1.1"]


def lies(query: dns.message.Message) -> dict[str, bytes]:
    """Return responses with the right id, none of which may be believed."""
    question = query.question[0]
    good = record(question.name, "A", "6.6.6.6")
    other = dns.message.make_query("other.org", "A", id=query.id)
    wire = response(query, good).to_wire()
    loop = [record(question.name, "CNAME", "b.org."), record("b.org.", "CNAME", "b.org.")]
    long = [record(f"{n}.org.", "CNAME", f"{n + 1}.org.") for n in range(20)]
    return {
        "nothing": wire[:2],
        "header": wire[:12],
        "cut": wire[:-3],
        "junk": wire + b"junk",
        "query": query.to_wire(),
        "question": response(other, record("other.org.", "A", "6.6.6.6")).to_wire(),
        "type": response(dns.message.make_query(question.name, "AAAA", id=query.id)).to_wire(),
        "class": response(dns.message.make_query(question.name, "A", "CH", id=query.id)).to_wire(),
        "none": wire[:4] + b"\0\0\0\0\0\0\0\0",
        "refused": response(query, good, rcode=5).to_wire(),
        "servfail": response(query, good, rcode=2).to_wire(),
        "loop": response(query, *loop).to_wire(),
        "long": response(query, record(question.name, "CNAME", "0.org."), *long).to_wire(),
        "pointer": wire[:12] + b"\xc0\x0c" + wire[14:],
        "huge": response(query, good).to_wire() + bytes(messages.RESPONSE_MOST),
    }


@pytest.mark.parametrize("lie", sorted(lies(dns.message.make_query("a.org", "A"))))
async def test_a_lie_is_not_believed_and_the_next_server_is_asked(lie: str) -> None:
    async with (
        FakeUpstream(lambda query, stream: [lies(query)[lie]]).serving() as liar,
        FakeUpstream(address("1.1.1.1")).serving() as server,
    ):
        asker = forwarder(liar, server)
        assert texts(await asker.ask("a.org", A)) == ["1.1.1.1"]
        asked = len(liar.asked)
        assert texts(await asker.ask("b.org", A)) == ["1.1.1.1"]
        assert len(liar.asked) == asked  # it is asked last now
        with pytest.raises(Unavailable, match=r"a\.org"):
            await forwarder(liar, timing=Timing(try_s=0.1, total_s=0.5)).ask("a.org", A)


async def test_servers_that_are_silent_closed_or_missing() -> None:
    async with (
        FakeUpstream(lambda query, stream: []).serving() as silent,
        FakeUpstream(address("1.1.1.1")).serving() as server,
    ):
        assert texts(await forwarder(silent, server).ask("a.org", A)) == ["1.1.1.1"]
        assert texts(await forwarder(Upstream("127.0.0.1", 1), server).ask("a.org", A))
        asked = len(silent.asked)
        with pytest.raises(Unavailable, match="Timeout"):
            await forwarder(silent).ask("a.org", A)
        assert 0 < len(silent.asked) - asked <= QUICK.rounds  # for a part of its time each
    with pytest.raises(Unavailable, match=r"network\.resolvers"):
        await forwarder().ask("a.org", A)
    assert upstreams(["192.0.2.1", "::1"])[1] == Upstream("::1")
    with pytest.raises(InvalidArgument, match=r"dns\.example"):
        upstreams(["dns.example"])


async def test_a_server_without_edns() -> None:
    def behave(query: dns.message.Message, stream: bool) -> Iterable[bytes]:
        if query.edns >= 0:
            return [response(query, rcode=dns.rcode.FORMERR).to_wire()]
        return address("1.1.1.1")(query, stream)

    async with FakeUpstream(behave).serving() as server:
        asker = forwarder(server)
        assert texts(await asker.ask("a.org", A)) == ["1.1.1.1"]
        assert texts(await asker.ask("b.org", A)) == ["1.1.1.1"]
    assert len(server.asked) == 3


def test_only_the_chain_from_the_asked_name_is_taken() -> None:
    asked = mixed_case("www.a.org")
    query = dns.message.make_query(asked, "A")
    message = response(
        query,
        record("bank.org.", "A", "6.6.6.6"),
        record("cdn.net.", "A", "1.1.1.1", "1.1.1.2", ttl=50),
        record("WWW.a.org.", "CNAME", "a.cdn.net.", ttl=300),
        record("a.cdn.net.", "CNAME", "CDN.net.", ttl=20),
        record("cdn.net.", "AAAA", "2606:4700::1"),
    )
    message.additional.append(record("www.a.org.", "A", "6.6.6.6"))
    message.authority.append(record("www.a.org.", "NS", "evil.org."))
    answer = messages.read_answer(message.to_wire(), asked, A)
    assert sorted(texts(answer)) == ["1.1.1.1", "1.1.1.2"]
    assert [str(name).lower() for name in answer.chain] == ["a.cdn.net.", "cdn.net."]
    assert answer.ttl_s == 20
    with pytest.raises(BadAnswer):
        messages.read_answer(message.to_wire(), mixed_case("bank.org"), A)


def test_negative_answers() -> None:
    asked = mixed_case("a.org")
    query = dns.message.make_query(asked, "A")
    gone = response(query, rcode=dns.rcode.NXDOMAIN)
    assert messages.read_answer(gone.to_wire(), asked, A).ttl_s == 0
    soa = "ns.org. root.org. 1 7200 900 1209600 30"
    gone.authority.append(record("org.", "SOA", soa, ttl=900))
    answer = messages.read_answer(gone.to_wire(), asked, A)
    assert (answer.rcode, answer.ttl_s) == (dns.rcode.NXDOMAIN, 30)


@hypothesis.given(st.binary(max_size=200), st.integers(0, 2**32))
def test_no_bytes_crash_the_parsers(junk: bytes, seed: int) -> None:
    """Junk, and good messages with some bytes changed."""
    asked = mixed_case("www.a.org")
    query = dns.message.make_query(asked, "A", use_edns=0)
    good = bytearray(
        response(
            query, record(asked, "CNAME", "b.org."), record("b.org.", "A", "1.1.1.1")
        ).to_wire()
    )
    chance = random.Random(seed)
    for _ in range(chance.randrange(1, 6)):
        good[chance.randrange(len(good))] = chance.randrange(256)
    for wire in (junk, query.to_wire()[:12] + junk, bytes(good)):
        try:
            answer = messages.read_answer(wire, asked, A)
        except (BadAnswer, Truncated):
            pass
        else:
            assert all(isinstance(a, ipaddress.IPv4Address) for a in answer.addresses)
        with contextlib.suppress(queries.BadQuery):
            queries.parse_query(wire)


class Counting:
    """An upstream that counts, answers when told, and fails when told."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = asyncio.Event()
        self.answer = Answer(
            rcode=dns.rcode.NOERROR, ttl_s=60, addresses=(ipaddress.ip_address("1.1.1.1"),)
        )
        self.error: Exception | None = None

    async def ask(self, name: str, rdtype: dns.rdatatype.RdataType) -> Answer:
        self.asked.append(name)
        await self.go.wait()
        if self.error:
            raise self.error
        return self.answer


async def test_equal_questions_are_asked_once_and_one_that_gives_up_takes_nothing_along() -> None:
    asker = Counting()
    lookups = Lookups(asker)
    waiting = [asyncio.create_task(lookups.find("a.org", A)) for _ in range(20)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    await asyncio.sleep(0)
    asker.go.set()
    found = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(found[0], asyncio.CancelledError)
    assert all(answer == asker.answer for answer in found[1:])
    assert asker.asked == ["a.org"]
    await lookups.close()


async def test_how_long_answers_are_kept() -> None:
    now = 0.0
    asker = Counting()
    asker.go.set()
    lookups = Lookups(asker, clock=lambda: now)

    async def kept_s(ttl_s: float, **changes: object) -> float:
        nonlocal now
        now += 1e6
        asker.answer = Answer(**{"rcode": dns.rcode.NOERROR, "ttl_s": ttl_s, **changes})
        return (await lookups.find("a.org", A)).ttl_s

    some = {"addresses": (ipaddress.ip_address("1.1.1.1"),)}
    assert await kept_s(0, **some) == 5
    assert await kept_s(60, **some) == 60
    assert await kept_s(2**31 - 1, **some) == 3600
    assert await kept_s(0) == 10
    assert await kept_s(2**31 - 1, rcode=dns.rcode.NXDOMAIN) == 60
    asker.error = Unavailable("no server")
    assert await kept_s(0) == 1
    asker.error = RuntimeError("a bug")
    assert (await lookups.find("b.org", A)).rcode == dns.rcode.SERVFAIL
    asker.error = None
    assert await kept_s(60, **some) == 60
    now += 20
    known = lookups.known("a.org", A)
    assert known is not None
    assert known.ttl_s == pytest.approx(40)
    now += 40
    assert lookups.known("a.org", A) is None
    await lookups.close()


async def test_the_cache_and_the_flights_are_bounded() -> None:
    asker = Counting()
    asker.go.set()
    lookups = Lookups(asker, caching=Caching(weight=20, flights=3))
    for number in range(50):
        await lookups.find(f"{number}.org", A)
    assert lookups.known("49.org", A)
    assert sum(lookups.known(f"{n}.org", A) is not None for n in range(50)) == 10
    asker.go.clear()
    waiting = [asyncio.create_task(lookups.find(f"x{n}.org", A)) for n in range(5)]
    await asyncio.sleep(0.01)
    assert [task.done() for task in waiting] == [False, False, False, True, True]
    assert waiting[4].result().rcode == dns.rcode.SERVFAIL
    await lookups.close()
    await asyncio.gather(*waiting, return_exceptions=True)
