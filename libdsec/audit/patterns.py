"""Patterns of paths as in policies: ``*`` and ``?`` within a component, ``**`` for any depth. Pure.

The daemon compiles policies and knows more forms; here ``**`` stands alone between slashes, so that
a hostile path costs no more than its length.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from libdsec.errors import InvalidArgument

_DEEP = "**"
_MAX_STARS = 3  # in a component: names have 255 bytes, and a matcher goes back for each star


class Pattern:
    """A pattern; one without a slash is a name at any depth. Raises `InvalidArgument`."""

    def __init__(self, text: str) -> None:
        parts = (text if text.startswith("/") else f"/**/{text}").split("/")[1:]
        for part in parts:
            if not part or (part != _DEEP and (_DEEP in part or part.count("*") > _MAX_STARS)):
                raise InvalidArgument(
                    f"pattern {text!r}: between slashes give ** alone, or a name with "
                    f"at most {_MAX_STARS} stars",
                    field="pattern",
                )
        self._parts = [None if part == _DEEP else _component(part) for part in parts]

    def matches(self, path: str) -> bool:
        """Say whether the pattern matches the absolute `path` itself."""
        return self._end(path) == len(path)

    def covers(self, path: str) -> bool:
        """Say whether it matches `path` or a directory above it, as rules of policies do."""
        return self._end(path, first=True) >= 0

    def _end(self, path: str, *, first: bool = False) -> int:
        """Return where the last match of a beginning of `path` ends, or the `first`; -1: none."""
        states, place, end = self._skipped({0}), 0, -1
        for name in path.split("/")[1:]:
            place += 1 + len(name)
            stepped = {at for at in states if at < len(self._parts) and self._parts[at] is None}
            stepped |= {at + 1 for at in states if self._is(at, name)}
            states = self._skipped(stepped)
            if len(self._parts) in states:
                end = place
                if first:
                    break
        return end

    def _is(self, at: int, name: str) -> bool:
        part = self._parts[at] if at < len(self._parts) else None
        return part is not None and part.fullmatch(name) is not None

    def _skipped(self, states: Iterable[int]) -> set[int]:
        """Return `states` and those after a ``**`` that stands for nothing."""
        found = set(states)
        for at, part in enumerate(self._parts):
            if part is None and at in found:
                found.add(at + 1)
        return found


def _component(part: str) -> re.Pattern[str]:
    wild = {"*": ".*", "?": "."}
    return re.compile("".join(wild.get(c) or re.escape(c) for c in part), re.DOTALL)
