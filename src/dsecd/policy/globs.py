"""Patterns of paths: their form, and what they cover. Pure.

`?` is one character and `*` any number of them, none being `/`; `**` is any number of characters.
Between two slashes it may be nothing at all: `/**/x` covers `/x`, which is what people expect.
Every other character stands for itself, so that `[id].tsx` needs no quoting. A pattern covers what
it matches and everything beneath; kernels work that way (mounts, Landlock), and the other reading
leaves the files in a denied directory open.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable

MAX_LENGTH = 4096  # PATH_MAX
MAX_WILDCARDS = 8  # a security module makes an automaton of them
_QUICK = 256  # characters
_WILD = re.compile(r"(?<=/)\*\*/|\*\*|\*|\?")


def fault(pattern: str) -> str:
    """Return what is wrong with a path pattern, as the end of a sentence; "" when it is good."""
    if not pattern.startswith("/"):
        return "is not absolute; start it with / (or /**/ for a name at any depth)"
    if pattern != "/" and any(part in ("", ".", "..") for part in pattern[1:].split("/")):
        return "has an empty, . or .. component; write the plain path, without a final /"
    return name_fault(pattern)


def name_fault(pattern: str) -> str:
    """Return what is wrong with a pattern that need not be a path; "" when it is good."""
    if not pattern or len(pattern.encode("utf-8", "surrogatepass")) > MAX_LENGTH:
        return f"is empty or longer than {MAX_LENGTH} bytes"
    if "\0" in pattern:
        return "contains a NUL"
    if "***" in pattern:
        return "has three stars in a row; two mean any depth"
    if len(_WILD.findall(pattern)) > MAX_WILDCARDS:
        return f"has more than {MAX_WILDCARDS} wildcards; split it into several rules"
    return ""


@functools.lru_cache(maxsize=4096)
def is_literal(pattern: str) -> bool:
    """Say whether `pattern` names one path."""
    return not _WILD.search(pattern)


def is_subtree(pattern: str) -> bool:
    """Say whether `pattern` is one path, or all beneath one: no file need be looked at."""
    return is_literal(pattern.removesuffix("/**") or "/")


@functools.lru_cache(maxsize=4096)
def head(pattern: str) -> str:
    """Return the path that is certain: the literal components before the first wildcard one."""
    if is_literal(pattern):
        return pattern
    first = _WILD.search(pattern)
    assert first is not None
    return pattern[: first.start()].rpartition("/")[0] or "/"


@functools.lru_cache(maxsize=4096)
def _tokens(pattern: str) -> tuple[str, ...]:
    """Return literal texts at even places, wildcards at odd ones."""
    found, place = [], 0
    for wild in _WILD.finditer(pattern):
        found += [pattern[place : wild.start()], wild.group()]
        place = wild.end()
    return (*found, pattern[place:])


def _ends(pattern: str, text: str) -> set[int]:
    """Return every place up to which `pattern` matches a beginning of `text`.

    All places are followed at once: a backtracking matcher takes forever for ``*a*a*a*b``.
    """
    literal, *rest = _tokens(pattern)
    places = {len(literal)} if text.startswith(literal) else set()
    for wild, literal in zip(rest[::2], rest[1::2], strict=True):
        if not places:
            break
        size = len(literal)
        starts = _after(wild, text, places)
        places = {place + size for place in starts if text.startswith(literal, place)}
    return places


def _after(wild: str, text: str, places: set[int]) -> Iterable[int]:
    """Return the places where a wildcard that begins at one of `places` may end."""
    first = min(places)
    if wild == "**":
        return range(first, len(text) + 1)
    if wild == "**/":
        slashes = (at + 1 for at in range(first, len(text)) if text[at] == "/")
        return places.union(slashes)
    if wild == "?":
        return {at + 1 for at in places if at < len(text) and text[at] != "/"}
    ends: set[int] = set()
    inside = False
    for at in range(first, len(text) + 1):
        inside = inside or at in places
        if inside:
            ends.add(at)
        inside = inside and at < len(text) and text[at] != "/"
    return ends


def matches(pattern: str, text: str) -> bool:
    """Say whether `pattern` matches all of `text`, with nothing beneath: abstract socket names."""
    return len(text) in _ends(pattern, text)


def covers(pattern: str, path: str) -> bool:
    """Say whether `pattern` covers the absolute, normalised `path`."""
    if pattern == "/":
        return True
    return any(at == len(path) or path[at] == "/" for at in _ends(pattern, path))


def within(inner: str, outer: str) -> bool:
    """Say whether all that `inner` covers is surely covered by `outer`.

    False may mean "not known": patterns are compared only where that is simple and quick.
    """
    if inner == outer or outer in ("/", "/**"):
        return True
    if is_literal(outer):
        return covers(outer, head(inner))
    return len(inner) <= _QUICK and is_literal(inner) and covers(outer, inner)
