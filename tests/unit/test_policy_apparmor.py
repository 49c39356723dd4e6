"""Profiles of AppArmor, read back: what a profile's text allows is what the model allows."""

from __future__ import annotations

import re
import shutil
import subprocess

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dsecd.policy import globs, language, masks, reference
from dsecd.policy.apparmor import Profile, compile_profile
from dsecd.policy.compile import compile_policy
from dsecd.policy.rules import Access, FilePolicy, FileRule, MountRule, SystemPolicy
from libdsec.errors import InvalidArgument
from tests.unit import policy_cases as cases

PARSER = shutil.which("apparmor_parser", path="/usr/sbin:/sbin")
LETTER: dict[Access, str] = {"read": "r", "write": "w", "execute": "x"}
_TOKEN = re.compile(r"\\\\\\\\|\\x[0-9a-f]{2}|\[[^\]]*\]|\*\*|.", re.DOTALL)
_RULE = re.compile(r'  (deny )?"(.*)" ([rwklmix]+),')


def files(*rules: FileRule, **fields: object) -> FilePolicy:
    return FilePolicy(rules=rules, **fields)  # type: ignore[arg-type]


def rule(verdict: str, pattern: str, *access: str) -> FileRule:
    return FileRule(verdict=verdict, pattern=pattern, access=frozenset(access))  # type: ignore[arg-type]


def lines(profile: Profile, heading: str) -> list[str]:
    """Return the lines of a part of a profile."""
    part = profile.text.partition(f"  # {heading}\n")[2].partition("\n\n")[0]
    return [line.strip() for line in part.splitlines() if line.startswith("  ")]


def expression(text: str) -> re.Pattern[bytes]:
    """Return a quoted path of a profile as a regular expression (apparmor.d(5), globbing)."""
    plain = {"{": "(?:", "}": ")", ",": "|", "*": r"[^/\0]*", "**": r"[^\0]*", r"\\\\": r"\\"}
    parts = []
    for token in _TOKEN.findall(text):
        if token in plain:
            parts.append(plain[token])
        elif token.startswith(("[", "\\x")):
            parts.append(token)
        else:
            parts.append(re.escape(token))
    return re.compile("".join(parts).encode(), re.DOTALL)


def allows(profile: Profile, access: Access, path: str, directory: bool) -> bool:
    """Say what AppArmor would: all that allows, less all that denies."""
    name = path.encode() + (b"/" if directory and path != "/" else b"")
    allowed = denied = False
    for line in lines(profile, "files"):
        found = _RULE.fullmatch(f"  {line}")
        assert found, line
        if LETTER[access] in found[3] and expression(found[2]).fullmatch(name):
            allowed, denied = allowed or not found[1], denied or bool(found[1])
    return allowed and not denied


@given(st.sampled_from(cases.PATTERNS), st.sampled_from(cases.PATHS), st.booleans())
def test_a_pattern_covers_the_same_paths(pattern: str, path: str, directory: bool) -> None:
    hidden = compile_profile(files(hidden=(pattern,)), SystemPolicy())
    assert allows(hidden, "read", path, directory) != globs.covers(pattern, path)
    opened = compile_profile(files(rule("allow", pattern, "read"), default="deny"), SystemPolicy())
    assert allows(opened, "read", path, directory) == globs.covers(pattern, path)


TEXT = st.text(st.sampled_from("ab/*?[]{}^$\\\"' ,@#.é漢\n\x7f"), max_size=6)


@given(TEXT, TEXT)
def test_characters_stand_for_themselves(some: str, other: str) -> None:
    pattern, path = f"/{some}", f"/{other}"
    assume(not globs.fault(pattern) and not globs.fault(path.replace("*", "-")))
    profile = compile_profile(files(rule("allow", pattern, "read"), default="deny"), SystemPolicy())
    assert allows(profile, "read", path, directory=False) == globs.covers(pattern, path)


@given(cases.POLICIES, st.sampled_from(cases.PATHS), st.sampled_from(cases.ACCESSES))
def test_a_profile_says_what_the_model_says(policy: object, path: str, access: Access) -> None:
    try:
        compiled = compile_policy(language.from_object(policy), cases.CATALOGUE)
    except InvalidArgument:
        return
    profile = compile_profile(compiled.files, compiled.system)
    assert allows(profile, access, path, directory=False) == (
        reference.decide_file(compiled.files, access, path) == "allow"
    )


@given(cases.POLICIES, st.sampled_from(cases.PATTERNS))
def test_another_denial_takes_nothing_away(policy: object, pattern: str) -> None:
    """What a profile denies, it still denies when a rule that denies is added."""
    try:
        compiled = compile_policy(language.from_object(policy), cases.CATALOGUE)
    except InvalidArgument:
        return
    before = compile_profile(compiled.files, compiled.system)
    more = (*compiled.files.rules, rule("deny", pattern, "write"))
    system = compiled.system
    mounts = (*system.mounts, MountRule(verdict="deny", fstype="tmpfs", pattern=pattern))
    after = compile_profile(
        FilePolicy(rules=more, hidden=compiled.files.hidden, default=compiled.files.default),
        SystemPolicy(mounts=mounts, mount_default=system.mount_default),
    )
    for part in ("files", "mounts"):
        old = {line for line in lines(before, part) if line.startswith("deny")}
        assert old <= set(lines(after, part))
        opened = {line for line in lines(after, part) if not line.startswith("deny")}
        assert opened <= set(lines(before, part))


def test_directories_above_a_rule_keep_their_names() -> None:
    profile = compile_profile(
        files(rule("deny", "/a/b/c*", "read"), hidden=("/d/e",)), SystemPolicy()
    )
    held = [line for line in lines(profile, "files") if line.endswith(" w,")]
    assert held == [f'deny "{path}" w,' for path in ("/a/", "/a/b/", "/d/", "/d/e/")]
    assert not allows(profile, "write", "/a", directory=True)
    assert allows(profile, "write", "/a/x", directory=True)


def test_rules_on_paths_close_what_gives_other_names() -> None:
    found = lines(compile_profile(files(hidden=("/a/b",)), SystemPolicy()), "mounts")
    for kind in ("options=(bind)", "options=(rbind)", "options=(move)", "fstype=(overlay)"):
        assert f'deny mount {kind} -> "/{{,**}}",' in found
    for place in ("/", "/a/", "/a/b{,/,/**}"):
        assert f'deny mount fstype=(*) -> "{place}",' in found
    assert "pivot_root," not in found
    plain = lines(compile_profile(files(), SystemPolicy()), "mounts")
    assert "pivot_root," in plain
    assert not any(line.startswith("deny") for line in plain)


def test_mounts_by_type_and_place() -> None:
    system = SystemPolicy(
        mounts=(
            MountRule(verdict="allow", fstype="tmpfs", pattern="/m"),
            MountRule(verdict="allow", fstype="bind", pattern="/n"),
            MountRule(verdict="deny", fstype="ramfs", pattern="/m/x"),
        ),
        mount_default="deny",
    )
    found = lines(compile_profile(files(), system), "mounts")
    for wanted in (
        'mount fstype=(tmpfs) -> "/m{,/,/**}",',
        'mount options=(bind) -> "/n{,/,/**}",',
        'deny mount fstype=(ramfs) -> "/m/x{,/,/**}",',
        'deny mount options=(move) -> "/m/x{,/,/**}",',  # what fsopen(2) made has no type
        'deny mount options=(shared) -> "/{,**}",',
    ):
        assert wanted in found
    assert 'mount -> "/{,**}",' not in found
    everywhere = SystemPolicy(
        mounts=(MountRule(verdict="allow", fstype="tmpfs"),), mount_default="deny"
    )
    assert "pivot_root," in lines(compile_profile(files(), everywhere), "mounts")


def test_where_writing_is_closed_mounts_need_a_place_to_write() -> None:
    policy = files(rule("allow", "/w", "read", "write"), default="deny")
    found = lines(compile_profile(policy, SystemPolicy()), "mounts")
    assert 'mount -> "/w{,/,/**}",' in found
    assert 'mount -> "/{,**}",' not in found


def test_every_profile_has_the_platform_s_protections() -> None:
    profile = compile_profile(files(), SystemPolicy())
    protected = lines(profile, "the host's memory, disks and kernel")
    for path in masks.MASKED:
        assert f"deny {path} rwklmx," in protected
    for path in masks.READ_ONLY:
        assert f"deny {path}{{,/,/**}} wl," in protected
    assert "attach_disconnected" not in profile.text.partition("abi <")[2]


def test_a_name_is_that_of_the_content() -> None:
    some = compile_profile(files(hidden=("/a",)), SystemPolicy())
    assert some == compile_profile(files(hidden=("/a",)), SystemPolicy())
    assert re.fullmatch(r"dsec-[0-9a-f]{32}", some.name)
    assert some.text.count(some.name) == 3  # the header, signal and ptrace
    assert some.name != compile_profile(files(hidden=("/b",)), SystemPolicy()).name
    assert compile_profile(files(hidden=("/a",)), SystemPolicy(), "x").name.startswith("x-")


@pytest.mark.skipif(PARSER is None, reason="apparmor_parser is not installed")
def test_the_parser_takes_every_pattern() -> None:
    strange = "".join(chr(code) for code in range(1, 256) if chr(code) not in "/*?")
    patterns = [*cases.PATTERNS, f"/{strange}", "/漢字/??*x", "/**/a/**/b*/?"]
    policy = files(*(rule("deny", each, "read", "write", "execute") for each in patterns))
    mounts = tuple(
        MountRule(verdict="deny", fstype=fstype, pattern=each)
        for each in patterns
        for fstype in ("*", "bind", "overlay", "fuse.x-y_z")
    )
    profile = compile_profile(policy, SystemPolicy(mounts=mounts))
    done = subprocess.run(
        [str(PARSER), "-Q", "--skip-cache", "--quiet"],
        input=profile.text.encode(), capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
