"""The account of what is enforced: nothing is silently open, whatever the host lacks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from dsecd.host.probe import Feature
from dsecd.policy import explain, language, mechanisms
from dsecd.policy.compile import Compiled, compile_policy
from dsecd.policy.explain import CLOSED, Row
from dsecd.policy.mechanisms import (
    APART,
    AT_START,
    ATTRIBUTES,
    BY_NUMBER,
    ENTRY,
    GAIN,
    HELD,
    NEEDS,
    NO_MOUNTS,
    NOT_LISTENED,
    READ_TOO,
    RENAMED,
    SHARED,
)
from libdsec.errors import InvalidArgument, Unsupported
from tests.unit import policy_cases as cases

FEATURES = sorted({name for needs in NEEDS.values() for name in needs})
WITHOUT_LSM = ("apparmor", "bpf_lsm")


def table(*missing: str) -> list[Feature]:
    """Return the probe's table of a host without `missing`."""
    return [
        Feature(name, name not in missing, "refused here" if name in missing else "", "policy")
        for name in FEATURES
    ]


def compiled(value: dict[str, Any]) -> Compiled:
    return compile_policy(language.from_object(value), cases.CATALOGUE)


def rows(value: dict[str, Any], *missing: str) -> dict[str, Row]:
    return {row.place: row for row in explain.Host(table(*missing)).explain(compiled(value))}


def files(*paths: str, **access: list[str]) -> dict[str, Any]:
    return {"files": {"rules": [{"paths": list(paths), **access}]}}


def test_a_closed_network_is_the_namespaces_work() -> None:
    found = rows({"network": {"services": {"npm": False}}}, "bpf_cgroup")
    assert found["network.services.npm"].by == ("netns",)
    assert found["network.default"].state == "enforced"


def test_an_allowlist_needs_bpf_and_says_so() -> None:
    found = rows({"network": {"services": {"pypi": True}}}, "bpf_cgroup")
    for place, mechanism in (("services.pypi", "resolver"), ("default", "bpf_cgroup")):
        row = found[f"network.{place}"]
        assert (row.state, row.by) == ("closed", ("netns",))
        assert row.reasons == (CLOSED, f"{mechanism} is not there (bpf_cgroup: refused here)")
    with pytest.raises(Unsupported, match="nothing is reachable"):
        explain.require_all(found.values())
    here = rows({"network": {"services": {"pypi": True}}})["network.services.pypi"]
    assert (here.state, here.by, here.remarks) == ("enforced", ("resolver",), (SHARED,))


def test_only_who_would_enforce_rules_closes_a_network_without() -> None:
    """A backend that knows no rules on networks leaves them open, and a host without namespaces."""
    rules = compiled({"network": {"services": {"192.0.2.0/24": True}}})
    lacking = table("bpf_cgroup")
    for offered, state in (({"netns", "bpf_cgroup"}, "closed"), ({"netns"}, "not enforced")):
        found = explain.Host(lacking, offered).explain(rules)
        assert {row.state for row in found if row.place.startswith("network.")} == {state}
    found = explain.Host(table("bpf_cgroup", "network_namespaces")).explain(rules)
    assert {row.state for row in found if row.place.startswith("network.")} == {"not enforced"}
    with_link = explain.Host(lacking, {"seccomp", "bpf_cgroup"}).explain(compiled({}))
    assert {row.place: row.state for row in with_link}["network.default"] == "closed"


def test_one_host_answers_for_sandboxes_with_and_without_a_link() -> None:
    rules = compiled({"network": {"services": {"192.0.2.0/24": True}}})
    host = explain.Host(table("bpf_cgroup"))
    for closed, state in ((True, "closed"), (False, "not enforced"), (None, "closed")):
        found = {row.place: row.state for row in host.explain(rules, closed)}
        assert found["network.default"] == state
    assert "bpf_cgroup" not in host.there
    assert host.there == tuple(name for name in NEEDS if "bpf_cgroup" not in NEEDS[name])


def test_a_denied_name_is_open_by_number_where_everything_is() -> None:
    row = rows({"network": {"default": "allow", "services": {"npm": False}}})[
        "network.services.npm"
    ]
    assert (row.state, row.reasons) == ("partly", (BY_NUMBER,))


@pytest.mark.parametrize(
    ("value", "state", "by"),
    [
        (files("/a/b", deny=["write"]), "enforced", ("mounts",)),
        (files("/a/b", deny=["execute"]), "enforced", ("mounts",)),
        (files("/a/b", deny=["read", "write", "execute"]), "enforced", ("mounts",)),
        (files("/a/b", deny=["read"]), "not enforced", ()),
        (files("/a/*", deny=["write"]), "not enforced", ()),
        (files("/a/b", "/**/c", deny=["write"]), "not enforced", ("mounts",)),
        (files("/", deny=["write"]), "partly", ("mounts",)),
        (files("/dev/x", deny=["write"]), "partly", ("mounts",)),
        (files("/proc", deny=["write"]), "not enforced", ()),
        (files("/proc/self/mem", deny=["write"]), "not enforced", ()),
        (files("/", deny=["read", "write", "execute"]), "not enforced", ()),
        (files("/a/b", allow=["read"]), "enforced", ("default",)),
    ],
)
def test_without_a_security_module_mounts_do_what_they_can(
    value: dict[str, Any], state: str, by: tuple[str, ...]
) -> None:
    row = rows(value, *WITHOUT_LSM)["files.rules[0]"]
    assert (row.state, row.by) == (state, by)
    assert bool(row.reasons) == (state != "enforced")
    # of a pattern AppArmor sees every path but not every change, BPF LSM what exists at start
    wild = any("*" in path for path in value["files"]["rules"][0]["paths"])
    whole = "partly" if wild else "enforced"
    assert rows(value)["files.rules[0]"].state == whole


def test_hidden_globs_hold_for_what_exists() -> None:
    hidden = {"files": {"hide": ["/**/answers"]}}
    assert AT_START in rows(hidden, "apparmor")["files.hide[0]"].reasons
    assert rows(hidden, *WITHOUT_LSM)["files.hide[0]"].state == "not enforced"
    assert rows(hidden)["files.hide[0]"].by == ("apparmor",)


def test_landlock_closes_files_but_for_attributes() -> None:
    value = {"files": {"default": "deny", "rules": [{"paths": ["/w"], "allow": ["read"]}]}}
    found = rows(value, *WITHOUT_LSM)
    assert found["files.rules[0]"].by == ("landlock",)
    assert (found["files.default"].state, found["files.default"].reasons[0]) == (
        "partly",
        ATTRIBUTES,
    )


def test_landlock_does_not_see_what_a_name_opens_within_its_directory() -> None:
    rules = [{"paths": ["/w"], "allow": ["write"]}, {"paths": ["/w/known"], "allow": ["read"]}]
    value = {"files": {"default": "deny", "rules": rules}}
    assert RENAMED in rows(value, *WITHOUT_LSM)["files.default"].reasons[0]
    rules[1]["allow"] = ["write"]
    assert RENAMED not in rows(value, *WITHOUT_LSM)["files.default"].reasons[0]


def test_a_filter_of_calls_closes_mounts_only_whole() -> None:
    closed = rows({"mounts": {"default": "deny"}}, *WITHOUT_LSM)
    assert closed["mounts.default"].by == ("seccomp",)
    some = {"mounts": {"default": "deny", "rules": [{"allow": "tmpfs"}]}}
    assert rows(some, *WITHOUT_LSM)["mounts.default"].state == "not enforced"
    assert rows(some)["mounts.default"].by == ("apparmor",)


def test_vsock_and_unix_sockets() -> None:
    assert rows({}, *WITHOUT_LSM)["vsock.default"].by == ("seccomp",)
    peer = {"vsock": {"allow": ["2:1024"]}}
    assert rows(peer, *WITHOUT_LSM)["vsock.allow[0]"].state == "not enforced"
    abstract = rows({"unix": {"deny": ["@x", "/run/x"]}}, *WITHOUT_LSM)
    assert abstract["unix.deny[0]"].state == "not enforced"
    assert abstract["unix.deny[1]"].state == "enforced"
    assert any(NOT_LISTENED in remark for remark in abstract["unix.deny[1]"].remarks)


def test_what_a_mechanism_forbids_beyond_a_rule_is_said_where_it_is_used() -> None:
    hidden = {"files": {"hide": ["/a"]}}
    assert rows(hidden, *WITHOUT_LSM)["files.hide[0]"].remarks == (f"{NO_MOUNTS}; {HELD}",)
    assert rows(hidden)["files.hide[0]"].remarks == ()
    opened = files("/a", allow=["write", "execute"])
    opened["files"]["default"] = "deny"
    found = rows(opened, *WITHOUT_LSM)
    assert found["files.rules[0]"].remarks == (f"{ENTRY}; {GAIN}; {READ_TOO}",)
    assert found["files.default"].remarks == (f"{NO_MOUNTS}; {APART}",)


def test_a_mechanism_that_the_backend_does_not_apply_counts_for_nothing() -> None:
    rules = compiled(files("/a", deny=["write"]))
    (row, *_) = explain.Host(table(), {"seccomp", "netns"}).explain(rules)
    assert row.state == "not enforced"
    assert "mounts is not applied here" in row.reasons


def test_strict_refuses_and_names_every_rule() -> None:
    value = files("/a", deny=["read"]) | {"unix": {"deny": ["@x"]}}
    found = explain.Host(table(*WITHOUT_LSM)).explain(compiled(value))
    with pytest.raises(Unsupported) as caught:
        explain.require_all(found)
    assert caught.value.detail["rules"] == ["files.rules[0]", "unix.deny[0]"]
    assert "files.rules[0]: deny read of /a is not enforced: apparmor is not there" in str(
        caught.value
    )
    explain.require_all(explain.Host(table()).explain(compiled(value)))


@pytest.mark.parametrize("preset", ["sealed", "grader", "swe", "open"])
def test_presets_are_enforced_without_a_security_module(preset: str) -> None:
    explain.require_all(rows({"extends": preset}, *WITHOUT_LSM).values())


@pytest.mark.parametrize("mechanism", sorted(NEEDS))
def test_each_mechanism_that_goes_leaves_a_trace(mechanism: str) -> None:
    """A policy that only this mechanism, of those offered, can enforce."""
    only: dict[str, tuple[dict[str, Any], set[str]]] = {
        "netns": ({}, {"seccomp"}),
        "bpf_cgroup": ({"network": {"services": {"192.0.2.0/24": True}}}, {"seccomp"}),
        "resolver": ({"network": {"services": {"pypi": True}}}, {"seccomp", "bpf_cgroup"}),
        "relay": (
            {"network": {"check_names": True, "services": {"pypi": True}}},
            {"seccomp", "bpf_cgroup", "resolver"},
        ),
        "seccomp": ({"ioctls": {"deny": ["TCGETS"]}}, {"netns"}),
        "mounts": (files("/a", deny=["write"]), {"seccomp", "netns"}),
        "landlock": (files("/a", allow=["read"]) | {}, {"seccomp", "netns"}),
        "apparmor": (files("/a", deny=["read"]), {"seccomp", "netns"}),
        "bpf_lsm": ({"vsock": {"allow": ["2"]}}, {"netns"}),
    }
    value, others = only[mechanism]
    if mechanism == "landlock":
        value = {"files": {**value["files"], "default": "deny"}}
    rules = compiled(value)
    with_it = explain.Host(table(), others | {mechanism}).explain(rules)
    without = explain.Host(table(), others).explain(rules)
    assert any(mechanism in row.by for row in with_it)
    assert explain.unenforced(without)
    assert len(explain.unenforced(without)) >= len(explain.unenforced(with_it))
    with pytest.raises(Unsupported):
        explain.require_all(without)


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES, st.sets(st.sampled_from(sorted(NEEDS))), st.sampled_from(sorted(NEEDS)))
def test_less_is_never_enforced_more(value: dict[str, Any], offered: set[str], gone: str) -> None:
    try:
        rules = compiled(value)
    except InvalidArgument:
        reject()
    before = explain.Host(table(), offered).explain(rules)
    assert len(before) >= len(rules.lines)
    assert_no_better(before, explain.Host(table(), offered - {gone}).explain(rules))
    lacking = table(*NEEDS[gone])
    assert_no_better(before, explain.Host(lacking, offered).explain(rules))


def assert_no_better(before: Iterable[Row], after: Iterable[Row]) -> None:
    grades = ["not enforced", "partly", "enforced"]
    for old, new in zip(before, after, strict=True):
        if new.state == "closed":  # more than any rule asks for, but what it opens is not there
            assert new.place.startswith("network.")
        else:
            assert grades.index(new.state) <= grades.index(old.state)
        assert bool(new.reasons) == (new.state != "enforced")
        assert str(new)


def test_checked_names_say_what_is_checked_and_what_is_closed() -> None:
    value = {
        "network": {
            "check_names": True,
            "rules": [
                {"allow": "a.example.com"},
                {"allow": "b.example.com", "ports": ["1-1000"]},
                {"deny": "c.example.com"},
            ],
        }
    }
    web, wide, denied, *_ = explain.Host(table()).explain(compiled(value))
    assert (web.state, web.by, web.remarks) == ("enforced", ("relay",), (mechanisms.UNSEEN,))
    assert wide.state == "enforced"
    assert mechanisms.CHECKED_ONLY in wide.remarks[0]
    assert (denied.by, denied.remarks) == (("resolver",), ())
    value["network"]["rules"].append({"allow": "192.0.2.0/24"})  # type: ignore[attr-defined]
    web, *_ = explain.Host(table()).explain(compiled(value))
    assert mechanisms.SOME_BY_NUMBER in web.remarks[0]
    web, *_ = explain.Host(table("bpf_cgroup")).explain(compiled(value))
    assert web.state == "closed"
    assert web.reasons[0] == explain.CLOSED
    assert "relay is not there (bpf_cgroup: refused here)" in web.reasons[1]
