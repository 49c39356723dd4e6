"""The table that the kernel looks up says what the rules say."""

from __future__ import annotations

import ipaddress
import random

import pytest

from dsecd.host import nettable
from dsecd.host.nettable import (
    ICMP,
    OTHER,
    TCP,
    UDP,
    PortRange,
    Table,
    combine,
    covers,
    find,
)
from dsecd.policy.rules import DNS_PORT, NameRule, NetPolicy, NetRule, opens_dns
from dsecd.policy.table import compile_table, name_ranges
from libdsec.errors import InvalidArgument
from tests import net_cases

BITS = {"tcp": TCP, "udp": UDP, "icmp": ICMP, "other": OTHER}


def packed(address: str) -> bytes:
    return nettable.pack_address(ipaddress.ip_address(address))


def tcp(verdict: str, prefix: str, first: int, last: int | None = None) -> NetRule:
    return NetRule(
        verdict=verdict,  # type: ignore[arg-type]
        protocol="tcp",
        prefix=ipaddress.ip_network(prefix),
        first_port=first,
        last_port=first if last is None else last,
    )


@pytest.mark.parametrize("seed", range(8))
def test_tables_agree_with_the_reference(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        rules = net_cases.policy(rng)
        table = compile_table(rules)
        for _ in range(40):
            kind, address = rng.choice(net_cases.KINDS), rng.choice(net_cases.ADDRESSES)
            target = ipaddress.ip_address(address)
            if target.is_loopback:
                continue  # allowed by the programs
            port = rng.choice(net_cases.PORTS) if kind in ("tcp", "udp") else 0
            if port == DNS_PORT and not opens_dns(rules):
                continue  # closed by the programs
            found = covers(find(table.rows, packed(address)), BITS[kind], port)
            assert found == net_cases.allowed(rules, (kind, address, port)), (rules, kind, address)


def searched(table: Table, address: bytes) -> tuple[PortRange, ...]:
    """Return what the search of `rules_allow` in bpf/decide.h ends at."""
    rows = {(row.address, row.bits): row.ranges for row in table.rows}
    lengths = nettable.lengths(table.rows)[not address.startswith(nettable.MAPPED)]
    place, ranges = 0, ()
    for step in (128, 64, 32, 16, 8, 4, 2, 1):
        if place + step <= len(lengths):
            bits = lengths[place + step - 1]
            prefix = int.from_bytes(address, "big") >> (128 - bits) << (128 - bits)
            here = rows.get((prefix.to_bytes(16, "big"), bits))
            if here is not None:
                place, ranges = place + step, here  # type: ignore[assignment]
    return ranges


def test_a_search_over_lengths_ends_at_the_longest_prefix() -> None:
    rng = random.Random(5)
    for _ in range(300):
        table = compile_table(net_cases.policy(rng, most=30))
        for row in table.rows:
            last = int.from_bytes(row.address, "big") | (1 << (128 - row.bits)) - 1
            for address in (row.address, last.to_bytes(16, "big")):
                assert searched(table, address) == find(table.rows, address), row


def test_a_search_over_every_length_there_is() -> None:
    rules = [tcp("allow", f"8000::/{bits}", bits + 1) for bits in range(1, 129)]
    rules += [tcp("allow", f"128.0.0.0/{bits}", bits + 1) for bits in range(1, 33)]
    table = compile_table(NetPolicy(rules=tuple(rules)))
    four, six = nettable.lengths(table.rows)
    assert (len(four), len(six)) == (nettable.LENGTHS4, nettable.LENGTHS6)
    for row in table.rows:
        assert searched(table, row.address) == find(table.rows, row.address)


def test_a_denial_of_a_shorter_prefix_reaches_the_rows_of_longer_ones() -> None:
    table = compile_table(
        NetPolicy(rules=(tcp("deny", "10.0.0.0/8", 22), tcp("allow", "10.1.2.3/32", 20, 25)))
    )
    found = find(table.rows, packed("10.1.2.3"))
    assert found == (PortRange(20, 21, TCP), PortRange(23, 25, TCP))
    assert find(table.denials, packed("10.9.9.9")) == (PortRange(22, 22, TCP),)


def test_no_ipv6_prefix_covers_a_mapped_address() -> None:
    everything = NetRule(verdict="allow", protocol="any", prefix=ipaddress.ip_network("::/0"))
    inside = NetRule(verdict="allow", protocol="any", prefix=ipaddress.ip_network("::ffff:0:0/96"))
    table = compile_table(NetPolicy(rules=(everything, inside)))
    assert find(table.rows, packed("::ffff:10.1.2.3")) == ()
    assert find(table.rows, packed("2001:db8::1")) == (PortRange(0, 65535, 15),)


def test_rows_that_say_the_same_as_the_prefix_around_them_are_left_out() -> None:
    rules = (tcp("allow", "10.0.0.0/8", 443), tcp("allow", "10.1.0.0/16", 443))
    assert len(compile_table(NetPolicy(rules=rules)).rows) == 3  # both families' roots and one


def test_too_many_separate_ranges_are_refused_with_the_prefix() -> None:
    rules = tuple(tcp("allow", "10.0.0.0/8", port) for port in range(1, 600, 2))
    with pytest.raises(InvalidArgument, match=r"10\.0\.0\.0/8 has 300 separate port ranges"):
        compile_table(NetPolicy(rules=rules))


def test_many_ranges_are_packed_in_parts_that_the_programs_chain() -> None:
    rules = tuple(tcp("allow", "10.0.0.0/8", port) for port in range(1, 80, 2))
    keys, values = nettable.pack_rows(5, compile_table(NetPolicy(rules=rules)).rows)
    parts = [(k, v) for k, v in zip(keys, values, strict=True) if k[8:] == packed("10.0.0.0")]
    assert [int.from_bytes(key[4:8], "little") for key, _ in parts] == [80, 81, 82]
    assert {int.from_bytes(key[:4], "little") for key, _ in parts} == {104}
    assert [value[:4] for _, value in parts] == [b"\x10\0\1\0", b"\x10\0\1\0", b"\x08\0\0\0"]


def test_openings_of_names_lose_what_is_denied() -> None:
    rules = [
        NameRule(verdict="allow", pattern="a.org", protocol="tcp", first_port=80, last_port=90),
        NameRule(verdict="deny", pattern="*", protocol="any", first_port=85, last_port=85),
    ]
    ranges = name_ranges(rules)
    assert ranges == (PortRange(80, 84, TCP), PortRange(86, 90, TCP))
    assert combine(ranges, [PortRange(0, 86, 15)]) == (PortRange(87, 90, TCP),)


def test_values_come_back_as_they_were_packed() -> None:
    ranges = (PortRange(1, 2, TCP), PortRange(5, 65535, UDP))
    assert nettable.unpack_name(nettable.pack_name(ranges, 77)) == (77, ranges)
    assert nettable.unpack_name_key(nettable.name_key(3, packed("::1"))) == (3, packed("::1"))
    packed_lengths = nettable.pack_lengths(())
    assert nettable.unpack_binding(nettable.pack_binding(4, packed_lengths, 9, 1, [], [])) == (4, 9)
    assert nettable.unpack_address(packed("192.0.2.1")) == ipaddress.ip_address("192.0.2.1")
