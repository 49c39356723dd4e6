"""What adding, repeating and moving rules may change: in the model, and in the kernel's table.

That a denial more never allows more in the model is in test_policy_reference.
"""

from __future__ import annotations

import ipaddress
import itertools
import random
from typing import Any

import msgspec
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dsecd.host import nettable
from dsecd.host.nettable import Row, Table, covers, find
from dsecd.policy.rules import NetPolicy, NetRule, Verdict
from dsecd.policy.table import compile_table
from libdsec.errors import InvalidArgument
from tests import net_cases
from tests.unit import policy_cases as cases
from tests.unit.test_policy_reference import allowed, attempt
from tests.unit.test_policy_table import BITS, packed, searched

SEEDS = st.randoms(use_true_random=False)


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES, cases.PERMISSIONS, cases.SOME_ADDRESSES, cases.SOME_PORTS)
def test_adding_a_permission_never_denies_more(
    policy: dict[str, Any], permission: tuple[str, Any], addresses: list[str], ports: list[int]
) -> None:
    before, after = attempt(policy), attempt(cases.with_permission(policy, permission))
    if before is None or after is None:
        reject()  # what would have no effect is refused
    assert allowed(before, addresses, ports) <= allowed(after, addresses, ports)


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES, SEEDS)
def test_order_and_repetition_do_not_matter(policy: dict[str, Any], rng: random.Random) -> None:
    one, other = attempt(policy), attempt(cases.rearranged(policy, rng))
    if one is None or other is None:
        assert one is other
        return
    assert (one.net, one.files, one.system) == (other.net, other.files, other.system)


# --- the table ----------------------------------------------------------------------------------


def compiled(rules: NetPolicy) -> Table | None:
    """Return None for rules that do not fit into the kernel's table."""
    try:
        return compile_table(rules)
    except InvalidArgument:
        return None


def opened(table: Table) -> set[tuple[str, str, int]]:
    """Return everything in the universe that the table allows."""
    found = set()
    for address in net_cases.ADDRESSES:
        ranges = searched(table, packed(str(ipaddress.ip_address(address))))
        for kind, bit in BITS.items():
            for port in net_cases.PORTS if kind in ("tcp", "udp") else (0,):
                if covers(ranges, bit, port):
                    found.add((kind, address, port))
    return found


def with_rule(rng: random.Random, policy: NetPolicy, verdict: Verdict) -> NetPolicy:
    (drawn,) = net_cases.rules(rng, 1)
    made: NetRule = msgspec.structs.replace(drawn, verdict=verdict)
    at = rng.randint(0, len(policy.rules))
    return msgspec.structs.replace(policy, rules=(*policy.rules[:at], made, *policy.rules[at:]))


@settings(max_examples=2 * cases.EXAMPLES)
@given(SEEDS)
def test_a_rule_more_changes_a_table_in_one_direction(rng: random.Random) -> None:
    policy = net_cases.policy(rng)
    tables = [compiled(with_rule(rng, policy, "deny")), compiled(policy)]
    tables.append(compiled(with_rule(rng, policy, "allow")))
    sets = [opened(table) for table in tables if table is not None]
    for fewer, more in itertools.pairwise(sets):
        assert fewer <= more


@settings(max_examples=2 * cases.EXAMPLES)
@given(SEEDS)
def test_a_table_is_the_same_for_rules_in_any_order(rng: random.Random) -> None:
    policy = net_cases.policy(rng)
    rules = cases.rearranged(list(policy.rules), rng)
    assert compiled(msgspec.structs.replace(policy, rules=tuple(rules))) == compiled(policy)


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES)
def test_what_compiles_has_a_table_whose_rows_are_whole(policy: dict[str, Any]) -> None:
    rules = attempt({"network": policy["network"]}) if "network" in policy else None
    table = compiled(rules.net) if rules else None
    if table is None:
        reject()
    for row in table.rows:
        check_row(row)
        assert searched(table, row.address) == find(table.rows, row.address)
    assert len({(row.address, row.bits) for row in table.rows}) == len(table.rows)


def check_row(row: Row) -> None:
    """What bpf/layout.h says of a row."""
    behind = 128 - row.bits
    assert int.from_bytes(row.address, "big") & ((1 << behind) - 1) == 0
    assert len(row.ranges) <= nettable.MAX_RANGES
    for each in row.ranges:
        assert 0 <= each.first <= each.last <= 65535
        assert 0 < each.protocols < 16
