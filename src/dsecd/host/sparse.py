"""Sparse files, and whether what lies in them survived the machine: for the caches of the host."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2  # include/uapi/linux/falloc.h
_PIECE = 16 << 20  # of one call, some tens of milliseconds
# copy_file_range(2) between two kinds of file system (5.19), from a special one, before 5.3
_NOT_HERE = (errno.EXDEV, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_libc = ctypes.CDLL(None, use_errno=True)


def punch(fd: int, offset: int, size: int) -> None:
    """Give a part of a file back to the disk; it reads as zeros then. Raises `OSError`."""
    mode = _KEEP_SIZE | _PUNCH_HOLE
    if _libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(size)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"fallocate: {os.strerror(code)}")


def copy_sparse(source: Path, to: Path) -> None:
    """Make `to` a copy of `source`, holes included, with mode 0600. Raises `OSError`.

    Where the file system can, both share their blocks until one is written to.
    """
    with source.open("rb") as read:
        size = os.fstat(read.fileno()).st_size
        with contextlib.ExitStack() as undo:
            target = os.open(to, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            undo.callback(to.unlink)
            try:
                os.ftruncate(target, size)
                copy_data(read.fileno(), target, size)
            finally:
                os.close(target)
            undo.pop_all()


def copy_data(
    source: int, to: int, size: int, at: int = 0, proceed: Callable[[], None] | None = None
) -> None:
    """Copy what is no hole in the first `size` bytes of `source` to the offset `at` of `to`.

    Moves the offsets of both. The kernel copies, or shares blocks where the file system can.
    `proceed` is called before each piece and may raise to end it. Raises `OSError`, ENODATA when
    the file turns out to be shorter.
    """
    copy: Callable[[int, int, int, int, int], int] = os.copy_file_range
    for start, end in _extents(source, size):
        while start < end:
            if proceed is not None:
                proceed()
            length = min(end - start, _PIECE)
            try:
                done = copy(source, to, length, start, at + start)
            except OSError as error:
                if copy is _send or error.errno not in _NOT_HERE:
                    raise
                copy = _send
                continue
            if done == 0:
                raise OSError(errno.ENODATA, f"a file ends at {start} instead of {end}")
            start += done


def _send(source: int, to: int, length: int, start: int, at: int) -> int:
    os.lseek(to, at, os.SEEK_SET)
    return os.sendfile(to, source, start, length)


def _extents(fd: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each stretch of data, as far as the file system tells."""
    end = 0
    while end < size:
        try:
            start = os.lseek(fd, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # a hole up to the end
                return
            raise
        if start >= size:
            return
        end = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        yield start, end


def boot_id() -> str:
    """Return what is different after each start of the machine, "" where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
