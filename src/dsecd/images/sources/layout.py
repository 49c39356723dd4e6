"""Files of an image as tools leave it on a disk: in a directory, or in one plain tar."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from dsecd.images.sources import archive
from dsecd.images.sources.archive import Archive
from dsecd.images.sources.compression import Damage, Readable, Stream
from dsecd.images.sources.paths import Parts, show, split
from libdsec.errors import InvalidArgument

MAX_FILES = 100_000
_LINKS = 8  # symbolic links inside an archive, as old docker save wrote for equal layers


class Files(Protocol):
    """The files of one image by their relative names."""

    def open(self, name: str) -> contextlib.AbstractContextManager[tuple[Readable, int] | None]:
        """Open a regular file and yield it with its size; None when there is none."""


def files(source: Path) -> Files:
    """Return the files in a directory or tar. Raises `InvalidArgument` when it is neither."""
    if source.is_dir():
        return _Directory(source)
    if source.is_file():
        return _Tar(source)
    raise InvalidArgument(f"{source} is neither a directory nor a file", field="source")


def _parts(name: str) -> Parts:
    return split(name.encode("utf-8", "replace"))


class _Directory:
    def __init__(self, root: Path) -> None:
        self._root = root

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[Readable, int] | None]:
        path = self._root.joinpath(*(os.fsdecode(part) for part in _parts(name)))
        # the layout is the caller's, but what its JSON names may not lead out of it
        try:
            inside = path.resolve().is_relative_to(self._root.resolve())
        except (OSError, RuntimeError):  # a loop of links
            inside = False
        if not inside:
            raise InvalidArgument(f"{name} in {self._root} leads out of it", field="source")
        try:
            fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except (FileNotFoundError, NotADirectoryError):
            yield None
            return
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            os.close(fd)
            yield None
            return
        with os.fdopen(fd, "rb", buffering=0) as file:
            yield file, status.st_size


class _Section:
    """A part of a file."""

    def __init__(self, file: Readable, size: int) -> None:
        self._file, self._left = file, size

    def read(self, size: int, /) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


class _Seeking(Stream):
    """The stream of a plain file; what is skipped is not read."""

    def __init__(self, fd: int) -> None:
        super().__init__(iter(()), 0)
        self._fd = fd
        self._size = os.fstat(fd).st_size

    def read(self, size: int) -> bytes:
        data = os.pread(self._fd, size, self.offset)
        self.offset += len(data)
        return data

    def skip(self, size: int) -> bool:
        self.offset += size
        return self.offset <= self._size


class _Tar:
    """A tar that is not compressed: its headers are read once, the rest is sought."""

    def __init__(self, source: Path) -> None:
        self._source = source
        self._places: dict[Parts, tuple[int, int]] = {}  # offset, size
        self._links: dict[Parts, bytes] = {}
        with source.open("rb", buffering=0) as file:
            try:
                self._index(_Seeking(file.fileno()))
            except Damage as error:
                raise InvalidArgument(
                    f"{source} is not a readable tar archive ({error}); an image must be a "
                    "directory or a tar that is not compressed",
                    field="source",
                ) from error

    def _index(self, stream: _Seeking) -> None:
        for member in Archive(stream, open_end=True):
            parts = split(member.name)
            if member.kind == archive.REGULAR and member.segments is None:
                self._places[parts] = (stream.offset, member.size)
            elif member.kind == archive.SYMLINK:
                self._links[parts] = member.link
            elif member.kind == archive.LINK and (place := self._places.get(split(member.link))):
                self._places[parts] = place
            if len(self._places) + len(self._links) > MAX_FILES:
                raise Damage(f"more than {MAX_FILES} files")

    @contextlib.contextmanager
    def open(self, name: str) -> Iterator[tuple[Readable, int] | None]:
        parts = _parts(name)
        for _ in range(_LINKS):
            if parts not in self._links:
                break
            parts = self._follow(parts)
        place = self._places.get(parts)
        if place is None:
            yield None
            return
        with self._source.open("rb", buffering=0) as file:
            file.seek(place[0])
            yield _Section(file, place[1]), place[1]

    def _follow(self, parts: Parts) -> Parts:
        above = list(parts[:-1])
        for name in self._links[parts].split(b"/"):
            if name == b".." and not above:
                raise InvalidArgument(f"{show(parts)} leads out of {self._source}", field="source")
            if name == b"..":
                above.pop()
            elif name not in (b"", b"."):
                above.append(name)
        return tuple(above)
