"""Addresses: which are let through, how long they stay open, and what asking may carry out."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Iterable, Sequence

import hypothesis
import hypothesis.strategies as st
import pytest

from dsecd.resolver.budget import BITS_PER_CHARACTER, Bucket, Limits, Outflow
from dsecd.resolver.names import Opening, Ruling
from dsecd.resolver.pins import Pins
from dsecd.resolver.reserved import Address, keep, reach
from libdsec.errors import Exhausted

HTTPS, SSH = Opening("tcp", 443, 443), Opening("tcp", 22, 22)
WEB = Ruling(answered=True, openings=(HTTPS,))


class FakeClock:
    """Seconds that pass when told to."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeSink:
    """What is open, as the kernel would have it."""

    def __init__(self) -> None:
        self.open: set[tuple[Opening, str]] = set()
        self.calls = 0
        self.busy: set[str] = set()
        self.fails = False

    def admit(self, opening: Opening, addresses: Sequence[Address], ttl_s: float) -> None:
        self.calls += 1
        assert ttl_s >= 0
        for number, address in enumerate(addresses):
            if self.fails and number == len(addresses) - 1:
                raise OSError("the map is full")
            self.open.add((opening, str(address)))

    def withdraw(self, opening: Opening, addresses: Sequence[Address]) -> None:
        for address in addresses:
            self.open.discard((opening, str(address)))

    def in_use(self, addresses: Sequence[Address]) -> Iterable[Address]:
        return [address for address in addresses if str(address) in self.busy]

    def addresses(self, opening: Opening = HTTPS) -> set[str]:
        return {address for kind, address in self.open if kind == opening}


def ips(*texts: str) -> list[Address]:
    return [ipaddress.ip_address(text) for text in texts]


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def sink() -> FakeSink:
    return FakeSink()


@pytest.fixture
def pins(sink: FakeSink, clock: FakeClock) -> Pins:
    return Pins(sink, clock, floor_s=300, most=10)


GLOBAL = ("1.1.1.1", "151.101.0.223", "2606:4700::1111", "64:ff9b::101:101")
ELSEWHERE = (
    "10.0.0.1", "172.16.0.1", "172.31.255.255", "192.168.1.1", "100.64.0.1", "100.127.255.255",
    "192.0.2.1", "198.18.0.1", "fd00::1", "fc00::1", "fec0::1", "64:ff9b::10.0.0.1",
    "64:ff9b::192.168.0.1", "64:ff9b::100.64.0.1",
)  # fmt: skip
NOWHERE = (
    "0.0.0.0", "0.1.2.3", "127.0.0.1", "127.255.255.255", "169.254.169.254", "224.0.0.1",
    "239.255.255.250", "240.0.0.1", "255.255.255.255", "::", "::1", "::7f00:1", "::1.2.3.4",
    "::ffff:127.0.0.1", "::ffff:10.0.0.1", "::ffff:1.1.1.1", "::ffff:0:10.0.0.1", "fe80::1",
    "ff02::1", "64:ff9b::127.0.0.1", "64:ff9b::169.254.169.254", "64:ff9b:1::10.0.0.1",
    "2002:7f00:1::", "2002:a9fe:a9fe::", "2002:a00:1::1", "2002:101:101::1", "2001:0:1::1",
    "100::1", "2001:db8::1", "4000::1", "5f00::1",
)  # fmt: skip


def test_addresses_by_where_they_lead() -> None:
    assert {text: reach(*ips(text)) for text in GLOBAL} == dict.fromkeys(GLOBAL, "global")
    assert {text: reach(*ips(text)) for text in ELSEWHERE} == dict.fromkeys(ELSEWHERE, "private")
    assert {text: reach(*ips(text)) for text in NOWHERE} == dict.fromkeys(NOWHERE, "never")


def test_private_rules_keep_what_is_somewhere() -> None:
    every = ips(*GLOBAL, *ELSEWHERE, *NOWHERE)
    assert keep(every, private=False) == tuple(ips(*GLOBAL))
    assert keep(every, private=True) == tuple(ips(*GLOBAL, *ELSEWHERE))


def test_networks_of_the_host_are_refused_in_every_form() -> None:
    refused = (ipaddress.ip_network("203.0.113.0/24"), ipaddress.ip_network("1.1.1.0/24"))
    assert keep(ips(*GLOBAL), private=True, refused=refused) == tuple(ips(*GLOBAL[1:3]))


@hypothesis.given(st.ip_addresses())
@hypothesis.settings(max_examples=500)
def test_nothing_is_global_that_python_calls_local(address: Address) -> None:
    if reach(address) == "global":
        assert address.is_global or address in ipaddress.ip_network("64:ff9b::/96")
        assert not address.is_multicast


def test_an_address_is_open_for_its_ttl_and_at_least_the_floor(
    pins: Pins, sink: FakeSink, clock: FakeClock
) -> None:
    pins.admit("a.org", WEB, ips("1.1.1.1"), 5)
    pins.admit("b.org", WEB, ips("2.2.2.2"), 3600)
    assert sink.addresses() == {"1.1.1.1", "2.2.2.2"}
    clock.now += 299
    pins.expire()
    assert sink.addresses() == {"1.1.1.1", "2.2.2.2"}
    clock.now += 302  # floor and the spare time
    pins.expire()
    assert sink.addresses() == {"2.2.2.2"}
    clock.now += 3600
    pins.expire()
    assert not sink.open
    assert len(pins) == 0


def test_a_changed_answer_adds_and_a_name_in_use_stays(
    pins: Pins, sink: FakeSink, clock: FakeClock
) -> None:
    for _ in range(100):
        pins.admit("a.org", WEB, ips("1.1.1.1"), 60)
        clock.now += 10
        pins.expire()
        assert "1.1.1.1" in sink.addresses()
    assert sink.calls < 6  # not once an answer
    pins.admit("a.org", WEB, ips("1.1.1.2"), 60)
    assert sink.addresses() == {"1.1.1.1", "1.1.1.2"}
    clock.now += 599
    pins.expire()
    assert sink.addresses() == {"1.1.1.2"}


def test_names_that_share_an_address(pins: Pins, sink: FakeSink, clock: FakeClock) -> None:
    ssh = Ruling(answered=True, openings=(SSH,))
    pins.admit("a.org", WEB, ips("1.1.1.1"), 60)
    clock.now += 400
    pins.admit("b.org", WEB, ips("1.1.1.1"), 60)
    pins.admit("c.org", ssh, ips("1.1.1.1"), 60)
    clock.now += 250
    pins.expire()  # a.org's time is over
    assert sink.open == {(HTTPS, "1.1.1.1"), (SSH, "1.1.1.1")}
    pins.replace(lambda name: ssh if name == "c.org" else Ruling(answered=False))
    assert sink.open == {(SSH, "1.1.1.1")}


def test_an_address_with_connections_is_kept(pins: Pins, sink: FakeSink, clock: FakeClock) -> None:
    pins.admit("a.org", WEB, ips("1.1.1.1", "1.1.1.2"), 60)
    sink.busy = {"1.1.1.1"}
    clock.now += 601
    pins.expire()
    assert sink.addresses() == {"1.1.1.1"}
    clock.now += 301
    pins.expire()
    assert sink.addresses() == {"1.1.1.1"}
    calls = sink.calls
    pins.admit("a.org", WEB, ips("1.1.1.1"), 60)
    assert sink.calls == calls + 1  # to let new connections in, which the sink may refuse by now
    sink.busy.clear()
    clock.now += 601
    pins.expire()
    assert not sink.open


def test_too_many_addresses_are_refused_together(pins: Pins, sink: FakeSink) -> None:
    pins.admit("a.org", WEB, ips(*(f"1.1.1.{n}" for n in range(8))), 60)
    with pytest.raises(Exhausted):
        pins.admit("b.org", WEB, ips("2.2.2.1", "2.2.2.2", "2.2.2.3"), 60)
    assert len(pins) == len(sink.open) == 8
    pins.admit("b.org", WEB, ips("2.2.2.1", "2.2.2.2"), 60)


def test_a_sink_that_fails_leaves_nothing_open(pins: Pins, sink: FakeSink) -> None:
    pins.admit("a.org", WEB, ips("1.1.1.1"), 60)
    sink.fails = True
    with pytest.raises(OSError, match="full"):
        pins.admit("b.org", WEB, ips("1.1.1.1", "2.2.2.2", "3.3.3.3"), 60)
    assert sink.addresses() == {"1.1.1.1"}
    assert len(pins) == 1
    with pytest.raises(OSError, match="full"):
        pins.replace(lambda name: Ruling(answered=True, openings=(SSH,)))
    assert not sink.open
    assert len(pins) == 0


def test_a_policy_without_private_closes_private_addresses(pins: Pins, sink: FakeSink) -> None:
    private = Ruling(answered=True, openings=(HTTPS,), private=True)
    pins.admit("a.org", private, ips("10.0.0.1", "1.1.1.1"), 60)
    pins.replace(lambda name: WEB)
    assert sink.addresses() == {"1.1.1.1"}


def test_the_next_daemon_takes_over(pins: Pins, sink: FakeSink, clock: FakeClock) -> None:
    pins.admit("a.org", WEB, ips("1.1.1.1"), 3000)
    pins.admit("b.org", WEB, ips("2.2.2.2"), 3000)
    private = Ruling(answered=True, openings=(HTTPS,), private=True)
    pins.admit("c.org", private, ips("10.0.0.1"), 3000)
    clock.now += 1000
    other = FakeSink()
    later = Pins(other, clock, floor_s=300, most=10)
    refused = Ruling(answered=False)
    later.restore(pins.held(), lambda name: WEB if name in ("a.org", "c.org") else refused)
    assert other.addresses() == {"1.1.1.1"}
    clock.now += 2200
    later.expire()
    assert other.addresses() == {"1.1.1.1"}
    pins.clear()
    assert not sink.open


STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("admit"), st.sampled_from("abc"), st.sets(st.integers(1, 6)),
            st.sampled_from([0, 60, 1000, 5000]),
        ),
        st.tuples(st.just("pass"), st.sampled_from([1, 299, 301, 700, 4000])),
        st.tuples(st.just("replace"), st.sets(st.sampled_from("abc"))),
    ),
    max_size=20,
)  # fmt: skip


@hypothesis.given(STEPS)
def test_what_is_open_is_what_some_name_holds(steps: list[tuple]) -> None:
    """Against a plain model: an answer's addresses are open from the reply until its time."""
    clock, sink = FakeClock(), FakeSink()
    pins = Pins(sink, clock, floor_s=300, most=1000)
    allowed, promised = set("abc"), {}
    judge: Callable[[str], Ruling] = lambda name: (  # noqa: E731
        WEB if name in allowed else Ruling(answered=False)
    )
    for step in steps:
        if step[0] == "admit" and step[1] in allowed:
            pins.admit(step[1], WEB, ips(*(f"1.1.1.{n}" for n in step[2])), step[3])
            for n in step[2]:
                until = clock.now + max(step[3], 300)
                promised[step[1], n] = max(until, promised.get((step[1], n), 0))
        elif step[0] == "pass":
            clock.now += step[1]
            pins.expire()
        elif step[0] == "replace":
            allowed = step[1]
            pins.replace(judge)
            promised = {key: until for key, until in promised.items() if key[0] in allowed}
        must = {f"1.1.1.{n}" for (_, n), until in promised.items() if until > clock.now}
        may = {f"1.1.1.{n}" for (_, n), until in promised.items() if until + 300 > clock.now}
        assert must <= sink.addresses() <= may
        assert len(sink.open) == len({address for _, address, _ in pins.held()})
    clock.now += 10000
    pins.expire()
    assert not sink.open


def test_a_bucket_fills_with_time(clock: FakeClock) -> None:
    bucket = Bucket(2, 0.5, clock)
    assert [bucket.take() for _ in range(3)] == [True, True, False]
    clock.now += 2
    assert [bucket.take() for _ in range(2)] == [True, False]
    clock.now += 1000
    assert [bucket.take() for _ in range(3)] == [True, True, False]


def test_what_a_sandbox_says_by_asking_is_bounded(clock: FakeClock) -> None:
    """Data in labels, whatever the code: bits that leave in an hour stay below what is promised."""
    limits = Limits()
    outflow = Outflow(limits, clock)
    said = count = 0.0
    for second in range(3600):
        clock.now += 1
        for number in range(3):
            chosen = f"{second}x{number}".ljust(60, "q")
            if outflow.charge(chosen + ".evil.example", chosen):
                said += len(chosen) * BITS_PER_CHARACTER
                count += 1
            if outflow.charge("known.evil.example", "known"):
                said += 10
    assert said <= limits.chosen_bits_burst + 60 * limits.chosen_bits_per_minute + 1
    assert count <= limits.new_names_burst + 60 * limits.new_names_per_minute


def test_names_given_in_full_and_ordinary_wildcards_are_free_enough(clock: FakeClock) -> None:
    outflow = Outflow(Limits(), clock)
    assert all(outflow.charge("pypi.org", "") for _ in range(10000))
    hosts = [f"d{n:08x}host" for n in range(40)]
    assert all(outflow.charge(f"{host}.cloudfront.net", host) for host in hosts)
    assert all(outflow.charge(f"{host}.cloudfront.net", host) for host in hosts for _ in range(2))
    assert not outflow.charge("q" * 63 + "." + "q" * 63 + ".cloudfront.net", "q" * 127)
