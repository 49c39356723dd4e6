"""The local disk that builds need: directories for their work, room, and a word when it is full."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import shutil
import sqlite3
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

from libdsec.errors import Exhausted

RESERVE_BYTES = 256 << 20  # of the disk, never filled by a build
LEASE = "lease"  # file in a directory of work: the key of the lease that the work holds
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextlib.asynccontextmanager
async def scratch(parent: Path) -> AsyncIterator[Path]:
    """Yield a new directory below `parent`, locked (flock) while this process works in it."""
    directory, fd = _make(parent)
    try:
        yield directory
    finally:
        await asyncio.to_thread(_remove, directory, fd)


def sweep(parent: Path) -> list[str]:
    """Remove what dead processes left in `parent`; return the keys of the leases they held."""
    leases = []
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    for entry in list(parent.iterdir()):
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):  # finished; not ours
            fd = os.open(entry, _DIRECTORY)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(fd)
                continue
            with contextlib.suppress(OSError):
                leases.append((entry / LEASE).read_text())
            _remove(entry, fd)
    return leases


def room(directory: Path, reserve: int = RESERVE_BYTES) -> int:
    """Return how many bytes may be written to the disk of `directory`. Raises `Exhausted`."""
    left = free(directory) - reserve
    if left <= 0:
        raise Exhausted(f"the disk of {directory} is full; remove layers or free space")
    return left


def free(directory: Path) -> int:
    """Return how many bytes the disk of `directory` has left."""
    status = os.statvfs(directory)
    return status.f_bavail * status.f_frsize


def shared(one: Path, other: Path) -> bool:
    """Whether both directories are on one file system."""
    return one.stat().st_dev == other.stat().st_dev


@contextlib.contextmanager
def full_named(what: str) -> Iterator[None]:
    """Turn the many errors of a full disk into `Exhausted`; `what` was being done."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise Exhausted(f"disk full while {what}; remove layers or free space") from error
        raise
    except sqlite3.OperationalError as error:
        if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
            raise Exhausted(f"disk full while {what}; remove layers or free space") from error
        raise


def _make(parent: Path) -> tuple[Path, int]:
    parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    while True:
        directory = Path(tempfile.mkdtemp(dir=parent))
        with contextlib.suppress(FileNotFoundError):
            fd = os.open(directory, _DIRECTORY)
            fcntl.flock(fd, fcntl.LOCK_EX)
            if directory.exists():
                return directory, fd
            os.close(fd)  # a sweep came between its making and its lock


def _remove(directory: Path, fd: int) -> None:
    """Remove `directory` and close `fd`, whose lock keeps others from doing that, too."""
    try:
        shutil.rmtree(directory, ignore_errors=True)
    finally:
        os.close(fd)
