"""What binding, updating and connecting cost with one policy and with 10,000; `-s` shows figures.

The bars here are wide, for busy machines: they find what grows with the number of policies.
"""

from __future__ import annotations

import contextlib
import ipaddress
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from dsec_bench.policy import costs, places
from dsec_bench.stats import interleave

from dsecd.host.netpolicy import Access, Opening
from dsecd.host.nettable import TCP, PortRange
from tests.system.netpolicy_lab import Agent, Cgroups, Lab, access, lab, rule

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf_cgroup", "veth")]
POLICIES = 10_000
ROUNDS, CONNECTS = 7, 2000
SERVER = ("192.0.2.1", 9)


def policy(number: int) -> Access:
    """Return a policy of eight rules, unlike every other."""
    own = [rule("allow", f"10.{number >> 8}.{number & 255}.{k}/32", 443) for k in range(7)]
    return access(*own, rule("allow", "192.0.2.0/24", 9, kind="udp"))


def median_us(work: Callable[[Any], object], items: list[Any]) -> float:
    found = []
    for item in items:
        start = time.perf_counter_ns()
        work(item)
        found.append(time.perf_counter_ns() - start)
    return statistics.median(found) / 1000


@contextlib.contextmanager
def outsider(box: Lab) -> Iterator[Agent]:
    """A process beside the sandbox, in a cgroup for which no program runs."""
    with contextlib.closing(Cgroups()) as others:
        others.make("free")
        with contextlib.closing(Agent(others.path / "free", box.wire.box)) as agent:
            yield agent


def overhead_ns(box: Lab, free: Agent) -> float:
    """Return what a connect(2) costs more than outside: the median of alternating rounds."""

    def median(agent: Agent) -> float:
        return statistics.median(agent.time_connects(*SERVER, CONNECTS))

    return statistics.median(median(box.agent) - median(free) for _ in range(ROUNDS))


def test_costs_do_not_grow_with_the_number_of_policies() -> None:
    policies = [policy(number) for number in range(POLICIES + 500)]
    live, new = policies[:POLICIES], policies[POLICIES:]
    cgroups = range(10**12, 10**12 + POLICIES)  # ids that no cgroup has
    figures = {}
    with lab() as box, outsider(box) as free:
        box.policies.bind(box.cgroup, live[5000])
        figures["connect, 1 policy: ns"] = overhead_ns(box, free)
        figures["bind, policy known: µs"] = median_us(
            lambda cgroup: box.policies.bind(cgroup, live[5000]), list(cgroups)[:1000]
        )
        figures["bind, policy of 8 rules new: µs"] = median_us(
            lambda pair: box.policies.bind(*pair), list(zip(cgroups, live, strict=True))
        )
        figures["connect, 10,000 policies: ns"] = overhead_ns(box, free)
        figures["update, 10,000 policies: µs"] = median_us(
            lambda made: box.policies.bind(box.cgroup, made), new
        )
        ranges = (PortRange(443, 443, TCP),)
        figures["admit an address: µs"] = median_us(
            lambda n: box.policies.admit(
                box.cgroup, ipaddress.IPv4Address(0x08000000 + n), Opening("a", ranges, 10**18)
            ),
            list(range(1000)),
        )
    print("", *(f"{name} {value:.1f}" for name, value in figures.items()), sep="\n")
    assert figures["connect, 10,000 policies: ns"] < figures["connect, 1 policy: ns"] + 2000
    assert figures["bind, policy known: µs"] < 100
    assert figures["update, 10,000 policies: µs"] < 1000


def test_a_look_up_does_not_get_deeper_with_every_policy() -> None:
    """In one trie of all policies connect(2) cost 50 ns more at one policy, 150 at 10,000."""
    samples: dict[int, list[float]] = {0: [], 1: [], POLICIES: []}
    with contextlib.ExitStack() as stack:
        free = stack.enter_context(places.outside())
        spots = [stack.enter_context(places.bare(free))]
        spots += [stack.enter_context(places.ours(count)) for count in (1, POLICIES)]
        instrument = places.Instrument(free.procs("free"), [spot.wire for spot in spots])
        stack.callback(instrument.close)
        for _, spot in interleave(spots, 60):
            instrument.enter(spot)
            asked = ("connect", places.rules.SERVER, places.rules.PORT, CONNECTS)
            tries = range(costs.TRIES["connect"])
            samples[spot.policies].append(min(instrument.ask(*asked) for _ in tries))
    extra = {count: costs.paired(samples[0], samples[count]) for count in (1, POLICIES)}
    print(f"connect, ns more than without policy: {extra}")
    assert extra[POLICIES] < 1.5 * extra[1]
