"""Rules as tables of the security module: the right answer for every path, and their bytes."""

from __future__ import annotations

import os
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.host import lsmtable
from dsecd.host.lsmtable import CONNECT, EXECUTE, READ, REPLACE, SEE, WRITE, Denial, Place, Table
from dsecd.policy import language, lsm, reference
from dsecd.policy.compile import Compiled, compile_policy
from dsecd.policy.rules import FilePolicy, FileRule, SystemPolicy
from libdsec.errors import Unsupported

ROOT, PROC, DEV, DISK = 77, 81, 59, 60
PLACES = (
    Place(ROOT, "/", "/"), Place(PROC, "/", "/proc"), Place(PROC, "/sys", "/proc/sys"),
    Place(DEV, "/cpu/1/cpuinfo", "/proc/cpuinfo"), Place(DEV, "/dev", "/dev"),
    Place(DISK, "/84c1/s", "/dev/shm"),
)  # fmt: skip
BITS = {"read": READ, "write": WRITE, "execute": EXECUTE}
NAMES = ("a", "b", "c")


def compiled(policy: dict[str, Any]) -> Compiled:
    return compile_policy(language.from_object(policy))


def table(policy: dict[str, Any], found: lsm.Found | None = None) -> Table:
    made = compiled(policy)
    return lsm.compile_table(made.files, made.system, PLACES, found or {})


def denied(made: Table, path: str, device: int = ROOT) -> Denial:
    """Return what the programs find for a path in a file system (bpf/lsm/decide.h)."""
    node = made.roots.get(device)
    if node is None:
        return made.own
    for name in path.split("/"):
        if not name:
            continue
        below = made.names.get((node.number, os.fsencode(name))) if node.has_places else None
        if below is None:
            return node.below
        node = below
    return node.here


def access(made: Table, path: str, device: int = ROOT) -> int:
    return denied(made, path, device).access & ~REPLACE


paths = st.lists(st.sampled_from(NAMES), min_size=0, max_size=4).map(lambda p: "/" + "/".join(p))
patterns = st.one_of(paths, paths.map(lambda path: path.rstrip("/") + "/**"))
rules = st.builds(
    FileRule,
    verdict=st.sampled_from(("allow", "deny")),
    pattern=patterns,
    access=st.frozensets(st.sampled_from(("read", "write", "execute")), min_size=1),
)
policies = st.builds(
    FilePolicy,
    rules=st.lists(rules, max_size=5).map(tuple),
    hidden=st.lists(patterns, max_size=2).map(tuple),
    default=st.sampled_from(("allow", "deny")),
)


@given(policies, st.lists(paths, min_size=1, max_size=8))
def test_tables_say_what_the_reference_says(policy: FilePolicy, asked: list[str]) -> None:
    made = lsm.compile_table(policy, SystemPolicy(), PLACES, {})
    for path in asked:
        for name, bit in BITS.items():
            says = reference.decide_file(policy, name, path) == "deny"  # type: ignore[arg-type]
            assert bool(denied(made, path).access & bit) == says, (path, name)


@given(policies, paths, paths)
def test_what_the_reference_holds_in_place_is_held(
    policy: FilePolicy, source: str, target: str
) -> None:
    made = lsm.compile_table(policy, SystemPolicy(), PLACES, {})
    held = READ | WRITE | REPLACE
    refused = denied(made, source).access & held or denied(made, target).access & WRITE
    assert bool(refused) == (reference.decide_rename(policy, source, target) == "deny")


@given(policies, rules)
def test_one_more_denial_opens_nothing(policy: FilePolicy, rule: FileRule) -> None:
    more = FilePolicy(
        rules=(*policy.rules, FileRule(verdict="deny", pattern=rule.pattern, access=rule.access)),
        hidden=policy.hidden,
        default=policy.default,
    )
    before, after = (lsm.compile_table(p, SystemPolicy(), PLACES, {}) for p in (policy, more))
    for path in ("/", "/a", "/a/b", "/a/b/c", "/b", "/c/c/c/c"):
        old, new = denied(before, path).access, denied(after, path).access
        assert old & new == old


def test_a_file_system_is_judged_by_where_it_is_seen() -> None:
    made = table({"files": {"rules": [{"paths": ["/proc/x", "/dev/shm"], "deny": ["write"]}]}})
    assert access(made, "/x", PROC) == WRITE
    assert access(made, "/sys/x", PROC) == 0
    assert access(made, "/dev/null", DEV) == 0
    assert access(made, "/84c1/s/file", DISK) == WRITE
    assert denied(made, "/84c1/s", DISK).access & REPLACE
    assert access(made, "/84c1/other", DISK) == lsmtable.EVERYTHING & ~REPLACE
    assert access(made, "/cpu/2", DEV) == lsmtable.EVERYTHING & ~REPLACE
    assert access(made, "/anything", 9999) == 0


def test_under_a_closed_default_what_the_sandbox_mounts_is_closed() -> None:
    made = table({"files": {"default": "deny", "rules": [{"paths": ["/a"], "allow": ["read"]}]}})
    assert made.own.access == READ | WRITE | EXECUTE
    assert made.foreign.access == EXECUTE  # memory files are not on any path
    assert made.flags & lsmtable.HOLDS


def test_hidden_paths_cannot_be_seen_nor_moved() -> None:
    made = table({"files": {"hide": ["/a/b"]}})
    assert denied(made, "/a/b").access == READ | WRITE | EXECUTE | SEE | CONNECT | REPLACE
    assert denied(made, "/a").access == REPLACE
    assert access(made, "/a/b/c") == READ | WRITE | EXECUTE | SEE | CONNECT


def test_wildcards_hold_for_what_was_found_and_links_for_both_ends() -> None:
    found = {"/a/*.key": ["/a/x.key"], "/l/f": ["/c/f"]}
    policy = {"files": {"rules": [{"paths": ["/a/*.key", "/l/f"], "deny": ["read"]}]}}
    assert lsm.patterns(compiled(policy).files, SystemPolicy()) == ("/a/*.key", "/l/f")
    made = table(policy, found)
    for path in ("/a/x.key", "/l/f", "/c/f"):
        assert access(made, path) == READ
    for path in ("/a", "/l", "/c"):
        assert denied(made, path).access == REPLACE
    assert access(made, "/a/y.key") == 0


def test_types_of_file_systems_are_bits() -> None:
    made = table(
        {"mounts": {"default": "deny", "rules": [
            {"allow": "tmpfs", "at": "/a/**"}, {"deny": "*", "at": "/a/b"},
        ]}}
    )  # fmt: skip
    bit = 1 << made.types["tmpfs"]
    assert not denied(made, "/a/x").mounts & bit
    assert denied(made, "/a/x").mounts & 1
    assert denied(made, "/a").mounts & bit
    assert denied(made, "/a/b/c").mounts == lsmtable.EVERY_TYPE
    assert made.own.mounts == lsmtable.EVERY_TYPE


def test_unix_names_and_vsock_peers() -> None:
    made = table(
        {"unix": {"default": "deny", "allow": ["@one", "/run/s"], "deny": ["@two"]},
         "vsock": {"allow": ["2:1-9"], "deny": ["*:5"]}}
    )  # fmt: skip
    assert made.abstracts == {b"one": False, b"two": True}
    assert made.flags & lsmtable.ABSTRACT_DENY
    assert made.flags & lsmtable.VSOCK_DENY
    assert access(made, "/run/s") == 0
    assert access(made, "/run/t") == CONNECT
    assert [(peer.cid, peer.first_port, peer.deny) for peer in made.peers] == [
        (None, 5, True), (2, 1, False),
    ]  # fmt: skip
    assert table({"unix": {"deny": ["@**"]}}).flags & lsmtable.ABSTRACT_DENY
    assert not table({"unix": {"default": "deny", "allow": ["@**"]}}).flags & lsmtable.ABSTRACT_DENY


def test_more_than_the_programs_hold_is_refused() -> None:
    many = [{"deny": f"type{number}", "at": "/"} for number in range(64)]
    with pytest.raises(Unsupported, match="64 types"):
        table({"mounts": {"rules": many}})
    with pytest.raises(Unsupported, match="17 rules"):
        table({"vsock": {"allow": [f"2:{port}" for port in range(17)]}})


def test_nothing_to_enforce_is_known_as_such() -> None:
    assert not lsm.concerns(FilePolicy(), SystemPolicy())
    assert not lsm.concerns(FilePolicy(), compiled({"ioctls": {"deny": [1]}}).system)
    assert lsm.concerns(FilePolicy(hidden=("/a",)), SystemPolicy())
    assert lsm.concerns(FilePolicy(), SystemPolicy(unix_default="deny"))


def test_a_name_that_no_file_can_have_is_no_place() -> None:
    made = table({"files": {"hide": ["/a/" + "x" * 256]}})
    assert not made.roots[ROOT].has_places


def test_bytes_carry_the_cgroup_and_the_numbers() -> None:
    made = table({"files": {"hide": ["/a/b"]}})
    rows = lsmtable.pack(made, cgroup=7, base=100)
    assert list(rows) == ["names", "mount_types", "abstracts", "roots", "bindings"]
    assert {lsmtable.cgroup_of(key) for part in rows.values() for key in part} == {7}
    assert sorted({lsmtable.number_of(key) for key in rows["names"]})[0] > 100
    assert all(len(key) == lsmtable.NAME_KEY_BYTES for key in rows["names"])
    assert all(len(value) == lsmtable.NODE_BYTES for value in rows["roots"].values())
    assert [len(value) for value in rows["bindings"].values()] == [lsmtable.BINDING_BYTES]
