"""The link between a sandbox's network namespace and the host: a routed veth pair.

Point to point, no bridge: a bridge ends at 1,023 ports and floods, a route is one hash entry.
The host's end has no address. The sandbox has a /32 and a /128 and two default routes through
addresses that exist nowhere (169.254.1.1, fe80::1): permanent neighbour entries on both sides
lead to the other end. So there is no ARP or neighbour discovery to wait for, to spoof or to
overflow the host's neighbour table (permanent entries are outside gc_thresh3), and no duplicate
address detection: IPv6 works at once.

Where a virtual machine runs in the sandbox the addresses are its guest's. The namespace routes
between the veth and a tap, in the same way: the guest's gateways lead to the tap's end. What the
guest sends that is not IP ends there, and one address there is the resolver's.
"""

from __future__ import annotations

import array
import errno
import fcntl
import ipaddress
import struct

import msgspec

from dsecd.host.rtnetlink import (
    NLM_F_CREATE,
    NLM_F_EXCL,
    NLM_F_REPLACE,
    Message,
    attr,
    attr_text,
    attr_u32,
    attributes,
    nest,
)

GATEWAY = ipaddress.IPv4Address("169.254.1.1")
GATEWAY6 = ipaddress.IPv6Address("fe80::1")
INSIDE = "eth0"
INSIDE_INDEX = 2  # loopback is 1
TAP = "tap0"  # of a monitor, in the sandbox's namespace
TAP_MAC, GUEST_MAC = b"\x02\xd5\xec\x02\x00\x01", b"\x02\xd5\xec\x02\x00\x02"
RESOLVER = ipaddress.IPv4Address("169.254.1.53")  # for a guest: it does not reach loopback

RTM_NEWLINK, RTM_DELLINK, RTM_GETLINK, RTM_SETLINK = 16, 17, 18, 19
RTM_NEWADDR, RTM_NEWROUTE, RTM_GETROUTE, RTM_NEWNEIGH = 20, 24, 26, 28
IFLA_ADDRESS, IFLA_IFNAME, IFLA_MTU, IFLA_LINKINFO, IFLA_IFALIAS = 1, 3, 4, 18, 20
IFLA_STATS64, IFLA_AF_SPEC, IFLA_GROUP, IFLA_NET_NS_FD = 23, 26, 27, 28
IFLA_NUM_TX_QUEUES, IFLA_NUM_RX_QUEUES = 31, 32
IFLA_INFO_KIND, IFLA_INFO_DATA, VETH_INFO_PEER = 1, 2, 1
IFLA_INET6_ADDR_GEN_MODE, IN6_ADDR_GEN_MODE_NONE = 8, 1
IFF_UP, IFF_NOARP = 0x1, 0x80
NUD_PERMANENT = 0x80
SIOCETHTOOL, ETHTOOL_GLINK, ETHTOOL_STXCSUM = 0x8946, 0xA, 0x17
RT_TABLE_MAIN, RTPROT_STATIC, RTN_UNICAST, RTNH_F_ONLINK = 254, 4, 1, 4
RT_TABLE_LOCAL, RTN_LOCAL = 255, 2
RT_SCOPE_UNIVERSE, RT_SCOPE_LINK = 0, 253
RTA_DST, RTA_OIF, RTA_GATEWAY, RTA_TABLE = 1, 4, 5, 15
IFA_ADDRESS, IFA_LOCAL, IFA_F_NODAD = 1, 2, 0x02
NDA_DST, NDA_LLADDR = 1, 2
AF_INET, AF_INET6 = 2, 10

_LINK = struct.Struct("=BxHiII")
_ROUTE = struct.Struct("=BBBBBBBBI")
_NEIGHBOUR = struct.Struct("=BxxxiHBB")
_ADDRESS = struct.Struct("=BBBBI")
_U32 = struct.Struct("=I")
_BYTES = struct.Struct("=QQ")  # at offset 16 of rtnl_link_stats64: rx_bytes, tx_bytes
_QUEUES = attr_u32(IFLA_NUM_TX_QUEUES, 1) + attr_u32(IFLA_NUM_RX_QUEUES, 1)
_NO_LINK_LOCAL = nest(
    IFLA_AF_SPEC,
    nest(AF_INET6, attr(IFLA_INET6_ADDR_GEN_MODE, bytes([IN6_ADDR_GEN_MODE_NONE]))),
)


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One sandbox's link. `index` is the host end's interface index, chosen by us so that the whole
    configuration is one batch that needs no answer in between; `address6` None: IPv4 only."""

    name: str
    index: int
    group: int
    mtu: int
    alias: str
    address: ipaddress.IPv4Address
    address6: ipaddress.IPv6Address | None

    @property
    def mac_host(self) -> bytes:
        return b"\x02\xd5\xec\x00\x00\x01"

    @property
    def mac_inside(self) -> bytes:
        return b"\x02\xd5\xec\x01" + (self.index & 0xFFFF).to_bytes(2, "big")


class Found(msgspec.Struct, frozen=True):
    """An interface of the host that carries one of our groups."""

    name: str
    index: int
    group: int
    alias: str


class Route(msgspec.Struct, frozen=True):
    """A route of the namespace. `index` is the interface it leaves by, 0 when it has not one."""

    target: ipaddress.IPv4Network | ipaddress.IPv6Network
    index: int
    table: int


def create(link: Link, netns_fd: int) -> Message:
    """Make the pair, its far end in the namespace `netns_fd`; EEXIST on any collision."""
    peer = (
        _link(INSIDE_INDEX)
        + attr_text(IFLA_IFNAME, INSIDE)
        + attr(IFLA_ADDRESS, link.mac_inside)
        + attr_u32(IFLA_MTU, link.mtu)
        + attr_u32(IFLA_NET_NS_FD, netns_fd)
        + _QUEUES
    )
    payload = (
        _link(link.index)
        + attr_text(IFLA_IFNAME, link.name)
        + attr(IFLA_ADDRESS, link.mac_host)
        + attr_u32(IFLA_MTU, link.mtu)
        + attr_u32(IFLA_GROUP, link.group)
        + _QUEUES
        + nest(
            IFLA_LINKINFO,
            attr(IFLA_INFO_KIND, b"veth"),
            nest(IFLA_INFO_DATA, attr(VETH_INFO_PEER | 0x8000, peer)),
        )
    )
    return Message(RTM_NEWLINK, NLM_F_CREATE | NLM_F_EXCL, payload, f"create veth {link.name}")


def host_end(link: Link) -> list[Message]:
    """Configure and start the host's end, with routes to the sandbox's addresses."""
    alias = attr(IFLA_IFALIAS, link.alias.encode())
    messages = [
        # the alias before the start: an interface without one is what a crash left half made
        Message(RTM_SETLINK, 0, _link(link.index) + alias, "set alias"),
        *_start(link.index, ipv6=link.address6 is not None),
    ]
    messages += _routes_to(link, link.index, link.mac_inside)
    return messages


def inside_end(link: Link) -> list[Message]:
    """Configure and start the sandbox's end; to be sent from inside its namespace."""
    messages = _start(INSIDE_INDEX, ipv6=link.address6 is not None)
    for address in _addresses(link):
        family, bits = _family(address)
        # even with IFF_NOARP an address is tentative until a work item has looked at it, and a
        # packet sent before takes ::1 as its source
        address_flags = IFA_F_NODAD if family == AF_INET6 else 0
        payload = _ADDRESS.pack(family, bits, address_flags, RT_SCOPE_UNIVERSE, INSIDE_INDEX)
        payload += attr(IFA_ADDRESS, address.packed) + attr(IFA_LOCAL, address.packed)
        flags = NLM_F_CREATE | NLM_F_EXCL
        messages.append(Message(RTM_NEWADDR, flags, payload, f"address {address} inside"))
        if family == AF_INET6:
            # the kernel's own comes with that work item; until then answers are not for us
            payload = _ROUTE.pack(
                family, bits, 0, 0, RT_TABLE_LOCAL, RTPROT_STATIC, 0, RTN_LOCAL, 0
            )
            payload += attr(RTA_DST, address.packed) + attr_u32(RTA_OIF, INSIDE_INDEX)
            messages.append(Message(RTM_NEWROUTE, NLM_F_CREATE, payload, "local route inside"))
        messages += _default_route(link, family)
    return messages


def guest_end(link: Link, tap: int) -> list[Message]:
    """Configure the sandbox's end, and the tap of index `tap`, for a guest that has the addresses.

    To be sent from inside the namespace, which has to forward.
    """
    ipv6 = link.address6 is not None
    messages = _start(INSIDE_INDEX, ipv6=ipv6)
    payload = _ADDRESS.pack(AF_INET, 32, 0, RT_SCOPE_LINK, INSIDE_INDEX)
    payload += attr(IFA_ADDRESS, RESOLVER.packed) + attr(IFA_LOCAL, RESOLVER.packed)
    flags = NLM_F_CREATE | NLM_F_EXCL
    messages.append(Message(RTM_NEWADDR, flags, payload, "address of the resolver inside"))
    for address in _addresses(link):
        messages += _default_route(link, _family(address)[0])
    payload = _link(tap) + attr(IFLA_ADDRESS, TAP_MAC) + attr_u32(IFLA_MTU, link.mtu)
    messages.append(Message(RTM_SETLINK, 0, payload, "configure the tap"))
    messages += _start(tap, ipv6=ipv6)
    messages += _routes_to(link, tap, GUEST_MAC)
    return messages


def settle_carrier(control: int, name: str) -> None:
    """Make interface `name` send at once; `control` is a socket of its namespace.

    The end that starts first gets its carrier from the other's start, and the kernel activates its
    queue later, in linkwatch's work item; a packet sent before that is dropped and the sandbox's
    first connection takes a second longer. Asking for the link's state does the work now
    (ethtool_op_get_link, linkwatch_sync_dev). Raises OSError.
    """
    if not _ethtool(control, name, ETHTOOL_GLINK):
        raise OSError(errno.ENETDOWN, f"{name} has no carrier")


def finish_checksums(control: int, name: str) -> None:
    """Have packets leave interface `name` with their checksums; `control` as above.

    A guest may leave a checksum to the host and say where in the packet it belongs, to the byte
    (virtio_net_hdr: csum_start, csum_offset). A veth hands that on, and a network card would write
    over the port or address that the program on the host's end has judged. Raises OSError.
    """
    _ethtool(control, name, ETHTOOL_STXCSUM, 0)


def _ethtool(control: int, name: str, command: int, data: int = 0) -> int:
    """Make a request of one value (struct ethtool_value); return that."""
    value = array.array("I", [command, data])
    request = struct.pack("16sP", name.encode(), value.buffer_info()[0])
    fcntl.ioctl(control, SIOCETHTOOL, request)
    return value[1]


def regroup(index: int, group: int) -> Message:
    """Move an interface to another group."""
    return Message(RTM_SETLINK, 0, _link(index) + attr_u32(IFLA_GROUP, group), "mark for removal")


def remove_group(group: int) -> Message:
    """Remove every interface of `group` at once: one RCU grace period (8–18 ms) for all of them."""
    return Message(RTM_DELLINK, 0, _link(0) + attr_u32(IFLA_GROUP, group), "remove interfaces")


def remove(index: int) -> Message:
    """Remove one interface and so its peer."""
    return Message(RTM_DELLINK, 0, _link(index), "remove interface")


def read(index: int) -> Message:
    """Ask for one interface."""
    return Message(RTM_GETLINK, 0, _link(index), "read interface")


def list_all() -> Message:
    """Ask for all interfaces of the namespace."""
    return Message(RTM_GETLINK, 0, _link(0), "list interfaces")


def parse(payload: bytes) -> Found:
    """Return name, index, group and alias of a link message."""
    (_family, _type, index, _flags, _change) = _LINK.unpack_from(payload)
    fields = attributes(payload, _LINK.size)
    return Found(
        name=fields.get(IFLA_IFNAME, b"").rstrip(b"\0").decode(errors="replace"),
        index=index,
        group=_u32(fields, IFLA_GROUP),
        alias=fields.get(IFLA_IFALIAS, b"").rstrip(b"\0").decode(errors="replace"),
    )


def parse_mtu(payload: bytes) -> int:
    """Return the MTU of a link message, in bytes; 0 for an interface without one."""
    return _u32(attributes(payload, _LINK.size), IFLA_MTU)


def list_routes(family: int) -> Message:
    """Ask for all routes of an address family, of all tables."""
    return Message(RTM_GETROUTE, 0, _ROUTE.pack(family, *[0] * 8), "list routes")


def parse_route(payload: bytes) -> Route:
    """Return target, interface and table of a route message."""
    family, bits, _source_bits, _tos, table, *_rest = _ROUTE.unpack_from(payload)
    fields = attributes(payload, _ROUTE.size)
    address = fields.get(RTA_DST, bytes(4 if family == AF_INET else 16))
    return Route(
        target=ipaddress.ip_network((address, bits), strict=False),
        index=_u32(fields, RTA_OIF),
        table=_u32(fields, RTA_TABLE) or table,
    )


def parse_bytes(payload: bytes) -> tuple[int, int]:
    """Return (received, sent) bytes of the host's end of a link message."""
    stats = attributes(payload, _LINK.size).get(IFLA_STATS64, b"")
    if len(stats) < 16 + _BYTES.size:
        return 0, 0
    received, sent = _BYTES.unpack_from(stats, 16)
    return received, sent


def _link(index: int, flags: int = 0, change: int = 0) -> bytes:
    return _LINK.pack(0, 0, index, flags, change)


def _start(index: int, *, ipv6: bool) -> list[Message]:
    messages = []
    if ipv6:
        # before IFF_UP, which is when the kernel would make the link-local address
        payload = _link(index) + _NO_LINK_LOCAL
        messages.append(Message(RTM_SETLINK, 0, payload, "no link-local address"))
    flags = IFF_UP | IFF_NOARP
    messages.append(Message(RTM_SETLINK, 0, _link(index, flags, flags), "start interface"))
    return messages


def _route(family: int, bits: int, scope: int, flags: int) -> bytes:
    return _ROUTE.pack(family, bits, 0, 0, RT_TABLE_MAIN, RTPROT_STATIC, scope, RTN_UNICAST, flags)


def _routes_to(link: Link, index: int, mac: bytes) -> list[Message]:
    """Lead to the sandbox's addresses, through interface `index` to `mac`."""
    messages = []
    for address in _addresses(link):
        family, bits = _family(address)
        scope = RT_SCOPE_LINK if family == AF_INET else RT_SCOPE_UNIVERSE
        payload = _route(family, bits, scope, 0)
        payload += attr(RTA_DST, address.packed) + attr_u32(RTA_OIF, index)
        flags = NLM_F_CREATE | NLM_F_EXCL
        messages.append(Message(RTM_NEWROUTE, flags, payload, f"route to {address}"))
        messages.append(_neighbour(index, address, mac))
    return messages


def _default_route(link: Link, family: int) -> list[Message]:
    """Lead to everywhere, through the sandbox's end."""
    gateway = GATEWAY if family == AF_INET else GATEWAY6
    payload = _route(family, 0, RT_SCOPE_UNIVERSE, RTNH_F_ONLINK)
    payload += attr(RTA_GATEWAY, gateway.packed) + attr_u32(RTA_OIF, INSIDE_INDEX)
    flags = NLM_F_CREATE | NLM_F_EXCL
    return [
        _neighbour(INSIDE_INDEX, gateway, link.mac_host),
        Message(RTM_NEWROUTE, flags, payload, f"default route via {gateway}"),
    ]


def _neighbour(
    index: int, address: ipaddress.IPv4Address | ipaddress.IPv6Address, mac: bytes
) -> Message:
    payload = _NEIGHBOUR.pack(_family(address)[0], index, NUD_PERMANENT, 0, 0)
    payload += attr(NDA_DST, address.packed) + attr(NDA_LLADDR, mac)
    flags = NLM_F_CREATE | NLM_F_REPLACE
    return Message(RTM_NEWNEIGH, flags, payload, f"neighbour {address}")


def _u32(fields: dict[int, bytes], kind: int) -> int:
    """Return the attribute's number, 0 when there is none."""
    return int(_U32.unpack(fields.get(kind, bytes(4)))[0])


def _family(address: ipaddress.IPv4Address | ipaddress.IPv6Address) -> tuple[int, int]:
    return (AF_INET, 32) if address.version == 4 else (AF_INET6, 128)


def _addresses(link: Link) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    return [link.address] if link.address6 is None else [link.address, link.address6]
