"""Generated network rules and questions, from a universe so small that rules overlap often."""

from __future__ import annotations

import ipaddress
import random

from dsecd.policy.reference import Kind, Opening, decide_net
from dsecd.policy.rules import NetPolicy, NetRule

NETWORKS = (
    "0.0.0.0/0", "10.0.0.0/8", "10.1.0.0/16", "10.1.2.0/24", "10.1.2.3/32", "10.1.2.2/31",
    "128.0.0.0/1", "192.0.2.128/25", "::/0", "::/1", "2000::/3", "2001:db8::/32",
    "2001:db8:1::/48", "2001:db8:1::1/128", "2001:db8:1::/127", "64:ff9b::/96",
)  # fmt: skip
ADDRESSES = (
    "10.1.2.3", "10.1.2.2", "10.1.2.9", "10.1.9.9", "10.2.0.1", "192.0.2.1", "192.0.2.129",
    "198.51.100.7", "::ffff:10.1.2.3", "::ffff:192.0.2.129", "64:ff9b::a01:203",
    "2001:db8:1::1", "2001:db8:1::2", "2001:db8:2::1", "2620::1", "127.0.0.1", "::1",
)  # fmt: skip
PORTS = (1, 22, 52, 53, 54, 80, 81, 443, 8000, 8005, 65535)
KINDS: tuple[Kind, ...] = ("tcp", "udp", "icmp", "other")
NUMBERS = {"tcp": 6, "udp": 17, "other": 132}

Question = tuple[Kind, str, int]


def policy(rng: random.Random, most: int = 12) -> NetPolicy:
    """Return a policy; one in eight has many ranges at one prefix, for rows in parts."""
    made = rules(rng, rng.randint(0, most))
    if rng.random() < 0.125:
        prefix = ipaddress.ip_network(rng.choice(NETWORKS))
        made += [
            NetRule(
                verdict=rng.choice(("allow", "allow", "deny")),
                protocol=rng.choice(("tcp", "udp")),
                prefix=prefix,
                first_port=port,
                last_port=port + rng.randint(0, 1),
            )
            for port in sorted(rng.sample(range(1, 120, 3), 36))
        ]
    return NetPolicy(rules=tuple(made), default=rng.choice(("deny", "deny", "allow")))


def rules(rng: random.Random, count: int) -> list[NetRule]:
    """Return rules."""
    return [_rule(rng) for _ in range(count)]


def _rule(rng: random.Random) -> NetRule:
    protocol = rng.choice(("tcp", "udp", "icmp", "any"))
    first, last = 0, 65535
    if protocol in ("tcp", "udp") and rng.random() < 0.8:
        first, last = sorted((rng.choice(PORTS), rng.choice(PORTS)))
    return NetRule(
        verdict=rng.choice(("allow", "allow", "deny")),
        protocol=protocol,
        prefix=ipaddress.ip_network(rng.choice(NETWORKS)),
        first_port=first,
        last_port=last,
    )


def opening(rng: random.Random) -> Opening:
    """Return ports that a name opens."""
    kind = rng.choice(("tcp", "udp", "icmp"))
    if kind == "icmp":
        return Opening("icmp", 0, 65535)
    first, last = sorted((rng.choice(PORTS), rng.choice(PORTS)))
    return Opening(kind, first, last)


def allowed(
    policy: NetPolicy, question: Question, entered: dict[str, list[Opening]] | None = None
) -> bool:
    """Return the reference's verdict; `entered` by the text of the address."""
    kind, address, port = question
    known = {ipaddress.ip_address(text): found for text, found in (entered or {}).items()}
    verdict = decide_net(policy, kind, ipaddress.ip_address(address), port, known)
    return verdict == "allow"
