"""Attempts by calls and packets of every kind."""

# ruff: noqa: F403, F405 - what is imported is beside this file inside the sandbox

from __future__ import annotations

import os
import socket
import struct
import threading
import time

from network_kit import *  # type: ignore[import-not-found]

MPTCP, SCTP, DCCP, UDPLITE = 262, 132, 33, 136


def checksum(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def ip_packet(target: str, protocol: int, body: bytes) -> bytes:
    head = struct.pack("!BBHHHBBH4s4s", 0x45, 0, 20 + len(body), 7, 0, 64, protocol, 0,
                       bytes(4), socket.inet_aton(target))  # fmt: skip
    return head + body


def udp_packet(port: int, body: bytes = b"x") -> bytes:
    return struct.pack("!HHHH", 4000, port, 8 + len(body), 0) + body


def echo_request() -> bytes:
    body = struct.pack("!BBHHH", 8, 0, 0, 1, 1)
    return struct.pack("!BBHHH", 8, 0, checksum(body), 1, 1)


# --- plain calls ------------------------------------------------------------------------------


@attempt
def tcp_connect(v4: str, v6: str) -> object:
    return sock(INET, STREAM).connect((v4, 80))


@attempt
def tcp6_connect(v4: str, v6: str) -> object:
    return sock(INET6, STREAM).connect((v6, 80))


@attempt
def tcp_to_a_mapped_address(v4: str, v6: str) -> object:
    return sock(INET6, STREAM).connect((f"::ffff:{v4}", 80))


@attempt
def tcp_not_blocking(v4: str, v6: str) -> object:
    made = sock(INET, STREAM)
    made.setblocking(False)
    code = made.connect_ex((v4, 80))
    time.sleep(0.1)
    return code


@attempt
def tcp_fast_open(v4: str, v6: str) -> object:
    return sock(INET, STREAM).sendto(b"x", 0x20000000, (v4, 80))  # MSG_FASTOPEN


@attempt
def tcp_fast_open_on_connect(v4: str, v6: str) -> object:
    made = sock(INET, STREAM)
    made.setsockopt(socket.IPPROTO_TCP, 30, 1)  # TCP_FASTOPEN_CONNECT
    made.connect((v4, 80))
    return made.send(b"x")


@attempt
def tcp_again_after_a_refusal(v4: str, v6: str) -> object:
    made = sock(INET, STREAM)
    for _ in range(50):
        made.connect_ex((v4, 80))
    return made.connect((v4, 80))


@attempt
def tcp_by_many_threads(v4: str, v6: str) -> object:
    threads = [
        threading.Thread(target=lambda: sock(INET, STREAM).connect_ex((v4, 80))) for _ in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return "done"


@attempt
def tcp_in_another_session(v4: str, v6: str) -> object:
    def work() -> object:
        os.setsid()
        return sock(INET, STREAM).connect((v4, 80))

    return apart(work)


@attempt
def tcp_as_another_user(v4: str, v6: str) -> object:
    def work() -> object:
        os.setgroups([])
        os.setuid(65534)
        return sock(INET, STREAM).connect((v4, 80))

    return apart(work)


@attempt
def tcp_from_another_address(v4: str, v6: str) -> object:
    made = sock(INET, STREAM)
    made.setsockopt(socket.IPPROTO_IP, 15, 1)  # IP_FREEBIND
    made.bind((ALLOWED, 0))
    return made.connect((v4, 80))


@attempt
def tcp_bound_to_the_device(v4: str, v6: str) -> object:
    made = sock(INET, STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, b"eth0\0")
    return made.connect((v4, 80))


@attempt
def tcp_transparent(v4: str, v6: str) -> object:
    made = sock(INET, STREAM)
    made.setsockopt(socket.IPPROTO_IP, 19, 1)  # IP_TRANSPARENT
    return made.connect((v4, 80))


@attempt
def tcp_with_a_mark(v4: str, v6: str) -> object:
    made = sock(INET, STREAM)
    made.setsockopt(socket.SOL_SOCKET, 36, 1)  # SO_MARK
    return made.connect((v4, 80))


@attempt
def tcp_by_a_source_route(v4: str, v6: str) -> object:
    made = sock(INET, STREAM)
    route = struct.pack("!BBB4sB", 131, 7, 4, socket.inet_aton(v4), 0)  # LSRR, then the end
    made.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, route)
    return made.connect((ALLOWED, 80))


@attempt
def tcp_to_another_port_of_an_allowed_address(v4: str, v6: str) -> object:
    return sock(INET, STREAM).connect((ALLOWED, 8100))


@attempt
def mptcp_connect(v4: str, v6: str) -> object:
    return sock(INET, STREAM, MPTCP).connect((v4, 80))


@attempt
def sctp_connect(v4: str, v6: str) -> object:
    return sock(INET, STREAM, SCTP).connect((v4, 80))


@attempt
def sctp_datagram(v4: str, v6: str) -> object:
    return sock(INET, socket.SOCK_SEQPACKET, SCTP).sendto(b"x", (v4, 80))


@attempt
def dccp_connect(v4: str, v6: str) -> object:
    return sock(INET, 6, DCCP).connect((v4, 80))


# --- datagrams --------------------------------------------------------------------------------


@attempt
def udp_sendto(v4: str, v6: str) -> object:
    return sock(INET, DGRAM).sendto(b"x", (v4, 80))


@attempt
def udp6_sendto(v4: str, v6: str) -> object:
    return sock(INET6, DGRAM).sendto(b"x", (v6, 80))


@attempt
def udp_to_a_mapped_address(v4: str, v6: str) -> object:
    return sock(INET6, DGRAM).sendto(b"x", (f"::ffff:{v4}", 80))


@attempt
def udp_connected(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.connect((v4, 80))
    return made.send(b"x")


@attempt
def udp_connected_elsewhere(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.connect((own(), 9))
    return made.sendto(b"x", (v4, 80))


@attempt
def udp_disconnected_and_connected_again(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.connect(("127.0.0.1", 9))
    libc.connect(made.fileno(), bytes(16), 16)  # AF_UNSPEC
    made.connect((v4, 80))
    return made.send(b"x")


@attempt
def udp_sendmsg_with_a_source(v4: str, v6: str) -> object:
    info = struct.pack("=i4s4s", 0, socket.inet_aton(own()), bytes(4))  # IP_PKTINFO
    return sock(INET, DGRAM).sendmsg([b"x"], [(socket.IPPROTO_IP, 8, info)], 0, (v4, 80))


@attempt
def udp_corked(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.sendto(b"x", socket.MSG_MORE, (v4, 80))
    return made.sendto(b"y", (v4, 80))


@attempt
def udp_in_fragments(v4: str, v6: str) -> object:
    return sock(INET, DGRAM).sendto(bytes(4000), (v4, 80))


@attempt
def udp6_in_fragments(v4: str, v6: str) -> object:
    return sock(INET6, DGRAM).sendto(bytes(4000), (v6, 80))


@attempt
def udp_in_segments(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.setsockopt(socket.IPPROTO_UDP, 103, 500)  # UDP_SEGMENT
    return made.sendto(bytes(2000), (v4, 80))


@attempt
def udp_not_checked_for_errors(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.setsockopt(socket.IPPROTO_IP, 10, 3)  # IP_MTU_DISCOVER: probe
    return made.sendto(b"x", socket.MSG_CONFIRM, (v4, 80))


@attempt
def udp_encapsulating(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.setsockopt(socket.IPPROTO_UDP, 100, 2)  # UDP_ENCAP: ESP in UDP
    return made.sendto(bytes(16), (v4, 4500))


@attempt
def udplite_sendto(v4: str, v6: str) -> object:
    return sock(INET, DGRAM, UDPLITE).sendto(b"x", (v4, 80))


@attempt
def udp_broadcast(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
    return made.sendto(b"x", ("255.255.255.255", 80))


@attempt
def udp_multicast(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    made.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, 8)
    return made.sendto(b"x", ("239.1.2.3", 80))


@attempt
def many_datagrams_in_one_call(v4: str, v6: str) -> object:
    made = sock(INET, DGRAM)
    address = struct.pack("=HH4s8x", INET, socket.htons(80), socket.inet_aton(v4))
    name, data = ctypes.create_string_buffer(address), ctypes.create_string_buffer(b"x")
    vector = struct.pack("=QQ", ctypes.addressof(data), 1)
    vectors = ctypes.create_string_buffer(vector)
    header = struct.pack("=QIxxxxQQQQii", ctypes.addressof(name), 16, ctypes.addressof(vectors),
                         1, 0, 0, 0, 0) + bytes(8)  # fmt: skip
    headers = ctypes.create_string_buffer(header * 2)
    return libc.sendmmsg(made.fileno(), headers, 2, 0)


# --- other protocols, and packets made by hand -----------------------------------------------


@attempt
def ping(v4: str, v6: str) -> object:
    return sock(INET, DGRAM, socket.IPPROTO_ICMP).sendto(echo_request(), (v4, 0))


@attempt
def ping6(v4: str, v6: str) -> object:
    request = struct.pack("!BBHHH", 128, 0, 0, 1, 1)
    return sock(INET6, DGRAM, socket.IPPROTO_ICMPV6).sendto(request, (v6, 0))


@attempt
def raw_icmp(v4: str, v6: str) -> object:
    return sock(INET, RAW, socket.IPPROTO_ICMP).sendto(echo_request(), (v4, 0))


@attempt
def raw_ip(v4: str, v6: str) -> object:
    return sock(INET, RAW, 255).sendto(ip_packet(v4, 17, udp_packet(80)), (v4, 0))


@attempt
def raw_tunnel(v4: str, v6: str) -> object:
    inner = ip_packet(v4, 17, udp_packet(80))
    return sock(INET, RAW, 4).sendto(inner, (v4, 0))


@attempt
def raw_gre(v4: str, v6: str) -> object:
    return sock(INET, RAW, 47).sendto(bytes(8), (v4, 0))


@attempt
def raw6_with_extension_headers(v4: str, v6: str) -> object:
    return sock(INET6, RAW, 0).sendto(bytes([17, 0, 1, 4, 0, 0, 0, 0]) + udp_packet(80), (v6, 0))


@attempt
def packet_socket(v4: str, v6: str) -> object:
    made = socket.socket(socket.AF_PACKET, DGRAM)
    return made.sendto(ip_packet(v4, 17, udp_packet(80)), ("eth0", 0x0800, 0, 0, bytes(6)))


@attempt
def packet_socket_in_disguise(v4: str, v6: str) -> object:
    return socket.socket(INET, 10, 0x0800).fileno() and "ok"  # SOCK_PACKET


@attempt
def tunnel_device(v4: str, v6: str) -> object:
    fd = os.open("/dev/net/tun", os.O_RDWR)
    return call("ioctl", fd, 0x400454CA, struct.pack("16sH22x", b"t0", 1))  # TUNSETIFF


@attempt
def device_node_of_a_tunnel(v4: str, v6: str) -> object:
    os.mknod("/tmp/tun", 0o20666, os.makedev(10, 200))
    return os.open("/tmp/tun", os.O_RDWR)


@attempt
def xdp_socket(v4: str, v6: str) -> object:
    return socket.socket(44, RAW).fileno() and "ok"


@attempt
def vsock_to_the_host(v4: str, v6: str) -> object:
    return socket.socket(40, STREAM).connect((2, 1024))


@attempt
def kernel_crypto_socket(v4: str, v6: str) -> object:
    return socket.socket(38, socket.SOCK_SEQPACKET).fileno() and "ok"
