"""The compiler: errors that name the rule, the promises of `rules`, no crash on anything."""

from __future__ import annotations

import ipaddress
import time
from typing import Any

import pytest
from hypothesis import example, given, reject, settings
from hypothesis import strategies as st

from dsecd.policy import globs, language, presets, seccomp, targets
from dsecd.policy.compile import MAX_LINES, Compiled, compile_policy
from dsecd.policy.ioctls import REQUESTS
from dsecd.policy.rules import FilePolicy, NetPolicy, SystemPolicy
from libdsec.errors import InvalidArgument
from tests.unit import policy_cases as cases


def compiled(value: dict[str, Any]) -> Compiled:
    return compile_policy(language.from_object(value))


def refusal(value: dict[str, Any]) -> InvalidArgument:
    with pytest.raises(InvalidArgument) as caught:
        compiled(value)
    return caught.value


def test_names_are_checked_where_the_policy_says_so_last() -> None:
    rules = [{"allow": "a.example.com"}]
    assert not compiled({"network": {"rules": rules}}).net.check_names
    assert compiled({"extends": "swe", "network": {"check_names": True}}).net.check_names
    for network in ({"default": "allow"}, {}):
        value = {"extends": "open", "network": {"check_names": True, **network}}
        error = refusal(value)
        assert error.message.startswith('network.check_names: needs default = "deny"')
    closed = {"extends": "open", "network": {"check_names": True, "default": "deny"}}
    assert compiled(closed).net.check_names


def rule(**fields: Any) -> dict[str, Any]:
    return {"network": {"rules": [fields]}}


def _read(text: str) -> object:
    """Return what the standard library takes `text` for: a network, or none."""
    try:
        found = ipaddress.ip_network(text)
    except ValueError:
        return None
    return found if found.version == 4 else None


@settings(max_examples=500)
@given(
    st.text(alphabet="0123456789./ -+\0\u0661", max_size=18)
    | st.from_regex(r"\A(\d{1,3}\.){3}(0|1|128|010)(/(\d{0,3}|255\.255\.\d{1,3}\.0))?\Z")
)
@example("192.0.2.0/24")
@example("192.0.2.0/")
@example("192.0.2.0/255.255.255.0")
@example("192.0.2.0/0.0.0.255")
@example("192.0.2.1/24")
@example("192.0.02.1")
def test_a_network_of_ipv4_is_read_as_the_standard_library_reads_it(text: str) -> None:
    try:
        found = targets.network(text, "here")
    except InvalidArgument:
        assert _read(text) is None
    else:
        assert found == _read(text)


def test_an_empty_policy_is_closed() -> None:
    empty = compiled({})
    assert (empty.net, empty.files, empty.system) == (NetPolicy(), FilePolicy(), SystemPolicy())
    assert compiled({"network": {"services": {}}}).net == NetPolicy()


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_presets_compile_alone_and_extended(name: str) -> None:
    alone = compile_policy(presets.PRESETS[name])
    extended = compiled({"extends": name})
    assert (alone.net, alone.files, alone.system) == (extended.net, extended.files, extended.system)


@pytest.mark.parametrize(
    ("value", "place", "words"),
    [
        (rule(allow="pypy"), "network.rules[0]", "unknown service 'pypy'; did you mean pypi?"),
        (rule(allow="intranet"), "network.rules[0]", "the catalogue has alpine"),
        (rule(), "network.rules[0]", "exactly one of allow and deny"),
        (rule(allow="a.b", deny="a.b"), "network.rules[0]", "exactly one of allow and deny"),
        (rule(allow="10.0.0.1/8"), "network.rules[0]", "write 10.0.0.0/8"),
        (rule(allow="10.0.0.0/33"), "network.rules[0]", "is not an address"),
        (rule(allow="1.2.3"), "network.rules[0]", "is not an address"),
        (rule(allow="fe80::1%eth0"), "network.rules[0]", "names an interface"),
        (rule(allow="example.org:443"), "network.rules[0]", "write it in ports"),
        (rule(allow="a.*.org"), "network.rules[0]", "only *.NAME is a wildcard"),
        (rule(allow="a..org"), "network.rules[0]", "not a domain name"),
        (rule(allow="-a.org"), "network.rules[0]", "not a domain name"),
        (rule(allow="a.b." + "c" * 64), "network.rules[0]", "not a domain name"),
        (rule(allow="x.99"), "network.rules[0]", "neither a domain name nor"),
        (rule(allow="a.b", ports=["80-"]), "network.rules[0]", "is not a port"),
        (rule(allow="a.b", ports=["90-80"]), "network.rules[0]", "lowest first"),
        (rule(allow="a.b", ports=["70000"]), "network.rules[0]", "lowest first"),
        (rule(allow="a.b", ports=[1], protocol="icmp"), "network.rules[0]", "icmp has no ports"),
        (rule(allow="pypi", ports=[80]), "network.rules[0]", "in the catalogue"),
        (rule(deny="a.b", private=True), "network.rules[0]", "private is for names"),
        (rule(allow="10.0.0.0/8", private=True), "network.rules[0]", "private is for domains"),
        (rule(allow="*", private=True), "network.rules[0]", "private is for domains"),
        ({"files": {"hide": ["answers"]}}, "files.hide[0]", "is not absolute"),
        ({"files": {"hide": ["/a/../b"]}}, "files.hide[0]", "component"),
        ({"files": {"hide": ["/a/"]}}, "files.hide[0]", "component"),
        ({"files": {"hide": ["/a\0"]}}, "files.hide[0]", "NUL"),
        ({"files": {"hide": ["/***"]}}, "files.hide[0]", "three stars"),
        ({"files": {"hide": ["/" + "*a" * 9]}}, "files.hide[0]", "more than 8 wildcards"),
        ({"files": {"hide": ["/" + "a" * 5000]}}, "files.hide[0]", "4096"),
        ({"files": {"rules": [{"paths": ["/a"]}]}}, "files.rules[0]", "at least one path"),
        ({"files": {"rules": [{"paths": ["/a"], "allow": ["read"], "deny": ["read"]}]}},
         "files.rules[0]", "read is both allowed and denied"),
        ({"ioctls": {"deny": ["TIOCGWINSZZ"]}}, "ioctls.deny[0]", "did you mean TIOCGWINSZ?"),
        ({"ioctls": {"deny": ["!"]}}, "ioctls.deny[0]", "write its number"),
        ({"ioctls": {"allow": ["FS_IOC_SETFLAGS"]}}, "ioctls.allow[0]", "by the platform"),
        ({"mounts": {"rules": [{}]}}, "mounts.rules[0]", "exactly one"),
        ({"mounts": {"rules": [{"allow": "tmp fs"}]}}, "mounts.rules[0]", "not a file system type"),
        ({"unix": {"deny": ["run/x"]}}, "unix.deny[0]", "an abstract name starts with @"),
        ({"unix": {"deny": ["@"]}}, "unix.deny[0]", "is empty"),
        ({"vsock": {"allow": ["host:1"]}}, "vsock.allow[0]", "is not a peer"),
        ({"vsock": {"allow": ["2:9-1"]}}, "vsock.allow[0]", "from the lowest"),
        ({"vsock": {"allow": ["4294967296"]}}, "vsock.allow[0]", "32 bits"),
    ],
)  # fmt: skip
def test_what_cannot_be_obeyed_names_the_rule(
    value: dict[str, Any], place: str, words: str
) -> None:
    error = refusal(value)
    assert error.detail["field"] == place
    assert str(error).startswith(place)
    assert words in str(error)


@pytest.mark.parametrize(
    ("value", "first", "second"),
    [
        ({"network": {"services": {"pypi": True}, "rules": [{"deny": "pypi"}]}},
         "network.services.pypi", "network.rules[0]"),
        ({"network": {"services": {"pypi": True, "*": False}}},
         "network.services.pypi", "network.services.*"),
        ({"network": {"services": {"10.1.0.0/16": True, "10.0.0.0/8": False}}},
         "network.services.10.1.0.0/16", "network.services.10.0.0.0/8"),
        ({"network": {"rules": [{"allow": "a.b.c"}, {"deny": "*.c"}]}},
         "network.rules[0]", "network.rules[1]"),
        ({"network": {"rules": [{"allow": "1.2.3.4", "protocol": "udp", "ports": [53]},
                                {"deny": "1.2.3.0/24", "ports": ["50-60"]}]}},
         "network.rules[0]", "network.rules[1]"),
        ({"extends": "open", "network": {"services": {"192.168.1.1": True}}},
         "network.services.192.168.1.1", "open: network.rules"),
        ({"files": {"hide": ["/a"], "rules": [{"paths": ["/a/b"], "allow": ["read"]}]}},
         "files.rules[0]", "files.hide[0]"),
        ({"files": {"rules": [{"paths": ["/a/*"], "allow": ["read"]},
                              {"paths": ["/a"], "deny": ["read", "write"]}]}},
         "files.rules[0]", "files.rules[1]"),
        ({"ioctls": {"allow": ["TCGETS"], "deny": [0x5401]}}, "ioctls.allow[0]", "ioctls.deny[0]"),
        ({"mounts": {"rules": [{"allow": "tmpfs", "at": "/m"}, {"deny": "*"}]}},
         "mounts.rules[0]", "mounts.rules[1]"),
        ({"unix": {"allow": ["@x"], "deny": ["@**"]}}, "unix.allow[0]", "unix.deny[0]"),
        ({"vsock": {"allow": ["2:5"], "deny": ["*:1-9"]}}, "vsock.allow[0]", "vsock.deny[0]"),
    ],
)  # fmt: skip
def test_contradictions_name_both_rules(value: dict[str, Any], first: str, second: str) -> None:
    error = refusal(value)
    assert error.detail["field"] == first
    assert error.detail["rules"][0] == first
    assert second in str(error)


def test_denying_a_part_is_no_contradiction() -> None:
    assert compiled({"network": {"services": {"10.0.0.0/8": True, "10.1.0.0/16": False}}})
    assert compiled({"network": {"services": {"github": True, "api.github.com": False}}})
    rules = [{"allow": "a.b", "ports": [80]}, {"deny": "a.b", "ports": [81]}]
    assert compiled({"network": {"rules": rules}})


def test_a_policy_overrides_the_services_of_its_preset_and_denies_what_it_allows() -> None:
    names = compiled({"extends": "swe", "network": {"services": {"npm": False}}}).net.names
    assert {each.verdict for each in names if each.pattern == "registry.yarnpkg.com"} == {"deny"}
    denied = compiled({"extends": "swe", "network": {"rules": [{"deny": "pypi"}]}}).net.names
    assert {each.verdict for each in denied if each.pattern == "pypi.org"} == {"allow", "deny"}
    assert compiled({"extends": "open", "network": {"default": "deny"}}).net.default == "deny"


def test_a_domain_without_ports_opens_the_web_only() -> None:
    rules = compiled(rule(allow="a.example")).net.names
    assert {(each.protocol, each.first_port) for each in rules} == {("tcp", 80), ("tcp", 443)}
    denied = compiled(rule(deny="a.example")).net.names
    assert [(each.protocol, each.last_port) for each in denied] == [("any", 65535)]


def test_ports_are_joined_and_any_is_split() -> None:
    rules = compiled(rule(allow="192.0.2.1", ports=[81, 80, "82-90", 85])).net.rules
    assert {(each.protocol, each.first_port, each.last_port) for each in rules} == {
        ("tcp", 80, 90),
        ("udp", 80, 90),
    }
    assert [each.protocol for each in compiled(rule(allow="192.0.2.1")).net.rules] == ["any"]
    every = compiled(rule(allow="192.0.2.1", ports=[22, "0-65535"])).net.rules
    assert [each.protocol for each in every] == ["tcp", "udp"]  # ports say nothing about icmp


def test_order_does_not_matter() -> None:
    one = compiled({"network": {"services": {"pypi": True, "go": True, "10.0.0.0/8": False}}})
    two = compiled({"network": {"services": {"10.0.0.0/8": False, "go": True, "pypi": True}}})
    assert one.net == two.net
    assert hash(one.net) == hash(two.net)


def test_too_many_entries_are_refused() -> None:
    services = {f"n{index}.example": True for index in range(MAX_LINES + 1)}
    assert "at most" in str(refusal({"network": {"services": services}}))


def test_names_of_ioctls_are_32_bit_requests() -> None:
    assert all(0 < request <= 0xFFFFFFFF for request in REQUESTS.values())
    assert len(set(REQUESTS.values())) == len(REQUESTS)


@pytest.mark.parametrize(
    ("pattern", "covered", "open_"),
    [
        ("/a", ["/a", "/a/b/c"], ["/", "/ab", "/b/a"]),
        ("/a/*", ["/a/b", "/a/b/c"], ["/a"]),
        ("/a/**/c", ["/a/c", "/a/b/c", "/a/x/y/c/d"], ["/a", "/a/bc", "/c"]),
        ("/**/conftest.py", ["/conftest.py", "/w/t/conftest.py"], ["/w/xconftest.py"]),
        ("/a/?", ["/a/b", "/a/b/c"], ["/a/bc", "/a"]),
        ("/a/[id].tsx", ["/a/[id].tsx"], ["/a/i.tsx"]),
        ("/", ["/", "/a"], []),
        ("/a/**", ["/a/b", "/a/b/c"], ["/a", "/ab"]),
        ("/a\nb", ["/a\nb/c"], ["/a"]),
        ("/a*", ["/a\nb"], ["/b"]),
    ],
)
def test_patterns_cover_what_they_match_and_all_beneath(
    pattern: str, covered: list[str], open_: list[str]
) -> None:
    assert not globs.fault(pattern)
    assert all(globs.covers(pattern, path) for path in covered)
    assert not any(globs.covers(pattern, path) for path in open_)


def test_no_pattern_takes_long_to_match() -> None:
    """A backtracking matcher would not come back from the first of these."""
    start = time.process_time()
    for pattern in ("/" + "*a" * 8 + "b", "/" + "**a" * 8 + "b", "/" + "**/a" * 8 + "b"):
        assert not globs.covers(pattern, "/" + "a" * 4000)
        assert not globs.covers(pattern, "/a" * 2000)
    assert time.process_time() - start < 2


@settings(max_examples=6 * cases.EXAMPLES)
@given(st.text("/ab*?", max_size=10), st.text("/ab", max_size=10))
def test_patterns_agree_with_a_second_reading(pattern: str, path: str) -> None:
    if globs.fault("/" + pattern) or globs.fault("/" + path):
        reject()
    assert globs.covers("/" + pattern, "/" + path) == cases.naive_covers("/" + pattern, "/" + path)
    assert globs.matches(pattern, path) == cases.naive_glob(pattern, path)


def test_comparing_paths_has_an_end() -> None:
    rules = [{"paths": [f"/a/{index}"], "allow": ["read"]} for index in range(400)]
    rules += [{"paths": [f"/*{index}*/c"], "deny": ["read"]} for index in range(400)]
    assert "to compare them all" in str(refusal({"files": {"rules": rules}}))


def test_what_the_platform_denies_is_what_its_filter_denies() -> None:
    """`seccomp.denies_ioctl` against what tests of the filter itself know of each request."""
    denied = {name for name, request in REQUESTS.items() if seccomp.denies_ioctl(request)}
    assert {"XFS_IOC_SWAPEXT", "EXT4_IOC_MOVE_EXT", "EXT4_IOC_SWAP_BOOT", "TIOCSTI"} < denied
    assert {"FS_IOC_SETFLAGS", "FS_IOC_FSSETXATTR", "BTRFS_IOC_SNAP_CREATE_V2"} < denied
    assert not denied & {"FS_IOC_GETFLAGS", "FS_IOC_FSGETXATTR", "FICLONE", "TCGETS", "FIONREAD"}


def check_promises(rules: Compiled) -> None:
    """What `rules` promises to mechanisms."""
    for each in (*rules.net.rules, *rules.net.names):
        assert 0 <= each.first_port <= each.last_port <= 65535
        if each.protocol in ("any", "icmp"):
            assert (each.first_port, each.last_port) == (0, 65535)
    for net in rules.net.rules:
        if isinstance(net.prefix, ipaddress.IPv6Network):
            assert not net.prefix.subnet_of(targets.MAPPED)
    for name in rules.net.names:
        assert name.pattern == name.pattern.lower()
        assert name.pattern.isascii()
        assert not name.pattern.endswith(".")
        assert (name.verdict, name.protocol) != ("allow", "any")
        assert not (name.private and name.verdict == "deny")
    assert hash((rules.net, rules.files, rules.system)) is not None


@settings(max_examples=cases.EXAMPLES)
@given(cases.POLICIES)
def test_generated_policies_compile_or_name_the_rule(value: dict[str, Any]) -> None:
    try:
        rules = compile_policy(language.from_object(value), cases.CATALOGUE)
    except InvalidArgument as refused:
        error = refused
    else:
        check_promises(rules)
        return
    assert str(error).startswith(("swe: ", "open: ", "grader: ", error.detail["field"]))


_ANY = st.one_of(
    st.text(max_size=12),
    st.text("*?/.:-0123456789abfx[]@%", max_size=14),
    st.sampled_from([*cases.DOMAINS, *cases.NETWORKS, *cases.PATTERNS, *cases.UNIX, *cases.VSOCK]),
)
_NETWORK_RULE = st.fixed_dictionaries(
    {},
    optional={
        "allow": _ANY, "deny": _ANY, "private": st.booleans(),
        "protocol": st.sampled_from(["tcp", "udp", "icmp", "any"]),
        "ports": st.lists(st.one_of(_ANY, st.integers(-1, 70000)), max_size=2),
    },
)  # fmt: skip
_ACCESS = st.lists(st.sampled_from(cases.ACCESSES), max_size=2)
_REQUEST = st.lists(st.one_of(_ANY, st.integers(0, 1 << 33)), max_size=2)


def _table(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({}, optional=fields)


_WILD_POLICIES = _table(
    network=_table(
        services=st.dictionaries(_ANY, st.booleans(), max_size=2),
        rules=st.lists(_NETWORK_RULE, max_size=2),
    ),
    files=_table(
        hide=st.lists(_ANY, max_size=1),
        rules=st.lists(
            _table(paths=st.lists(_ANY, max_size=2), allow=_ACCESS, deny=_ACCESS), max_size=1
        ),
    ),
    ioctls=_table(allow=_REQUEST, deny=_REQUEST),
    mounts=_table(rules=st.lists(_table(allow=_ANY, deny=_ANY, at=_ANY), max_size=1)),
    unix=_table(allow=st.lists(_ANY, max_size=1), deny=st.lists(_ANY, max_size=1)),
    vsock=_table(allow=st.lists(_ANY, max_size=1), deny=st.lists(_ANY, max_size=1)),
)


_ONE_TABLE = st.sampled_from(["network", "files", "ioctls", "mounts", "unix", "vsock"])


@settings(max_examples=6 * cases.EXAMPLES)
@given(_WILD_POLICIES, st.none() | _ONE_TABLE)
def test_the_compiler_never_crashes(value: dict[str, Any], table: str | None) -> None:
    """With one table alone, an error in another does not hide its faults."""
    chosen = value if table is None else {table: value.get(table, {})}
    try:
        rules = compiled(chosen)
    except InvalidArgument:
        return
    check_promises(rules)
