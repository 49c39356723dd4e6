"""The program on the host's end of an interface: packets nobody's socket made, given as bytes."""

from __future__ import annotations

import ctypes
import ipaddress
import random
import socket
import struct
import time
from collections.abc import Iterator

import pytest

from dsecd.host import syscalls
from tests import net_cases
from tests.system.netpolicy_lab import BOX, Lab, access, lab, rule
from tests.system.network_lab import datagrams, in_namespace
from tests.system.test_netpolicy import LATER_NS, _bind, _entered, ip, opening

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf_cgroup", "veth")]
PASS, DROP = -1, 2
_TEST_RUN = 10
_ETHER = bytes.fromhex("020000000009" * 2)
TCP, UDP, ICMP, ICMP6, FRAGMENT, ROUTING, HOP, NONE = 6, 17, 1, 58, 44, 43, 0, 59


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with lab() as made:
        yield made


@pytest.fixture
def box(shared: Lab) -> Lab:
    shared.policies.unbind(shared.cgroup)
    shared.policies.bind(shared.cgroup, access())
    shared.policies.bind_link(shared.cgroup, shared.wire.index)
    list(shared.policies.events())
    return shared


def frame4(to: str, protocol: int, payload: bytes, offset: int = 0, number: int = 7,
           first: int = 0x45) -> bytes:  # fmt: skip
    head = struct.pack("!BBHHHBBH4s4s", first, 0, 20 + len(payload), number, offset, 64, protocol,
                       0, socket.inet_aton(BOX[4]), socket.inet_aton(to))  # fmt: skip
    total = sum(struct.unpack("!10H", head))
    check = ~((total & 0xFFFF) + (total >> 16)) & 0xFFFF
    return _ETHER + b"\x08\0" + head[:10] + struct.pack("!H", check) + head[12:] + payload


def frame6(to: str, following: int, payload: bytes) -> bytes:
    addresses = [socket.inet_pton(socket.AF_INET6, text) for text in (BOX[6], to)]
    head = struct.pack("!IHBB", 6 << 28, len(payload), following, 64)
    return _ETHER + b"\x86\xdd" + head + b"".join(addresses) + payload


def frame(to: str, protocol: int, payload: bytes) -> bytes:
    return (frame6 if ":" in to else frame4)(to, protocol, payload)


def ports(port: int) -> bytes:
    """Return the start of a TCP or UDP header, padded to a UDP header."""
    return struct.pack("!HHHH", 40000, port, 12, 0) + b"data"


def judge(box: Lab, *frames: bytes, index: int | None = None) -> list[int]:
    """Return the program's verdicts on frames that come in at the interface."""

    def work() -> list[int]:
        return [_run(box.policies.link_program, data, index or box.wire.index) for data in frames]

    return in_namespace(box.wire.world, work)


def _run(program: int, data: bytes, index: int) -> int:
    packet = ctypes.create_string_buffer(data, len(data))
    context = ctypes.create_string_buffer(bytes(40) + struct.pack("=I", index), 192)
    attr = ctypes.create_string_buffer(
        struct.pack("=IIIIQQIIIIQQ", program, 0, len(data), 0, ctypes.addressof(packet), 0, 1, 0,
                    192, 0, ctypes.addressof(context), 0))  # fmt: skip
    syscalls.call("bpf", _TEST_RUN, attr, len(attr) - 1)
    return int(struct.unpack_from("=i", attr, 4)[0])


def fragment6(following: int, offset: int, more: bool, payload: bytes, number: int = 9) -> bytes:
    return struct.pack("!BBHI", following, 0, offset << 3 | more, number) + payload


# --- agreement with the reference ---------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_packets_agree_with_the_reference(box: Lab, seed: int) -> None:
    rng = random.Random(100 + seed)
    for _ in range(40):
        rules, entered = net_cases.policy(rng), _entered(rng)
        _bind(box, rules, entered)
        questions, frames = [], []
        for _ in range(40):
            kind, address = rng.choice(net_cases.KINDS), rng.choice(net_cases.ADDRESSES)
            if "ffff" in address or ipaddress.ip_address(address).is_loopback:
                continue
            number = (ICMP6 if ":" in address else ICMP) if kind == "icmp" else (
                net_cases.NUMBERS[kind])  # fmt: skip
            port = rng.choice(net_cases.PORTS) if kind in ("tcp", "udp") else 0
            questions.append((kind, address, port))
            frames.append(frame(address, number, ports(port)))
        for question, verdict in zip(questions, judge(box, *frames), strict=True):
            expected = net_cases.allowed(rules, question, entered)
            assert verdict == (PASS if expected else DROP), (question, rules, entered)


# --- single laws --------------------------------------------------------------------------------


@pytest.fixture
def web(box: Lab) -> Lab:
    """One server is allowed, over both families: port 80 of tcp, port 90 of udp."""
    allow = [
        rule("allow", prefix, port, kind=kind)
        for prefix in ("192.0.2.1/32", "2001:db8::1/128")
        for kind, port in (("tcp", 80), ("udp", 90))  # type: ignore[assignment]
    ]
    box.policies.bind(box.cgroup, access(*allow))
    return box


def test_an_interface_that_nobody_bound_passes_nothing(web: Lab) -> None:
    good = frame4("192.0.2.1", TCP, ports(80))
    assert judge(web, good) == [PASS]
    web.policies.unbind(web.cgroup)
    assert judge(web, good) == [DROP]


def test_what_is_not_ip_is_dropped(web: Lab) -> None:
    good = frame4("192.0.2.1", TCP, ports(80))
    arp = _ETHER + b"\x08\x06" + bytes(28)
    vlan = _ETHER + b"\x81\0\0\5\x08\0" + good[14:]
    wrong_version = _ETHER + b"\x08\0" + frame6("2001:db8::1", TCP, ports(80))[14:]
    short = good[:24]
    assert judge(web, arp, vlan, wrong_version) == [DROP] * 3
    assert judge(web, short + bytes(10)) == [DROP]


def test_a_virtual_machine_may_find_its_gateway(web: Lab) -> None:
    arp = _ETHER + b"\x08\x06" + bytes(28)
    solicit = frame6("ff02::1:ff00:1", ICMP6, b"\x87" + bytes(23))
    assert judge(web, arp, solicit) == [DROP, DROP]
    web.policies.bind_link(web.cgroup, web.wire.index, neighbours=True)
    other = frame6("2001:db8::2", ICMP6, b"\x87" + bytes(23))
    tunnelled = frame6("ff02::1:ff00:1", UDP, ports(90))
    assert judge(web, arp, solicit, other, tunnelled) == [PASS, PASS, DROP, DROP]


def test_source_routes_and_loopback_on_the_wire_are_dropped(web: Lab) -> None:
    options = frame4("192.0.2.1", TCP, bytes.fromhex("83070400000000") + ports(80), first=0x47)
    routed = struct.pack("!BBBB", TCP, 0, 4, 0) + bytes(4) + ports(80)
    assert (
        judge(
            web,
            options,
            frame6("2001:db8::1", ROUTING, routed),
            frame4("127.0.0.1", TCP, ports(80)),
            frame6("::1", TCP, ports(80)),
        )
        == [DROP] * 4
    )


def test_extension_headers_hide_nothing(web: Lab) -> None:
    def behind(count: int, port: int) -> bytes:
        headers = [struct.pack("!BB6x", 60 if i + 1 < count else TCP, 0) for i in range(count)]
        return frame6("2001:db8::1", 60, b"".join(headers) + ports(port))

    long_one = struct.pack("!BB", TCP, 2) + bytes(22)
    assert judge(web, behind(1, 80), behind(3, 80), behind(3, 81)) == [PASS, PASS, DROP]
    assert judge(web, behind(9, 80)) == [DROP]
    good, bad = (frame6("2001:db8::1", HOP, long_one + ports(port)) for port in (80, 81))
    assert judge(web, good, bad) == [PASS, DROP]
    cut_short = frame6("2001:db8::1", 60, struct.pack("!BB6x", TCP, 200) + ports(80))
    assert judge(web, cut_short, frame6("2001:db8::1", NONE, b"data" * 8)) == [DROP, DROP]


def test_later_fragments_pass_when_the_first_did(web: Lab) -> None:
    later = frame4("192.0.2.1", UDP, b"x" * 16, offset=2, number=20)
    assert judge(web, later) == [DROP]  # the first was never seen
    first = frame4("192.0.2.1", UDP, ports(90), offset=0x2000, number=20)
    assert judge(web, first, later) == [PASS, PASS]
    bad = frame4("192.0.2.1", UDP, ports(91), offset=0x2000, number=20)
    assert judge(web, bad, later) == [DROP, DROP]  # the same number for another port
    elsewhere = frame4("192.0.2.9", UDP, b"x" * 16, offset=2, number=20)
    assert judge(web, first, elsewhere) == [PASS, DROP]
    tiny = frame4("192.0.2.1", TCP, b"\x9c\x40", offset=0x2000, number=21)
    assert judge(web, tiny) == [DROP]  # the port is in the second


def test_later_fragments_of_ipv6_pass_when_the_first_did(web: Lab) -> None:
    first = frame6("2001:db8::1", FRAGMENT, fragment6(UDP, 0, True, ports(90)))
    bad = frame6("2001:db8::1", FRAGMENT, fragment6(UDP, 0, True, ports(91)))
    later = frame6("2001:db8::1", FRAGMENT, fragment6(UDP, 2, False, b"x" * 16))
    whole = frame6("2001:db8::1", FRAGMENT, fragment6(UDP, 0, False, ports(90)))
    assert judge(web, later, first, later, bad, later) == [DROP, PASS, PASS, DROP, DROP]
    assert judge(web, whole) == [PASS]


def test_names_open_packets_too_and_expiry_cuts_no_open_connection(web: Lab) -> None:
    expired = time.monotonic_ns() - 1
    web.policies.admit(web.cgroup, ip("198.51.100.1"), opening("a", "tcp", 443, 443, expired))
    web.policies.admit(web.cgroup, ip("2001:db8::9"), opening("a", "udp", 443, 443, LATER_NS))
    good = [frame4("198.51.100.1", TCP, ports(443)), frame6("2001:db8::9", UDP, ports(443))]
    assert judge(web, *good) == [PASS, PASS]
    assert judge(web, frame4("198.51.100.1", TCP, ports(444))) == [DROP]
    web.policies.forget(web.cgroup, ip("198.51.100.1"), "a")
    assert judge(web, *good) == [DROP, PASS]


def test_denied_packets_are_counted_and_told(web: Lab) -> None:
    judge(web, frame4("192.0.2.1", UDP, ports(4789)), frame6("ff02::16", ICMP6, bytes(24)))
    assert web.policies.counters(web.cgroup).denied_packets == 1  # multicast is chatter
    (event,) = web.policies.events()
    assert (event.where, event.protocol, event.port, event.pid) == ("link", UDP, 4789, 0)


def test_packet_sockets_do_not_get_round_the_policy(web: Lab) -> None:
    """The real interface: frames by AF_PACKET, from a process in no sandbox's cgroup."""
    web.wire.filter(web.policies.link_program)
    web.wire.filter(web.policies.link_program)  # again: replaced
    server = datagrams(web.wire.world, "192.0.2.1", 90)
    other = datagrams(web.wire.world, "192.0.2.2", 90)
    other.settimeout(0.3)

    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
            sock.bind(("eth0", 0))
            for address in ("192.0.2.2", "192.0.2.1"):
                sock.send(frame4(address, UDP, ports(90)))

    try:
        in_namespace(web.wire.box, send)
        assert server.recv(100) == b"data"
        with pytest.raises(TimeoutError):
            other.recv(100)
    finally:
        server.close()
        other.close()


def test_large_datagrams_arrive_in_fragments(web: Lab) -> None:
    web.wire.filter(web.policies.link_program)
    server = datagrams(web.wire.world, "192.0.2.1", 90)

    def send() -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.sendto(b"x" * 9000, ("192.0.2.1", 90))

    try:
        in_namespace(web.wire.box, send)
        assert len(server.recv(10000)) == 9000
    finally:
        server.close()
