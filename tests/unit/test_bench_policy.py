"""What `dsec-bench policy` computes, promises and makes up, without a kernel to ask."""

from __future__ import annotations

import random
import struct
from collections import Counter
from pathlib import Path

import pytest
from dsec_bench.bench import Context, Options
from dsec_bench.policy import POLICY, cases, costs, live, model, parts, places, rules
from dsec_bench.policy.cases import Attempt, Scenario
from dsec_bench.policy.plot import extra_ns
from dsec_bench.progress import Steps
from dsec_bench.report import Report, Row, show
from dsec_bench.stats import Round, Summary
from dsec_bench.toolchain import compile_c
from rich.console import Console

from dsecd.policy import language
from dsecd.policy.compile import compile_policy

PROMISED = {
    "bind_us", "update_ms", "connect_overhead_us", "connect_10000_vs_1_policies", "model_cases",
    "model_disagreements",
}  # fmt: skip


def test_every_promised_figure_has_a_part_that_measures_it() -> None:
    assert set(POLICY.figures) == PROMISED
    assert len(POLICY.figures) == len(PROMISED)
    assert set(POLICY.parts) == set(parts.PARTS)


def test_a_running_daemon_is_not_measured() -> None:
    report = Report("policy", POLICY.figures, {})
    with Steps() as steps:
        POLICY.run(Context(Options(endpoint="unix:/nowhere"), report, steps))
    assert set(report.missing) == PROMISED
    assert "not --endpoint" in report.missing["bind_us"]


# --- figures --------------------------------------------------------------------------------------


def test_overhead_is_the_median_of_differences_in_one_round() -> None:
    base = [400.0, 900.0, 410.0]  # the second round was disturbed, for all
    connects = {
        places.NO_POLICY: base,
        "dsec, 1": [each + 70 for each in base],
        "dsec, 1,000": [each + 90 for each in base],
        "dsec, 10,000": [each + 77 for each in base],
    }
    figures = costs.derive(connects)
    assert figures["connect_overhead_us"] == pytest.approx(0.09)
    assert figures["connect_10000_vs_1_policies"] == pytest.approx(1.1)
    assert set(figures) == set(parts.PARTS["cost"][0])
    assert costs.quotient([2.0, 9.0, 4.0], [1.0, 3.0, 2.0]) == 2.0


def test_places_are_named_by_kind_and_number() -> None:
    wire: object = None
    assert places.Place(places.OURS, 10_000, Path(), wire).name == "dsec, 10,000"  # type: ignore[arg-type]
    assert places.Place(places.NO_POLICY, 0, Path(), wire).name == "no policy"  # type: ignore[arg-type]


def test_tables_in_microseconds_say_so() -> None:
    report = Report("policy", (), {})
    report.row(Row("calls", "bind", Summary.of([Round(1.0, [0.0125])]), unit="µs"))
    console = Console(width=130)
    with console.capture() as captured:
        show(report, console)
    assert "p50 µs" in captured.get()
    assert "12.50" in captured.get()


def test_the_picture_takes_what_operations_cost_more() -> None:
    report = Report("policy", (), {})
    extra = {"no policy": 0.0, "dsec, 1": 70.0, "dsec, 10,000": 77.0, "nftables, 1": 600.0}
    report.run("policy cost", what="send", extra_ns=extra)
    assert extra_ns(report, "send", places.OURS) == {1: 70.0, 10_000: 77.0}
    assert extra_ns(report, "send", places.NFT) == {1: 600.0}
    assert extra_ns(report, "tcp", places.OURS) == {}


# --- what is bound --------------------------------------------------------------------------------


def test_policies_differ_and_have_eight_rules() -> None:
    numbers = (0, 1, 255, 256, 9_999, 100_001, 110_000)
    tables = {rules.access(number).table for number in numbers}
    assert len(tables) == len(numbers)
    assert {len(rules.rules(number).rules) for number in numbers} == {8}


def test_both_contenders_have_the_same_rules() -> None:
    text = rules.elements(300)
    for rule in rules.rules(300).rules:
        prefix = str(rule.prefix).removesuffix("/32")
        assert f"{prefix} . {rule.protocol} . {rule.first_port}" in text
    made = rules.ruleset(["ds0", "w0"])
    assert Counter(made.split())["set"] == 2
    assert '"w0" : jump c1' in made
    assert f"flush set inet {rules.TABLE} s7" in rules.update(7, 300)


def test_updates_open_and_close_the_server() -> None:
    for open_ in (True, False):
        written = language.from_object(live.policy(5, open_=open_))
        net = compile_policy(written).net
        attempt = Attempt("connect", "tcp", rules.SERVER, rules.PORT)
        assert cases.model(Scenario({}, net, ()))(attempt) == open_
    assert live.policy(5, open_=True) != live.policy(6, open_=True)


@pytest.mark.parametrize(("name", "flags"), [("calls.c", ("-pthread",)), ("hold.c", ("-static",))])
def test_the_instruments_compile(name: str, flags: tuple[str, ...]) -> None:
    assert compile_c(name, *flags, "-Wall", "-Wextra", "-Werror").exists()


# --- the model's cases ----------------------------------------------------------------------------


def test_cases_of_one_seed_are_the_same() -> None:
    def made(seed: int) -> list[object]:
        rng = random.Random(seed)
        return [(each := cases.scenario(rng)), cases.attempts(rng, each, 20)]

    assert made(3) == made(3)
    assert made(3) != made(4)


def test_names_open_their_global_addresses_and_private_ones_where_the_rule_says_so() -> None:
    net = cases.net_of([{"allow": "*.pypi.org"}])
    assert cases.told(net, "pypi.org", 4) is None
    assert cases.told(net, "a.pypi.org", 4) == {"151.101.0.223", "151.101.64.223"}
    assert cases.told(net, "a.b.pypi.org", 4) == {"151.101.128.223"}
    assert cases.told(net, "a.pypi.org", 6) == set()
    private = cases.net_of([{"allow": "*.pypi.org", "private": True}])
    assert "10.1.2.3" in (cases.told(private, "a.pypi.org", 4) or ())
    assert len(cases.entered(private, ["pypi.org", "a.pypi.org"])) == 3


def test_the_resolver_can_be_asked_under_any_policy() -> None:
    allows = cases.model(Scenario({}, cases.net_of([]), ()))
    assert allows(Attempt("sendto", "udp", cases.RESOLVERS[0], 53))
    assert allows(Attempt("connect", "tcp", f"::ffff:{cases.RESOLVERS[0]}", 53))
    assert not allows(Attempt("sendto", "udp", cases.RESOLVERS[0], 54))
    assert not allows(Attempt("sendto", "udp", "192.0.2.1", 53))


@pytest.mark.parametrize(
    ("address", "leaves"),
    [("10.1.2.3", True), ("127.9.9.9", False), ("0.0.0.0", False), ("240.0.0.1", False),
     ("255.255.255.255", False), ("2001:db8::1", True), ("::1", False), ("::", False),
     ("::ffff:10.1.2.3", False), ("fe80::1", False)],
)  # fmt: skip
def test_only_what_the_far_end_takes_in_is_sent_as_packets(address: str, leaves: bool) -> None:
    assert cases.travels(address) == leaves


@pytest.mark.parametrize("kind", ["tcp", "udp", "icmp", "other"])
def test_frames_carry_their_number_and_right_checksums(kind: str) -> None:
    made = model.frame(Attempt("frame", kind, "192.0.2.1", 443), 4242)  # type: ignore[arg-type]
    assert model._checksum(made[14:34]) == 0  # RFC 1071: with its own sum in it
    at = 34 + (6 if kind == "icmp" else 0)
    assert struct.unpack_from("!H", made, at) == (4242,)
    six = model.frame(Attempt("frame", "icmp", "2001:db8::1", 0), 7)
    pseudo = six[22:54] + struct.pack("!II", len(six) - 54, 58)
    assert model._checksum(pseudo + six[54:]) == 0
