"""The policies that the bench binds: eight rules each, unlike every other; for us and for nft(8).

Rule sets of nftables are what an operator would write who knows it: one table, a map from the
interface to the sandbox's chain, and in the chain one look-up in the sandbox's set. Pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator

from dsecd.host.netpolicy import Access
from dsecd.policy.rules import NetPolicy, NetRule, Protocol
from dsecd.policy.table import compile_table

TABLE = "dsec_bench"
SERVER, PORT = "192.0.2.1", 9  # what every policy allows
REACHED = "192.0.2.0/24"
HOSTS = 6


def hosts(number: int) -> Iterator[str]:
    """Yield the addresses that policy `number` alone allows, at port 443."""
    for last in range(HOSTS):
        yield f"10.{number >> 8 & 255}.{number & 255}.{last + 10 * (number >> 16)}"


def rules(number: int) -> NetPolicy:
    """Return policy `number`."""
    entries: list[tuple[str, Protocol, int]] = [(text, "tcp", 443) for text in hosts(number)]
    entries += [(REACHED, "tcp", PORT), (REACHED, "udp", PORT)]
    return NetPolicy(
        rules=tuple(
            NetRule(
                verdict="allow",
                protocol=protocol,
                prefix=ipaddress.ip_network(prefix),
                first_port=port,
                last_port=port,
            )
            for prefix, protocol, port in entries
        )
    )


def access(number: int) -> Access:
    """Return policy `number` as it is bound; compiled, as it is long before a sandbox starts."""
    made = Access(table=compile_table(rules(number)))
    hash(made.table)
    return made


def elements(number: int) -> str:
    """Return the set of nft(8) of policy `number`."""
    entries = [f"{text} . tcp . 443" for text in hosts(number)]
    entries += [f"{REACHED} . tcp . {PORT}", f"{REACHED} . udp . {PORT}"]
    return "{ " + ", ".join(entries) + " }"


def ruleset(interfaces: list[str]) -> str:
    """Return the table of nft(8) for sandboxes behind `interfaces`, with a policy each."""
    lines = [f"table inet {TABLE} {{"]
    for number in range(len(interfaces)):
        lines += [
            f"set s{number} {{ type ipv4_addr . inet_proto . inet_service; flags interval;",
            f"  elements = {elements(number)}; }}",
            f"chain c{number} {{ ip daddr . meta l4proto . th dport @s{number} accept; drop; }}",
        ]
    jumps = [f'"{name}" : jump c{number}' for number, name in enumerate(interfaces)]
    lines += [
        f"map boxes {{ type ifname : verdict; elements = {{ {', '.join(jumps)} }}; }}",
        "chain first { type filter hook prerouting priority raw; iifname vmap @boxes; }",
        "}",
    ]
    return "\n".join(lines)


def update(place: int, number: int) -> str:
    """Return what gives the sandbox in `place` policy `number`, in one transaction."""
    return (
        f"flush set inet {TABLE} s{place}\nadd element inet {TABLE} s{place} {elements(number)}\n"
    )
