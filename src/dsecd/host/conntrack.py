"""The host's table of tracked connections (ctnetlink), asked for those of one sandbox.

A guest's sockets are its kernel's own: what it is connected to shows only here.
Source: linux/netfilter/nfnetlink_conntrack.h.
"""

from __future__ import annotations

import contextlib
import ipaddress
import struct

from dsecd.host.nettable import IpAddress
from dsecd.host.rtnetlink import Message, Netlink, attr, attributes

NETLINK_NETFILTER = 12
_SUBSYS_CTNETLINK, _CT_GET = 1, 1
_CTA_TUPLE_ORIG, _CTA_MARK, _CTA_MARK_MASK = 1, 8, 21
_CTA_TUPLE_IP, _CTA_IP_V4_DST, _CTA_IP_V6_DST = 1, 2, 4
_GEN = struct.Struct("=BBH")  # struct nfgenmsg


def peers(mark: int) -> set[IpAddress]:
    """Return the addresses to which connections with `mark` go. Raises OSError."""
    payload = _GEN.pack(0, 0, 0)
    payload += attr(_CTA_MARK, mark.to_bytes(4, "big"))
    payload += attr(_CTA_MARK_MASK, b"\xff\xff\xff\xff")
    message = Message(_SUBSYS_CTNETLINK << 8 | _CT_GET, 0, payload, "list connections")
    with contextlib.closing(Netlink(NETLINK_NETFILTER)) as table:
        return {address for answer in table.dump(message) for address in parse(answer)}


def parse(answer: bytes) -> list[IpAddress]:
    """Return where the connection of one answer goes: one address, none when it says none."""
    first = attributes(answer, _GEN.size).get(_CTA_TUPLE_ORIG, b"")
    found = attributes(attributes(first).get(_CTA_TUPLE_IP, b""))
    packed = found.get(_CTA_IP_V4_DST) or found.get(_CTA_IP_V6_DST)
    return [ipaddress.ip_address(packed)] if packed else []
