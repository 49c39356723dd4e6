"""Sparse files, and whether what lies in them survived the machine: for the caches of the host."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_KEEP_SIZE, _PUNCH_HOLE = 0x1, 0x2  # include/uapi/linux/falloc.h
_libc = ctypes.CDLL(None, use_errno=True)


def punch(fd: int, offset: int, size: int) -> None:
    """Give a part of a file back to the disk; it reads as zeros then. Raises `OSError`."""
    mode = _KEEP_SIZE | _PUNCH_HOLE
    if _libc.fallocate(fd, mode, ctypes.c_long(offset), ctypes.c_long(size)) < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"fallocate: {os.strerror(code)}")


def boot_id() -> str:
    """Return what is different after each start of the machine, "" where it is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""
