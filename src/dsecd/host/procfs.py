"""Small readings of /proc that other layers need: what exists, what a process is."""

from __future__ import annotations

import os
from pathlib import Path


def existing(paths: tuple[str, ...], root: str = "/") -> tuple[str, ...]:
    """Return those of `paths` that exist below `root`, in order."""
    base = root.rstrip("/")
    return tuple(path for path in paths if os.path.lexists(base + path))


def swap_active(root: str = "/") -> bool:
    """Return whether the host has a swap device now."""
    try:
        return len(Path(root, "proc/swaps").read_text().splitlines()) > 1
    except OSError:
        return False


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0))
