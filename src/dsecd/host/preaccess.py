"""Reads of a file that wait until somebody has filled it (FAN_PRE_ACCESS, Linux 6.14).

Who holds the last descriptor of the group and closes it lets every waiting and every later read go
on (fanotify(7)): it fails open.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from dsecd.host import syscalls
from libdsec.errors import Unsupported

_PRE_CONTENT, _CLOEXEC, _UNLIMITED = 0x08, 0x01, 0x10 | 0x20  # a full queue lets reads go on
_LARGEFILE = 0o100000
PRE_ACCESS, ADD = 0x00100000, 0x01


def open_group() -> int:
    """Return a descriptor of a new group. Raises `OSError`."""
    group: int = syscalls.call(
        "fanotify_init", _PRE_CONTENT | _CLOEXEC | _UNLIMITED, _LARGEFILE | 0o2000000
    )
    return group


def try_on(directory: Path) -> None:
    """Raise `Unsupported` when files in `directory` cannot be marked."""
    try:
        group = open_group()
    except OSError as error:
        raise Unsupported(
            f"no fanotify group: {error.strerror}",
            reason="the kernel lacks CONFIG_FANOTIFY_ACCESS_PERMISSIONS",
        ) from error
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            mark(group, file.fileno())
    finally:
        os.close(group)


def mark(group: int, file: int) -> None:
    """Let reads of the open `file` ask the group, in descriptors that are opened from now on.

    Raises `Unsupported` where the kernel cannot.
    """
    try:
        syscalls.call("fanotify_mark", group, ADD, PRE_ACCESS, file, None)
    except OSError as error:
        raise Unsupported(
            f"no pre-access events: {error.strerror}",
            reason="the kernel has no FAN_PRE_ACCESS (6.14), or the file system does not allow it",
        ) from error
