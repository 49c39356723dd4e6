"""Which mounts a policy's denials become: complete, in order, and no more than needed."""

from __future__ import annotations

import posixpath

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.host.plan import GUARD_MASK, GUARD_NO_EXEC, GUARD_READ_ONLY, GUARDS_MAX, Guard
from dsecd.policy import guards, landlock, reference
from dsecd.policy.rules import (
    EVERY_ACCESS,
    Access,
    FilePolicy,
    FileRule,
    SystemPolicy,
    UnixRule,
)
from libdsec.errors import InvalidArgument

PATHS = ("/", "/a", "/a/b", "/a/b/c", "/a/d", "/e", "/dev", "/dev/shm/x", "/proc/sys", "/a/*")
RULES = st.builds(
    FileRule,
    verdict=st.sampled_from(["allow", "deny"]),
    pattern=st.sampled_from(PATHS),
    access=st.frozensets(st.sampled_from(sorted(EVERY_ACCESS)), min_size=1),
)
POLICIES = st.builds(
    FilePolicy,
    rules=st.lists(RULES, max_size=6).map(tuple),
    hidden=st.lists(st.sampled_from(PATHS), max_size=3).map(tuple),
    default=st.sampled_from(["allow", "deny"]),
)


def deny(pattern: str, *access: Access) -> FileRule:
    return FileRule(verdict="deny", pattern=pattern, access=frozenset(access))


def made(*rules: FileRule, hidden: tuple[str, ...] = ()) -> dict[str, int]:
    found = guards.for_policy(FilePolicy(rules=rules, hidden=hidden), SystemPolicy())
    return {guard.path: guard.how for guard in found}


def test_a_guard_is_held_in_place_by_all_above_it() -> None:
    assert made(deny("/a/b/c", "write")) == {"/a": 0, "/a/b": 0, "/a/b/c": GUARD_READ_ONLY}
    assert made(hidden=("/x",)) == {"/x": GUARD_MASK}
    # beneath a noexec mount it could still be moved
    both = {"/a": GUARD_NO_EXEC, "/a/b": GUARD_NO_EXEC}
    assert made(deny("/a/b", "execute"), deny("/a", "execute")) == both


def test_what_one_above_does_is_not_done_again() -> None:
    assert made(deny("/a", "write"), deny("/a/b/c", "write")) == {"/a": GUARD_READ_ONLY}
    # beneath a read-only mount nothing is renamed
    assert made(deny("/a", "write"), hidden=("/a/b/c",)) == {
        "/a": GUARD_READ_ONLY, "/a/b/c": GUARD_MASK,
    }  # fmt: skip
    assert made(deny("/a/b/c", "write"), hidden=("/a",)) == {"/a": GUARD_MASK}
    assert made(deny("/a", "write"), deny("/a/b", "execute")) == {
        "/a": GUARD_READ_ONLY, "/a/b": GUARD_NO_EXEC,
    }  # fmt: skip


def test_accesses_of_one_path_add_up() -> None:
    both = {"/a": GUARD_READ_ONLY | GUARD_NO_EXEC}
    assert made(deny("/a", "write"), deny("/a", "execute")) == both
    assert made(deny("/a", "write", "execute")) == both
    assert made(deny("/a", *EVERY_ACCESS)) == {"/a": GUARD_MASK}
    assert made(deny("/a", "read", "write")) == {}


def test_kernel_trees_need_nothing_to_hold_them() -> None:
    assert made(hidden=("/proc/sys/kernel", "/dev/shm/x/y")) == {
        "/proc/sys/kernel": GUARD_MASK, "/dev/shm/x/y": GUARD_MASK,
    }  # fmt: skip
    assert made(hidden=("/process/x",)) == {"/process": 0, "/process/x": GUARD_MASK}
    assert made(deny("/", "write")) == {"/": GUARD_READ_ONLY, "/dev": GUARD_READ_ONLY}


def test_what_no_command_could_start_without_is_left() -> None:
    assert made(hidden=("/", "/proc", "/dev", "/proc/self/fd", "/proc/12", "/*/x")) == {}
    assert made(deny("/proc", "write")) == {}


def test_a_denied_socket_is_a_mask() -> None:
    system = SystemPolicy(unix=(
        UnixRule(verdict="deny", pattern="/run/x"), UnixRule(verdict="deny", pattern="@y"),
        UnixRule(verdict="allow", pattern="/run/z"),
    ))  # fmt: skip
    assert guards.for_policy(FilePolicy(), system) == (Guard("/run"), Guard("/run/x", GUARD_MASK))


@pytest.mark.parametrize("hidden", [
    tuple(f"/d{n}" for n in range(GUARDS_MAX + 1)),
    tuple(f"/{n}{'x' * 3000}" for n in range(30)),
])  # fmt: skip
def test_too_many_are_refused(hidden: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgument, match="use fewer paths"):
        made(hidden=hidden)


@given(policy=POLICIES)
def test_guards_do_what_is_claimed_and_stand_in_order(policy: FilePolicy) -> None:
    found = guards.for_policy(policy, SystemPolicy())
    places = {guard.path: place for place, guard in enumerate(found)}
    effect: dict[str, int] = {}
    for guard in found:
        above = posixpath.dirname(guard.path)
        assert places.get(above, -1) < places[guard.path] or guard.path == "/"
        effect[guard.path] = guard.how
    for rule in policy.rules:
        how = guards.denial(rule.pattern, rule.access) if rule.verdict == "deny" else None
        if how is not None:
            assert how & ~_effect(effect, rule.pattern) == 0
    for pattern in policy.hidden:
        if guards.mask(pattern) is not None:
            assert _effect(effect, pattern) & GUARD_MASK
    # and nothing is closed that the policy does not close
    for path in ("/a", "/a/b", "/a/b/c", "/a/d", "/a/d/x", "/e", "/e/x"):
        how = _effect(effect, path)
        for access, bit in (("write", GUARD_READ_ONLY), ("execute", GUARD_NO_EXEC)):
            if how & bit:
                assert reference.decide_file(policy, access, path) == "deny"  # type: ignore[arg-type]
        if how & GUARD_MASK:
            assert reference.decide_file(policy, "read", path) == "deny"


def _effect(effect: dict[str, int], path: str) -> int:
    """Return what the guards above and at `path` do; a mask does everything."""
    total = 0
    while True:
        total |= effect.get(path, 0)
        if path == "/":
            return 7 if total & GUARD_MASK else total
        path = posixpath.dirname(path)


def allow(pattern: str, *access: Access) -> FileRule:
    return FileRule(verdict="allow", pattern=pattern, access=frozenset(access))


def test_a_ruleset_has_a_rule_for_each_opened_path() -> None:
    rules = (allow("/b", "read"), allow("/b", "execute"), allow("/a", "write"), allow("/*", "read"),
             deny("/c", "read"))  # fmt: skip
    assert landlock.for_policy(FilePolicy(rules=rules)) is None
    found = landlock.for_policy(FilePolicy(rules=rules, default="deny"))
    assert found is not None
    assert found.rules == (("/a", 0x7FF2 & ~0xC), ("/b", 0xD))
    assert found.handled == 0x7FFF
