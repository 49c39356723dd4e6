"""The build context: which local files a COPY takes, and their tar.

By the rules of Docker's reference: patterns are those of Go's filepath.Match, ``.dockerignore``
adds ``**`` and exceptions with ``!``, and the last pattern that matches a path decides. Symbolic
links are copied as they are; one that is named itself is followed, but not out of the context.
"""

from __future__ import annotations

import os
import posixpath
import re
import tarfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple, cast

from libdsec.archive import BLOCK, PushFile
from libdsec.errors import InvalidArgument

_GROUP = re.compile(r"\[\^?(?:\\.|[^\]\\])+\]")
_WILD = re.compile(r"[*?\[\\]")


class Entry(NamedTuple):
    """A local file and its name in the target."""

    name: str
    path: Path
    is_directory: bool


class Owner(NamedTuple):
    uid: int
    gid: int


class Ignore:
    """What ``.dockerignore`` leaves out."""

    def __init__(self, text: str = "") -> None:
        self._rules: list[tuple[re.Pattern[str], bool]] = []
        for line in text.splitlines():
            pattern = line.strip()
            if not pattern or line.startswith("#"):
                continue
            exception = pattern.startswith("!")
            cleaned = posixpath.normpath(pattern.removeprefix("!").strip()).strip("/")
            if cleaned not in ("", "."):
                self._rules.append((_compile(cleaned), exception))
        self.has_exceptions = any(exception for _, exception in self._rules)

    def excludes(self, path: str) -> bool:
        """Whether `path`, relative to the context, is left out."""
        excluded = False
        for pattern, exception in self._rules:
            if pattern.fullmatch(path):
                excluded = not exception
        return excluded


class Context:
    """A directory, without what is ignored. Raises `InvalidArgument` when it is none."""

    def __init__(self, root: Path, ignore: Ignore | None = None) -> None:
        if not root.is_dir():
            raise InvalidArgument(f"the build context {root} is not a directory", field="context")
        self._root = root.resolve()
        self._ignore = ignore or Ignore()

    def select(self, sources: Sequence[str], into_directory: bool) -> list[Entry]:
        """Return what `sources` name, parents before what is in them.

        The content of a directory, and a file under its own name; under "" when it is the only
        one and `into_directory` is false. Raises `InvalidArgument` when a source matches nothing.
        """
        paths = [path for source in sources for path in self._match(source)]
        if len(paths) > 1 and not into_directory:
            raise InvalidArgument(
                f"{len(paths)} files match: the target must end with /", field="dockerfile"
            )
        found: list[Entry] = []
        for path in paths:
            real = self._inside(path)
            if real.is_dir():
                found += self._walk(real, path, "")
            else:
                found.append(Entry(posixpath.basename(path) if into_directory else "", real, False))
        return found

    def is_directory(self, source: str) -> bool:
        """Whether `source`, without wildcards, names a directory of the context."""
        return not _WILD.search(source) and (self._root / source.lstrip("/")).is_dir()

    def _match(self, source: str) -> list[str]:
        cleaned = posixpath.normpath(source.lstrip("/") or ".")
        if not _WILD.search(cleaned):
            if not os.path.lexists(self._root / cleaned):
                raise _missing(source, "is not in the build context")
            if cleaned != "." and self._is_left_out(cleaned):
                raise _missing(source, "is left out of the build context by .dockerignore")
            return [cleaned]
        found = [""]
        for part in cleaned.split("/"):
            found = [match for directory in found for match in self._children(directory, part)]
        kept = [path for path in found if not self._is_left_out(path)]
        if not kept:
            raise _missing(source, "matches nothing in the build context")
        return kept

    def _children(self, directory: str, part: str) -> Iterator[str]:
        """Yield the names in `directory` that the pattern `part` matches."""
        place = self._root / directory
        if not _WILD.search(part):
            if os.path.lexists(place / part):
                yield posixpath.join(directory, part)
        elif place.is_dir():
            pattern = _compile(part, below=False)
            for name in sorted(os.listdir(place)):  # noqa: PTH208 - names, not paths
                if pattern.fullmatch(name):
                    yield posixpath.join(directory, name)

    def _is_left_out(self, path: str) -> bool:
        if not self._ignore.excludes(path):
            return False
        real = self._root / path
        return not (real.is_dir() and any(self._walk(real, path, "")))

    def _walk(self, directory: Path, relative: str, name: str) -> Iterator[Entry]:
        with os.scandir(directory) as scan:
            children = sorted(scan, key=lambda child: child.name)
        for child in children:
            path = child.name if relative == "." else f"{relative}/{child.name}"
            entry = Entry(
                posixpath.join(name, child.name), Path(child.path),
                child.is_dir(follow_symlinks=False),
            )  # fmt: skip
            excluded = self._ignore.excludes(path)
            if not entry.is_directory:
                if not excluded:
                    yield entry
            elif not excluded:
                yield entry
                yield from self._walk(entry.path, path, entry.name)
            elif self._ignore.has_exceptions and (
                below := list(self._walk(entry.path, path, entry.name))
            ):
                yield entry
                yield from below

    def _inside(self, path: str) -> Path:
        real = (self._root / path).resolve()
        if not real.is_relative_to(self._root):
            raise InvalidArgument(f"{path} leads out of the build context", field="dockerfile")
        if not real.exists():
            raise _missing(path, "is a link to nothing")
        return real


def pack(
    entries: Sequence[Entry],
    owner: Owner,
    mode: int | None,
    push: Callable[[bytes], None],
) -> None:
    """Write a tar of `entries` to `push`; `mode` replaces their permissions. May block."""
    sink = PushFile(push)
    with tarfile.open(
        fileobj=cast(IO[bytes], sink), mode="w|", bufsize=BLOCK, format=tarfile.PAX_FORMAT
    ) as tar:
        for entry in entries:
            member = tar.gettarinfo(entry.path, entry.name)
            if member is None or not (
                member.isfile() or member.isdir() or member.issym() or member.islnk()
            ):
                continue  # sockets, devices and pipes have no meaning elsewhere
            member.uid, member.gid = owner
            member.uname = member.gname = ""
            if mode is not None and not member.issym():
                member.mode = mode
            if member.isreg():
                with entry.path.open("rb") as file:
                    tar.addfile(member, file)
            else:
                tar.addfile(member)
    sink.finish()


def _missing(source: str, why: str) -> InvalidArgument:
    return InvalidArgument(f"{source} {why}", field="dockerfile")


def _compile(pattern: str, below: bool = True) -> re.Pattern[str]:
    """Return the expression of a pattern; with `below` what is in a match matches, too."""
    expression, at = "", 0
    while at < len(pattern):
        char = pattern[at]
        at += 1
        if pattern.startswith("**", at - 1) and below:
            at += 1
            if pattern.startswith("/", at):
                expression, at = expression + "(?:.*/)?", at + 1
            else:
                expression += ".*"
        elif char == "*":
            expression += "[^/]*"
        elif char == "?":
            expression += "[^/]"
        elif char == "[" and (group := _GROUP.match(pattern, at - 1)):
            expression, at = expression + group[0], group.end()
        elif char == "\\" and at < len(pattern):
            expression, at = expression + re.escape(pattern[at]), at + 1
        else:
            expression += re.escape(char)
    try:
        return re.compile(expression + ("(?:/.*)?" if below else ""), re.DOTALL)
    except re.error as error:
        raise InvalidArgument(f"{pattern!r} is no pattern: {error}", field="context") from error
