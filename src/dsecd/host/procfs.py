"""Small readings of /proc that other layers need: what exists, what a process is."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def existing(paths: tuple[str, ...], root: str = "/") -> tuple[str, ...]:
    """Return those of `paths` that exist below `root`, in order."""
    base = root.rstrip("/")
    return tuple(path for path in paths if os.path.lexists(base + path))


def open_to_others(path: str, root: str = "/") -> bool:
    """Return whether `path` exists below `root` and its mode gives others anything."""
    return _mode(root.rstrip("/") + path) & 0o007 != 0


def writable_by_others(path: str, root: str = "/") -> bool:
    """Return whether `path`, or anything in the directory `path`, may be written by others."""
    base = root.rstrip("/") + path
    if _mode(base) & 0o002:
        return True
    return any(
        _mode(os.path.join(folder, name)) & 0o002  # noqa: PTH118
        for folder, _, names in os.walk(base)
        for name in names
    )


def _mode(path: str) -> int:
    """Return the permission bits, 0 for what does not exist or is a link."""
    try:
        found = os.lstat(path).st_mode
    except OSError:
        return 0
    return 0 if stat.S_ISLNK(found) else stat.S_IMODE(found)


def swap_active(root: str = "/") -> bool:
    """Return whether the host has a swap device now."""
    try:
        return len(Path(root, "proc/swaps").read_text().splitlines()) > 1
    except OSError:
        return False


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))
