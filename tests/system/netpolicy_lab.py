"""Sandboxes for the tests of network policy: cgroups and network namespaces of our own.

The namespaces are those of `dsec_bench.policy.world`; `Agent` is a process in a sandbox's cgroup.
"""

from __future__ import annotations

import contextlib
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dsec_bench.policy.world import BOX as BOX
from dsec_bench.policy.world import Agent as Process
from dsec_bench.policy.world import Cgroups, Wire

from dsecd.host.netpolicy import Access, NetworkPolicies, sandbox_level
from dsecd.policy.rules import NetPolicy, NetRule, Protocol, Verdict
from dsecd.policy.table import compile_table

_AGENT = Path(__file__).with_name("netpolicy_agent.py")


def rule(
    verdict: Verdict, prefix: str, first: int = 0, last: int | None = None, kind: Protocol = "any"
) -> NetRule:
    """Return a rule; one port when only the first is given."""
    return NetRule(
        verdict=verdict,
        protocol=kind,
        prefix=ipaddress.ip_network(prefix),
        first_port=first,
        last_port=65535 if kind in ("any", "icmp") else first if last is None else last,
    )


def access(*rules: NetRule, default: Verdict = "deny", **more: Any) -> Access:
    return Access(table=compile_table(NetPolicy(rules=rules, default=default)), **more)


class Agent(Process):
    """`agent.calls(...)` and so on are functions of netpolicy_agent."""

    def __init__(self, cgroup: Path, box: int) -> None:
        super().__init__(cgroup / "cgroup.procs", box, _AGENT)


class Lab:
    """One sandbox that is bound to nothing yet, with its agent."""

    def __init__(self, pins: Path | None = None, **options: Any) -> None:
        with contextlib.ExitStack() as undo:
            self.cgroups = undo.enter_context(contextlib.closing(Cgroups()))
            self.wire = undo.enter_context(contextlib.closing(Wire()))
            level = sandbox_level(self.cgroups.path)
            self.policies = NetworkPolicies(self.cgroups.fd, level=level, pins=pins, **options)
            undo.callback(lambda: self.policies.close(remove=True))
            self.policies.start()
            self.cgroup = self.cgroups.make("box")
            self.agent = undo.enter_context(
                contextlib.closing(Agent(self.cgroups.path / "box", self.wire.box))
            )
            self._undo = undo.pop_all()

    def close(self) -> None:
        self._undo.close()


@contextlib.contextmanager
def lab(**options: Any) -> Iterator[Lab]:
    with contextlib.closing(Lab(**options)) as made:
        yield made
