"""Network policy in the kernel: real sockets and packets against the reference's verdicts."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import random
import select
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from dsecd.host import nettable, sockdiag
from dsecd.host.netpolicy import Access, Opening
from dsecd.policy.reference import Opening as NameOpening
from dsecd.policy.rules import NetPolicy, opens_dns
from dsecd.policy.table import compile_table
from libdsec.errors import InvalidArgument, NotFound
from tests import net_cases
from tests.system.netpolicy_lab import BOX, Lab, access, lab, rule
from tests.system.network_lab import datagrams, in_namespace, listen

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf_cgroup", "veth")]
BITS = {"tcp": nettable.TCP, "udp": nettable.UDP, "icmp": nettable.ICMP}
DENIED = errno.EPERM
LATER_NS = 10**18


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with lab() as made:
        yield made


@pytest.fixture
def box(shared: Lab) -> Lab:
    """The shared sandbox, bound to what allows nothing; the ring is empty."""
    shared.policies.unbind(shared.cgroup)
    shared.policies.bind(shared.cgroup, access())
    list(shared.policies.events())
    return shared


def opening(name: str, kind: str, first: int, last: int, until_ns: int = LATER_NS) -> Opening:
    return Opening(name, (nettable.PortRange(first, last, BITS[kind]),), until_ns)


def ip(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    return ipaddress.ip_address(text)


# --- agreement with the reference ---------------------------------------------------------------


def _entered(rng: random.Random) -> dict[str, list[NameOpening]]:
    return {
        address: [net_cases.opening(rng) for _ in range(rng.randint(1, 2))]
        for address in rng.sample([a for a in net_cases.ADDRESSES if "ffff" not in a], 3)
    }


def _bind(box: Lab, rules: NetPolicy, entered: dict[str, list[NameOpening]]) -> None:
    openings = [
        (ip(address), opening(f"{index}", each.protocol, each.first_port, each.last_port))
        for address, found in entered.items()
        for index, each in enumerate(found)
    ]
    made = Access(table=compile_table(rules), dns_only=not opens_dns(rules))
    box.policies.bind(box.cgroup, made, openings)


def _questions(rng: random.Random, count: int) -> list[tuple[str, str, str, int]]:
    """Return (how, kind, address, port) that the agent's `calls` takes."""
    ways = (("connect", "tcp"), ("connect", "udp"), ("sendto", "udp"), ("sendto", "icmp"))
    found = []
    for _ in range(count):
        (how, kind), address = rng.choice(ways), rng.choice(net_cases.ADDRESSES)
        if kind == "icmp" and ":" in address:
            continue  # ping sockets of IPv6 do not tell that a packet was dropped: see below
        found.append((how, kind, address, 0 if kind == "icmp" else rng.choice(net_cases.PORTS)))
    return found


@pytest.mark.parametrize("seed", range(4))
def test_calls_agree_with_the_reference(box: Lab, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        rules, entered, cases = net_cases.policy(rng), _entered(rng), _questions(rng, 45)
        _bind(box, rules, entered)
        for case, code in zip(cases, box.agent.calls(cases), strict=True):
            expected = net_cases.allowed(rules, case[1:], entered)  # type: ignore[arg-type]
            assert (code != DENIED) == expected, (case, code, rules, entered)


def test_packets_of_connected_sockets_agree_with_the_reference(box: Lab) -> None:
    """The sockets were connected when all was allowed: this is the skb program alone."""
    rng = random.Random(7)
    box.policies.bind(box.cgroup, access(default="allow", dns_only=False))
    cases = [("udp", address, port) for address in net_cases.ADDRESSES for port in (53, 80, 8000)]
    box.agent.prepare(cases)
    try:
        for _ in range(40):
            rules, entered = net_cases.policy(rng), _entered(rng)
            _bind(box, rules, entered)
            sent = box.agent.send_all()
            for case in cases:
                expected = net_cases.allowed(rules, case, entered)  # type: ignore[arg-type]
                code = sent[" ".join(map(str, case))]
                assert (code != DENIED) == expected, (case, code, rules, entered)
    finally:
        box.agent.drop_all()


@pytest.mark.parametrize("address", ["2001:db8:1::1", "64:ff9b::a01:203", "2620::1"])
def test_icmpv6_agrees_with_the_reference(box: Lab, address: str) -> None:
    """sendto(2) of a ping socket succeeds even so: the counter tells."""
    rng = random.Random(3)
    for _ in range(30):
        rules, entered = net_cases.policy(rng), _entered(rng)
        _bind(box, rules, entered)
        before = box.policies.counters(box.cgroup).denied_packets
        box.agent.calls([("sendto", "icmp", address, 0)])
        denied = box.policies.counters(box.cgroup).denied_packets - before
        expected = net_cases.allowed(rules, ("icmp", address, 0), entered)
        assert denied == (0 if expected else 1), (rules, entered)


# --- single laws --------------------------------------------------------------------------------


def test_an_unbound_sandbox_reaches_nothing(box: Lab) -> None:
    box.policies.unbind(box.cgroup)
    cases = [("connect", "tcp", "192.0.2.1", 80), ("sendto", "udp", "2001:db8::1", 80)]
    assert box.agent.calls(cases) == [DENIED, DENIED]
    assert box.agent.calls([("connect", "tcp", "127.0.0.1", 9)]) == [0]
    with pytest.raises(NotFound, match="no network policy is bound"):
        box.policies.counters(box.cgroup)


def test_dns_leads_to_the_resolver_only(box: Lab) -> None:
    everything = access(default="allow", resolvers=(ip("10.9.0.1"), ip("fd09::1")))
    box.policies.bind(box.cgroup, everything)
    found = {
        address: box.agent.calls([("sendto", "udp", address, 53), ("connect", "tcp", address, 53)])
        for address in ("10.9.0.1", "::ffff:10.9.0.1", "fd09::1", "192.0.2.53", "2001:db8::53")
    }
    denied = {address for address, codes in found.items() if DENIED in codes}
    assert denied == {"192.0.2.53", "2001:db8::53"}
    assert [found[address] for address in denied] == [[DENIED, DENIED]] * 2
    closed = access(rule("deny", "0.0.0.0/0"), resolvers=(ip("10.9.0.1"),))
    box.policies.bind(box.cgroup, closed)
    cases = [("sendto", "udp", "10.9.0.1", 53), ("sendto", "udp", "10.9.0.1", 54)]
    assert box.agent.calls(cases) == [0, DENIED]


WAYS = (
    "fast_open", "second_address", "reconnect", "sendmsg", "mapped", "v4_of_a_v6_socket",
    "route_option", "mptcp",
)  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_unusual_calls_do_not_get_round_the_policy(box: Lab, way: str) -> None:
    """Each is accepted when the address is allowed, so it is the policy that refuses."""
    allowed = rule("allow", "192.0.2.1/32", 80, kind="udp")
    box.policies.bind(box.cgroup, access(allowed))
    refused = box.agent.way_round(way, "192.0.2.9", 80)
    counters = box.policies.counters(box.cgroup)
    assert counters.denied_calls + counters.denied_packets > 0
    assert refused in (DENIED, errno.ETIMEDOUT, -1)  # -1: a timeout of the agent's
    if way == "route_option":
        return  # refused whatever the policy is: it may lead anywhere
    box.policies.bind(box.cgroup, access(allowed, rule("allow", "192.0.2.9/32")))
    before = box.policies.counters(box.cgroup)
    assert box.agent.way_round(way, "192.0.2.9", 80) not in (DENIED, -1)
    after = box.policies.counters(box.cgroup)
    assert after.denied_calls == before.denied_calls
    assert after.denied_packets == before.denied_packets


def test_calls_to_the_own_address_stay_inside(box: Lab) -> None:
    case = [("connect", "tcp", BOX[4], 9)]
    assert box.agent.calls(case) == [DENIED]
    box.policies.bind(box.cgroup, access(own=(ip(BOX[4]),)))
    assert box.agent.calls(case) == [0]


def test_raw_and_foreign_sockets_are_refused(box: Lab) -> None:
    raw, sctp, udplite = (2, 3, 255), (2, 1, 132), (2, 2, 136)
    wanted = [raw, (2, 3, 1), (10, 3, 58), udplite]
    assert [box.agent.create(*each) for each in wanted] == [DENIED] * 4
    assert box.agent.create(*sctp) in (DENIED, errno.EPROTONOSUPPORT)
    plain = [(2, 1, 0), (2, 2, 0), (2, 2, 1), (10, 1, 6), (10, 2, 58), (1, 1, 0), (2, 1, 262)]
    assert [box.agent.create(*each) for each in plain] == [0] * 7
    assert box.policies.counters(box.cgroup).denied_sockets >= 4
    box.policies.bind(box.cgroup, access(raw=True))
    assert box.agent.create(*raw) == 0


def test_a_name_opens_its_ports_until_it_expires_and_not_what_is_denied(box: Lab) -> None:
    box.policies.bind(box.cgroup, access(rule("deny", "192.0.2.1/32", 81, kind="tcp")))
    assert box.policies.admit(box.cgroup, ip("192.0.2.1"), opening("a", "tcp", 80, 82))
    assert not box.policies.admit(box.cgroup, ip("192.0.2.1"), opening("b", "tcp", 81, 81))
    cases = [("connect", "tcp", "192.0.2.1", port) for port in (79, 80, 81, 82, 83)]
    assert box.agent.calls(cases) == [DENIED, 0, DENIED, 0, DENIED]
    soon = 0
    while time.monotonic_ns() >= soon:  # until it was asked in time
        soon = time.monotonic_ns() + 300_000_000
        assert box.policies.admit(box.cgroup, ip("2001:db8::1"), opening("a", "tcp", 80, 80, soon))
        found = box.agent.calls([("connect", "tcp", "2001:db8::1", 80)])
    assert found == [0]
    time.sleep(0.31)
    assert box.agent.calls([("connect", "tcp", "2001:db8::1", 80)]) == [DENIED]
    box.policies.forget(box.cgroup, ip("192.0.2.1"), "a")
    assert box.agent.calls(cases) == [DENIED] * 5
    assert [str(address) for address, _ in box.policies.openings(box.cgroup)] == ["2001:db8::1"]


def test_an_address_stays_open_while_one_of_its_names_is(box: Lab) -> None:
    for name, port in (("a", 80), ("b", 443)):
        box.policies.admit(box.cgroup, ip("192.0.2.1"), opening(name, "tcp", port, port))
    cases = [("connect", "tcp", "192.0.2.1", port) for port in (80, 443)]
    assert box.agent.calls(cases) == [0, 0]
    box.policies.forget(box.cgroup, ip("192.0.2.1"), "a")
    assert box.agent.calls(cases) == [DENIED, 0]


def test_denied_attempts_are_counted_and_told_at_a_limited_rate(box: Lab) -> None:
    begun = time.monotonic()
    box.agent.calls([("connect", "tcp", "192.0.2.7", port) for port in range(1, 301)])
    windows = 2 + int(time.monotonic() - begun)  # of a second, at most
    counters = box.policies.counters(box.cgroup)
    assert select.select([box.policies.event_fd], [], [], 0)[0]
    events = list(box.policies.events())
    assert not select.select([box.policies.event_fd], [], [], 0)[0]
    assert counters.denied_calls == 300
    assert 64 <= len(events) <= 64 * windows
    assert counters.unreported == 300 - len(events)
    first = events[0]
    told = (first.cgroup, first.where, first.protocol, str(first.address), first.port)
    assert told == (box.cgroup, "connect", 6, "192.0.2.7", 1)
    assert first.pid > 0
    assert list(box.policies.events()) == []


def test_the_ring_is_read_round_its_end(box: Lab) -> None:
    """5,461 records of 48 bytes fill the ring; each bind starts a new window of 64."""
    total = 0
    for _ in range(100):
        box.policies.unbind(box.cgroup)
        box.policies.bind(box.cgroup, access())
        box.agent.calls([("connect", "udp", "192.0.2.7", port) for port in range(1, 65)])
        ports = [event.port for event in box.policies.events()]
        assert ports == list(range(1, 65))
        total += len(ports)
    assert total == 6400


# --- updates ------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", [4, 6])
def test_an_update_cuts_connections(box: Lab, version: int) -> None:
    address = {4: "192.0.2.1", 6: "2001:db8::1"}[version]
    prefix = f"{address}/{'32' if version == 4 else '128'}"
    server = listen(box.wire.world, {4: "0.0.0.0", 6: "::"}[version], 80, version)
    try:
        box.policies.bind(box.cgroup, access(rule("allow", prefix, 80, kind="tcp")))
        assert box.agent.hold("c", address, 80) == 0
        peer = server.accept()[0]
        peer.sendall(b"yy")
        assert box.agent.exchange("c") == "y"
        box.policies.bind(box.cgroup, access())
        assert box.agent.exchange("c") == "y"  # was received before
        assert box.agent.exchange("c", 0.3) == "timeout"  # nothing leaves any more
        peer.sendall(b"z")
        assert box.agent.exchange("c", 0.3) == "timeout"  # nor comes in

        assert in_namespace(box.wire.box, lambda: _cut(box)) == 1
        assert box.agent.exchange("c") == "ECONNABORTED"
        assert ip(address) not in in_namespace(box.wire.box, _peers)
        peer.close()
    finally:
        server.close()
        box.agent.drop_all()


def _peers() -> set[nettable.IpAddress]:
    with contextlib.closing(sockdiag.open_diag()) as diag:
        return sockdiag.peers(diag)


def _cut(box: Lab) -> int:
    with contextlib.closing(sockdiag.open_diag()) as diag:
        found = sockdiag.connected(diag)
        assert found
        return sockdiag.cut(diag, found, lambda *r: box.policies.allows(box.cgroup, *r))


def test_connections_that_stay_allowed_outlive_updates(box: Lab) -> None:
    server = listen(box.wire.world, "0.0.0.0", 80)
    try:
        box.policies.bind(box.cgroup, access(rule("allow", "192.0.2.0/24", 80, kind="tcp")))
        assert box.agent.hold("c", "192.0.2.1", 80) == 0
        peer = server.accept()[0]
        for number in range(300):  # policies come and go around it
            other = rule("allow", f"198.51.{number // 100}.{number % 100}/32", 443, kind="tcp")
            box.policies.bind(
                box.cgroup, access(rule("allow", "192.0.2.1/32", 80, kind="tcp"), other)
            )
        peer.sendall(b"y")
        assert box.agent.exchange("c") == "y"
        assert in_namespace(box.wire.box, lambda: _cut(box)) == 0
        peer.close()
    finally:
        server.close()
        box.agent.drop_all()


def test_updates_are_atomic_for_packets_under_way(box: Lab) -> None:
    """An address that a rule or a name opens before and after is open at every moment between."""
    kept = rule("allow", "192.0.2.1/32", 80, kind="udp")
    named = [(ip("2001:db8::1"), opening("a", "udp", 80, 80))]
    box.policies.bind(box.cgroup, access(kept), named)
    box.agent.prepare([("udp", "192.0.2.1", 80), ("udp", "2001:db8::1", 80)])
    updates, sent, refused = 0, 0, 0
    try:
        with ThreadPoolExecutor(1) as threads:
            # more updates than wait unused: rules of old policies were removed
            while updates <= 300 or sent <= 1000:
                sending = threads.submit(box.agent.send_for, 1.0)
                while not sending.done():
                    updates += 1
                    other = rule("allow", f"10.{updates >> 8 & 255}.{updates & 255}.0/24")
                    box.policies.bind(box.cgroup, access(kept, other), named)
                went, failed = sending.result()
                sent, refused = sent + went, refused + failed
    finally:
        box.agent.drop_all()
    assert refused == 0


def test_an_update_that_fails_half_way_leaves_the_former_policy(box: Lab) -> None:
    """The new rules are in the map already when the addresses of names turn out not to fit."""
    kept = rule("allow", "192.0.2.1/32", 80, kind="udp")
    named = [(ip("2001:db8::1"), opening("a", "udp", 80, 80))]
    box.policies.bind(box.cgroup, access(kept), named)
    ranges = tuple(nettable.PortRange(2 * n, 2 * n, nettable.UDP) for n in range(1, 18))
    unfit = [(ip("2001:db8::2"), opening("b", "udp", 80, 80))]
    unfit += [(ip("2001:db8::3"), Opening("c", ranges, LATER_NS))]
    other = [rule("allow", f"198.51.100.{n}/32", 80, kind="udp") for n in range(20)]
    with pytest.raises(InvalidArgument, match="17 separate port ranges"):
        box.policies.bind(box.cgroup, access(*other), unfit)
    old = [("connect", "udp", "192.0.2.1", 80), ("connect", "udp", "2001:db8::1", 80)]
    new = [("connect", "udp", "198.51.100.1", 80), ("connect", "udp", "2001:db8::2", 80)]
    assert DENIED not in box.agent.calls(old)
    assert box.agent.calls(new) == [DENIED, DENIED]
    assert box.policies.openings(box.cgroup) == named
    box.policies.bind(box.cgroup, access(*other))
    assert box.agent.calls(new)[0] != DENIED
    assert box.agent.calls(old) == [DENIED, DENIED]


def test_datagrams_from_strangers_do_not_come_in(box: Lab) -> None:
    """Receiving needs no answer; what is not allowed out is not allowed in."""
    box.policies.bind(box.cgroup, access(rule("allow", "192.0.2.1/32", 7001, kind="udp")))
    box.agent.prepare([("udp", "192.0.2.1", 7001)])
    server = datagrams(box.wire.world, "192.0.2.1", 7001)
    try:
        box.agent.send_all()
        data, sender = server.recvfrom(100)
        assert data == b"data"
        server.sendto(b"reply", sender)
        before = box.policies.counters(box.cgroup).denied_packets
        box.policies.bind(box.cgroup, access())
        server.sendto(b"stranger", sender)
        deadline = time.monotonic() + 5
        while box.policies.counters(box.cgroup).denied_packets == before:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        server.close()
        box.agent.drop_all()


def test_maps_are_empty_when_everything_is_unbound() -> None:
    with lab() as box:
        policies = box.policies
        policies.bind(box.cgroup, access(rule("allow", "192.0.2.1/32")))
        policies.admit(box.cgroup, ip("192.0.2.9"), opening("a", "tcp", 1, 2))
        policies.bind_link(box.cgroup, 4242)
        for number in range(600):
            policies.bind(box.cgroup, access(rule("allow", f"10.0.{number % 256}.{number // 256}")))
        policies.unbind(box.cgroup)
        policies.unbind(box.cgroup)
        time.sleep(0.06)
        policies.unbind(box.cgroup)
        maps = (policies._bindings, policies._counts, policies._links, policies._names)
        assert [len(each.all_keys()) for each in maps] == [0, 0, 0, 0]
        assert len(policies._rules.all_keys()) <= 3 * 256  # of policies that wait for a user
