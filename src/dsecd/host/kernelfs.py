"""All reading and writing of cgroup and proc files goes through one small object.

The drivers above it are logic over paths, so their tests hand them a recording twin instead of a
kernel. Each call opens, acts and closes: nothing here keeps a descriptor.
"""

from __future__ import annotations

import os
from pathlib import Path

_READ = os.O_RDONLY | os.O_CLOEXEC
_WRITE = os.O_WRONLY | os.O_CLOEXEC


class KernelFiles:
    """The real thing. Every method raises `OSError` as the kernel answers."""

    def read(self, path: str) -> str:
        """Return the whole of a kernel file (at most 1 MiB)."""
        fd = os.open(path, _READ)
        try:
            parts = []
            while part := os.read(fd, 65536):
                parts.append(part)
                if len(parts) > 16:
                    break
            return b"".join(parts).decode("utf-8", "replace")
        finally:
            os.close(fd)

    def number(self, path: str) -> int:
        """Return the one number that a kernel file holds."""
        fd = os.open(path, _READ)
        try:
            return int(os.read(fd, 64))
        finally:
            os.close(fd)

    def write(self, path: str, value: str) -> None:
        """Write `value` in one write(2), which is what kernel files parse."""
        fd = os.open(path, _WRITE)
        try:
            os.write(fd, value.encode())
        finally:
            os.close(fd)

    def mkdir(self, path: str) -> None:
        Path(path).mkdir(mode=0o755)

    def rmdir(self, path: str) -> None:
        Path(path).rmdir()

    def directories(self, path: str) -> list[str]:
        """Return the names of the directories in `path`, sorted."""
        with os.scandir(path) as entries:
            return sorted(e.name for e in entries if e.is_dir(follow_symlinks=False))

    def exists(self, path: str) -> bool:
        return Path(path).exists()

    def chown(self, path: str, uid: int) -> None:
        os.chown(path, uid, uid)

    def tag(self, path: str, value: str) -> None:
        """Remember `value` on a cgroup directory; it dies with the directory, not with us.

        Kernfs keeps trusted.* attributes in memory; 3 µs on either hierarchy.
        """
        os.setxattr(path, "trusted.dsec", value.encode())

    def tagged(self, path: str) -> str:
        """Return what `tag` stored, "" when nothing was."""
        try:
            return os.getxattr(path, "trusted.dsec").decode()
        except OSError:
            return ""

    def inode(self, path: str) -> int:
        return Path(path).stat().st_ino

    def open_directory(self, path: str) -> int:
        """Return a descriptor fit for CLONE_INTO_CGROUP."""
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


def fields(text: str) -> dict[str, int]:
    """Return the numbers of a flat-keyed file ("name value" lines)."""
    pairs: dict[str, int] = {}
    for line in text.splitlines():
        name, _, value = line.partition(" ")
        if value.strip().isdigit():
            pairs[name] = int(value)
    return pairs
