"""What typed rules allow: a model to test mechanisms against, written for clarity. Pure.

It follows the text of `dsecd.policy.rules` word by word and decides one question at a time, by
looking at every rule. Kernel mechanisms must agree with it; nothing calls it while a sandbox runs.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Iterable, Mapping
from typing import Literal

import msgspec

from dsecd.policy import globs
from dsecd.policy.rules import (
    CHECKED_PORTS,
    DNS_PORT,
    EVERY_ACCESS,
    LAST_PORT,
    Access,
    FilePolicy,
    NameRule,
    NetPolicy,
    SystemPolicy,
    Verdict,
    opens_dns,
)

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Kind = Literal["tcp", "udp", "icmp", "other"]  # of a packet or call; "other" is the rest of IP
NameKind = Literal["tcp", "udp", "icmp"]
KINDS: tuple[NameKind, ...] = ("tcp", "udp", "icmp")  # that a name may open


class Opening(msgspec.Struct, frozen=True, order=True):
    """A protocol and a range of its ports; icmp has the whole range."""

    protocol: NameKind
    first_port: int
    last_port: int


class NameDecision(msgspec.Struct, frozen=True, kw_only=True):
    """`answered`: the resolver asks and answers; otherwise NXDOMAIN. `openings` are what each
    address of the answer is entered with, sorted and disjoint; with `check_names` nothing is
    entered, and they are what the relay passes on. `private`: keep addresses that are not global.
    """

    answered: bool
    openings: tuple[Opening, ...] = ()
    private: bool = False


Entered = Mapping[Address, Collection[Opening]]  # what the resolver has entered


def unmapped(address: Address) -> Address:
    """Return the IPv4 address in an IPv4-mapped IPv6 address, every other one as it is."""
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped
    return address


def decide_net(
    policy: NetPolicy, kind: Kind, address: Address, port: int, entered: Entered | None = None
) -> Verdict:
    """Return the verdict on what leaves for `address`; `port` is 0 where there is none."""
    target = unmapped(address)
    if target.is_loopback or target.is_unspecified:
        return "allow"
    if port == DNS_PORT and kind in ("tcp", "udp") and not opens_dns(policy):
        return "deny"
    found = {
        rule.verdict
        for rule in policy.rules
        if target in rule.prefix
        and rule.protocol in ("any", kind)
        and rule.first_port <= port <= rule.last_port
    }
    if "deny" in found:
        return "deny"
    opened = any(
        opening.protocol == kind and opening.first_port <= port <= opening.last_port
        for opening in (entered or {}).get(target, ())
    )
    return "allow" if opened or "allow" in found else policy.default


def name_matches(pattern: str, name: str) -> bool:
    """Say whether a pattern of `NameRule` covers `name`, which is in the same form."""
    if pattern.startswith("*."):
        return name.endswith(pattern[1:]) and len(name) >= len(pattern)
    return pattern in ("*", name)


def decide_name(policy: NetPolicy, name: str) -> NameDecision:
    """Return what the sandbox's resolver does with a question for `name`."""
    covering = [rule for rule in policy.names if name_matches(rule.pattern, name)]
    private = any(rule.private for rule in covering if rule.verdict == "allow")
    if policy.default == "allow":
        denied = any(rule.verdict == "deny" for rule in covering)
        return NameDecision(answered=not denied, private=private and not denied)
    openings = tuple(_openings(covering))
    if policy.check_names:
        openings = tuple(
            Opening("tcp", port, port)
            for port in CHECKED_PORTS
            if any(each.protocol == "tcp" and _holds(each, port) for each in openings)
        )
    return NameDecision(
        answered=bool(openings), openings=openings, private=private and bool(openings)
    )


def _holds(opening: Opening, port: int) -> bool:
    return opening.first_port <= port <= opening.last_port


def _openings(rules: Iterable[NameRule]) -> Iterable[Opening]:
    """Yield the ports of rules that allow less those of rules that deny."""
    known = list(rules)
    for kind in KINDS:
        # verdicts change only where a range begins or has ended
        own = [rule for rule in known if rule.protocol in ("any", kind)]
        edges = {rule.first_port for rule in own} | {rule.last_port + 1 for rule in own}
        places = sorted(edges | {LAST_PORT + 1})
        start: int | None = None
        for place in places:
            verdicts = {rule.verdict for rule in own if rule.first_port <= place <= rule.last_port}
            opened = verdicts == {"allow"}
            if opened and start is None:
                start = place
            elif not opened and start is not None:
                yield Opening(kind, start, place - 1)
                start = None


def decide_file(policy: FilePolicy, access: Access, path: str) -> Verdict:
    """Return the verdict on one access to an absolute, normalised path without symbolic links."""
    if any(globs.covers(pattern, path) for pattern in policy.hidden):
        return "deny"
    found = {
        rule.verdict
        for rule in policy.rules
        if access in rule.access and globs.covers(rule.pattern, path)
    }
    return _winner(found, policy.default)


def decide_rename(policy: FilePolicy, source: str, target: str) -> Verdict:
    """Return the verdict on rename(2): a read of the old path and a write of both.

    What cannot be read could else be given a name under which it can. No protected path is taken
    along: renaming a directory above what a rule protects would carry it out of the rule's reach.
    Of a pattern with wildcards the literal directories at its start are held in place in this way.
    """
    anchors = [globs.head(pattern) for pattern in policy.hidden] + [
        globs.head(rule.pattern) for rule in policy.rules if rule.verdict == "deny"
    ]
    beneath = source.rstrip("/") + "/"
    if any(anchor == source or anchor.startswith(beneath) for anchor in anchors):
        return "deny"
    needed = {
        decide_file(policy, "read", source),
        decide_file(policy, "write", source),
        decide_file(policy, "write", target),
    }
    return "deny" if "deny" in needed else "allow"


def decide_link(policy: FilePolicy, source: str, target: str) -> Verdict:
    """Return the verdict on link(2): a write of the new path, which opens no more than the old."""
    opens_more = any(
        decide_file(policy, access, source) == "deny"
        and decide_file(policy, access, target) == "allow"
        for access in EVERY_ACCESS
    )
    return "deny" if opens_more else decide_file(policy, "write", target)


def decide_ioctl(policy: SystemPolicy, request: int) -> Verdict:
    """Return the verdict on an ioctl(2) request."""
    found = {rule.verdict for rule in policy.ioctls if rule.request == request & 0xFFFFFFFF}
    return _winner(found, policy.ioctl_default)


def decide_mount(policy: SystemPolicy, fstype: str, path: str) -> Verdict:
    """Return the verdict on mounting a file system type at a path."""
    found = {
        rule.verdict
        for rule in policy.mounts
        if rule.fstype in ("*", fstype) and globs.covers(rule.pattern, path)
    }
    return _winner(found, policy.mount_default)


def decide_unix(policy: SystemPolicy, name: str) -> Verdict:
    """Return the verdict on connecting to a unix socket: a path, or `@` and an abstract name."""
    meets = globs.matches if name.startswith("@") else globs.covers
    found = {
        rule.verdict
        for rule in policy.unix
        if rule.pattern.startswith("@") == name.startswith("@") and meets(rule.pattern, name)
    }
    return _winner(found, policy.unix_default)


def decide_vsock(policy: SystemPolicy, cid: int, port: int) -> Verdict:
    """Return the verdict on an AF_VSOCK peer."""
    found = {
        rule.verdict
        for rule in policy.vsock
        if rule.cid in (None, cid) and rule.first_port <= port <= rule.last_port
    }
    return _winner(found, policy.vsock_default)


def _winner(found: set[Verdict], default: Verdict) -> Verdict:
    if "deny" in found:
        return "deny"
    return "allow" if "allow" in found else default
