"""The pool of sandbox addresses and the resolver file."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.host.addresses import AddressPool, host_resolvers, parse_resolvers, resolv_conf
from libdsec.errors import Exhausted, InvalidArgument


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def pool(clock: Clock, pool4: str = "10.9.0.0/29", start: int = 0) -> AddressPool:
    return AddressPool(pool4, "fd00::/64", 60, start=start, clock=clock)


def test_addresses_are_the_slots_of_both_ranges() -> None:
    addresses = pool(Clock(), "10.9.0.0/16")
    assert str(addresses.address(258)) == "10.9.1.2"
    assert str(addresses.address6(258)) == "fd00::102"


def test_network_and_broadcast_address_are_never_given() -> None:
    addresses = pool(Clock(), start=4)
    given_out = [str(addresses.address(addresses.acquire())) for _ in range(addresses.size)]
    assert sorted(given_out) == [f"10.9.0.{i}" for i in range(1, 7)]


def test_an_address_rests_before_it_is_used_again() -> None:
    clock = Clock()
    addresses = pool(clock)
    slots = [addresses.acquire() for _ in range(addresses.size)]
    with pytest.raises(Exhausted, match="in use"):
        addresses.acquire()
    addresses.release(slots[3])
    clock.now += 59
    with pytest.raises(Exhausted, match="rests"):
        addresses.acquire()
    clock.now += 1
    assert addresses.acquire() == slots[3]


def test_least_recently_used_first() -> None:
    clock = Clock()
    addresses = pool(clock)
    slots = [addresses.acquire() for _ in range(3)]
    for slot in reversed(slots):
        addresses.release(slot)
        clock.now += 100
    fresh = [addresses.acquire() for _ in range(3)]
    assert not set(fresh) & set(slots)
    assert [addresses.acquire() for _ in range(3)] == slots[::-1]


def test_an_address_that_nobody_saw_need_not_rest() -> None:
    addresses = pool(Clock())
    slots = [addresses.acquire() for _ in range(addresses.size)]
    addresses.release(slots[0], rest=False)
    assert addresses.acquire() == slots[0]


def test_reserved_addresses_are_skipped_and_can_be_released() -> None:
    addresses = pool(Clock())
    addresses.reserve(2)
    assert 2 not in [addresses.acquire() for _ in range(addresses.size - 1)]
    addresses.release(2)
    with pytest.raises(InvalidArgument):
        addresses.reserve(7)


@pytest.mark.parametrize("pool4", ["10.0.0.0/8", "10.0.0.0/30", "10.0.0.1/24", "nonsense"])
def test_bad_ranges_name_the_option(pool4: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        AddressPool(pool4, "fd00::/64", 60)
    assert caught.value.detail["field"] == "network.pool4"


def test_ipv6_range_must_hold_every_slot() -> None:
    with pytest.raises(InvalidArgument) as caught:
        AddressPool("10.0.0.0/16", "fd00::/120", 60)
    assert caught.value.detail["field"] == "network.pool6"


@settings(deadline=None)
@given(st.lists(st.one_of(st.just("take"), st.integers(0, 5), st.floats(0, 90)), max_size=80))
def test_no_address_is_given_twice_or_early(steps: list[object]) -> None:
    clock = Clock()
    addresses = pool(clock, start=3)
    held: list[int] = []
    released: dict[int, float] = {}
    for step in steps:
        if step == "take":
            try:
                slot = addresses.acquire()
            except Exhausted:
                continue
            assert slot not in held
            assert clock.now - released.get(slot, -100) >= 60
            held.append(slot)
        elif isinstance(step, int) and held:
            slot = held.pop(step % len(held))
            addresses.release(slot)
            addresses.release(slot)  # a second time changes nothing
            released[slot] = clock.now
        elif isinstance(step, float):
            clock.now += step
        assert addresses.in_use == len(held)


def test_resolvers_that_a_sandbox_cannot_reach_are_left_out() -> None:
    text = (
        "# made by hand\nsearch example.org\nnameserver 127.0.0.53\nnameserver ::1\n"
        "nameserver fe80::1%eth0\nnameserver nonsense\nnameserver\nnameserver 192.0.2.53\n"
        "nameserver 169.254.169.254\n nameserver 2001:db8::53 \n"
    )
    assert parse_resolvers(text) == ["192.0.2.53", "169.254.169.254", "2001:db8::53"]


def test_systemd_resolved_hosts_give_the_real_servers(tmp_path: Path) -> None:
    stub, real = tmp_path / "stub", tmp_path / "real"
    stub.write_text("nameserver 127.0.0.53\n")
    real.write_text("nameserver 192.0.2.53\n")
    assert host_resolvers([stub, real]) == ["192.0.2.53"]
    assert host_resolvers([tmp_path / "none", stub]) == []


def test_resolver_file_has_at_most_three_servers() -> None:
    text = resolv_conf(["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"])
    assert text.count("nameserver") == 3
    assert "options" in text
