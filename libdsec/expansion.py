"""Words of a Dockerfile: quotes, escapes and variables, by the rules of its reference. Pure.

Within double quotes variables are expanded and a backslash keeps its meaning before ``"``, ``$``
and itself only; within single quotes nothing has a meaning; elsewhere a backslash takes the next
character as it is. Instead of the backslash, a file may choose the backtick.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_PLAIN = re.compile(NAME)
_BRACED = re.compile(rf"(?P<name>{NAME})(?::(?P<operator>[-+])(?P<word>.*))?", re.DOTALL)


class Malformed(Exception):
    """The text cannot be split into words."""


def words(text: str, variables: Mapping[str, str], escape: str = "\\") -> list[str]:
    """Return the words of `text`, expanded. Raises `Malformed`."""
    found: list[str] = []
    begun = False
    for piece, is_blank in _Scanner(text, variables, escape).pieces():
        if is_blank:
            begun = False
        elif begun:
            found[-1] += piece
        else:
            found.append(piece)
            begun = True
    return found


def whole(text: str, variables: Mapping[str, str], escape: str = "\\") -> str:
    """Return `text` as one word, with its blanks. Raises `Malformed`."""
    return "".join(piece for piece, _ in _Scanner(text, variables, escape).pieces())


class _Scanner:
    def __init__(self, text: str, variables: Mapping[str, str], escape: str) -> None:
        self._text, self._variables, self._escape = text, variables, escape
        self._at = 0

    def pieces(self) -> Iterator[tuple[str, bool]]:
        """Yield parts of words, and the blanks between words as (blank, True)."""
        while self._at < len(self._text):
            char = self._take()
            if char == "'":
                yield self._until_quote(), False
            elif char == '"':
                yield from ((piece, False) for piece in self._in_double_quotes())
            elif char == "$":
                yield self._variable(), False
            elif char == self._escape:
                yield self._take() or char, False
            else:
                yield char, char.isspace()

    def _take(self) -> str:
        char = self._text[self._at : self._at + 1]
        self._at += 1
        return char

    def _until_quote(self) -> str:
        end = self._text.find("'", self._at)
        if end < 0:
            raise Malformed("no closing quotation")
        piece, self._at = self._text[self._at : end], end + 1
        return piece

    def _in_double_quotes(self) -> Iterator[str]:
        yield ""  # quotes make a word, even with nothing between them
        while (char := self._take()) != '"':
            if not char:
                raise Malformed("no closing quotation")
            if char == "$":
                yield self._variable()
            elif char == self._escape:
                escaped = self._take()
                yield escaped if escaped in ('"', "$", self._escape) else char + escaped
            else:
                yield char

    def _variable(self) -> str:
        """Return the value of the variable whose ``$`` was just taken."""
        if plain := _PLAIN.match(self._text, self._at):
            self._at = plain.end()
            return self._variables.get(plain[0], "")
        if not self._text.startswith("{", self._at):
            return "$"
        inner = self._braces()
        match = _BRACED.fullmatch(inner)
        if match is None:
            raise Malformed(f"${{{inner}}} is not supported; use ${{name}}, :- or :+")
        found = self._variables.get(match["name"], "")
        if match["operator"] is None or (match["operator"] == "-" and found):
            return found
        if match["operator"] == "+" and not found:
            return ""
        return whole(match["word"], self._variables, self._escape)

    def _braces(self) -> str:
        """Return what is between the braces that begin here; they may be nested."""
        depth, start = 0, self._at
        while self._at < len(self._text):
            char = self._take()
            depth += (char == "{") - (char == "}")
            if depth == 0:
                return self._text[start + 1 : self._at - 1]
        raise Malformed("no closing brace")
