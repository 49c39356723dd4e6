"""Reads a directory tree through open directories only; no symbolic link is ever followed.

A name is opened first and looked at afterwards, through the descriptor, so that what is described
is what is read, whoever moves things about meanwhile.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from dsecd.images.model import Chunk, Node
from dsecd.images.sources.paths import MAX_COMPONENTS, Parts, show
from dsecd.images.sources.report import (
    MAX_ENTRIES,
    MAX_NAMES,
    MAX_SIZE,
    Check,
    Report,
    too_large,
    too_many,
)
from dsecd.images.sources.sink import Sink
from libdsec.errors import DSecError, InvalidArgument, NotFound, WrongState

TRIES = 3  # to read a file that changes meanwhile
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# NONBLOCK: should a fifo have taken a file's place, opening it must not wait for a writer
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_GONE = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR, errno.ENXIO)

KEEP, EMPTY, OMIT = "keep", "empty", "omit"


class Rules(Protocol):
    """What a source makes of an inode; all are asked for every name but the root's."""

    def action(self, parts: Parts, status: os.stat_result) -> str:
        """Return KEEP, EMPTY (a file without its content) or OMIT."""

    def make(self, parts: Parts, status: os.stat_result, xattrs: dict[bytes, bytes]) -> Node:
        """Return the node without content."""

    def omitted(self, node: Node) -> Node | None:
        """Return what stands in the place of something omitted."""

    @property
    def tells_omitted(self) -> bool:
        """Whether what is below an omitted directory is asked for, too, each by its name."""


class _Level:
    """One open directory on the way down, with the names in it that are still to be read."""

    def __init__(self, fd: int, parts: Parts, node: Node, names: list[bytes]) -> None:
        self.fd, self.parts, self.node = fd, parts, node
        self.names = names  # the last one comes first


class Walker:
    """One walk. `enter_mounts` goes into file systems mounted below; `devices` keeps device nodes,
    `whiteouts` those of number 0/0, which hide something when the tree becomes a lower.

    Only directories tell by st_dev that they are mount points: overlayfs gives files others.
    """

    def __init__(
        self,
        rules: Rules,
        sink: Sink,
        check: Check,
        *,
        enter_mounts: bool = False,
        devices: bool = False,
        whiteouts: bool = False,
    ) -> None:
        self._rules, self._sink, self._check = rules, sink, check
        self._enter_mounts, self._devices, self._whiteouts = enter_mounts, devices, whiteouts
        self._links: dict[tuple[int, int], Node] = {}
        self._device = 0
        self._held = 0  # bytes of names, targets and attributes
        self.report = Report()

    def read(self, root: int) -> Node:
        """Return the tree below the open directory `root`, which stays the caller's."""
        levels = [self._root(os.open(b".", _DIRECTORY, dir_fd=root))]
        top = levels[0].node
        try:
            while levels:
                if not levels[-1].names:
                    os.close(levels.pop().fd)
                    continue
                name = levels[-1].names.pop()
                below = self._entry(levels[-1], name)
                if below is not None:
                    levels.append(below)
        finally:
            for level in levels:
                os.close(level.fd)
        return top

    def _root(self, fd: int) -> _Level:
        """Return the first level; it takes the descriptor over."""
        try:
            status = os.fstat(fd)
            self._device = status.st_dev
            return _Level(fd, (), self._make((), status, fd), self._names(fd))
        except BaseException:
            os.close(fd)
            raise

    def _entry(self, level: _Level, name: bytes) -> _Level | None:
        """Put `name` into the level's node; return the level below it when it is to be entered."""
        parts = (*level.parts, name)
        with _explained(parts):
            status = os.lstat(name, dir_fd=level.fd)
            if stat.S_ISDIR(status.st_mode):
                return self._directory(level, name, parts)
            node = self._leaf(level.fd, name, parts, status)
        if node is not None:
            level.node.children[name] = node
        self._check(self.report.size_bytes)
        return None

    def _directory(self, level: _Level, name: bytes, parts: Parts) -> _Level | None:
        if len(parts) > MAX_COMPONENTS:
            raise InvalidArgument(
                f"{show(parts[:8])}/… is deeper than {MAX_COMPONENTS} directories; remove it",
                path=show(parts[:8]),
            )
        fd = os.open(name, _DIRECTORY, dir_fd=level.fd)
        try:
            status = os.fstat(fd)
            node = self._make(parts, status, fd)
            placed: Node | None = node
            entered = self._enter_mounts or status.st_dev == self._device
            if self._rules.action(parts, status) == OMIT:
                placed = self._rules.omitted(node)
                entered = entered and self._rules.tells_omitted
            elif not entered:
                self.report.mounts.append(show(parts))
            if placed is not None:
                level.node.children[name] = placed
            if entered:
                return _Level(fd, parts, node, self._names(fd))
        except BaseException:
            os.close(fd)
            raise
        os.close(fd)
        return None

    def _leaf(self, above: int, name: bytes, parts: Parts, status: os.stat_result) -> Node | None:
        """Return the node of what is no directory, None when it is left out."""
        kind = stat.S_IFMT(status.st_mode)
        if kind == stat.S_IFSOCK:
            self.report.sockets += 1
            return None
        action = self._rules.action(parts, status)
        key = (status.st_dev, status.st_ino)
        if action == KEEP and status.st_nlink > 1 and key in self._links:
            return self._links[key]
        node: Node | None
        if kind == stat.S_IFREG:
            node = self._file(above, name, parts, action)
        else:
            node = self._special(above, name, parts, status)
        if node is not None and action == OMIT:
            return self._rules.omitted(node)
        if node is not None and action == KEEP and status.st_nlink > 1:
            self._links[key] = node
        return node

    def _special(
        self, above: int, name: bytes, parts: Parts, status: os.stat_result
    ) -> Node | None:
        # there is no *at form for attributes: a magic link to the open directory, one component
        path = b"/proc/self/fd/%d/%s" % (above, name)
        node = self._make(parts, status, path)
        if stat.S_ISLNK(status.st_mode):
            node.target = os.fsencode(os.readlink(name, dir_fd=above))
            self._charge(len(node.target))
        elif not stat.S_ISFIFO(status.st_mode):
            kept = self._whiteouts if node.is_whiteout() else self._devices
            if not kept:
                self.report.devices += 1
                return None
        return node

    def _file(self, above: int, name: bytes, parts: Parts, action: str) -> Node:
        fd = os.open(name, _FILE, dir_fd=above)
        try:
            for _ in range(TRIES):
                before = os.fstat(fd)
                if not stat.S_ISREG(before.st_mode):
                    raise changed(parts)
                node = self._make(parts, before, fd)
                if action != KEEP:
                    return node
                if self.report.size_bytes + before.st_size > MAX_SIZE:
                    raise too_large(parts)
                node.size = before.st_size
                try:
                    node.chunks = self._content(fd, before.st_size)
                except InvalidArgument:  # it was truncated
                    if os.fstat(fd).st_size >= before.st_size:
                        raise
                    continue
                if _version(os.fstat(fd)) == _version(before):
                    self.report.size_bytes += before.st_size
                    self.report.stored_bytes += before.st_size
                    return node
        finally:
            os.close(fd)
        raise changed(parts)

    def _names(self, fd: int) -> list[bytes]:
        """Return what is in the open directory, the last name first."""
        found = []
        with os.scandir(fd) as entries:
            for entry in entries:
                found.append(os.fsencode(entry.name))
                self._charge(len(found[-1]), 1)
        return sorted(found, reverse=True)

    def _make(self, parts: Parts, status: os.stat_result, target: int | bytes) -> Node:
        xattrs = _xattrs(target)
        self._charge(sum(len(name) + len(value) for name, value in xattrs.items()))
        return self._rules.make(parts, status, xattrs)

    def _charge(self, size: int, entries: int = 0) -> None:
        """Count what stays in memory: whoever filled the directory may mean harm."""
        self._held += size
        self.report.entries += entries
        if self._held > MAX_NAMES or self.report.entries > MAX_ENTRIES:
            raise too_many("directory")

    def _content(self, fd: int, size: int) -> list[Chunk | None]:
        if size == 0:
            return []
        os.lseek(fd, 0, os.SEEK_SET)
        return self._sink.add_fd(fd, size)


@contextlib.contextmanager
def opened(directory: Path | int) -> Iterator[int]:
    """Yield `directory` open. Raises `NotFound`, or `InvalidArgument` when it is none."""
    if isinstance(directory, int):
        yield directory
        return
    try:
        # the caller's own path: symbolic links on the way are meant
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise NotFound(f"{directory} does not exist", path=str(directory)) from error
    except NotADirectoryError as error:
        raise InvalidArgument(f"{directory} is not a directory", field="source") from error
    try:
        yield fd
    finally:
        os.close(fd)


def changed(parts: Parts) -> DSecError:
    return WrongState(
        f"{show(parts)} changed while it was read; stop what writes there, or exclude it",
        state="changing",
        path=show(parts),
    )


@contextlib.contextmanager
def _explained(parts: Parts) -> Iterator[None]:
    """What is gone, or has become something else, was changed between two system calls."""
    try:
        yield
    except OSError as error:
        if error.errno in _GONE:
            raise changed(parts) from error
        error.filename = error.filename or show(parts)
        raise


def _version(status: os.stat_result) -> tuple[int, ...]:
    return (status.st_size, status.st_mtime_ns, status.st_ctime_ns)


def _xattrs(target: int | bytes) -> dict[bytes, bytes]:
    """Return all extended attributes of an open file, or of the last component of a path."""
    follow = isinstance(target, int)
    try:
        names = os.listxattr(target, follow_symlinks=follow)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM):
            return {}
        raise
    found = {}
    for name in names:
        try:
            found[os.fsencode(name)] = os.getxattr(target, name, follow_symlinks=follow)
        except OSError as error:  # gone meanwhile, or hidden from this caller
            if error.errno not in (errno.ENODATA, errno.EPERM):
                raise
    return found
