"""Attempts that only a guest's kernel makes possible: frames of any kind at the tap.

The host's end is a router: it takes what is for its hardware address, whatever the rest says.
"""

# ruff: noqa: F403, F405 - what is imported is beside this file inside the sandbox

from __future__ import annotations

import os
import socket
import struct

from network_kit import *  # type: ignore[import-not-found]
from network_packets import checksum, udp_packet  # type: ignore[import-not-found]

GATEWAY = bytes.fromhex("02d5ec020001")
BROADCAST = b"\xff" * 6
ALLOWED6 = "2600:db8::10"
IP, IP6, ARP, VLAN, QINQ = 0x0800, 0x86DD, 0x0806, 0x8100, 0x88A8
TCP, UDP, ICMP6, IPV6_IN_IP, FRAGMENT, ROUTING, OPTIONS = 6, 17, 58, 41, 44, 43, 60
SOL_PACKET, VNET_HDR, NEEDS_CSUM = 263, 15, 1


def own_hardware() -> bytes:
    with open("/sys/class/net/eth0/address") as file:  # noqa: PTH123
        return bytes.fromhex(file.read().strip().replace(":", ""))


def own6() -> str:
    with open("/proc/net/if_inet6") as file:  # noqa: PTH123
        found = next(line.split()[0] for line in file if line.split()[3] == "00")
    return socket.inet_ntop(INET6, bytes.fromhex(found))


def ether(kind: int, body: bytes, to: bytes = GATEWAY, source: bytes = b"") -> bytes:
    return to + (source or own_hardware()) + struct.pack("!H", kind) + body


def packet(
    target: str,
    protocol: int,
    body: bytes,
    source: str = "",
    fragment: int = 0,
    options: bytes = b"",
    number: int = 777,
) -> bytes:
    head = struct.pack("!BBHHHBBH4s4s", 0x45 + len(options) // 4, 0, 20 + len(options) + len(body),
                       number, fragment, 64, protocol, 0, socket.inet_aton(source or own()),
                       socket.inet_aton(target)) + options  # fmt: skip
    return head[:10] + struct.pack("!H", checksum(head)) + head[12:] + body


def packet6(target: str, following: int, body: bytes, source: str = "") -> bytes:
    addresses = [socket.inet_pton(INET6, text) for text in (source or own6(), target)]
    return struct.pack("!IHBB", 6 << 28, len(body), following, 64) + b"".join(addresses) + body


def summed6(target: str, protocol: int, body: bytes, at: int) -> bytes:
    """Return `body` with its checksum, which lies `at` its start."""
    pseudo = b"".join(socket.inet_pton(INET6, text) for text in (own6(), target))
    total = checksum(pseudo + struct.pack("!IHBB", len(body), 0, 0, protocol) + body)
    return body[:at] + struct.pack("!H", total) + body[at + 2 :]


def udp6(target: str, port: int = 80) -> bytes:
    return summed6(target, UDP, udp_packet(port, b"xy"), 6)


def syn(port: int) -> bytes:
    return struct.pack("!HHIIBBHHH", 4000, port, 1, 0, 0x50, 2, 8192, 0, 0)


def summed(target: str, segment: bytes) -> bytes:
    """Return a TCP segment with its checksum."""
    pseudo = socket.inet_aton(own()) + socket.inet_aton(target)
    total = checksum(pseudo + struct.pack("!HH", TCP, len(segment)) + segment)
    return segment[:16] + struct.pack("!H", total) + segment[18:]


def send(*frames: bytes) -> object:
    with socket.socket(socket.AF_PACKET, RAW) as raw:
        raw.bind(("eth0", 0))
        for each in frames:
            raw.send(each)
    return "sent"


def to(v4: str, **more: object) -> bytes:
    return packet(v4, UDP, udp_packet(80), **more)


# --- as a kernel would send it, and with other addresses ------------------------------------------


@attempt
def frame_of_udp(v4: str, v6: str) -> object:
    return send(ether(IP, to(v4)))


@attempt
def frame_of_udp6(v4: str, v6: str) -> object:
    return send(ether(IP6, packet6(v6, UDP, udp6(v6))))


@attempt
def frame_of_a_syn(v4: str, v6: str) -> object:
    return send(ether(IP, packet(v4, TCP, summed(v4, syn(80)))))


@attempt
def frame_from_an_allowed_address(v4: str, v6: str) -> object:
    return send(ether(IP, to(v4, source=ALLOWED)))


@attempt
def frame_from_another_sandbox(v4: str, v6: str) -> object:
    head, _, last = own().rpartition(".")
    return send(*[ether(IP, to(v4, source=f"{head}.{int(last) + more}")) for more in (-1, 1, 2)])


@attempt
def frame_from_the_gateway(v4: str, v6: str) -> object:
    return send(ether(IP, to(v4, source="169.254.1.1"), source=GATEWAY))


@attempt
def frame_from_the_resolver(v4: str, v6: str) -> object:
    return send(ether(IP, to(v4, source="169.254.1.53")))


@attempt
def frame_from_loopback(v4: str, v6: str) -> object:
    return send(ether(IP, to(v4, source="127.0.0.1")))


@attempt
def frame_from_a_foreign_address_of_ipv6(v4: str, v6: str) -> object:
    return send(ether(IP6, packet6(v6, UDP, udp6(v6), ALLOWED6)))


@attempt
def frame_of_foreign_hardware(v4: str, v6: str) -> object:
    return send(ether(IP, to(v4), source=bytes.fromhex("02d5ec01beef")))


@attempt
def frame_for_all_hardware(v4: str, v6: str) -> object:
    return send(ether(IP, to(v4), BROADCAST), ether(IP, to(v4), bytes.fromhex("01005e000001")))


@attempt
def frame_for_the_hardware_of_the_host(v4: str, v6: str) -> object:
    return send(ether(IP, to(v4), bytes.fromhex("02d5ec000001")))


# --- in other wrappings ---------------------------------------------------------------------------


@attempt
def frame_of_a_vlan(v4: str, v6: str) -> object:
    return send(ether(VLAN, struct.pack("!HH", 5, IP) + to(v4)))


@attempt
def frame_with_a_priority(v4: str, v6: str) -> object:
    """Of VLAN 0, which is none: kernels take it for a plain one."""
    return send(ether(VLAN, struct.pack("!HH", 7 << 13, IP) + to(v4)))


@attempt
def frame_of_a_vlan_in_a_vlan(v4: str, v6: str) -> object:
    return send(ether(QINQ, struct.pack("!HHHH", 0, VLAN, 0, IP) + to(v4)))


@attempt
def frame_of_the_wrong_protocol(v4: str, v6: str) -> object:
    return send(ether(IP, packet6(v6, UDP, udp6(v6))), ether(IP6, to(v4)))


@attempt
def frame_of_802_3(v4: str, v6: str) -> object:
    body = b"\xaa\xaa\3\0\0\0" + struct.pack("!H", IP) + to(v4)
    return send(ether(len(body), body))


@attempt
def frame_of_ipv6_in_ip(v4: str, v6: str) -> object:
    return send(ether(IP, packet(v4, IPV6_IN_IP, packet6(v6, UDP, udp6(v6)))))


@attempt
def frame_of_ip_options(v4: str, v6: str) -> object:
    route = struct.pack("!BBB4sB", 131, 7, 4, socket.inet_aton(v4), 0)  # LSRR, then the end
    return send(ether(IP, packet(ALLOWED, TCP, syn(80), options=route)))


@attempt
def frame_of_a_routing_header(v4: str, v6: str) -> object:
    frames = []
    for kind in (0, 2, 4):
        header = struct.pack("!BBBBI", TCP, 2, kind, 1, 0) + socket.inet_pton(INET6, v6)
        frames.append(ether(IP6, packet6(ALLOWED6, ROUTING, header + syn(80))))
    return send(*frames)


@attempt
def frames_of_fragments(v4: str, v6: str) -> object:
    datagram = udp_packet(80, b"x" * 24)
    return send(ether(IP, packet(v4, UDP, datagram[:16], fragment=0x2000)),
                ether(IP, packet(v4, UDP, datagram[16:], fragment=2)))  # fmt: skip


@attempt
def frame_of_a_later_fragment(v4: str, v6: str) -> object:
    return send(ether(IP, packet(v4, UDP, b"x" * 16, fragment=2)))


@attempt
def frames_of_fragments_that_overlap(v4: str, v6: str) -> object:
    """The port is judged in the first, and another one written over it."""
    return send(ether(IP, packet(ALLOWED, TCP, syn(80)[:16], fragment=0x2000)),
                ether(IP, packet(ALLOWED, TCP, syn(8104)[:16], fragment=0x2000)),
                ether(IP, packet(ALLOWED, TCP, syn(8104)[16:] + bytes(4), fragment=2)))  # fmt: skip


@attempt
def frames_of_ipv6_fragments(v4: str, v6: str) -> object:
    datagram = summed6(v6, UDP, udp_packet(80, b"x" * 24), 6)
    return send(*[
        ether(IP6, packet6(v6, FRAGMENT, struct.pack("!BBHI", UDP, 0, at | more, 9) + part))
        for at, more, part in ((0, 1, datagram[:16]), (16, 0, datagram[16:]))
    ])  # fmt: skip


# --- left to the host to finish -------------------------------------------------------------------


def words(data: bytes) -> int:
    return sum(struct.unpack(f"!{len(data) // 2}H", data))


def send_unfinished(frame: bytes, start: int, at: int) -> object:
    """Send `frame` for the host to write the checksum of all from `start` on, to `at`."""
    with socket.socket(socket.AF_PACKET, RAW) as raw:
        raw.setsockopt(SOL_PACKET, VNET_HDR, 1)
        raw.bind(("eth0", 0))
        return raw.send(struct.pack("=BBHHHH", NEEDS_CSUM, 0, 0, 0, start, at - start) + frame)


@attempt
def port_made_of_a_checksum(v4: str, v6: str) -> object:
    """To a port that is open, until the checksum is written over it; then all others are right."""
    port, start = 8105, 14 + 6
    done = summed(ALLOWED, syn(port))
    segment = done[:2] + struct.pack("!H", 80) + done[4:]
    # the sum of a whole head is zero: from `start` on it is what the words before it lack
    number = (port + words(segment) - 0x4500 - 20 - len(segment)) % 0xFFFF
    frame = ether(IP, packet(ALLOWED, TCP, segment, number=number))
    return send_unfinished(frame, start, 14 + 20 + 2)


@attempt
def address_made_of_a_checksum(v4: str, v6: str) -> object:
    start, last = 14 + 24, socket.inet_pton(INET6, v6)[-2:]
    options = struct.pack("!BBBBI", TCP, 0, 1, 4, 0)  # four bytes of padding, of any value
    body = options + summed6(v6, TCP, syn(80), 16)
    frame = ether(IP6, packet6(ALLOWED6, OPTIONS, body))
    spare = (-words(last) - words(frame[start:])) % 0xFFFF
    frame = frame[:58] + struct.pack("!H", spare) + frame[60:]
    return send_unfinished(frame, start, start + 14)


# --- after what could change the way of others ----------------------------------------------------


@attempt
def tcp_after_a_claim_by_arp(v4: str, v6: str) -> object:
    claims = []
    for claimed in ("169.254.1.1", v4, "198.51.100.1"):
        address = socket.inet_aton(claimed)
        head = struct.pack("!HHBBH", 1, IP, 6, 4, 2)
        body = head + own_hardware() + address + GATEWAY + address
        claims += [ether(ARP, body), ether(ARP, body, BROADCAST)]
    send(*claims)
    return sock(INET, STREAM).connect((v4, 80))


@attempt
def tcp6_after_a_claim_by_neighbour_discovery(v4: str, v6: str) -> object:
    body = struct.pack("!BBHI", 136, 0, 0, 0xA0000000) + socket.inet_pton(INET6, "fe80::1")
    body += b"\2\1" + own_hardware()
    for target in ("ff02::1", "fe80::1"):
        send(ether(IP6, packet6(target, ICMP6, summed6(target, ICMP6, body, 2))))
    return sock(INET6, STREAM).connect((v6, 80))


@attempt
def tcp6_after_the_advertisement_of_a_router(v4: str, v6: str) -> object:
    body = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 1800, 0, 0) + b"\1\1" + own_hardware()
    send(ether(IP6, packet6("ff02::1", ICMP6, summed6("ff02::1", ICMP6, body, 2))))
    return sock(INET6, STREAM).connect((v6, 80))


@attempt
def tcp_after_a_redirect(v4: str, v6: str) -> object:
    body = struct.pack("!BBH4s", 5, 1, 0, socket.inet_aton(own())) + packet(v4, TCP, syn(80))[:28]
    body = body[:2] + struct.pack("!H", checksum(body)) + body[4:]
    for target in ("169.254.1.53", v4):
        send(ether(IP, packet(target, 1, body, "169.254.1.1")))
    return sock(INET, STREAM).connect((v4, 80))


@attempt
def frame_of_a_machine_behind_the_guest(v4: str, v6: str) -> object:
    """The guest routes for another: the addresses are not the sandbox's."""
    fd = os.open("/dev/net/tun", os.O_RDWR)
    try:
        call("ioctl", fd, 0x400454CA, struct.pack("16sH22x", b"behind", 0x1001))  # TUNSETIFF
        with sock(INET, DGRAM) as control:  # SIOCSIFFLAGS
            call("ioctl", control.fileno(), 0x8914, struct.pack("16sH22x", b"behind", 1))
        with open("/proc/sys/net/ipv4/ip_forward", "w") as file:  # noqa: PTH123
            file.write("1")
        return os.write(fd, to(v4, source="192.168.9.2"))
    finally:
        os.close(fd)
