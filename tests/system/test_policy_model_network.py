"""Generated policies of the language: real calls and packets against the reference model.

`DSEC_EXAMPLES` raises the number of policies, `DSEC_SEED` chooses others.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
from collections.abc import Iterator

import msgspec
import pytest
from dsec_bench.policy import cases, model
from dsec_bench.policy.cases import WAYS, Attempt, Scenario
from dsec_bench.policy.model import Lab

from tests.unit.policy_cases import EXAMPLES

pytestmark = [pytest.mark.root, pytest.mark.needs("bpf_cgroup", "veth")]
SEED = int(os.environ.get("DSEC_SEED", "20"))
CASES = 5000


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with contextlib.closing(Lab(random.Random(SEED))) as made:
        yield made


def test_the_kernel_agrees_with_the_model(lab: Lab) -> None:
    result = model.run(lab, random.Random(SEED), policies=EXAMPLES)
    assert not result.disagreements, "\n".join(map(str, result.disagreements[:3]))
    assert result.cases >= CASES * EXAMPLES / 50
    for way in WAYS:  # each is tried often, with both verdicts
        assert result.compared[way] > 200, way
        assert 0.1 < result.allowed[way] / result.compared[way] < 0.9, way
    assert result.compared["name"] > 100


def lacking_a_rule(scenario: Scenario) -> Scenario:
    rules = scenario.net.rules[1:]
    return dataclasses.replace(scenario, net=msgspec.structs.replace(scenario.net, rules=rules))


def lacking_names(scenario: Scenario) -> Scenario:
    return dataclasses.replace(scenario, names=())


def forgetting_port_53(scenario: Scenario) -> Scenario:
    """A rule that opens it by number, to an address that nobody tries, lifts what is said of it."""
    rules = (*scenario.net.rules, *cases.net_of([{"allow": "192.0.2.33", "ports": [53]}]).rules)
    return dataclasses.replace(scenario, net=msgspec.structs.replace(scenario.net, rules=rules))


def test_a_model_that_lacks_a_rule_is_caught_in_every_way(lab: Lab) -> None:
    """Were the comparison blind, it would not see this either."""
    result = model.run(lab, random.Random(SEED), policies=25, believed=lacking_a_rule)
    attempts = [each.attempt for each in result.disagreements]
    assert {each.way for each in attempts if isinstance(each, Attempt)} == set(WAYS)
    first = result.disagreements[0]
    assert len(first.scenario.net.rules) <= 2  # brought down to what matters
    text = str(first)
    assert "kernel: " in text
    assert "model: " in text
    assert str(first.scenario.written) in text


@pytest.mark.parametrize("believed", [lacking_names, forgetting_port_53])
def test_a_model_that_forgets_names_or_port_53_is_caught(
    lab: Lab, believed: model.Believed
) -> None:
    assert model.run(lab, random.Random(SEED), policies=15, believed=believed).disagreements


def test_what_is_tried_lies_at_the_edges() -> None:
    assert cases.edges(80, 443, 65535) == [79, 80, 443, 444]
    assert cases.edges(0, 65535, 65535) == [0, 65535]
    net = cases.net_of([{"allow": "192.0.2.128/25", "ports": ["50-60"]}])
    addresses, ports = cases.addresses_of(net, ()), cases.ports_of(net)
    assert {"192.0.2.127", "192.0.2.128", "192.0.2.255", "192.0.3.0"} <= set(addresses)
    assert {"::ffff:192.0.2.128", "10.213.0.1"} <= set(addresses)
    assert {49, 50, 60, 61} <= set(ports)
