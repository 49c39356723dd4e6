"""Which names a policy lets a sandbox ask for, and what their addresses open. Pure.

The semantics are those of `dsecd.policy.rules`: a name's openings are the ports of all allowing
rules that cover it, less those of all denying rules that cover it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import msgspec

from dsecd.policy.rules import CHECKED_PORTS, NameRule, NetPolicy

_PLAIN = re.compile(rb"[a-z0-9_-]{1,63}").fullmatch
Protocol = Literal["tcp", "udp", "icmp"]
PROTOCOLS: tuple[Protocol, ...] = ("tcp", "udp", "icmp")  # that a name may open


class Opening(msgspec.Struct, frozen=True, order=True):
    """A protocol and ports that a name opens at each of its addresses; icmp has all ports."""

    protocol: Protocol
    first_port: int
    last_port: int


class Ruling(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for one name.

    `chosen` is what the sandbox says to a domain's servers by asking: the labels before the longest
    wildcard that covers the name. It is "" when a rule gives the name in full, and when `*` allows
    it: then the sandbox may as well connect to any server and tell it. What is `checked` is open at
    the relay only, not at the name's addresses.
    """

    answered: bool
    openings: tuple[Opening, ...] = ()
    private: bool = False
    chosen: str = ""
    checked: bool = False

    @property
    def pinned(self) -> tuple[Opening, ...]:
        """What the name opens at its addresses."""
        return () if self.checked else self.openings


REFUSED = Ruling(answered=False)


def plain(labels: Sequence[bytes]) -> str:
    """Return the name of `labels`, in lower case; "" when it is no name of a host.

    Labels are compared as bytes of the wire: a dot, a backslash or a zero byte *inside* a label
    (RFC 2181 section 11 allows all) would make another name of the text than the one asked.
    """
    lower = [label.lower() for label in labels]
    return b".".join(lower).decode() if all(map(_PLAIN, lower)) else ""


class NameTable:
    """The name rules of one policy, by exact name and by suffix: `judge` is O(labels)."""

    def __init__(self, policy: NetPolicy) -> None:
        self._default_allow = policy.default == "allow"
        self._checked = policy.check_names
        self._exact: dict[str, list[NameRule]] = {}
        self._below: dict[str, list[NameRule]] = {}
        self._all: list[NameRule] = []
        for rule in policy.names:
            if rule.pattern == "*":
                self._all.append(rule)
            elif rule.pattern.startswith("*."):
                self._below.setdefault(rule.pattern[2:], []).append(rule)
            else:
                self._exact.setdefault(rule.pattern, []).append(rule)

    def judge(self, name: str) -> Ruling:
        """Return what holds for `name`, which is as `plain` returns it; "" is refused."""
        if not name:
            return REFUSED
        rules, suffix = self._covering(name)
        denying = [rule for rule in rules if rule.verdict == "deny"]
        allowing = [rule for rule in rules if rule.verdict == "allow"]
        private = any(rule.private for rule in allowing)
        if self._default_allow:
            return REFUSED if denying else Ruling(answered=True, private=private)
        openings = _openings(allowing, denying)
        if self._checked:
            openings = tuple(_checked(openings))
        if not openings:
            return REFUSED
        free = any(rule.pattern in (name, "*") for rule in allowing)
        return Ruling(
            answered=True,
            openings=openings,
            private=private,
            chosen="" if free else name[: len(name) - len(suffix) - 1],
            checked=self._checked,
        )

    def _covering(self, name: str) -> tuple[list[NameRule], str]:
        """Return the rules that cover `name`, and the longest allowed suffix among them."""
        rules = self._all + self._exact.get(name, [])
        longest = ""
        rest = name
        while dot := rest.find(".") + 1:
            rest = rest[dot:]
            found = self._below.get(rest, ())
            rules += found
            if not longest and any(rule.verdict == "allow" for rule in found):
                longest = rest
        return rules, longest


def _openings(allowing: list[NameRule], denying: list[NameRule]) -> tuple[Opening, ...]:
    """Return what `allowing` opens less what `denying` closes, sorted and disjoint."""
    found: list[Opening] = []
    for protocol in PROTOCOLS:
        opened = _union(_ranges(allowing, protocol))
        for first, last in _union(_ranges(denying, protocol)):
            opened = list(_without(opened, first, last))
        found += [Opening(protocol, first, last) for first, last in opened]
    return tuple(found)


def _checked(openings: Sequence[Opening]) -> Iterator[Opening]:
    """Yield those of the ports that the relay has."""
    for port in CHECKED_PORTS:
        if any(o.protocol == "tcp" and o.first_port <= port <= o.last_port for o in openings):
            yield Opening("tcp", port, port)


def _ranges(rules: Iterable[NameRule], protocol: Protocol) -> list[tuple[int, int]]:
    return [
        (rule.first_port, rule.last_port) for rule in rules if rule.protocol in (protocol, "any")
    ]


def _union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the same ports in ascending ranges that neither overlap nor touch."""
    merged: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged


def _without(ranges: Iterable[tuple[int, int]], first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the ports of `ranges` that are not in first..last."""
    for low, high in ranges:
        if low < first:
            yield low, min(high, first - 1)
        if high > last:
            yield max(low, last + 1), high
