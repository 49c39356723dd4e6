"""A FUSE mount that outlives the process that serves it.

Whoever holds the descriptor of /dev/fuse keeps the connection: the kernel ends it when the last
copy is closed. So the daemon opens and mounts, and gives the descriptor to the server
(Documentation/filesystems/fuse/fuse.rst of the kernel).
"""

from __future__ import annotations

import os
from pathlib import Path

from dsecd.host import mountinfo, syscalls

_FLAGS = syscalls.MS_RDONLY | syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC


def mount(target: Path, name: str) -> int:
    """Mount a connection at `target`, shown as `name`; return its descriptor. Raises `OSError`.

    Only processes of the mounting user may enter it. Looking at `target` blocks until it is served.
    """
    fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC)
    options = f"fd={fd},rootmode=40000,user_id={os.geteuid()},group_id={os.getegid()}"
    try:
        syscalls.mount(name, str(target), f"fuse.{name}", _FLAGS, options)
    except BaseException:
        os.close(fd)
        raise
    return fd


def connection(target: Path) -> str:
    """Return the connection's name below /sys/fs/fuse/connections, "" when none is mounted.

    It is the minor device number. The mount table tells, for stat(2) would ask the server.
    """
    wanted = f"{os.path.realpath(target.parent)}/{target.name}"
    found = ""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        for mount_ in mountinfo.parse(line):
            if mount_.point == wanted and mount_.type.startswith("fuse"):
                found = line.split(" ")[2].partition(":")[2]
    return found


def unmount(target: Path) -> None:
    """Detach the mount; what is open in it stays until it is closed. Raises `OSError`."""
    syscalls.umount(str(target))
