"""The tree under audit, and what the agent may do in it. Pure.

Rights are those of the classic mode bits. Root inside has every right: a user namespace gives it
the capabilities over all files of the sandbox.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from libdsec.audit.patterns import Pattern
from libdsec.model import FileType

READ, WRITE, SEARCH, EXECUTE = 4, 2, 1, 1
STICKY, SETUID = 0o1000, 0o4000
_MAX_LINKS = 40  # as the kernel


@dataclass(frozen=True, slots=True)
class Entry:
    """A file of the tree; `path` is absolute, `size` in bytes, `mode` the low 12 bits."""

    path: str
    type: FileType
    size: int = 0
    mode: int = 0o644
    uid: int = 0
    gid: int = 0
    target: str = ""  # of a symbolic link

    @property
    def name(self) -> str:
        """The last component."""
        return self.path.rpartition("/")[2]

    @property
    def parent(self) -> str:
        """The directory that it lies in; that of ``/`` is itself."""
        return self.path.rpartition("/")[0] or "/"


@dataclass(frozen=True, slots=True)
class Agent:
    """Who the audit is about: numbers as seen inside."""

    uid: int = 0
    gids: frozenset[int] = frozenset({0})

    @property
    def is_root(self) -> bool:
        """Whether no mode bit binds it."""
        return self.uid == 0


class Tree:
    """The entries of a sandbox by path; symbolic links are entries and are not followed.

    `hidden` and `fixed` are what its policy hides and denies to write.
    """

    def __init__(
        self,
        entries: Iterable[Entry],
        agent: Agent,
        hidden: Iterable[Pattern] = (),
        fixed: Iterable[Pattern] = (),
    ) -> None:
        self.agent = agent
        self._hidden = list(hidden)
        self._fixed = [*self._hidden, *fixed]
        self._entries = {"/": Entry("/", "dir", mode=0o755)}
        self._entries |= {entry.path: entry for entry in entries}
        self._children: dict[str, list[Entry]] = {}
        for entry in self._entries.values():
            if entry.path != "/":
                self._children.setdefault(entry.parent, []).append(entry)
        self._enterable: dict[str, bool] = {}

    def __iter__(self) -> Iterator[Entry]:
        return iter(self._entries.values())

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, path: str) -> Entry | None:
        """Return the entry at `path` itself."""
        return self._entries.get(path)

    def children(self, path: str) -> list[Entry]:
        """Return the entries of the directory `path`; [] when there is none."""
        return self._children.get(path, [])

    def below(self, path: str) -> Iterator[Entry]:
        """Yield every entry beneath `path`."""
        waiting = [path]
        while waiting:
            for entry in self.children(waiting.pop()):
                yield entry
                if entry.type == "dir":
                    waiting.append(entry.path)

    def resolve(self, path: str) -> Entry | None:
        """Return what `path` names, links followed inside the tree; None for nothing or a loop."""
        parts, place = path.split("/")[::-1], "/"
        links = 0
        while parts:
            part = parts.pop()
            if part in ("", "."):
                continue
            if part == "..":
                place = posixpath.dirname(place)
                continue
            entry = self._entries.get(posixpath.join(place, part))
            if entry is None:
                return None
            if entry.type != "symlink":
                place = entry.path
                continue
            links += 1
            if links > _MAX_LINKS:
                return None
            if entry.target.startswith("/"):
                place = "/"
            parts += entry.target.split("/")[::-1]
        return self._entries.get(place)

    # --- rights

    def readable(self, entry: Entry) -> bool:
        """Say whether the agent can read the file, or list the directory."""
        return self._may(entry, READ) and not _covered(entry, self._hidden)

    def executable(self, entry: Entry) -> bool:
        """Say whether the agent can run the file."""
        return self._may(entry, EXECUTE) and not _covered(entry, self._hidden)

    def writable(self, entry: Entry) -> bool:
        """Say whether the agent can change the content, or put another file in its place."""
        may = self._may(entry, WRITE) or self._replaceable(entry)
        return may and not _covered(entry, self._fixed)

    def _replaceable(self, entry: Entry) -> bool:
        parent = self._entries.get(entry.parent)
        if parent is None or parent is entry or not self._may(parent, WRITE):
            return False
        return not parent.mode & STICKY or self.agent.uid in (0, entry.uid, parent.uid)

    def _may(self, entry: Entry, right: int) -> bool:
        if self.agent.is_root:
            return True
        return self._reached(entry) and self._has(entry, right)

    def _reached(self, entry: Entry) -> bool:
        """Say whether every directory above the entry may be searched."""
        above = entry.parent
        unknown: list[str] = []
        while above not in self._enterable and above not in unknown[-1:]:
            unknown.append(above)
            above = posixpath.dirname(above)
        for directory in reversed(unknown):
            found = self._entries.get(directory)
            enterable = found is not None and self._has(found, SEARCH)
            if directory != "/":
                enterable = enterable and self._enterable[posixpath.dirname(directory)]
            self._enterable[directory] = enterable
        return self._enterable[entry.parent]

    def _has(self, entry: Entry, right: int) -> bool:
        if entry.uid == self.agent.uid:
            return bool(entry.mode >> 6 & right)
        shift = 3 if entry.gid in self.agent.gids else 0
        return bool(entry.mode >> shift & right)


def _covered(entry: Entry, patterns: Iterable[Pattern]) -> bool:
    return any(pattern.covers(entry.path) for pattern in patterns)
