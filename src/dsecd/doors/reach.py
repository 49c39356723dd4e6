"""Which names a policy lets a sandbox reach through the host, and at which addresses. Pure.

Proxy and relay connect from the host, where no program of the policy sees it: what the policy
says is asked here.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsecd.doors.upstream import PORT
from dsecd.policy.rules import NetPolicy
from dsecd.resolver.names import NameTable, Ruling
from dsecd.resolver.reserved import Address


class Reach:
    """The answers of one policy."""

    def __init__(self, policy: NetPolicy) -> None:
        self._open = policy.default == "allow"
        self._names = NameTable(policy)
        self._closed = [
            rule
            for rule in policy.rules
            if rule.verdict == "deny" and rule.protocol in ("tcp", "any")
        ]

    def ruling(self, host: str, port: int = PORT) -> Ruling | None:
        """Return what holds for TCP at a port of `host`; None when the policy does not open it."""
        found = self._names.judge(host)
        opened = self._open or any(
            opening.protocol == "tcp" and opening.first_port <= port <= opening.last_port
            for opening in found.openings
        )
        return found if found.answered and opened else None

    def allowed(self, addresses: Iterable[Address], port: int = PORT) -> list[str]:
        """Return those of a name's addresses that no rule denies: that wins over a name's rule."""
        closed = [rule.prefix for rule in self._closed if rule.first_port <= port <= rule.last_port]
        return [
            str(address) for address in addresses if not any(address in prefix for prefix in closed)
        ]
