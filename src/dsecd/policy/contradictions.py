"""Finds entries of a policy that allow only what other entries deny. Pure.

Deny wins, so such an entry has no effect, and whoever wrote it expected one. Each rule is compared
with single denying rules, not with their union: what is found is certain, and what two denials
cover only together is left to win at run time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from dsecd.policy import globs
from dsecd.policy.lines import Line, Rule
from dsecd.policy.rules import (
    EVERY_ACCESS,
    FileRule,
    IoctlRule,
    MountRule,
    NameRule,
    NetRule,
    Network,
    UnixRule,
    VsockRule,
)
from libdsec.errors import InvalidArgument

MAX_COMPARISONS = 50_000  # of path patterns, for one policy: a tenth of a second
_Prefix = tuple[int, int, int]  # version, length, the bits of the prefix
_Denial = tuple[Rule, Line]


def refuse(lines: Iterable[Line]) -> None:
    """Raise `InvalidArgument`, naming all the entries, for the first that can have no effect.

    A policy may deny what its preset allows; anything else is a contradiction.
    """
    entries = list(lines)
    denials = [line for line in entries if line.verdict == "deny"]
    if not denials:
        return
    everywhere = _Denials(denials)
    in_presets = _Denials(line for line in denials if line.layer)
    for line in entries:
        winners = (in_presets if line.layer else everywhere).over(line)
        if winners:
            raise InvalidArgument(
                f"{line} can have no effect, because deny wins: remove it, or "
                f"{' and '.join(map(str, winners))}",
                field=line.place,
                rules=[line.place, *(winner.place for winner in winners)],
            )


class _Denials:
    """Denying rules, found by what they are about: networks by prefix, names by pattern, paths by
    the literal directories at their start.
    """

    def __init__(self, lines: Iterable[Line]) -> None:
        self._nets: dict[_Prefix, list[_Denial]] = defaultdict(list)
        self._names: dict[str, list[_Denial]] = defaultdict(list)
        self._others: dict[tuple[type[Rule], str], list[_Denial]] = defaultdict(list)
        self._comparisons = 0
        self._lengths: set[tuple[int, int]] = set()
        for line in lines:
            self._add(line)

    def _add(self, line: Line) -> None:
        for rule in line.rules:
            if isinstance(rule, NetRule):
                self._lengths.add((rule.prefix.version, rule.prefix.prefixlen))
                self._nets[_key(rule.prefix, rule.prefix.prefixlen)].append((rule, line))
            elif isinstance(rule, NameRule):
                self._names[rule.pattern].append((rule, line))
            else:
                self._others[type(rule), _head(rule)].append((rule, line))
        for pattern in line.hidden:
            rule = FileRule(verdict="deny", pattern=pattern, access=EVERY_ACCESS)
            self._others[FileRule, _head(rule)].append((rule, line))

    def over(self, line: Line) -> list[Line]:
        """Return lines that together deny all of an allowing `line`; [] when something stays."""
        if line.verdict == "deny":
            return []
        winners: dict[str, Line] = {}
        for rule in line.rules:
            winner = self._over_rule(rule)
            if winner is None:
                return []
            winners[str(winner)] = winner
        return list(winners.values())

    def _over_rule(self, rule: Rule) -> Line | None:
        candidates = (line for other, line in self._near(rule) if _covered(rule, other))
        return next(candidates, None)

    def _near(self, rule: Rule) -> Iterator[_Denial]:
        """Yield the denials that may cover `rule`."""
        if isinstance(rule, NetRule):
            for version, length in self._lengths:
                if version == rule.prefix.version and length <= rule.prefix.prefixlen:
                    yield from self._nets.get(_key(rule.prefix, length), ())
        elif isinstance(rule, NameRule):
            for pattern in _patterns_over(rule.pattern):
                yield from self._names.get(pattern, ())
        else:
            for head in _above(_head(rule)):
                denials = self._others.get((type(rule), head), ())
                self._count(len(denials))
                yield from denials

    def _count(self, comparisons: int) -> None:
        self._comparisons += comparisons
        if self._comparisons > MAX_COMPARISONS:
            raise InvalidArgument(
                "policy: too many paths are allowed and denied in the same directories to compare "
                "them all; use fewer, wider rules",
                field="policy",
            )


def _key(prefix: Network, length: int) -> _Prefix:
    return prefix.version, length, int(prefix.network_address) >> (prefix.max_prefixlen - length)


def _head(rule: Rule) -> str:
    """Return the directories that a rule about paths is certainly beneath, "" for other rules."""
    if isinstance(rule, FileRule | MountRule | UnixRule) and rule.pattern.startswith("/"):
        return globs.head(rule.pattern)
    return ""


def _above(head: str) -> Iterator[str]:
    """Yield `head` and every directory above it."""
    yield head
    while head not in ("", "/"):
        head = head.rpartition("/")[0] or "/"
        yield head


def _patterns_over(pattern: str) -> Iterator[str]:
    """Yield `pattern` and every pattern that covers all that it covers."""
    yield pattern
    if pattern == "*":
        return
    labels = pattern.removeprefix("*.").split(".")
    for index in range(1, len(labels)):
        yield "*." + ".".join(labels[index:])
    yield "*"


def _covered(inner: Rule, outer: Rule) -> bool:
    """Say whether `outer`, near to `inner` and of the same type, surely covers all of it."""
    match inner, outer:
        case NetRule() | NameRule(), NetRule() | NameRule():
            same = outer.protocol in ("any", inner.protocol)
            return same and _holds(outer, inner)
        case FileRule(), FileRule():
            return inner.access <= outer.access and globs.within(inner.pattern, outer.pattern)
        case IoctlRule(), IoctlRule():
            return inner.request == outer.request
        case MountRule(), MountRule():
            same = outer.fstype in ("*", inner.fstype)
            return same and globs.within(inner.pattern, outer.pattern)
        case UnixRule(), UnixRule():
            return _unix_covered(inner.pattern, outer.pattern)
        case VsockRule(), VsockRule():
            return outer.cid in (None, inner.cid) and _holds(outer, inner)
    return False


def _holds(outer: NetRule | NameRule | VsockRule, inner: NetRule | NameRule | VsockRule) -> bool:
    return outer.first_port <= inner.first_port and inner.last_port <= outer.last_port


def _unix_covered(inner: str, outer: str) -> bool:
    if inner.startswith("@") or outer.startswith("@"):
        return inner == outer or (outer == "@**" and inner.startswith("@"))
    return globs.within(inner, outer)
