"""Directory trees as tar streams, packed and unpacked without holding them in memory.

Unpacking treats the archive as hostile (it was written inside a sandbox): the rules are those of
tarfile's "data" filter (PEP 706), applied here because older Python 3.11 lacks it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import os
import stat
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import IO, cast

from libdsec.errors import InvalidArgument

BLOCK = 256 << 10  # bytes handed on at a time


class PushFile(io.RawIOBase):
    """A write-only file that passes whole blocks to `push`."""

    def __init__(self, push: Callable[[bytes], None]) -> None:
        super().__init__()
        self._push = push
        self._buffer = bytearray()

    def writable(self) -> bool:
        return True

    def write(self, data: object) -> int:
        view = memoryview(cast(bytes, data))
        self._buffer += view
        while len(self._buffer) >= BLOCK:
            self._push(bytes(self._buffer[:BLOCK]))
            del self._buffer[:BLOCK]
        return len(view)

    def finish(self) -> None:
        """Pass on what is left."""
        if self._buffer:
            self._push(bytes(self._buffer))
            self._buffer.clear()


class PullFile(io.RawIOBase):
    """A read-only file over `pull`, which returns the next bytes, b"" at the end."""

    def __init__(self, pull: Callable[[], bytes]) -> None:
        super().__init__()
        self._pull = pull
        self._left = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: object) -> int:
        view = memoryview(cast(bytearray, buffer))
        if not self._left:
            self._left = self._pull()
        taken = self._left[: len(view)]
        view[: len(taken)] = taken
        self._left = self._left[len(taken) :]
        return len(taken)


def pack(root: Path, push: Callable[[bytes], None]) -> None:
    """Write a tar of the content of directory `root`, names relative to it, to `push`."""
    sink = PushFile(push)
    # the archive's bytes must not depend on who packs: owners inside are the sandbox's
    with tarfile.open(
        fileobj=cast(IO[bytes], sink), mode="w|", bufsize=BLOCK, format=tarfile.PAX_FORMAT
    ) as tar:
        for entry in sorted(os.listdir(root)):  # noqa: PTH208 - names, not paths
            tar.add(root / entry, arcname=entry, filter=_plain)
    sink.finish()


def _plain(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    if not (member.isfile() or member.isdir() or member.issym() or member.islnk()):
        return None  # sockets, devices and pipes have no meaning elsewhere
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def unpack(pull: Callable[[], bytes], root: Path, on_bytes: Callable[[int], None]) -> None:
    """Unpack the tar that `pull` yields below `root`, refusing whatever would leave it.

    Raises `InvalidArgument` naming the member that is refused.
    """
    root.mkdir(parents=True, exist_ok=True)
    top = os.path.realpath(root)
    modes: list[tuple[Path, int]] = []
    source = io.BufferedReader(PullFile(pull), BLOCK)
    with tarfile.open(fileobj=source, mode="r|", bufsize=BLOCK) as tar:
        for member in tar:
            safe = _checked(member, top)
            if safe is None:
                continue
            if safe.isdir():
                # its own mode comes last: it may forbid to fill it
                modes.append((Path(top, safe.name), safe.mode))
                Path(top, safe.name).mkdir(parents=True, exist_ok=True)
                continue
            _extract(tar, safe, top)
            on_bytes(safe.size if safe.isreg() else 0)
    for path, mode in reversed(modes):
        path.chmod(mode)
    while pull():  # the padding after the archive's end: the sender waits until it is read
        continue


def _checked(member: tarfile.TarInfo, top: str) -> tarfile.TarInfo | None:
    """Return `member` made harmless, None to skip it. Raises when it would escape `top`."""
    name = member.name.lstrip("/")
    if name in ("", "."):
        return None
    if not (member.isreg() or member.isdir() or member.issym() or member.islnk()):
        return None
    if not _inside(Path(top, name), top):
        raise InvalidArgument(f"archive member {member.name!r} would leave {top}", path=name)
    if member.issym() or member.islnk():
        start = Path(top, name).parent if member.issym() else Path(top)
        if Path(member.linkname).is_absolute() or not _inside(start / member.linkname, top):
            raise InvalidArgument(
                f"archive member {member.name!r} links to {member.linkname!r} outside of {top}",
                path=name,
            )
    safe = copy.copy(member)
    safe.name = name
    bits = member.mode & 0o755 | stat.S_IRUSR | stat.S_IWUSR
    safe.mode = bits | stat.S_IXUSR if member.isdir() else bits
    safe.uid, safe.gid = os.getuid(), os.getgid()
    safe.uname = safe.gname = ""
    return safe


def _inside(path: Path, top: str) -> bool:
    return os.path.commonpath([os.path.realpath(path), top]) == top


def _extract(tar: tarfile.TarFile, member: tarfile.TarInfo, top: str) -> None:
    target = Path(top, member.name)
    target.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError, IsADirectoryError, PermissionError):
        target.unlink()  # never write through a link that an earlier member left
    if hasattr(tarfile, "data_filter"):
        tar.extract(member, top, filter="fully_trusted")
    else:
        tar.extract(member, top)
