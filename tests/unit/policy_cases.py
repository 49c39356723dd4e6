"""Generated policies and questions, and a second reading of the language to compare with.

The universe is small on purpose: names, networks and paths that often overlap find disagreements
that random ones never would. `naive_*` decide from the policy as it is written, without compiler,
`ipaddress` or `re`.
"""

from __future__ import annotations

import os
import random
import socket
from typing import Any

from hypothesis import strategies as st

from dsecd.policy import catalogue
from dsecd.policy.language import Policy

VERDICTS = st.sampled_from(["allow", "deny"])
SERVICES = ("pypi", "npm", "github", "debian", "inside", "clock")
CATALOGUE = {
    **catalogue.shipped(),
    **catalogue.parse(
        """
        [inside]
        hosts = ["pypi.org", "*.corp.example"]
        networks = ["10.1.2.0/24", "2001:db8:1::/64"]
        ports = [80, "8000-8010"]
        private = true
        [clock]
        hosts = ["time.example.org"]
        ports = [123]
        protocol = "udp"
        """
    ),
}
DOMAINS = (
    "pypi.org", "*.pypi.org", "a.pypi.org", "registry.yarnpkg.com", "*.corp.example",
    "x.corp.example", "*.example", "Time.Example.ORG.", "bücher.example",
)  # fmt: skip
NETWORKS = (
    "0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.3", "192.0.2.0/24", "192.0.2.128/25",
    "::/0", "2001:db8::/32", "2001:db8:1::/48", "2001:db8:1::1", "::ffff:10.1.0.0/112",
    "64:ff9b::/96", "2002:a01::/32",
)  # fmt: skip
PORTS = (0, 1, 22, 53, 79, 80, 81, 123, 443, 444, 8000, 8005, 8010, 8011, 65534, 65535)
RANGES: tuple[int | str, ...] = (22, 80, 443, "53", "8000-8010", "80-443", "1-65535", "0-65535")
ADDRESSES = (
    "10.1.2.3", "10.1.9.9", "10.2.0.1", "192.0.2.1", "192.0.2.129", "198.51.100.7", "127.0.0.1",
    "0.0.0.0", "::1", "::", "::ffff:10.1.2.3", "::ffff:127.0.0.1", "64:ff9b::a01:203",
    "64:ff9b::c000:201", "2002:a01:203::1", "2001:db8:1::1", "2001:db8:2::1", "2620::1",
)  # fmt: skip
NAMES = (
    "pypi.org", "a.pypi.org", "a.b.pypi.org", "xpypi.org", "registry.yarnpkg.com", "corp.example",
    "x.corp.example", "time.example.org", "xn--bcher-kva.example", "example", "other.net",
)  # fmt: skip
PATTERNS = (
    "/", "/**", "/a", "/a/b", "/a/b/c", "/a/*", "/a/**", "/a/**/c", "/**/c", "/a/b*", "/a/?", "/d",
    "/*/b", "/a/[b]",
)  # fmt: skip
PATHS = (
    "/", "/a", "/a/b", "/a/bb", "/a/b/c", "/a/b/c/d", "/d", "/d/c", "/ab", "/a/[b]", "/e/f/c/g",
)  # fmt: skip
ACCESSES = ("read", "write", "execute")
EXAMPLES = int(os.environ.get("DSEC_EXAMPLES", "50"))  # per property; raise it for a long run
KINDS = ("tcp", "udp", "icmp", "other")
SOME_ADDRESSES = st.lists(st.sampled_from(ADDRESSES), min_size=4, max_size=4, unique=True)
SOME_PORTS = st.lists(st.sampled_from(PORTS), min_size=4, max_size=4, unique=True)


def _pruned(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Return dicts with these strategies, less the keys that drew None."""
    return st.fixed_dictionaries(fields).map(
        lambda drawn: {key: value for key, value in drawn.items() if value is not None}
    )


def _sides(values: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.tuples(VERDICTS, values).map(lambda drawn: {drawn[0]: drawn[1]})


TARGETS = st.sampled_from([*SERVICES, *DOMAINS, *NETWORKS, "*"])
_EXTRAS = _pruned(
    protocol=st.sampled_from([None, None, "tcp", "udp", "icmp", "any"]),
    ports=st.lists(st.sampled_from(RANGES), max_size=2),
)
NETWORK_RULES = st.one_of(
    _sides(st.sampled_from(SERVICES)),
    st.tuples(_sides(st.sampled_from([*DOMAINS, *NETWORKS, "*"])), _EXTRAS)
    .map(lambda drawn: drawn[0] | drawn[1])
    .filter(lambda rule: not (rule.get("protocol") == "icmp" and rule["ports"])),
)
DEFAULT = st.sampled_from([None, None, "allow", "deny"])
EXTENDS = st.sampled_from([None, None, None, "swe", "open", "sealed", "grader"])
FILE_RULES = _pruned(
    paths=st.lists(st.sampled_from(PATTERNS), min_size=1, max_size=2),
    allow=st.lists(st.sampled_from(ACCESSES), max_size=2, unique=True),
    deny=st.lists(st.sampled_from(ACCESSES), max_size=1),
).filter(
    lambda rule: (rule["allow"] or rule["deny"]) and not set(rule["allow"]) & set(rule["deny"])
)
UNIX = ("/run/x.sock", "/run/**", "/run/*.sock", "@x", "@x*", "@**")
VSOCK = ("2", "2:1024", "*:1024-2000", "3:5-9", "*")
REQUESTS = (0x5401, "TIOCGWINSZ", "FIONREAD", "0x5421", "FICLONE")
MOUNTS = ("tmpfs", "bind", "overlay", "*")


def _lists(values: Any) -> st.SearchStrategy[Any]:
    return st.lists(st.sampled_from(values), max_size=2)


POLICIES = _pruned(
    extends=EXTENDS,
    network=_pruned(
        default=DEFAULT,
        services=st.dictionaries(TARGETS, st.booleans(), max_size=3),
        rules=st.lists(NETWORK_RULES, max_size=4),
    ),
    files=_pruned(
        default=DEFAULT,
        hide=st.lists(st.sampled_from(PATTERNS), max_size=1),
        rules=st.lists(FILE_RULES, max_size=3),
    ),
    ioctls=_pruned(default=DEFAULT, allow=_lists(REQUESTS), deny=_lists(REQUESTS)),
    mounts=_pruned(
        default=DEFAULT,
        rules=st.lists(
            st.tuples(_sides(st.sampled_from(MOUNTS)), st.sampled_from(PATTERNS)).map(
                lambda drawn: drawn[0] | {"at": drawn[1]}
            ),
            max_size=2,
        ),
    ),
    unix=_pruned(default=DEFAULT, allow=_lists(UNIX), deny=_lists(UNIX)),
    vsock=_pruned(default=DEFAULT, allow=_lists(VSOCK), deny=_lists(VSOCK)),
)

# A denial of any kind, as a change to a policy in dict form: table, key, value
DENIALS = st.one_of(
    st.tuples(st.just("network"), NETWORK_RULES.filter(lambda rule: "deny" in rule)),
    st.tuples(st.just("files"), FILE_RULES.map(lambda rule: {**rule, "allow": []}))
    .filter(lambda drawn: bool(drawn[1]["deny"])),
    st.tuples(st.just("services"), TARGETS),
    st.tuples(st.just("hide"), st.sampled_from(PATTERNS)),
    st.tuples(st.just("mounts"), st.sampled_from(MOUNTS).map(lambda kind: {"deny": kind})),
    st.tuples(st.just("ioctls"), st.sampled_from(REQUESTS)),
    st.tuples(st.just("unix"), st.sampled_from(UNIX)),
    st.tuples(st.just("vsock"), st.sampled_from(VSOCK)),
)  # fmt: skip


# The same for a permission; `services` may replace what a preset says, so rules only
PERMISSIONS = st.one_of(
    st.tuples(st.just("network"), NETWORK_RULES.filter(lambda rule: "allow" in rule)),
    st.tuples(st.just("files"), FILE_RULES.map(lambda rule: {**rule, "deny": []}))
    .filter(lambda drawn: bool(drawn[1]["allow"])),
    st.tuples(st.just("mounts"), st.sampled_from(MOUNTS).map(lambda kind: {"allow": kind})),
    st.tuples(st.just("ioctls"), st.sampled_from(REQUESTS)),
    st.tuples(st.just("unix"), st.sampled_from(UNIX)),
    st.tuples(st.just("vsock"), st.sampled_from(VSOCK)),
)  # fmt: skip


def with_permission(policy: dict[str, Any], permission: tuple[str, Any]) -> dict[str, Any]:
    """Return `policy` with one permission more."""
    kind, value = permission
    key = "rules" if kind in ("network", "files", "mounts") else "allow"
    old = policy.get(kind, {})
    return {**policy, kind: {**old, key: [*old.get(key, []), value]}}


def rearranged(value: Any, rng: random.Random) -> Any:
    """Return the same tables with entries in another order, some of them twice."""
    if isinstance(value, dict):
        items = [(key, rearranged(each, rng)) for key, each in value.items()]
        rng.shuffle(items)
        return dict(items)
    if isinstance(value, list):
        entries = [rearranged(each, rng) for each in value]
        entries += [each for each in entries if rng.random() < 0.5]
        rng.shuffle(entries)
        return entries
    return value


def with_denial(policy: dict[str, Any], denial: tuple[str, Any]) -> dict[str, Any]:
    """Return `policy` with one denial more."""
    kind, value = denial
    if kind == "services":
        network = policy.get("network", {})
        services = {**network.get("services", {}), value: False}
        return {**policy, "network": {**network, "services": services}}
    table = "files" if kind == "hide" else kind
    key = {"hide": "hide", "network": "rules", "files": "rules", "mounts": "rules"}.get(
        kind, "deny"
    )
    old = policy.get(table, {})
    return {**policy, table: {**old, key: [*old.get(key, []), value]}}


# --- a second reading ---------------------------------------------------------------------------


def _bits(text: str) -> tuple[int, int]:
    """Return family (4 or 6) and value; an IPv4-mapped address is IPv4."""
    if ":" not in text:
        return 4, int.from_bytes(socket.inet_pton(socket.AF_INET, text))
    value = int.from_bytes(socket.inet_pton(socket.AF_INET6, text))
    return (4, value & 0xFFFFFFFF) if value >> 32 == 0xFFFF else (6, value)


def _carried(value: int) -> int | None:
    """Return the IPv4 address that a NAT64 or 6to4 address stands for."""
    if value >> 32 == 0x64FF9B << 72 >> 8:
        return value & 0xFFFFFFFF
    return value >> 80 & 0xFFFFFFFF if value >> 112 == 0x2002 else None


def _inside(network: str, address: str, denied: bool) -> bool:
    base, _, length = network.partition("/")
    family, prefix = _bits(base)
    own, value = _bits(address)
    bits = int(length) if length else 128 if ":" in base else 32
    if family == 4 and ":" in base:
        bits -= 96
    if denied and family == 4 and own == 6:
        carried = _carried(value)
        if carried is None:
            return False
        own, value = 4, carried
    width = 32 if family == 4 else 128
    return own == family and value >> (width - bits) == prefix >> (width - bits)


def _has(ports: list[int | str], port: int) -> bool:
    for each in ports:
        first, _, last = str(each).partition("-")
        if int(first) <= port <= int(last or first):
            return True
    return False


def _entries(policy: Policy) -> list[tuple[bool, str, str | None, list[int | str]]]:
    """Return (allowed, target, protocol, ports) of all network entries."""
    found: list[tuple[bool, str, str | None, list[int | str]]] = [
        (on, target, None, []) for target, on in policy.network.services.items()
    ]
    for rule in policy.network.rules:
        target = rule.deny if rule.allow is None else rule.allow
        assert target is not None
        found.append((rule.allow is not None, target, rule.protocol, list(rule.ports)))
    return found


def _meets(protocol: str | None, ports: list[int | str], kind: str, port: int) -> bool:
    """Say whether a protocol (None: any) and ports ([]: of no concern) hold it."""
    if not ports:
        return protocol in (None, "any", kind)
    return kind in ("tcp", "udp") and protocol in (None, "any", kind) and _has(ports, port)


def _names_dns(policy: Policy) -> bool:
    """Say whether an entry that allows gives port 53 by number."""
    for on, target, protocol, ports in _entries(policy):
        service = CATALOGUE.get(target)
        if service is not None:
            protocol, ports = service.protocol, service.ports
        every = {"1-65535", "0-65535"} & {str(each) for each in ports}
        if on and protocol != "icmp" and not every and _has(ports, 53):
            return True
    return False


def naive_net(policy: Policy, kind: str, address: str, port: int) -> bool:
    """Say whether a policy without preset lets (kind, address, port) out; no names resolved."""
    family, value = _bits(address)
    if (value >> 24 == 127 and family == 4) or value == 0 or (family, value) == (6, 1):
        return True
    if port == 53 and kind in ("tcp", "udp") and not _names_dns(policy):
        return False
    allowed = policy.network.default == "allow"
    for on, target, protocol, ports in _entries(policy):
        service = CATALOGUE.get(target)
        networks = service.networks if service else [target] if target[0] in "0123456789:" else []
        if target == "*":
            networks = ["0.0.0.0/0", "::/0"]
        if service is not None:
            protocol, ports = (service.protocol, service.ports) if on else (None, [])
        if any(_inside(network, address, not on) for network in networks) and _meets(
            protocol, ports, kind, port
        ):
            if not on:
                return False
            allowed = True
    return allowed


def _named(pattern: str, name: str) -> bool:
    pattern = {"bücher.example": "xn--bcher-kva.example"}.get(pattern, pattern.lower().rstrip("."))
    if pattern == "*":
        return True
    mine, theirs = pattern.split(".")[::-1], name.split(".")[::-1]
    if mine[-1] != "*":
        return mine == theirs
    return len(theirs) >= len(mine) and theirs[: len(mine) - 1] == mine[:-1]


def naive_name(policy: Policy, name: str, kind: str, port: int) -> bool:
    """Say whether a policy without preset, closed by default, opens this for a name's addresses."""
    allowed = False
    for on, target, protocol, ports in _entries(policy):
        service = CATALOGUE.get(target)
        patterns = [*service.hosts, *service.mirrors] if service else [target]
        if service is not None:
            protocol, ports = (service.protocol, service.ports) if on else (None, [])
        elif on and target != "*" and protocol != "icmp":
            ports, protocol = ports or [80, 443], protocol or "tcp"
        if any(_named(pattern, name) for pattern in patterns) and _meets(
            protocol, ports, kind, port
        ):
            if not on:
                return False
            allowed = True
    return allowed


def naive_glob(pattern: str, text: str) -> bool:
    """Match `?`, `*` and `**` one character at a time."""
    if not pattern:
        return not text
    if pattern.startswith("/**/"):
        slashes = [at for at, each in enumerate(text) if each == "/"]
        return text[:1] == "/" and any(naive_glob(pattern[3:], text[at:]) for at in slashes)
    if pattern.startswith("**"):
        return any(naive_glob(pattern[2:], text[at:]) for at in range(len(text) + 1))
    if pattern[0] == "*":
        whole = text.split("/")[0]
        return any(naive_glob(pattern[1:], text[at:]) for at in range(len(whole) + 1))
    good = bool(text) and (text[0] == pattern[0] or (pattern[0] == "?" and text[0] != "/"))
    return good and naive_glob(pattern[1:], text[1:])


def naive_covers(pattern: str, path: str) -> bool:
    """Say whether a pattern matches a path or a directory above it."""
    above = [path]
    while above[-1] != "/":
        above.append(above[-1].rpartition("/")[0] or "/")
    return any(naive_glob(pattern, each) for each in above)


def naive_file(policy: Policy, access: str, path: str) -> bool:
    """Say whether a policy without preset allows an access."""
    if any(naive_covers(pattern, path) for pattern in policy.files.hide):
        return False
    rules = [
        rule
        for rule in policy.files.rules
        if any(naive_covers(pattern, path) for pattern in rule.paths)
    ]
    if any(access in rule.deny for rule in rules):
        return False
    return policy.files.default != "deny" or any(access in rule.allow for rule in rules)
