"""Tap interfaces: made once, in the namespace of the calling thread, and attached to by a monitor.

Sources: Documentation/networking/tuntap.rst, linux/if_tun.h.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from pathlib import Path

NODE = "/dev/net/tun"
TUNSETIFF, TUNSETPERSIST, TUNSETOWNER = 0x400454CA, 0x400454CB, 0x400454CC
IFF_TAP, IFF_NO_PI, IFF_VNET_HDR = 0x2, 0x1000, 0x4000
FORWARDING = ("/proc/sys/net/ipv4/ip_forward", "/proc/sys/net/ipv6/conf/all/forwarding")


def make(name: str, owner: int) -> int:
    """Return the index of a new tap that user `owner`, a host's id, may attach to.

    It stays until it is removed or its namespace ends. Raises OSError.
    """
    fd = os.open(NODE, os.O_RDWR | os.O_CLOEXEC)
    try:
        flags = IFF_TAP | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(fd, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(fd, TUNSETOWNER, owner)
        fcntl.ioctl(fd, TUNSETPERSIST, 1)
    finally:
        os.close(fd)
    return socket.if_nametoindex(name)


def forward() -> None:
    """Have the calling thread's namespace route between its interfaces. Raises OSError."""
    for path in FORWARDING:
        if Path(path).exists():  # a kernel may have no IPv6
            Path(path).write_text("1")
