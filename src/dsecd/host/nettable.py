"""A network policy in the form of the kernel's tables, and its bytes (bpf/layout.h). Pure data.

Addresses are 16 bytes, IPv4 as ::ffff:a.b.c.d. `dsecd.policy.table` makes tables from rules;
`dsecd.host.netpolicy` enters them.
"""

from __future__ import annotations

import functools
import ipaddress
import struct
from collections.abc import Iterable, Mapping, Sequence

import msgspec

IpAddress = ipaddress.IPv4Address | ipaddress.IPv6Address
Interval = tuple[int, int]  # first and last port

TCP, UDP, ICMP, OTHER = 1, 2, 4, 8  # bits of protocols
RANGES, PARTS, PART_BITS = 16, 16, 4
MAX_RANGES = RANGES * PARTS
LENGTHS4, LENGTHS6, FIRST_STEP = 33, 129, 128
MAPPED_BITS = 96
MAPPED = bytes(10) + b"\xff\xff"

_PORTS = struct.Struct(f"=HH{3 * RANGES}H")
_RULE_KEY = struct.Struct("=II16s")
_NAME_KEY = struct.Struct("=I16s")
_NAME_HEAD = struct.Struct("=Q")
_BINDING = struct.Struct("=IIII16s16s16s16s168s")
_LINK = struct.Struct("=QII")
_COUNTERS = struct.Struct("=7Q")
_EVENT = struct.Struct("=QQ16sHBBI")

RULE_KEY_BYTES, PORTS_BYTES = _RULE_KEY.size, _PORTS.size
NAME_KEY_BYTES, NAME_BYTES = _NAME_KEY.size, _NAME_HEAD.size + _PORTS.size + 4
BINDING_BYTES, LINK_BYTES = _BINDING.size, _LINK.size
COUNTERS_BYTES, EVENT_BYTES = _COUNTERS.size, _EVENT.size

DNS_ONLY, RAW = 1, 2  # flags of a binding
NEIGHBOURS = 1  # flag of a link
_NO_ADDRESS = bytes(16)


class PortRange(msgspec.Struct, frozen=True, order=True, gc=False):
    """Ports of some protocols; protocols without ports are asked for port 0."""

    first: int
    last: int
    protocols: int


class Row(msgspec.Struct, frozen=True, gc=False):
    """All that is allowed at the addresses for which this is the longest prefix."""

    address: bytes  # zero behind the prefix
    bits: int
    ranges: tuple[PortRange, ...]


class Table(msgspec.Struct, frozen=True, cache_hash=True):
    """`rows` is what is allowed, `denials` what rules deny, by the longest prefix as well.

    The programs look for the longest prefix by binary search over the lengths, as `probed` does,
    and go on to longer ones only from a row that is there: `rows` has one wherever that is needed.
    """

    rows: tuple[Row, ...]
    lengths: bytes  # of the prefixes in `rows`, as `pack_lengths` packs them
    denials: tuple[Row, ...] = ()


class Counters(msgspec.Struct, frozen=True):
    """Totals of a sandbox since it was bound. `unreported` denials gave no event."""

    allowed_calls: int
    denied_calls: int
    denied_packets: int
    denied_sockets: int
    unreported: int


class Denied(msgspec.Struct, frozen=True):
    """A denied attempt. `pid` is of the host, 0 when a packet on an interface was dropped.

    `protocol` is the number of the internet protocol; `address` is the unspecified one and `port` 0
    where there is none (sockets, frames that are not IP).
    """

    time_s: float  # of the monotonic clock
    cgroup: int
    where: str
    protocol: int
    address: IpAddress
    port: int
    pid: int


_WHERE = ("", "connect", "sendmsg", "egress", "ingress", "socket", "link")


def pack_address(address: IpAddress) -> bytes:
    """Return the 16 bytes of an address."""
    return address.packed if address.version == 6 else MAPPED + address.packed


def unpack_address(data: bytes) -> IpAddress:
    """Return the address of 16 bytes; a mapped one as IPv4."""
    if data[:12] == MAPPED:
        return ipaddress.IPv4Address(data[12:])
    return ipaddress.IPv6Address(data)


def find(rows: Sequence[Row], address: bytes) -> tuple[PortRange, ...]:
    """Return what the row with the longest prefix of `address` has; () without one."""
    value, best = int.from_bytes(address, "big"), -1
    ranges: tuple[PortRange, ...] = ()
    for row in rows:
        shift = 128 - row.bits
        if row.bits > best and int.from_bytes(row.address, "big") >> shift == value >> shift:
            best, ranges = row.bits, row.ranges
    return ranges


@functools.lru_cache(1024)  # most rows have the same few lengths
def probed(count: int, sought: int) -> tuple[int, ...]:
    """Return which of `count` lengths are tried until number `sought` is, by its row's being there.

    Binary search on prefix lengths: Waldvogel et al., "Scalable High Speed IP Routing Lookups",
    SIGCOMM 1997, section 3. The steps are those of `rules_allow` in bpf/decide.h.
    """
    tried: list[int] = []
    place, step = 0, FIRST_STEP
    while step and (not tried or tried[-1] != sought):
        if place + step <= count:
            tried.append(place + step - 1)
            place += step if tried[-1] < sought else 0
        step //= 2
    return tuple(tried)


def family(row: Row) -> int:
    """Return 0 for a prefix of IPv4, 1 for one of IPv6."""
    return int(row.bits < MAPPED_BITS or row.address[:12] != MAPPED)


def lengths(rows: Iterable[Row]) -> tuple[list[int], list[int]]:
    """Return which lengths the prefixes of IPv4 and of IPv6 have, ascending."""
    found: tuple[set[int], set[int]] = (set(), set())
    for row in rows:
        found[family(row)].add(row.bits)
    return sorted(found[0]), sorted(found[1])


def covers(ranges: Iterable[PortRange], protocol: int, port: int) -> bool:
    """Say whether a bit of `protocol` and `port` are in one of the ranges."""
    return any(r.protocols & protocol and r.first <= port <= r.last for r in ranges)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the same ports as disjoint intervals, neighbours joined, in order."""
    joined: list[Interval] = []
    for first, last in sorted(intervals):
        if joined and first <= joined[-1][1] + 1:
            joined[-1] = (joined[-1][0], max(joined[-1][1], last))
        else:
            joined.append((first, last))
    return joined


def subtract(allowed: Iterable[Interval], denied: Iterable[Interval]) -> list[Interval]:
    """Return the ports of `allowed` that are not in `denied`, as `union` does."""
    left, taken = union(allowed), union(denied)
    for first, last in taken:
        left = [
            piece
            for a, b in left
            for piece in ((a, min(b, first - 1)), (max(a, last + 1), b))
            if piece[0] <= piece[1]
        ]
    return union(left) if taken else left


def merge(intervals: Mapping[int, Iterable[Interval]]) -> tuple[PortRange, ...]:
    """Return ranges for intervals by protocol bit; equal ones of several protocols are one."""
    merged: dict[Interval, int] = {}
    for bit, pieces in intervals.items():
        for interval in pieces:
            merged[interval] = merged.get(interval, 0) | bit
    return tuple(PortRange(first, last, bits) for (first, last), bits in sorted(merged.items()))


def combine(
    allowed: Iterable[PortRange], denied: Iterable[PortRange] = ()
) -> tuple[PortRange, ...]:
    """Return the ports of `allowed` that are not in `denied`."""
    allowed, denied = list(allowed), list(denied)
    return merge(
        {
            bit: subtract(
                [(r.first, r.last) for r in allowed if r.protocols & bit],
                [(r.first, r.last) for r in denied if r.protocols & bit],
            )
            for bit in (TCP, UDP, ICMP, OTHER)
        }
    )


# --- bytes of the maps --------------------------------------------------------------------------


@functools.lru_cache(4096)  # web ports at a thousand hosts: most rows of most policies are alike
def _parts(ranges: tuple[PortRange, ...]) -> tuple[bytes, ...]:
    """Return one struct ports, or several for many ranges."""
    parts = []
    for start in range(0, max(len(ranges), 1), RANGES):
        chunk = ranges[start : start + RANGES]
        numbers = [n for r in chunk for n in (r.first, r.last, r.protocols)]
        numbers += [0] * (3 * RANGES - len(numbers))
        parts.append(_PORTS.pack(len(chunk), start + RANGES < len(ranges), *numbers))
    return tuple(parts)


def pack_rows(number: int, rows: Sequence[Row]) -> tuple[list[bytes], list[bytes]]:
    """Return keys and values of the map `rules` for policy `number`."""
    keys, values = [], []
    pack, first = _RULE_KEY.pack, number << PART_BITS
    ranges: tuple[PortRange, ...] | None = None
    parts: tuple[bytes, ...] = ()
    for row in rows:
        if row.ranges is not ranges:  # neighbours mostly share theirs: no look-up
            ranges = row.ranges
            parts = _parts(ranges)
        for part, ports in enumerate(parts, first):
            keys.append(pack(row.bits, part, row.address))
            values.append(ports)
    return keys, values


def name_key(number: int, address: bytes) -> bytes:
    """Return the key of `names` for the names of number `number`."""
    return _NAME_KEY.pack(number, address)


def unpack_name_key(key: bytes) -> tuple[int, bytes]:
    """Return the number and the address."""
    number, address = _NAME_KEY.unpack(key)
    return number, address


def pack_name(ranges: tuple[PortRange, ...], until_ns: int) -> bytes:
    """Return a struct name_ports of at most `RANGES` ranges."""
    (ports,) = _parts(ranges)
    return _NAME_HEAD.pack(until_ns) + ports + bytes(4)


def unpack_name(value: bytes) -> tuple[int, tuple[PortRange, ...]]:
    """Return until_ns and the ranges."""
    (until_ns,) = _NAME_HEAD.unpack_from(value)
    count, _more, *numbers = _PORTS.unpack_from(value, _NAME_HEAD.size)
    return until_ns, tuple(PortRange(*numbers[3 * i : 3 * i + 3]) for i in range(count))


def rule_number(key: bytes) -> int:
    """Return the policy's number in a key of `rules`."""
    return int(_RULE_KEY.unpack(key)[1]) >> PART_BITS


def pack_lengths(rows: Iterable[Row]) -> bytes:
    """Return the part of a struct binding that says what to search for."""
    four, six = map(bytes, lengths(rows))
    return (
        bytes((len(four),))
        + four.ljust(LENGTHS4, b"\0")
        + bytes((len(six),))
        + six.ljust(LENGTHS6, b"\0")
    )


def pack_binding(
    policy: int,
    packed_lengths: bytes,
    names: int,
    flags: int,
    resolvers: Sequence[bytes],
    own: Sequence[bytes],
) -> bytes:
    """Return a struct binding; at most two addresses of each kind."""
    first, second = (*resolvers, _NO_ADDRESS, _NO_ADDRESS)[:2]
    third, fourth = (*own, _NO_ADDRESS, _NO_ADDRESS)[:2]
    return _BINDING.pack(policy, names, flags, 0, first, second, third, fourth, packed_lengths)


def unpack_binding(data: bytes) -> tuple[int, int]:
    """Return the numbers of the policy and of the names."""
    policy, names, *_ = _BINDING.unpack(data)
    return policy, names


def pack_link(cgroup: int, flags: int) -> bytes:
    return _LINK.pack(cgroup, flags, 0)


def unpack_counters(data: bytes) -> Counters:
    return Counters(*_COUNTERS.unpack(data)[:5])


def unpack_event(data: bytes) -> Denied:
    time_ns, cgroup, address, port, protocol, where, pid = _EVENT.unpack(data)
    return Denied(
        time_ns / 1e9, cgroup, _WHERE[where], protocol, unpack_address(address), port, pid
    )
