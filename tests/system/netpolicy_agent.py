"""What plays the sandbox's process in the tests of network policy: a line of JSON in, one out."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import socket
import struct
import sys
import time
from typing import Any

_held: dict[str, socket.socket] = {}
_KINDS = {
    "tcp": (socket.SOCK_STREAM, 0),
    "udp": (socket.SOCK_DGRAM, 0),
    "icmp4": (socket.SOCK_DGRAM, socket.IPPROTO_ICMP),
    "icmp6": (socket.SOCK_DGRAM, socket.IPPROTO_ICMPV6),
}


def _make(kind: str, family: int) -> socket.socket:
    name = f"icmp{4 if family == socket.AF_INET else 6}" if kind == "icmp" else kind
    sock = socket.socket(family, *_KINDS[name])
    sock.setblocking(False)
    if kind == "tcp":
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return sock


def _family(address: str) -> int:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _attempt(sock: socket.socket, how: str, address: str, port: int) -> int:
    try:
        if how == "connect":
            sock.connect((address, port))
        elif how == "send":
            sock.send(b"data")
        else:
            echo = (sock.family == socket.AF_INET and 8) or 128
            sock.sendto(bytes((echo, 0, 0, 0, 0, 0, 0, 1)), (address, port))
    except OSError as error:
        return 0 if error.errno == errno.EINPROGRESS else error.errno or -1
    return 0


def calls(cases: list[tuple[str, str, str, int]]) -> list[int]:
    """Return the errno of each (how, kind, address, port)."""
    found = []
    for how, kind, address, port in cases:
        with _make(kind, _family(address)) as sock:
            found.append(_attempt(sock, how, address, port))
    return found


def prepare(cases: list[tuple[str, str, int]]) -> int:
    """Connect datagram sockets, to be used by `send_all`."""
    for kind, address, port in cases:
        sock = _make(kind, _family(address))
        sock.connect((address, port))
        _held[f"{kind} {address} {port}"] = sock
    return len(cases)


def send_all() -> dict[str, int]:
    found = {}
    for name, sock in _held.items():
        code = _attempt(sock, "send", "", 0)
        # an ICMP error of an earlier datagram comes first
        found[name] = _attempt(sock, "send", "", 0) if code == errno.ECONNREFUSED else code
    return found


def send_for(duration_s: float) -> list[int]:
    """Send on all prepared sockets in turn; return how often it went well and how often not."""
    found, end = [0, 0], time.monotonic() + duration_s
    while time.monotonic() < end:
        for sock in _held.values():
            found[_attempt(sock, "send", "", 0) == errno.EPERM] += 1
    return found


def drop_all() -> int:
    for sock in _held.values():
        sock.close()
    _held.clear()
    return 0


def hold(name: str, address: str, port: int) -> int:
    """Make a TCP connection and keep it."""
    sock = socket.socket(_family(address), socket.SOCK_STREAM)
    sock.settimeout(5)
    try:
        sock.connect((address, port))
    except OSError as error:
        return error.errno or -1
    _held[name] = sock
    return 0


def exchange(name: str, patience_s: float = 5) -> str:
    """Send a byte on a kept connection and return what comes back, or the error's name."""
    sock = _held[name]
    sock.settimeout(patience_s)
    try:
        sock.send(b"x")
        return sock.recv(1).decode()
    except TimeoutError:
        return "timeout"
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def create(family: int, kind: int, protocol: int) -> int:
    try:
        socket.socket(family, kind, protocol).close()
    except OSError as error:
        return error.errno or -1
    return 0


def way_round(name: str, address: str, port: int) -> int:
    """Try to reach an address by an unusual call; return the errno, 0 when it was accepted."""
    try:
        globals()[f"_{name}"](address, port)
    except OSError as error:
        return error.errno or -1
    return 0


def _fast_open(address: str, port: int) -> None:
    with _make("tcp", _family(address)) as sock:
        sock.sendto(b"data", 0x20000000, (address, port))  # MSG_FASTOPEN


def _second_address(address: str, port: int) -> None:
    """A connected socket, and another address in sendto(2)."""
    with _make("udp", _family(address)) as sock:
        sock.connect(("192.0.2.1", 80))
        sock.sendto(b"data", (address, port))


def _reconnect(address: str, port: int) -> None:
    with _make("udp", _family(address)) as sock:
        sock.connect(("192.0.2.1", 80))
        sock.connect((address, port))


def _sendmsg(address: str, port: int) -> None:
    with _make("udp", _family(address)) as sock:
        sock.sendmsg([b"data"], [], 0, (address, port))


def _mapped(address: str, port: int) -> None:
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        sock.sendto(b"data", (f"::ffff:{address}", port))


def _mptcp(address: str, port: int) -> None:
    with socket.socket(_family(address), socket.SOCK_STREAM, 262) as sock:
        sock.settimeout(0.5)
        sock.connect((address, port))


def _v4_of_a_v6_socket(address: str, port: int) -> None:
    """An IPv6 socket given a struct sockaddr_in, which udpv6_sendmsg accepts."""
    libc = ctypes.CDLL(None, use_errno=True)
    name = struct.pack("=H", socket.AF_INET) + struct.pack("!H", port) + socket.inet_aton(address)
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as sock:
        if libc.sendto(sock.fileno(), b"data", 4, 0, name + bytes(8), 16) < 0:
            raise OSError(ctypes.get_errno(), "sendto")


def _route_option(address: str, port: int) -> None:
    """A loose source route: to an allowed address first, says the header."""
    with _make("udp", _family(address)) as sock:
        route = bytes((131, 7, 4)) + socket.inet_aton(address) + b"\0"
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_OPTIONS, route)
        sock.sendto(b"data", ("192.0.2.1", 80))


def time_connects(address: str, port: int, count: int) -> list[int]:
    """Return the nanoseconds of connect(2) of a datagram socket, `count` times."""
    found = []
    with socket.socket(_family(address), socket.SOCK_DGRAM) as sock:
        for _ in range(count):
            start = time.perf_counter_ns()
            with contextlib.suppress(PermissionError):
                sock.connect((address, port))
            found.append(time.perf_counter_ns() - start)
    return found


def main() -> None:
    for line in sys.stdin:
        name, arguments = json.loads(line)
        result: Any = globals()[name](*arguments)
        print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
