"""Copies of images and chunk indexes in the cache of a host, and which of them go.

dsec-blobd bounds chunks only. Copies may take `bound` bytes; those in use count and stay, of the
others the ones go that were used least recently. A file's mtime is the record of that: `trim` sets
it on what it finds in use. Removing a copy loses nothing, whoever dies meanwhile: the next layer
that needs it fetches it again.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Collection
from pathlib import Path

_KINDS = ("images", "indexes")
_RESOLUTION_S = 600.0  # of the record


class Copies:
    """Those below `cache`. `bound` 0: there is none."""

    def __init__(self, cache: Path, bound: int) -> None:
        self._directories = [cache / kind for kind in _KINDS]
        self._bound = bound
        for directory in self._directories:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            for entry in directory.glob(".*"):  # of a copy that a killed daemon was making
                entry.unlink(missing_ok=True)

    def trim(self, used: Collection[str]) -> set[Path]:
        """Remove copies until they fit, except those with a name in `used`; return which went."""
        total, idle, now = 0, [], time.time()
        for directory in self._directories:
            with os.scandir(directory) as entries:
                for entry in entries:
                    with contextlib.suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        total += status.st_size
                        if entry.name in used:
                            if status.st_mtime < now - _RESOLUTION_S:
                                os.utime(entry.path)
                        elif not entry.name.startswith("."):
                            idle.append((status.st_mtime, status.st_size, Path(entry.path)))
        gone = set()
        for _, size, path in sorted(idle):
            if not self._bound or total <= self._bound:
                break
            path.unlink(missing_ok=True)
            gone.add(path)
            total -= size
        return gone
