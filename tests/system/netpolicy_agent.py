"""What plays the sandbox's process in the tests of network policy: a line of JSON in, one out."""

from __future__ import annotations

import contextlib
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


def frames(interface: str, datas: list[str]) -> int:
    """Send frames past the kernel's network layer; the system call filter would forbid it."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as sock:
        sock.bind((interface, 0))
        for data in datas:
            sock.send(bytes.fromhex(data))
    return 0


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
