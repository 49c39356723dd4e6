"""Who a process is, beyond its pid, which the kernel gives to another one later."""

from __future__ import annotations

import contextlib
import os
import select
from collections.abc import Callable
from pathlib import Path


def open_pidfd(pid: int, expected: Callable[[], bool]) -> int:
    """Return a pidfd of `pid`, -1 when it is gone or is not the `expected` process any more."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return -1
    # opened first, looked at then: the pid cannot pass to another process in between unseen
    if expected() and not exited(fd):
        return fd
    os.close(fd)
    return -1


def exited(pidfd: int) -> bool:
    """Return whether the process behind `pidfd` has ended (a pidfd is then readable)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def used_bytes(pid: int, fd: int) -> int:
    """Return the bytes used in the file system of the open `fd` of `pid`, 0 when it is gone."""
    with contextlib.suppress(OSError):
        found = os.statvfs(descriptor(pid, fd))
        return (found.f_blocks - found.f_bfree) * found.f_frsize
    return 0


def descriptor(pid: int, fd: int) -> Path:
    """Return the path that opens what process `pid` has open as `fd`."""
    return Path(f"/proc/{pid}/fd/{fd}")
