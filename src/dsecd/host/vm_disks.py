"""The disks of a virtual machine, put into the root of a living jail from outside."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from dsecd.host import sparse
from dsecd.host.inside import open_inside


def root_of(pid: int) -> Path:
    """Return where the files of a process begin, for this process."""
    return Path(f"/proc/{pid}/root")


def place(root: Path, path: str, image: Path) -> None:
    """Copy `image` to the new file `path`, which whoever owns its directory may write.

    Holes stay holes. Raises `OSError`.
    """
    fd = _create(root, path)
    try:
        with image.open("rb") as source:
            size = os.fstat(source.fileno()).st_size
            os.ftruncate(fd, size)
            sparse.copy_data(source.fileno(), fd, size)
    finally:
        os.close(fd)


def place_empty(root: Path, path: str, size: int) -> None:
    """Make the new file `path` of `size` bytes, all of them a hole. Raises `OSError`."""
    fd = _create(root, path)
    try:
        os.ftruncate(fd, size)
    finally:
        os.close(fd)


def write(root: Path, path: str, content: bytes) -> None:
    """Make the new file `path` with `content`. Raises `OSError`."""
    fd = _create(root, path)
    with os.fdopen(fd, "wb") as file:
        file.write(content)


def read(root: Path, path: str, most_bytes: int) -> bytes:
    """Return the first `most_bytes` of the file `path`. Raises `OSError`."""
    fd = open_inside(root, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(fd, "rb") as file:
        return file.read(most_bytes)


def _create(root: Path, path: str) -> int:
    directory = open_inside(root, str(Path(path).parent), os.O_PATH | os.O_DIRECTORY)
    try:
        owner = os.fstat(directory)
    finally:
        os.close(directory)
    fd = open_inside(root, path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.fchown(fd, owner.st_uid, owner.st_gid)
    except BaseException:
        os.close(fd)
        raise
    return fd


def take(root: Path, path: str, to: Path) -> None:
    """Copy the file `path` to the new file `to` of the host. Raises `OSError`."""
    fd = open_inside(root, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        sparse.copy_sparse(Path(f"/proc/self/fd/{fd}"), to)
    finally:
        os.close(fd)


def used_bytes(root: Path, path: str) -> int:
    """Return how much of the disk the file `path` takes. Raises `OSError`."""
    fd = open_inside(root, path, os.O_PATH | os.O_NOFOLLOW)
    try:
        return os.fstat(fd).st_blocks * 512
    finally:
        os.close(fd)


def remove(root: Path, path: str) -> None:
    """Remove the file `path` where there is one. Raises `OSError`."""
    directory = open_inside(root, str(Path(path).parent), os.O_PATH | os.O_DIRECTORY)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(Path(path).name, dir_fd=directory)
    finally:
        os.close(directory)
