"""Paths inside a tree: tuples of components as bytes, and patterns over them."""

from __future__ import annotations

import re
from collections.abc import Iterable

from libdsec.errors import InvalidArgument

MAX_COMPONENTS = 512
MAX_NAME = 255  # bytes of one component

Parts = tuple[bytes, ...]


def split(name: bytes) -> Parts:
    """Return the components of a member's name. Raises `InvalidArgument` for one that escapes."""
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise InvalidArgument(
            f"member {name.decode('utf-8', 'replace')!r} leads out of the tree ('..')",
            member=name.decode("utf-8", "replace"),
        )
    if b"\0" in name or len(parts) > MAX_COMPONENTS or any(len(part) > MAX_NAME for part in parts):
        raise InvalidArgument(
            f"member name of {len(name)} bytes is not a possible path", member=show(parts[:4])
        )
    return parts


def show(parts: Parts) -> str:
    """Return `parts` as a path for messages."""
    return b"/".join(parts).decode("utf-8", "replace") or "."


def compile_patterns(patterns: Iterable[str], below: bool = False) -> re.Pattern[bytes] | None:
    """Return one expression that tells by `fullmatch` and `lastindex` which pattern a path matches.

    A pattern is a path relative to the root: ``*`` and ``?`` stand for characters of one component,
    ``**`` for any number of components. The first that matches counts; with `below` it matches what
    is below a match, too. None without patterns.
    """
    rest = b"(?:/.*)?" if below else b""
    branches = [b"(" + _expression(pattern) + rest + b")" for pattern in patterns]
    return re.compile(b"|".join(branches), re.DOTALL) if branches else None


def _expression(pattern: str) -> bytes:
    parts = pattern.encode("utf-8", "surrogateescape").strip(b"/").split(b"/")
    if b"" in parts or b".." in parts or b"." in parts:
        raise InvalidArgument(
            f"{pattern!r} is not a pattern of a path below the root", field="exclude"
        )
    expression = b""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == b"**":
            expression += b".+" if last else b"(?:[^/]+/)*"
            continue
        text = re.escape(part).replace(rb"\*", b"[^/]*").replace(rb"\?", b"[^/]")
        expression += text if last else text + b"/"
    return expression
