"""What a sandbox reaches while it runs: services inside, the network, its environment. Pure."""

from __future__ import annotations

import ipaddress
import re
import struct
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from libdsec.audit.report import Finding, Risk
from libdsec.audit.tree import Tree
from libdsec.model import SandboxPolicy

_LISTEN = "0A"  # TCP_LISTEN in /proc/net/tcp, see proc(5)
_ACCEPTS = 0x10000  # __SO_ACCEPTCON in /proc/net/unix
_HOSTING = ("github", "gitlab", "bitbucket", "codeberg", "githubusercontent")
_ENGINES = re.compile(r".*/(docker|containerd|podman|crio|buildkitd|dsecd)[^/]*\.sock", re.DOTALL)


def sockets(tcp: Iterable[str], unix: str, tree: Tree) -> Iterator[Finding]:
    """Yield a finding for each service that listens; arguments are texts of /proc/net."""
    for place in sorted(_listeners(tcp)):
        yield Finding(
            risk="medium", kind="service", path=place,
            reason="something listens here: the agent can talk to it, and to what stands behind it",
        )  # fmt: skip
    for line in unix.splitlines()[1:]:
        columns = line.split(maxsplit=7)
        if len(columns) == 8 and int(columns[3], 16) & _ACCEPTS:
            yield from _unix(columns[7])
    for entry in tree:
        if entry.type == "socket" and _ENGINES.fullmatch(entry.path) and tree.writable(entry):
            yield Finding(
                risk="critical", kind="service", path=entry.path, remedy="hide",
                reason="the socket of a container engine: who may use it is root on its host",
            )  # fmt: skip


def _unix(name: str) -> Iterator[Finding]:
    if not _ENGINES.fullmatch(name):
        yield Finding(
            risk="low", kind="service", path=name,
            reason="a unix socket listens here: the agent can talk to what stands behind it",
        )  # fmt: skip


def _listeners(tables: Iterable[str]) -> Iterator[str]:
    for table in tables:
        for line in table.splitlines()[1:]:
            columns = line.split()
            if len(columns) > 3 and columns[3] == _LISTEN:
                yield _place(columns[1])


def _place(text: str) -> str:
    """Return ``tcp://address:port`` for the hexadecimal words of /proc/net/tcp and tcp6."""
    words, _, port = text.partition(":")
    packed = b"".join(
        struct.pack("=I", int(words[at : at + 8], 16)) for at in range(0, len(words), 8)
    )
    address = ipaddress.ip_address(packed)
    host = f"[{address}]" if address.version == 6 else str(address)
    return f"tcp://{host}:{int(port, 16)}"


def network(sandbox_id: str, in_force: SandboxPolicy) -> Iterator[Finding]:
    """Yield what the sandbox's policy opens, and what of it its host does not enforce."""
    for row in in_force.rows:
        if row.state not in ("enforced", "closed"):
            why = "; ".join(row.reasons)
            yield Finding(
                risk="medium", kind="unenforced", path=sandbox_id,
                reason="a rule of its policy that the host does not fully enforce: it stands open",
                evidence=f"{row.place}: {row.verdict} {row.text} is {row.state}: {why}"[:300],
            )  # fmt: skip
    if in_force.network == "none" or any(row.state == "closed" for row in in_force.rows):
        return
    if in_force.policy is None:
        yield _open("high", "everything: the agent can fetch the fix and the answers")
    else:
        yield from _policy(in_force.policy)


def _preset(name: str) -> Iterator[Finding]:
    if name == "open":
        yield _open("high", "the public internet: the agent can fetch the fix and the answers")
    elif name == "swe":
        yield _open("high", "code hosting and registries: the agent can fetch the fix (policy swe)")


def _policy(policy: Mapping[str, Any]) -> Iterator[Finding]:
    yield from _preset(str(policy.get("extends", "")))
    part = policy.get("network", {})
    if part.get("default") == "allow":
        yield _open("high", "all that no rule denies: the agent can fetch the fix and the answers")
    yield from _services(part.get("services", {}))
    allowed = [str(rule["allow"]) for rule in part.get("rules", ()) if "allow" in rule]
    yield from _services(dict.fromkeys(allowed, True))


def _services(services: Mapping[str, bool]) -> Iterator[Finding]:
    for name, on in services.items():
        if not on:
            continue
        if name == "*" or any(host in name for host in _HOSTING):
            yield _open("high", f"{name}: the agent can fetch the project's later commits")
        else:
            yield _open("medium", f"{name}: a later release of the project may hold the fix")


def _open(risk: Risk, what: str) -> Finding:
    return Finding(
        risk=risk, kind="network", path="network", reason="close it unless the task needs it",
        evidence=f"open to {what}",
    )  # fmt: skip
