"""What plays the sandbox's process for `model`: a line of JSON in, one out."""

from __future__ import annotations

import errno
import json
import os
import socket
import struct
import sys
from typing import Any

ICMPV6 = socket.IPPROTO_ICMPV6
_standing: list[socket.socket] = []
_packets: list[socket.socket] = []


def _socket(kind: str, address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    if kind == "icmp":
        protocol = ICMPV6 if family == socket.AF_INET6 else socket.IPPROTO_ICMP
        return socket.socket(family, socket.SOCK_DGRAM, protocol)
    made = socket.socket(family, socket.SOCK_STREAM if kind == "tcp" else socket.SOCK_DGRAM)
    if kind == "tcp":  # closed with a reset: nothing stays behind
        made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    made.setblocking(False)
    return made


def _refused(act: Any, *arguments: Any) -> bool:
    """Say whether a call failed with EPERM, the policy's word; it may fail for other reasons."""
    try:
        act(*arguments)
    except OSError as error:
        return error.errno == errno.EPERM
    return False


def calls(cases: list[tuple[str, str, str, int]]) -> list[bool]:
    """Return whether each (way, kind, address, port) was let through."""
    found = []
    for way, kind, address, port in cases:
        with _socket(kind, address) as sock:
            if way == "connect":
                found.append(not _refused(sock.connect, (address, port)))
            else:
                found.append(not _refused(sock.sendto, b"data", (address, port)))
    return found


def pings(cases: list[tuple[str, int]]) -> int:
    """Send an echo request with each number to its address."""
    for address, number in cases:
        with _socket("icmp", address) as sock:
            echo = struct.pack("!BBHHH", 128 if ":" in address else 8, 0, 0, 0, number)
            _refused(sock.sendto, echo, (address, 0))
    return len(cases)


def frames(hexadecimal: list[str]) -> int:
    """Send frames as they are, by a packet socket, which no cgroup's program sees."""
    if not _packets:  # kept: closing one waits for an RCU grace period
        _packets.append(socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0))
        _packets[0].bind(("eth0", 0))
    for frame in hexadecimal:
        _packets[0].send(bytes.fromhex(frame))
    return len(hexadecimal)


def stand(cases: list[tuple[str, int]]) -> int:
    """Connect datagram sockets, for `send_all`."""
    for address, port in cases:
        sock = _socket("udp", address)
        sock.connect((address, port))
        _standing.append(sock)
    return len(_standing)


def send_all() -> list[bool]:
    """Return whether a datagram of each of these sockets was let through."""
    return [not _refused(_send, sock) for sock in _standing]


def _send(sock: socket.socket) -> None:
    try:
        sock.send(b"data")
    except ConnectionRefusedError:  # what came back for the one before
        sock.send(b"data")


def main() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # packets then arrive in order
    for line in sys.stdin:
        name, arguments = json.loads(line)
        print(json.dumps(globals()[name](*arguments)), flush=True)


if __name__ == "__main__":
    main()
