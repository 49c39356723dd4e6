"""A directory that is filled from hostile input: every step is relative to an open directory.

Nothing here resolves a path of more than one component, and no symbolic link is ever followed, so
that no member of an archive can reach outside the root, whatever was created before it.
"""

from __future__ import annotations

import os
import stat

from libdsec.errors import InvalidArgument

MAX_COMPONENTS = 512
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class Tree:
    """The root and a chain of open directories below it, kept while members share a prefix."""

    def __init__(self, root: str) -> None:
        self._fds = [os.open(root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)]
        self._names: list[bytes] = []

    def close(self) -> None:
        for fd in reversed(self._fds):
            os.close(fd)
        self._fds.clear()

    def parent(self, parts: tuple[bytes, ...], create: bool = True) -> int:
        """Return the open directory that holds the last of `parts`; missing ones are made, 0755.

        Raises `InvalidArgument` when one of them is something else than a directory, and
        `FileNotFoundError` without `create`. The descriptor stays ours, valid until the next call.
        """
        wanted = list(parts[:-1])
        common = 0
        while common < min(len(wanted), len(self._names)) and (
            wanted[common] == self._names[common]
        ):
            common += 1
        while len(self._names) > common:
            os.close(self._fds.pop())
            self._names.pop()
        for name in wanted[common:]:
            self._fds.append(self._descend(name, create, parts))
            self._names.append(name)
        return self._fds[-1]

    def _descend(self, name: bytes, create: bool, parts: tuple[bytes, ...]) -> int:
        above = self._fds[-1]
        if create:
            try:
                os.mkdir(name, 0o755, dir_fd=above)
                os.chmod(name, 0o755, dir_fd=above)  # whatever the umask; we just made it
            except FileExistsError:
                pass
        try:
            return os.open(name, _DIRECTORY, dir_fd=above)
        except NotADirectoryError as error:  # also what O_NOFOLLOW|O_DIRECTORY says of a symlink
            raise InvalidArgument(
                f"{show(parts)}: {name.decode('utf-8', 'replace')!r} on the way is not a directory",
                member=show(parts),
            ) from error

    def forget(self, parts: tuple[bytes, ...]) -> None:
        """Drop open directories at or below `parts`: that entry is about to be replaced."""
        depth = len(parts)
        if tuple(self._names[:depth]) == parts:
            while len(self._names) >= depth:
                os.close(self._fds.pop())
                self._names.pop()

    @property
    def root(self) -> int:
        """The open root directory."""
        return self._fds[0]

    def make_directory(self, parts: tuple[bytes, ...]) -> int:
        """Make the directory `parts` unless it is there, and return it open (ours)."""
        return self.parent((*parts, b"."))

    def clear(self, parts: tuple[bytes, ...]) -> int:
        """Remove what is at `parts`; return its parent. Raises `InvalidArgument` on a directory."""
        above = self.parent(parts)
        try:
            mode = os.lstat(parts[-1], dir_fd=above).st_mode
        except FileNotFoundError:
            return above
        if stat.S_ISDIR(mode):
            raise InvalidArgument(
                f"{show(parts)} is a directory and another kind of member", member=show(parts)
            )
        os.unlink(parts[-1], dir_fd=above)
        return above


def split(name: bytes) -> tuple[bytes, ...]:
    """Return the components of a member's name. Raises `InvalidArgument` for one that escapes."""
    parts = tuple(part for part in name.split(b"/") if part not in (b"", b"."))
    if b".." in parts:
        raise InvalidArgument(
            f"member {name.decode('utf-8', 'replace')!r} leads out of the tree ('..')",
            member=name.decode("utf-8", "replace"),
        )
    if b"\0" in name or len(parts) > MAX_COMPONENTS or any(len(part) > 255 for part in parts):
        raise InvalidArgument(
            f"member name of {len(name)} bytes is not a possible path", member=show(parts[:4])
        )
    return parts


def show(parts: tuple[bytes, ...]) -> str:
    """Return `parts` as a path for messages."""
    return b"/".join(parts).decode("utf-8", "replace") or "."
