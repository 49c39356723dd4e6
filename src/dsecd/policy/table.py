"""From network rules to the table that the kernel looks up: the whole answer at every prefix.

The kernel finds the longest prefix of an address and nothing else. The prefixes that hold an
address are a chain, so the rules that cover it are those of the longest one and of the shorter ones
around it: each row gets all of them, denials taken out, and one row decides.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from dsecd.host import nettable
from dsecd.host.nettable import (
    ICMP,
    MAPPED,
    MAPPED_BITS,
    MAX_RANGES,
    OTHER,
    TCP,
    UDP,
    Interval,
    PortRange,
    Row,
    Table,
    merge,
    subtract,
)
from dsecd.policy.rules import LAST_PORT, NameRule, NetPolicy, NetRule, Protocol, Verdict
from libdsec.errors import InvalidArgument

PROTOCOLS = {"tcp": TCP, "udp": UDP, "icmp": ICMP, "any": TCP | UDP | ICMP | OTHER}
_MAPPED = int.from_bytes(MAPPED + bytes(4), "big")
_ALL = (0, LAST_PORT)


@functools.lru_cache(64)  # sandboxes come with the same few policies again and again
def compile_table(policy: NetPolicy) -> Table:
    """Return the table of `policy`. Raises `InvalidArgument` for too many ranges at one prefix."""
    denied = [rule for rule in policy.rules if rule.verdict == "deny"]
    rows = _rows(policy.rules, open_=policy.default == "allow")
    return Table(
        (*rows, *_signposts(rows)),
        nettable.pack_lengths(rows),  # those of the signposts are among them
        _rows([_flipped(rule) for rule in denied], open_=False) if denied else (),
    )


def name_ranges(rules: Iterable[NameRule]) -> tuple[PortRange, ...]:
    """Return the openings of a name: the ranges of the rules that cover it."""
    return _ranges(list(rules), open_=False)


def _flipped(rule: NetRule) -> NetRule:
    return NetRule(
        verdict="allow",
        protocol=rule.protocol,
        prefix=rule.prefix,
        first_port=rule.first_port,
        last_port=rule.last_port,
    )


def _rows(rules: Sequence[NetRule], open_: bool) -> tuple[Row, ...]:
    four: dict[tuple[int, int], list[NetRule]] = {(_MAPPED, MAPPED_BITS): []}
    six: dict[tuple[int, int], list[NetRule]] = {(0, 0): []}
    for rule in rules:
        address, bits = int(rule.prefix.network_address), rule.prefix.prefixlen
        if rule.prefix.version == 4:
            four.setdefault((_MAPPED | address, MAPPED_BITS + bits), []).append(rule)
        elif bits < MAPPED_BITS or address >> 32 != _MAPPED >> 32:  # others are judged as IPv4
            six.setdefault((address, bits), []).append(rule)
    return (*_chain(four, open_), *_chain(six, open_))


def _signposts(rows: Iterable[Row]) -> list[Row]:
    """Return rows for the prefixes at which a search learns that there are longer ones.

    Each says what the longest of `rows` around it says: it may be where the search ends.
    """
    known = {(row.address, row.bits): row.ranges for row in rows}
    lengths = nettable.lengths(rows)
    found: dict[tuple[bytes, int], Row] = {}
    for row in rows:
        mine = lengths[nettable.family(row)]
        for place in nettable.probed(len(mine), mine.index(row.bits)):
            if mine[place] >= row.bits:
                continue
            at = (_cut(row.address, mine[place]), mine[place])
            if at not in known and at not in found:
                around = ((_cut(at[0], bits), bits) for bits in reversed(mine[:place]))
                found[at] = Row(*at, next(known[each] for each in around if each in known))
    return list(found.values())


def _cut(address: bytes, bits: int) -> bytes:
    """Return the prefix of `address` that is `bits` long."""
    return (int.from_bytes(address, "big") >> (128 - bits) << (128 - bits)).to_bytes(16, "big")


def _chain(by_prefix: dict[tuple[int, int], list[NetRule]], open_: bool) -> list[Row]:
    """Return the rows of one family; in this order a prefix follows those around it."""
    rows: list[Row] = []
    around: list[tuple[int, int, list[NetRule], tuple[PortRange, ...]]] = []
    for (address, bits), own in sorted(by_prefix.items()):
        while around and address >> (128 - around[-1][1]) != around[-1][0] >> (128 - around[-1][1]):
            around.pop()
        rules = [*around[-1][2], *own] if around else own
        ranges = _ranges(rules, open_)
        if len(ranges) > MAX_RANGES:
            raise InvalidArgument(
                f"{own[0].prefix if own else 'the default'} has {len(ranges)} separate port"
                f" ranges, at most {MAX_RANGES} fit: join some of them"
            )
        if not around or ranges != around[-1][3]:
            rows.append(Row(address.to_bytes(16, "big"), bits, ranges))
        around.append((address, bits, rules, ranges))
    return rows


def _ranges(rules: Iterable[NetRule | NameRule], open_: bool) -> tuple[PortRange, ...]:
    """Return what is allowed when all of `rules` cover an address."""
    ports = ((r.verdict, r.protocol, r.first_port, r.last_port) for r in rules)
    return _merged(tuple(ports), open_)


@functools.lru_cache(4096)  # most prefixes of most policies have the same few ports
def _merged(
    rules: tuple[tuple[Verdict, Protocol, int, int], ...], open_: bool
) -> tuple[PortRange, ...]:
    intervals: dict[int, list[Interval]] = {}
    for bit in (TCP, UDP, ICMP, OTHER):
        mine = [(verdict, ports) for verdict, kind, *ports in rules if PROTOCOLS[kind] & bit]
        allowed = [(first, last) for verdict, (first, last) in mine if verdict == "allow"]
        denied = [(first, last) for verdict, (first, last) in mine if verdict == "deny"]
        intervals[bit] = subtract([_ALL] if open_ else allowed, denied)
    return merge(intervals)
