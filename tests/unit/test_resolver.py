"""What a sandbox is told, over real loopback sockets; the client is dnspython's stub resolver."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator

import dns.asyncquery
import dns.asyncresolver
import dns.edns
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdatatype
import dns.resolver
import msgspec
import pytest

from dsecd.policy.rules import NameRule, NetPolicy
from dsecd.resolver import Limits, Refusal, Resolver, Served, Timing, bind
from libdsec.errors import Unavailable
from tests.unit.resolver_upstream import FakeUpstream, address, record, response
from tests.unit.test_resolver_addresses import HTTPS, FakeClock, FakeSink
from tests.waiting import until


def allow(pattern: str, *, private: bool = False) -> NameRule:
    return NameRule(
        verdict="allow", pattern=pattern, protocol="tcp",
        first_port=443, last_port=443, private=private,
    )  # fmt: skip


POLICY = NetPolicy(
    names=(
        allow("pypi.org"),
        allow("*.pypi.org"),
        allow("mirror.corp", private=True),
        NameRule(verdict="deny", pattern="evil.pypi.org", protocol="any"),
    )
)
LIMITS = Limits()


class Lab:
    """One sandbox, its resolver on 127.0.0.1 and ::1, and the upstream it leads to."""

    def __init__(self, upstream: FakeUpstream, host: str) -> None:
        self.upstream, self.host = upstream, host
        self.sink = FakeSink()
        self.refusals: list[Refusal] = []
        self.served: Served
        self.port = 0

    async def open(
        self,
        service: Resolver,
        policy: NetPolicy = POLICY,
        limits: Limits = LIMITS,
        overrides: dict[str, ipaddress.IPv4Address] | None = None,
        relay: ipaddress.IPv4Address | None = None,
    ) -> None:
        self.service = service
        sockets = bind(self.host, 0)
        self.port = sockets.udp.getsockname()[1]
        self.served = service.open(
            policy, self.sink, [sockets], on_refusal=self.refusals.append, limits=limits,
            overrides=overrides, relay=relay,
        )  # fmt: skip

    async def ask(self, name: str, rdtype: str = "A", *, tcp: bool = False) -> dns.message.Message:
        query = dns.message.make_query(name, rdtype)
        send = dns.asyncquery.tcp if tcp else dns.asyncquery.udp
        return await send(query, self.host, timeout=5, port=self.port)

    async def addresses(self, name: str, rdtype: str = "A", *, tcp: bool = False) -> list[str]:
        """Return what libc would: the addresses of a stub resolver's answer."""
        stub = dns.asyncresolver.Resolver(configure=False)
        stub.nameservers, stub.port, stub.lifetime = [self.host], self.port, 4.0
        answer = await stub.resolve(name, rdtype, tcp=tcp)
        return [found.address for found in answer]


@contextlib.asynccontextmanager
async def lab(
    behaviour: object = None,
    host: str = "127.0.0.1",
    clock: Callable[[], float] = time.monotonic,
    timing: Timing = Timing(try_s=5, total_s=15),  # noqa: B008 - no test waits for that
    **options: object,
) -> AsyncIterator[Lab]:
    upstream = FakeUpstream(behaviour or address("1.1.1.1", "1.1.1.2"))
    async with upstream.serving():
        service = Resolver(
            [upstream.place],
            timing=timing,
            refused=[ipaddress.ip_network("8.8.8.0/24")],
            clock=clock,
        )
        made = Lab(upstream, host)
        await made.open(service, **options)
        try:
            yield made
        finally:
            await made.served.close()
            await service.close()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize("tcp", [False, True])
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
async def test_allowed_names_are_answered_and_open_their_addresses(host: str, tcp: bool) -> None:
    if host == "::1" and not has_ipv6():
        pytest.skip("this host has no IPv6 loopback")
    async with lab(host=host) as it:
        for name in ("pypi.org", "PyPI.org", "files.a.pypi.org"):
            assert sorted(await it.addresses(name, tcp=tcp)) == ["1.1.1.1", "1.1.1.2"]
        assert it.sink.open == {(HTTPS, "1.1.1.1"), (HTTPS, "1.1.1.2")}
        assert it.upstream.names == ["pypi.org.", "files.a.pypi.org."]


async def test_addresses_are_open_before_the_reply_is_sent() -> None:
    async with lab() as it:
        seen: list[int] = []
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.connect((it.host, it.port))
            admit = it.sink.admit

            def watching(*arguments: object) -> None:
                with contextlib.suppress(BlockingIOError):
                    seen.append(len(client.recv(512)))
                admit(*arguments)

            it.sink.admit = watching  # type: ignore[method-assign, assignment]
            client.send(dns.message.make_query("pypi.org", "A").to_wire())
            assert await asyncio.wait_for(loop.sock_recv(client, 512), 5)
        assert it.sink.open
        assert not seen


@pytest.mark.parametrize(
    "name", ["example.com", "evil.pypi.org", "org", "1.1.1.1.in-addr.arpa", ".", "xpypi.org"]
)
@pytest.mark.parametrize("rdtype", ["A", "AAAA", "TXT", "HTTPS", "ANY", "PTR"])
async def test_other_names_do_not_exist_and_never_leave_the_host(name: str, rdtype: str) -> None:
    async with lab() as it:
        reply = await it.ask(name, rdtype)
        assert reply.rcode() == dns.rcode.NXDOMAIN
        assert not reply.answer
        assert reply.flags & dns.flags.RA  # or libc takes it for a referral
        assert not it.upstream.wires
        assert not it.sink.open
        assert it.refusals[0].reason == "not allowed"


async def test_libc_gives_up_at_once() -> None:
    async with lab() as it:
        with pytest.raises(dns.resolver.NXDOMAIN):
            await it.addresses("example.com")
        with pytest.raises(dns.resolver.NoAnswer):
            await it.addresses("pypi.org", "AAAA")
        assert it.served.resolver.counts.queries == 2  # it does not ask again


async def test_with_the_network_off_nothing_leaves() -> None:
    """Fault: DNS still answers with the network off, and carries data out."""
    async with lab(policy=NetPolicy()) as it:
        for name in ("pypi.org", "c2VjcmV0.evil.example", "localhost.evil.example"):
            for rdtype in ("A", "AAAA", "TXT", "NULL"):
                for tcp in (False, True):
                    reply = await it.ask(name, rdtype, tcp=tcp)
                    assert reply.rcode() == dns.rcode.NXDOMAIN
        assert not it.upstream.wires


async def test_other_types_of_an_allowed_name_are_absent() -> None:
    async with lab() as it:
        for rdtype in ("HTTPS", "SVCB", "CNAME", "TXT", "MX", "ANY", "NS", "SRV", "NULL"):
            reply = await it.ask("pypi.org", rdtype)
            assert (reply.rcode(), reply.answer) == (dns.rcode.NOERROR, [])
        assert not it.upstream.wires


async def test_localhost_is_the_sandbox() -> None:
    async with lab(policy=NetPolicy()) as it:
        assert await it.addresses("localhost") == ["127.0.0.1"]
        assert await it.addresses("a.LOCALHOST", "AAAA") == ["::1"]
        assert not it.sink.open
        assert not it.upstream.wires


async def test_only_name_and_type_of_a_query_leave() -> None:
    """Letter case, id, flags, options and padding of a sandbox's query would carry data out."""
    async with lab() as it:
        query = dns.message.make_query("pYpI.oRg", "A", use_edns=0)
        query.flags |= dns.flags.CD | dns.flags.AD
        query.use_edns(0, options=[dns.edns.GenericOption(65001, b"secret")])
        await dns.asyncquery.udp(query, it.host, timeout=5, port=it.port)
        sent = it.upstream.asked[0][0]
        assert sent.options == ()
        assert sent.flags == dns.flags.RD
        assert b"secret" not in it.upstream.wires[0]


async def test_a_chain_of_aliases_needs_no_rule_of_its_own() -> None:
    def behave(query: dns.message.Message, stream: bool) -> Iterable[bytes]:
        name = query.question[0].name
        chain = record(name, "CNAME", "dualstack.cdn.net.", ttl=300)
        return [response(query, chain, record("dualstack.cdn.net.", "A", "1.1.1.1")).to_wire()]

    async with lab(behave) as it:
        reply = await it.ask("pypi.org")
        assert [rrset.rdtype for rrset in reply.answer] == [5, 1]
        assert await it.addresses("pypi.org") == ["1.1.1.1"]
        assert (await it.ask("dualstack.cdn.net")).rcode() == dns.rcode.NXDOMAIN


async def test_rebinding_to_networks_that_are_not_global() -> None:
    """Fault: an allowed name is pointed at the host, its network or the cloud's metadata."""
    bad = ("127.0.0.1", "10.0.0.1", "169.254.169.254", "8.8.8.8", "0.0.0.0", "100.64.0.1")
    async with lab(address("1.1.1.1", *bad)) as it:
        assert await it.addresses("pypi.org") == ["1.1.1.1"]
        assert it.sink.addresses() == {"1.1.1.1"}
        assert it.refusals[-1].reason == "not global"
        assert sorted(await it.addresses("mirror.corp")) == ["1.1.1.1", "10.0.0.1", "100.64.0.1"]
    async with lab(address(*bad)) as it:
        with pytest.raises(dns.resolver.NoAnswer):
            await it.addresses("pypi.org")
        assert not it.sink.open


async def test_a_large_answer_is_truncated_over_udp_and_whole_over_tcp() -> None:
    many = [f"1.1.{n}.1" for n in range(32)]
    async with lab(address(*many)) as it:
        query = dns.message.make_query("a" * 60 + ".pypi.org", "A")
        reply = await dns.asyncquery.udp(query, it.host, timeout=5, port=it.port)
        assert reply.flags & dns.flags.TC
        assert (
            len(await it.addresses("a" * 60 + ".pypi.org")) == 32
        )  # the stub turns to TCP, or EDNS


async def test_upstream_failures_are_servfail() -> None:
    async with lab(lambda query, stream: [response(query, rcode=2).to_wire()]) as it:
        assert (await it.ask("pypi.org")).rcode() == dns.rcode.SERVFAIL
        assert not it.sink.open


async def test_a_sink_that_fails_gives_no_address() -> None:
    async with lab() as it:
        it.sink.fails = True
        reply = await it.ask("pypi.org")
        assert reply.rcode() == dns.rcode.SERVFAIL
        assert not reply.answer
        assert not it.sink.open


async def test_a_new_policy_closes_what_it_does_not_allow_also_for_waiting_queries() -> None:
    async with lab() as it:
        await it.ask("pypi.org")
        assert it.sink.open
        waiting = asyncio.create_task(it.ask("files.pypi.org"))
        while len(it.upstream.wires) < 2:  # noqa: ASYNC110 - seen by the upstream, not answered yet
            await asyncio.sleep(0)
        it.served.resolver.replace(NetPolicy())
        assert not it.sink.open
        assert (await waiting).rcode() == dns.rcode.NXDOMAIN
        assert (await it.ask("pypi.org")).rcode() == dns.rcode.NXDOMAIN
        assert not it.sink.open


async def test_an_open_policy_answers_and_opens_nothing() -> None:
    deny = NameRule(verdict="deny", pattern="*.evil.org", protocol="any")
    async with lab(policy=NetPolicy(names=(deny,), default="allow")) as it:
        assert await it.addresses("anything.example")
        assert (await it.ask("a.evil.org")).rcode() == dns.rcode.NXDOMAIN
        assert not it.sink.open


async def test_names_under_a_wildcard_are_counted() -> None:
    limits = Limits(new_names_burst=3, new_names_per_minute=0.001)
    async with lab(limits=limits) as it:
        codes = [(await it.ask(f"data{n}.pypi.org")).rcode() for n in range(6)]
        assert codes == [0, 0, 0, 3, 3, 3]
        assert len(it.upstream.wires) == 3
        assert {refusal.reason for refusal in it.refusals} == {"budget"}
        assert (await it.ask("data0.pypi.org")).rcode() == 0
        assert (await it.ask("pypi.org")).rcode() == 0


async def test_refusals_are_reported_at_a_bounded_rate() -> None:
    clock = FakeClock()
    async with lab(clock=clock, limits=Limits(events_burst=2, events_per_s=0.5)) as it:
        for number in range(10):
            await it.ask(f"scan{number}\\000\\027[31m.example")
        assert len(it.refusals) == 2
        assert it.refusals[0].name == "scan0\\000\\027[31m.example."  # safe to print
        assert it.served.resolver.counts.refused == 10
        clock.now += 2
        await it.ask("last.example")
        assert it.refusals[-1].unreported == 8


def malformed() -> Iterator[tuple[bytes, int | None]]:
    """Yield hostile queries and the code of the reply, None for no reply."""
    good = dns.message.make_query("pypi.org", "A", id=0x1234).to_wire()
    yield b"", None
    yield good[:11], None
    yield good[:2] + b"\x81\x00" + good[4:], None  # a response
    yield good[:12], dns.rcode.FORMERR
    yield good[:-1], dns.rcode.FORMERR
    yield good + b"x", dns.rcode.FORMERR
    yield good[:4] + b"\0\2" + good[6:], dns.rcode.FORMERR
    yield good[:12] + b"\xc0\x0c\0\1\0\1", dns.rcode.FORMERR  # a pointer to itself
    yield good[:2] + b"\x28\x00" + good[4:], dns.rcode.NOTIMP  # an update
    yield dns.message.make_query("version.bind", "TXT", "CH", id=1).to_wire(), dns.rcode.REFUSED
    yield good[:2] + b"\x01\x00" + struct.pack("!HHHH", 1, 0, 0, 9) + good[12:], dns.rcode.FORMERR


@pytest.mark.parametrize(("wire", "rcode"), list(malformed()))
async def test_malformed_queries(wire: bytes, rcode: int | None) -> None:
    async with lab() as it:
        loop = asyncio.get_running_loop()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.setblocking(False)
            client.connect((it.host, it.port))
            client.send(wire)
            if rcode is not None:
                reply = await asyncio.wait_for(loop.sock_recv(client, 512), 5)
                assert reply[3] & 15 == rcode
                assert reply[:2] == wire[:2]
        assert not it.upstream.wires
        assert await it.addresses("pypi.org")  # it lives


async def test_tcp_clients_that_misbehave() -> None:
    async with lab(limits=Limits(connections=2)) as it:
        stuck = [await asyncio.open_connection(it.host, it.port) for _ in range(2)]
        stuck[0][1].write(b"\0")  # half of a length
        stuck[1][1].write(b"\xff\xff" + b"x" * 100)  # too large: closed at once
        with contextlib.suppress(ConnectionResetError):  # bytes were left unread
            assert await stuck[1][0].read() == b""
        assert await it.addresses("pypi.org", tcp=True)
        for _, writer in stuck:
            writer.close()
        reader, writer = await asyncio.open_connection(it.host, it.port)
        query = dns.message.make_query("pypi.org", "A").to_wire()
        writer.write(3 * (struct.pack("!H", len(query)) + query))  # one after the other
        for _ in range(3):
            (size,) = struct.unpack("!H", await reader.readexactly(2))
            assert dns.message.from_wire(await reader.readexactly(size)).answer
        writer.close()


async def test_a_flood_is_left_to_the_kernel() -> None:
    clock = FakeClock()
    async with lab(clock=clock, limits=Limits(queries_burst=50, queries_per_s=20)) as it:
        query = dns.message.make_query("example.com", "A").to_wire()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.connect((it.host, it.port))
            for _ in range(400):
                client.send(query)
            await until(lambda: it.served.resolver.counts.queries >= 50)
            await asyncio.sleep(0.2)
        assert it.served.resolver.counts.queries == 50
        clock.now += 1
        await until(lambda: it.served.resolver.counts.queries >= 70)
        await asyncio.sleep(0.2)
        assert it.served.resolver.counts.queries == 70  # those that the kernel has kept


async def test_queries_that_wait_are_bounded() -> None:
    quick = Timing(try_s=0.5, total_s=1.5)
    async with lab(lambda query, stream: [], timing=quick, limits=Limits(waiting=3)) as it:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
            client.connect((it.host, it.port))
            for number in range(20):
                client.send(dns.message.make_query(f"h{number}.pypi.org", "A").to_wire())
            counts = it.served.resolver.counts
            await until(lambda: counts.queries >= 20)
            await asyncio.sleep(0.2)
            assert (counts.queries, counts.upstream, counts.dropped) == (20, 3, 17)
        assert (await it.ask("h99.pypi.org", tcp=True)).rcode() == dns.rcode.SERVFAIL


async def test_equal_queries_are_asked_upstream_once() -> None:
    async with lab() as it:
        for _ in range(5):
            assert (await it.ask("pypi.org")).answer  # dnspython checks the id
        assert it.served.resolver.counts.queries == 5
        assert it.served.resolver.counts.upstream == 1
        it.served.resolver.replace(NetPolicy())
        assert (await it.ask("pypi.org")).rcode() == dns.rcode.NXDOMAIN


async def test_addresses_are_closed_when_their_time_is_over() -> None:
    clock = FakeClock()
    async with lab(address("1.1.1.1", ttl=1000), clock=clock) as it:
        assert (await it.ask("pypi.org")).answer[0].ttl == 1000
        clock.now += 400
        assert (await it.ask("pypi.org")).answer[0].ttl == 600  # as long as it is cached here
        it.upstream.behaviour = address("1.1.1.2", ttl=1000)
        clock.now += 601
        assert (await it.ask("pypi.org")).answer[0].ttl == 1000  # asked again
        assert it.sink.addresses() == {"1.1.1.1", "1.1.1.2"}
        clock.now += 300
        it.served.resolver.expire()
        assert it.sink.addresses() == {"1.1.1.2"}


async def test_a_daemon_that_leaves_keeps_addresses_open_for_the_next() -> None:
    async with lab() as it:
        await it.ask("pypi.org")
        pins = await it.served.leave()
        assert sorted(str(pin[1]) for pin in pins) == ["1.1.1.1", "1.1.1.2"]
        assert it.sink.addresses() == {"1.1.1.1", "1.1.1.2"}


async def test_an_address_that_is_taken_is_a_clear_error() -> None:
    async with lab() as it:
        with pytest.raises(Unavailable, match="what else listens there"):
            bind(it.host, it.port)


async def test_an_override_is_answered_without_asking_or_opening() -> None:
    own = ipaddress.IPv4Address("127.77.0.1")
    async with lab(overrides={"pypi.org": own, "other.example": own}) as it:
        assert await it.addresses("PyPI.org") == ["127.77.0.1"]
        assert (await it.ask("pypi.org", "AAAA")).answer == []
        assert (await it.ask("other.example")).rcode() == dns.rcode.NXDOMAIN  # not allowed
        assert (it.upstream.asked, it.sink.open) == ([], set())
        it.served.resolver.replace(NetPolicy())
        assert (await it.ask("pypi.org")).rcode() == dns.rcode.NXDOMAIN
        # the host's side of it asks for the real addresses, and opens none of them
        found = await it.service.find("pypi.org", private=False)
        assert {str(each) for each in found} == {"1.1.1.1", "1.1.1.2"}
        assert it.sink.open == set()


async def test_checked_names_are_answered_with_the_relay_and_open_nothing() -> None:
    relay, own = ipaddress.IPv4Address("127.78.0.1"), ipaddress.IPv4Address("127.77.0.1")
    checked = msgspec.structs.replace(POLICY, check_names=True)
    async with lab(policy=checked, relay=relay, overrides={"pypi.org": own}) as it:
        assert await it.addresses("any.pypi.org") == ["127.78.0.1"]
        assert await it.addresses("pypi.org") == ["127.77.0.1"]
        assert (await it.ask("any.pypi.org", "AAAA")).answer == []
        for refused in ("evil.pypi.org", "example.org"):
            assert (await it.ask(refused)).rcode() == dns.rcode.NXDOMAIN
        assert (it.upstream.asked, it.sink.open) == ([], set())
        resolver = it.served.resolver
        assert {str(each) for each in await resolver.find("any.pypi.org")} == {"1.1.1.1", "1.1.1.2"}
        assert await resolver.find("evil.pypi.org") == []
        assert it.sink.open == set()
        # without the option addresses are opened, and closed when it comes again
        resolver.replace(POLICY)
        assert set(await it.addresses("any.pypi.org")) == {"1.1.1.1", "1.1.1.2"}
        assert it.sink.open
        resolver.replace(checked, relay)
        assert it.sink.open == set()
        resolver.replace(checked)  # nobody could bind one
        assert (await it.ask("any.pypi.org")).rcode() == dns.rcode.NXDOMAIN
        assert it.refusals[-1].reason == "not opened"


async def test_what_the_relay_asks_for_is_on_the_budget_of_the_sandbox() -> None:
    checked = msgspec.structs.replace(POLICY, check_names=True)
    limits = Limits(new_names_burst=2, new_names_per_minute=0.01)
    async with lab(policy=checked, limits=limits, behaviour=address("1.1.1.1")) as it:
        found = [bool(await it.served.resolver.find(f"n{n}.pypi.org")) for n in range(4)]
        assert found == [True, True, False, False]
        assert await it.served.resolver.find("pypi.org")  # given in full
