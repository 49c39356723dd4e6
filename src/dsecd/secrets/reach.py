"""Which names with secrets a policy lets a sandbox reach, and at which addresses. Pure.

The proxy connects from the host, where no program of the sandbox's policy sees it: what the policy
says is asked here.
"""

from __future__ import annotations

from collections.abc import Iterable

from dsecd.policy.rules import NetPolicy
from dsecd.resolver.names import NameTable, Ruling
from dsecd.resolver.reserved import Address
from dsecd.secrets.upstream import PORT


class Reach:
    """The answers of one policy."""

    def __init__(self, policy: NetPolicy) -> None:
        self._open = policy.default == "allow"
        self._names = NameTable(policy)
        self._closed = [
            rule.prefix
            for rule in policy.rules
            if rule.verdict == "deny"
            and rule.protocol in ("tcp", "any")
            and rule.first_port <= PORT <= rule.last_port
        ]

    def ruling(self, host: str) -> Ruling | None:
        """Return what holds for HTTPS at `host`; None when the policy does not open it."""
        found = self._names.judge(host)
        opened = self._open or any(
            opening.protocol == "tcp" and opening.first_port <= PORT <= opening.last_port
            for opening in found.openings
        )
        return found if found.answered and opened else None

    def allowed(self, addresses: Iterable[Address]) -> list[str]:
        """Return those of a name's addresses that no rule denies: that wins over a name's rule."""
        return [
            str(address)
            for address in addresses
            if not any(address in prefix for prefix in self._closed)
        ]
