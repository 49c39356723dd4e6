"""Generated policies of the language, what to try under them, and what the model says of it. Pure.

The universe is small, so that rules overlap often; addresses and ports lie at the edges of the
rules, where an enforcement that is off by one shows.
"""

from __future__ import annotations

import ipaddress
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from dsecd.policy import catalogue, language, reference
from dsecd.policy.compile import compile_policy
from dsecd.policy.reference import Address, Kind, Opening
from dsecd.policy.rules import DNS_PORT, LAST_PORT, NetPolicy
from dsecd.policy.table import compile_table
from libdsec.errors import InvalidArgument

# connect(2); sendto(2); a packet of a socket that was connected before the policy was bound; an
# echo request, whose arrival tells; a frame of a packet socket, judged on the link
Way = Literal["connect", "sendto", "egress", "ping", "frame"]
WAYS: tuple[Way, ...] = ("connect", "sendto", "egress", "ping", "frame")

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
        networks = ["192.0.2.123"]
        ports = [123]
        protocol = "udp"
        """
    ),
}
SERVICES = ("pypi", "npm", "debian", "inside", "clock")
DOMAINS = ("pypi.org", "*.pypi.org", "a.pypi.org", "*.corp.example", "x.corp.example", "*.example")
NETWORKS = (
    "0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.3", "10.1.2.2/31",
    "128.0.0.0/1", "192.0.2.0/24", "192.0.2.128/25", "::/0", "::/1", "2000::/3", "2001:db8::/32",
    "2001:db8:1::/48", "2001:db8:1::/127", "2001:db8:1::1", "::ffff:10.1.0.0/112", "64:ff9b::/96",
    "2002:a01::/32",
)  # fmt: skip
RANGES: tuple[int | str, ...] = (
    22, 53, 80, 443, "50-60", "8000-8010", "80-443", "1-65535", "0-65535", 65535,
)  # fmt: skip
ADDRESSES = (
    "10.1.9.9", "10.2.0.1", "192.0.2.77", "192.0.2.123", "198.51.100.7", "127.0.0.1", "0.0.0.0",
    "::1", "::", "64:ff9b::a01:203", "64:ff9b::c000:201", "2002:a01:203::1", "2001:db8:2::1",
)  # fmt: skip
PORTS = (1, 21, 22, 52, 53, 54, 79, 80, 81, 123, 442, 443, 444, 7999, 8005, 8011, 65534, 65535)

# what a DNS server would say; which of it the resolver keeps is written down here by hand
GLOBAL, PRIVATE, NEVER = "global", "private", "never"
ANSWERS: dict[str, dict[str, str]] = {
    "pypi.org": {"151.101.0.223": GLOBAL, "2a04:4e42::223": GLOBAL},
    "a.pypi.org": {"151.101.0.223": GLOBAL, "151.101.64.223": GLOBAL, "10.1.2.3": PRIVATE},
    "a.b.pypi.org": {"169.254.169.254": NEVER, "127.0.0.1": NEVER, "151.101.128.223": GLOBAL},
    "xpypi.org": {"151.101.192.223": GLOBAL},
    "registry.yarnpkg.com": {"104.16.1.35": GLOBAL, "2606:4700::6810:123": GLOBAL},
    "corp.example": {"8.8.4.4": GLOBAL},
    "x.corp.example": {"10.1.2.2": PRIVATE, "10.2.0.1": PRIVATE, "8.8.8.8": GLOBAL},
    "time.example.org": {"1.1.1.1": GLOBAL, "fd00::123": PRIVATE},
    "other.net": {"9.9.9.9": GLOBAL},
}
RESOLVERS = ("10.213.0.1", "fd5d:ec::1")


@dataclass(frozen=True, slots=True)
class Attempt:
    """Something that a sandbox's process does; `port` is 0 where there is none."""

    way: Way
    kind: Kind
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Scenario:
    """A policy and the names that the sandbox asks for before it tries anything.

    `written` is the policy in the language, for people.
    """

    written: dict[str, Any]
    net: NetPolicy
    names: tuple[str, ...]


# --- the model ----------------------------------------------------------------------------------


def told(net: NetPolicy, name: str, version: int) -> set[str] | None:
    """Return the addresses of a family that the model's resolver tells, None for NXDOMAIN."""
    decision = reference.decide_name(net, name)
    if not decision.answered:
        return None
    kept = (GLOBAL, PRIVATE) if decision.private else (GLOBAL,)
    return {
        text
        for text, reach in ANSWERS[name].items()
        if reach in kept and (":" in text) == (version == 6)
    }


def entered(net: NetPolicy, names: Iterable[str]) -> dict[Address, set[Opening]]:
    """Return what asking for `names` opens, by address."""
    found: dict[Address, set[Opening]] = {}
    for name in names:
        openings = reference.decide_name(net, name).openings
        for text in (told(net, name, 4) or set()) | (told(net, name, 6) or set()):
            found.setdefault(ipaddress.ip_address(text), set()).update(openings)
    return found


def model(scenario: Scenario) -> Callable[[Attempt], bool]:
    """Return what says whether an attempt is allowed: the reference, and that the sandbox's
    resolver can be asked under any policy."""
    opened = entered(scenario.net, scenario.names)
    resolvers = {ipaddress.ip_address(text) for text in RESOLVERS}

    def allows(attempt: Attempt) -> bool:
        address = reference.unmapped(ipaddress.ip_address(attempt.address))
        if address in resolvers and attempt.port == DNS_PORT and attempt.kind in ("tcp", "udp"):
            return True
        verdict = reference.decide_net(scenario.net, attempt.kind, address, attempt.port, opened)
        return verdict == "allow"

    return allows


# --- policies -----------------------------------------------------------------------------------


def scenario(rng: random.Random) -> Scenario:
    """Return a policy that the compiler takes."""
    while True:
        written = _policy(rng)
        try:
            net = compile_policy(language.from_object(written), CATALOGUE).net
            compile_table(net)
        except InvalidArgument:
            continue  # contradictory, say
        names = tuple(rng.sample(sorted(ANSWERS), rng.randint(0, 6)))
        return Scenario(written, net, names)


def net_of(rules: list[dict[str, Any]]) -> NetPolicy:
    """Return the typed rules of network rules of the language."""
    return compile_policy(language.from_object({"network": {"rules": rules}}), CATALOGUE).net


def _policy(rng: random.Random) -> dict[str, Any]:
    targets = (*SERVICES, *DOMAINS, *NETWORKS)
    services = {rng.choice(targets): rng.random() < 0.6 for _ in range(rng.randint(0, 2))}
    rules = [_rule(rng) for _ in range(rng.choice((0, 1, 2, 3, 4, 8, 16)))]
    if rng.random() < 0.1:  # more ports than fit into one row of the kernel's table
        ports = [f"{port}-{port + rng.randint(0, 1)}" for port in range(1, 120, 3)]
        rules.append({"allow": rng.choice(NETWORKS), "ports": ports})
    network: dict[str, Any] = {"services": services, "rules": rules}
    default = rng.choice((None, None, None, "deny", "allow"))
    if default:
        network["default"] = default
    extends = rng.choice((None, None, None, None, "swe", "open"))
    return {"network": network, **({"extends": extends} if extends else {})}


def _rule(rng: random.Random) -> dict[str, Any]:
    verdict = rng.choice(("allow", "allow", "deny"))
    if rng.random() < 0.15:
        return {verdict: rng.choice(SERVICES)}
    made: dict[str, Any] = {verdict: rng.choice((*DOMAINS, *NETWORKS, *NETWORKS, "*"))}
    protocol = rng.choice((None, None, "tcp", "udp", "icmp", "any"))
    if protocol:
        made["protocol"] = protocol
    if protocol != "icmp" and rng.random() < 0.7:
        made["ports"] = rng.sample(RANGES, rng.randint(1, 2))
    return made


# --- attempts -----------------------------------------------------------------------------------


def edges(first: int, last: int, most: int) -> list[int]:
    """Return the ends of a range and their neighbours outside, from 0 to `most`."""
    return [value for value in (first - 1, first, last, last + 1) if 0 <= value <= most]


def addresses_of(net: NetPolicy, names: Iterable[str]) -> list[str]:
    """Return addresses at the edges of the prefixes, mapped ones, those of names and others."""
    found = [*ADDRESSES, *RESOLVERS, *(text for name in names for text in ANSWERS[name])]
    for rule in net.rules:
        prefix, bits = rule.prefix, rule.prefix.max_prefixlen
        make = ipaddress.IPv4Address if bits == 32 else ipaddress.IPv6Address
        first, last = int(prefix.network_address), int(prefix.broadcast_address)
        found += [str(make(value)) for value in edges(first, last, (1 << bits) - 1)]
    mapped = [f"::ffff:{text}" for text in found if ":" not in text]
    kept = [text for text in [*found, *mapped] if not ipaddress.ip_address(text).is_multicast]
    return list(dict.fromkeys(kept))


def ports_of(net: NetPolicy) -> list[int]:
    """Return ports at the edges of the rules, and others."""
    own = {p for r in net.rules for p in edges(r.first_port, r.last_port, LAST_PORT)}
    own |= {p for r in net.names for p in edges(r.first_port, r.last_port, LAST_PORT)}
    return sorted({*PORTS, *own} - {0})


def attempts(rng: random.Random, scenario: Scenario, count: int) -> list[Attempt]:
    """Return `count` attempts at the edges of a policy, all ways but "egress"."""
    addresses, ports = addresses_of(scenario.net, scenario.names), ports_of(scenario.net)
    named = _named(scenario)
    found: list[Attempt] = []
    while len(found) < count:
        if named and rng.random() < 0.3:
            address, port = rng.choice(named)
        else:
            address, port = rng.choice(addresses), rng.choice(ports)
        made = _attempt(rng, address, port)
        if made is not None:
            found.append(made)
    return found


def _named(scenario: Scenario) -> list[tuple[str, int]]:
    """Return the addresses that names opened, with ports at the edges of what is open there."""
    return [
        (str(address), port)
        for address, openings in entered(scenario.net, scenario.names).items()
        for opening in sorted(openings)
        for port in edges(opening.first_port, opening.last_port, LAST_PORT)
        if port
    ]


def _attempt(rng: random.Random, address: str, port: int) -> Attempt | None:
    """Return a way of trying an address; None when the one that was drawn cannot be used there."""
    way: Way = rng.choice(("connect", "connect", "sendto", "ping", "frame", "frame"))
    if way in ("ping", "frame") and not travels(address):
        return None
    if way == "ping":
        return Attempt(way, "icmp", address, 0)
    kinds: dict[Way, Sequence[Kind]] = {
        "connect": ("tcp", "udp"),
        "sendto": ("udp",),
        "frame": ("tcp", "udp", "icmp", "other"),
    }
    kind = rng.choice(kinds[way])
    return Attempt(way, kind, address, port if kind in ("tcp", "udp") else 0)


def travels(address: str) -> bool:
    """Say whether a packet with this address leaves the box and is taken in by the world."""
    target = ipaddress.ip_address(address)
    if isinstance(target, ipaddress.IPv4Address):
        return 0 < int(target) >> 24 < 224 and not target.is_loopback
    return int(target) > 1 and target.ipv4_mapped is None and not target.is_link_local


def standing(rng: random.Random, count: int) -> list[Attempt]:
    """Return what sockets are connected to, once, that policies then come and go around."""
    net = net_of([{"allow": network} for network in NETWORKS])
    places = [
        (text, port)
        for text in addresses_of(net, sorted(ANSWERS))
        for port in PORTS
        if travels(text.removeprefix("::ffff:"))
    ]
    return [Attempt("egress", "udp", text, port) for text, port in rng.sample(places, count)]
