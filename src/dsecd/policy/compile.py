"""A policy of the language becomes typed rules: `compile_policy`. Pure.

What cannot be obeyed is an error that names the rule: an unknown service, a network with host bits,
a rule that allows only what others deny. A policy may deny what the preset that it extends allows,
and may override that preset's `services` and defaults; it may not allow what a rule of the preset
denies: deny wins, so that such a rule would have no effect and its author would believe otherwise.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable
from ipaddress import IPv4Network, IPv6Network
from typing import Any, TypeVar

import msgspec

from dsecd.policy import catalogue, compile_network, compile_system, contradictions, targets
from dsecd.policy.catalogue import Catalogue
from dsecd.policy.language import Network, Policy
from dsecd.policy.lines import Line
from dsecd.policy.presets import PRESETS
from dsecd.policy.rules import FilePolicy, NetPolicy, SystemPolicy, Verdict
from libdsec.errors import InvalidArgument

T = TypeVar("T")
MAX_LINES = 1000  # people must be able to read it, and the daemon to compile it between two events
MAX_RULES = 10_000  # of one kind; a policy is held in kernel memory


class Compiled(msgspec.Struct, frozen=True, kw_only=True):
    """What mechanisms enforce, in a canonical order: policies that mean the same are equal keys.

    `lines` are the entries of the language that it came from, for explanations.
    """

    net: NetPolicy
    files: FilePolicy
    system: SystemPolicy
    lines: tuple[Line, ...]


def compile_policy(policy: Policy, services: Catalogue | None = None) -> Compiled:
    """Return the typed rules of `policy`, with those of the preset that it extends.

    `services` is the catalogue; the shipped one by default. Raises `InvalidArgument`, naming the
    rule, for what is malformed, unknown or contradictory.
    """
    known = catalogue.shipped() if services is None else services
    layers = [("", policy)]
    if policy.extends is not None:
        layers.insert(0, (policy.extends, _without(PRESETS[policy.extends], policy)))
    lines = [line for layer, part in layers for line in _lines(part, layer, known)]
    if len(lines) > MAX_LINES:
        raise InvalidArgument(
            f"policy: {len(lines)} entries, at most {MAX_LINES} are taken; use fewer, wider ones",
            field="policy",
        )
    contradictions.refuse(lines)
    parts = [part for _, part in layers]

    def default(table: str, otherwise: Verdict) -> Verdict:
        return _said(parts, "default", table, otherwise)

    checks, otherwise = _said(parts, "check_names", "network", False), default("network", "deny")
    if checks and otherwise == "allow":
        targets.refuse(
            "network.check_names",
            'needs default = "deny": what no rule closes is reached by its address, unchecked',
        )
    return Compiled(
        net=NetPolicy(
            rules=_gathered(lines, "nets"),
            names=_gathered(lines, "names"),
            default=otherwise,
            check_names=checks,
        ),
        files=FilePolicy(
            rules=_gathered(lines, "files"),
            hidden=_gathered(lines, "hidden"),
            default=default("files", "allow"),
        ),
        system=SystemPolicy(
            ioctls=_gathered(lines, "ioctls"),
            mounts=_gathered(lines, "mounts"),
            unix=_gathered(lines, "unix"),
            vsock=_gathered(lines, "vsock"),
            ioctl_default=default("ioctls", "allow"),
            mount_default=default("mounts", "allow"),
            unix_default=default("unix", "allow"),
            vsock_default=default("vsock", "deny"),
        ),
        lines=tuple(lines),
    )


def _without(base: Policy, own: Policy) -> Policy:
    """Return the preset less the services that the policy itself turns on or off."""
    services = {
        name: on for name, on in base.network.services.items() if name not in own.network.services
    }
    network: Network = msgspec.structs.replace(base.network, services=services)
    return msgspec.structs.replace(base, network=network)


def _lines(policy: Policy, layer: str, known: Catalogue) -> Iterable[Line]:
    yield from compile_network.lines(policy.network, layer, known)
    yield from compile_system.lines(policy, layer)


def _said(parts: list[Policy], key: str, table: str, otherwise: T) -> T:
    """Return what the last of `parts` that says something of `key` in a table says."""
    for part in reversed(parts):
        value: T | None = getattr(getattr(part, table), key)
        if value is not None:
            return value
    return otherwise


def _gathered(lines: list[Line], kind: str) -> tuple[Any, ...]:
    """Return the rules of one kind of all lines, each once, in an order of their own."""
    found = dict.fromkeys(itertools.chain.from_iterable(map(operator.attrgetter(kind), lines)))
    if len(found) > MAX_RULES:
        raise InvalidArgument(
            f"policy: {len(found)} rules for {kind}, at most {MAX_RULES} are taken; "
            "use fewer, wider rules",
            field="policy",
        )
    return tuple(sorted(found, key=_order))


def _order(rule: Any) -> bytes:
    """Return bytes that sort equal rules alike, whatever the order in which they were written."""
    return _ENCODER.encode(rule)


def _packed(network: IPv4Network | IPv6Network) -> tuple[bytes, int]:
    return network.network_address.packed, network.prefixlen


_ENCODER = msgspec.json.Encoder(enc_hook=_packed, order="deterministic")
