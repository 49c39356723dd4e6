"""The directory of the sandboxes' agent sockets, on a tmpfs of its own.

/run is on disk on some hosts, where every directory and socket would cost journal writes. The mount
outlives the daemon: the sockets are how the next one finds the living.
"""

from __future__ import annotations

from pathlib import Path

from dsecd.host import mountinfo, syscalls
from libdsec.errors import Unsupported

_MS_PRIVATE = 1 << 18


def mount(path: Path) -> None:
    """Mount it at `path` unless it is there already. Raises `Unsupported`."""
    path.mkdir(parents=True, exist_ok=True)
    if mountinfo.at(path) is not None:
        return
    flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOEXEC
    try:
        syscalls.mount("dsec-sockets", str(path), "tmpfs", flags, "mode=711,nr_inodes=0")
        syscalls.mount("", str(path), "", _MS_PRIVATE)
    except OSError as error:
        raise Unsupported(f"cannot mount a tmpfs at {path}: {error.strerror}") from error


def unmount(path: Path) -> None:
    """Undo `mount`."""
    while mountinfo.at(path) is not None:
        syscalls.umount(str(path))
    if path.is_dir():
        path.rmdir()
