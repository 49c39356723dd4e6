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

MAX_LENGTH = 4096  # PATH_MAX
MAX_WILDCARDS = 8  # each one multiplies the work of a match
_WILD = re.compile(r"(?<=/)\*\*/|\*\*|\*|\?")
_MEANING = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}


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


def is_literal(pattern: str) -> bool:
    """Say whether `pattern` names one path."""
    return not _WILD.search(pattern)


def head(pattern: str) -> str:
    """Return the path that is certain: the literal components before the first wildcard one."""
    if is_literal(pattern):
        return pattern
    first = _WILD.search(pattern)
    assert first is not None
    return pattern[: first.start()].rpartition("/")[0] or "/"


@functools.lru_cache(maxsize=4096)
def _compiled(pattern: str, beneath: bool) -> re.Pattern[str]:
    text, place = "", 0
    for wild in _WILD.finditer(pattern):
        text += re.escape(pattern[place : wild.start()]) + _MEANING[wild.group()]
        place = wild.end()
    text += re.escape(pattern[place:])
    if beneath:
        text = "/.*" if pattern == "/" else f"{text}(?:/.*)?"
    return re.compile(text, re.DOTALL)


def matches(pattern: str, text: str) -> bool:
    """Say whether `pattern` matches all of `text`, with nothing beneath: abstract socket names."""
    return _compiled(pattern, False).fullmatch(text) is not None


def covers(pattern: str, path: str) -> bool:
    """Say whether `pattern` covers the absolute, normalised `path`."""
    return _compiled(pattern, True).fullmatch(path) is not None


def within(inner: str, outer: str) -> bool:
    """Say whether all that `inner` covers is surely covered by `outer`.

    False may mean "not known": patterns are compared only where that is simple.
    """
    if inner == outer or outer in ("/", "/**"):
        return True
    return (is_literal(inner) and covers(outer, inner)) or (
        is_literal(outer) and covers(outer, head(inner))
    )
