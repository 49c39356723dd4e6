"""Writable upper layers on disk, each with a hard limit that the kernel enforces.

An upper is a directory of its own in the volume: on btrfs a subvolume with a quota, on XFS a
directory with a project quota. dsec-spawner makes ``upper`` and ``work`` in it; removing it is
ours, after the sandbox is gone and off the path of anyone who waits. (A memory upper is a tmpfs
that the spawner makes by itself: it needs a size and nothing from here.) Writes beyond the limit
fail inside the sandbox with EDQUOT on btrfs and ENOSPC on XFS.

A directory's name is a hash of the sandbox id: the name shows in the sandbox's own mount table, and
`sweep` must be able to tell whose it is.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import errno
import fcntl
import hashlib
import logging
import os
import struct
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from dsecd import fastpath
from dsecd.host import btrfs
from dsecd.host.volume import KINDS, Kind, Volume, close_volume, open_volume
from libdsec.errors import DSecError, Exhausted, Internal, Unsupported
from libdsec.model import Feature

_log = logging.getLogger(__name__)
RESERVE_BYTES = 256 << 20  # of the volume, and of the disk below it, left when admission stops
MIN_BYTES = 1 << 20  # a limit that still lets an empty overlay be mounted
_THREADS = 2
_BURIED_AT_ONCE = 4
_TRASH = "gone-"
_FIRST_PROJECT = 1 << 30  # far from the projects an operator numbers by hand
_INODE_SHARE = 2048  # XFS does not charge inodes to the block limit: one inode per so many bytes
_FSGETXATTR = 2 << 30 | 28 << 16 | ord("X") << 8 | 31
_FSXATTR = struct.Struct("<5I8x")  # xflags, extsize, nextents, projid, cowextsize


class Upper(msgspec.Struct, frozen=True):
    """A disk upper. `project` is its quota project on XFS, 0 on btrfs. Fit for a journal."""

    dir: str
    project: int
    limit_bytes: int


class Uppers:
    """All disk uppers of the host. Blocking work runs in two threads of its own."""

    def __init__(
        self, directory: Path, point: Path, size_bytes: int = 0, kinds: Sequence[Kind] = KINDS
    ) -> None:
        """`directory` holds the volume's file, or is the volume; ours is mounted at `point`."""
        self._directory, self._point = directory, point
        self._size_bytes, self._kinds = size_bytes, kinds
        self._volume: Volume | None = None
        self._reason = "not started"
        self._projects: set[int] = set()
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="upper")
        # quota groups of removed subvolumes: they go when the last extent is freed
        self._zombies: collections.deque[int] = collections.deque()

    def start(self) -> None:
        """Open or make the volume; without one, disk uppers are refused with the reason.

        To be called before the spawners start: their mount namespaces must contain the mount.
        """
        try:
            self._volume = open_volume(self._directory, self._point, self._size_bytes, self._kinds)
        except DSecError as error:
            self._reason = error.message
            _log.warning("no disk uppers: %s", error.message)
            return
        if self._volume.kind == "xfs":
            self._projects = set(self._used_projects())

    def feature(self) -> Feature:
        """Return the row for the probe table."""
        volume = self._volume
        how = f"{volume.kind} at {volume.directory}" if volume else self._reason
        return Feature(
            name="upper_disk",
            available=volume is not None,
            reason=how,
            needed_for="upper='disk': a hard limit on what a sandbox writes to disk",
        )

    def free_bytes(self) -> int:
        """Return what the volume can still take, 0 without one."""
        return self._volume.free_bytes() if self._volume else 0

    def plan(self, sandbox: str, limit_bytes: int) -> Upper:
        """Return the upper that `make` will make: to be journalled before.

        Raises `Unsupported` without a volume, `Exhausted` when it, or the disk below it, is full.
        """
        volume = self._need()
        if volume.free_bytes() < RESERVE_BYTES:
            raise Exhausted("the volume for disk uppers is full; stop sandboxes or try again later")
        project = self._next_project() if volume.kind == "xfs" else 0
        limit = max(limit_bytes, MIN_BYTES)
        return Upper(str(volume.directory / _directory_name(sandbox)), project, limit)

    async def make(self, upper: Upper) -> None:
        """Make the directory with its limit. Raises `Internal`, `Exhausted`, and undoes it then."""
        await self._in_thread(self._make, upper)

    async def acquire(self, sandbox: str, limit_bytes: int) -> Upper:
        """`plan` and `make` in one."""
        upper = self.plan(sandbox, limit_bytes)
        await self.make(upper)
        return upper

    async def release(self, upper: Upper) -> None:
        """Remove the upper, if it is there; the sandbox must be gone. Raises `Internal`."""
        await self._in_thread(self._remove, Path(upper.dir), upper.project)

    def usage(self, upper: Upper) -> int:
        """Return the bytes charged to the upper; 0 when it is gone."""
        volume = self._need()
        try:
            if volume.kind == "btrfs":
                return btrfs.usage(volume.directory, btrfs.subvolume_id(Path(upper.dir)))
            with _opened(volume.directory) as fd:
                return fastpath.get_project_usage(fd, upper.project)[0]
        except OSError as error:  # not FileNotFoundError: the fast path has one type for all
            if error.errno != errno.ENOENT:
                raise
            return 0

    async def sweep(self, known: Collection[str], kept_dirs: Collection[str] = ()) -> list[str]:
        """Remove the uppers of sandboxes not in `known`; return the names of the directories.

        Those in `kept_dirs` stay: others branched off from them.
        """
        if self._volume is None:
            return []
        kept = {_directory_name(sandbox) for sandbox in known} | {Path(p).name for p in kept_dirs}
        stale = [
            entry
            for entry in self._volume.directory.iterdir()
            if entry.name not in kept and _is_ours(entry.name)
        ]
        for entry in stale:
            await self._in_thread(self._remove, entry, self._project_of(entry))
        return [entry.name for entry in stale]

    def close(self) -> None:
        """Wait for removals; the volume stays for the next daemon."""
        self._threads.shutdown()

    def teardown(self) -> None:
        """Remove the volume, if it is ours: no sandbox is left and none will come."""
        self.close()
        if self._volume is not None:
            close_volume(self._volume)
            self._volume = None

    # --- in threads -------------------------------------------------------------------------

    async def _in_thread(self, work: Callable[..., None], *args: object) -> None:
        loop = asyncio.get_running_loop()
        # shielded: a cancelled create must not return before its directory is there to be removed
        await asyncio.shield(loop.run_in_executor(self._threads, work, *args))

    def _make(self, upper: Upper) -> None:
        volume, directory = self._need(), Path(upper.dir)
        try:
            if volume.kind == "btrfs":
                btrfs.create(volume.directory, directory.name, upper.limit_bytes)
                directory.chmod(0o700)
            else:
                self._make_project(directory, upper)
        except FileExistsError as error:
            raise Internal(f"the upper {directory} exists already") from error
        except OSError as error:
            kind = Exhausted if error.errno in (errno.ENOSPC, errno.EDQUOT) else Internal
            raise kind(f"cannot make the upper {directory}: {error}") from error

    def _make_project(self, directory: Path, upper: Upper) -> None:
        directory.mkdir(mode=0o700)
        try:
            with _opened(directory) as fd:
                fastpath.set_project(fd, upper.project)
                inodes = upper.limit_bytes // _INODE_SHARE
                fastpath.set_project_quota(fd, upper.project, upper.limit_bytes, inodes)
        except OSError:
            directory.rmdir()
            raise

    def _remove(self, directory: Path, project: int) -> None:
        volume = self._need()
        try:
            if volume.kind == "btrfs":
                if number := btrfs.destroy(volume.directory, directory.name):
                    self._zombies.append(number)
                self._bury(volume)
                return
            trash = directory
            if not directory.name.startswith(_TRASH):
                trash = directory.with_name(_TRASH + directory.name)
                with contextlib.suppress(FileNotFoundError):
                    directory.rename(trash)
            fastpath.remove_tree(trash)
            if project:
                with _opened(volume.directory) as fd:
                    fastpath.set_project_quota(fd, project, 0)
                self._projects.discard(project)
        except OSError as error:
            raise Internal(f"cannot remove the upper {directory}: {error}") from error

    def _bury(self, volume: Volume) -> None:
        """Remove quota groups that are empty by now: a few, more than are added each time."""
        for _ in range(min(_BURIED_AT_ONCE, len(self._zombies))):
            with contextlib.suppress(IndexError):  # the other thread was faster
                number = self._zombies.popleft()
                if not btrfs.forget(volume.directory, number):
                    self._zombies.append(number)

    # --- projects ---------------------------------------------------------------------------

    def _need(self) -> Volume:
        if self._volume is None:
            raise Unsupported(
                f"this host has no disk uppers: {self._reason}; use upper='memory'",
                reason=self._reason,
            )
        return self._volume

    def _next_project(self) -> int:
        project = _FIRST_PROJECT
        if self._projects:
            project = max(self._projects) + 1
            if project >= 1 << 31:
                project = next(n for n in range(_FIRST_PROJECT, 1 << 31) if n not in self._projects)
        self._projects.add(project)
        return project

    def _used_projects(self) -> Iterator[int]:
        assert self._volume is not None
        for entry in self._volume.directory.iterdir():
            if _is_ours(entry.name) and (project := self._project_of(entry)):
                yield project

    def _project_of(self, directory: Path) -> int:
        """Return the project of a directory in the volume, 0 on btrfs and when it is gone."""
        if self._need().kind != "xfs":
            return 0
        reply = bytearray(_FSXATTR.size)
        try:
            with _opened(directory) as fd:
                fcntl.ioctl(fd, _FSGETXATTR, reply)
        except OSError:
            return 0
        return int(_FSXATTR.unpack(reply)[3])


def _directory_name(sandbox: str) -> str:
    return hashlib.blake2b(sandbox.encode(), digest_size=8).hexdigest()


def _is_ours(name: str) -> bool:
    """The operator's directories may lie beside ours: touch only what looks like one of ours."""
    plain = name.removeprefix(_TRASH)
    return len(plain) == 16 and not set(plain) - set("0123456789abcdef")


@contextlib.contextmanager
def _opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)
