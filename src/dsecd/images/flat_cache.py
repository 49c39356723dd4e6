"""Flat files of layers, made once per host for all virtual machines that attach them.

A file lies at `<directory>/<digest>.erofs` until there are too many: then the ones go that nobody
uses, those first whose last use is longest ago. A file's mtime is the record of that.

Files are not synced, for that would double the time to make one. So those of before the last start
of the machine are not trusted: they go when the daemon starts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from dsecd.host import sparse
from dsecd.images import disk, flat
from dsecd.images.local import Local
from libdsec.errors import Exhausted

_log = logging.getLogger("dsecd.layers")
_SUFFIX, _GONE = ".erofs", ".gone"
_AT_ONCE = 4  # copies: a disk gains nothing from more, a store of high latency does


class FlatLayer(msgspec.Struct, frozen=True):
    """A layer's file and its length, a multiple of 2 MiB. Paths are text, as in `Local`."""

    path: str
    size_bytes: int


class _Copy:
    """A file that is being made, and how many wait for it."""

    def __init__(self, task: asyncio.Task[FlatLayer]) -> None:
        self.task = task
        self.waiting = 0


class FlatLayers:
    """Those in `directory`. One per daemon, used from its event loop only.

    `bound_bytes`: of the disk that all take together; files in use count and stay. 0: no bound.
    `reserve_bytes` of the disk are never filled.
    """

    def __init__(
        self, directory: Path, bound_bytes: int = 0, reserve_bytes: int = disk.RESERVE_BYTES
    ) -> None:
        self._directory = directory
        self._bound_bytes = bound_bytes
        self._reserve_bytes = reserve_bytes
        self._users: dict[str, int] = {}
        self._sizes: dict[str, int] = {}  # of files made or checked by this process
        self._copies: dict[str, _Copy] = {}
        self._tasks: set[asyncio.Task[FlatLayer]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)

    def start(self) -> list[str]:
        """Find the files of an earlier daemon, remove what it left half made; return the digests.

        They count no user: recovery calls `acquire` for each living machine.
        """
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        record, boot = self._directory / "boot", sparse.boot_id()
        trusted = bool(boot) and record.exists() and record.read_text() == boot
        for entry in self._directory.iterdir():
            if entry.name.startswith(".") or not trusted:
                entry.unlink()
        record.write_text(boot)
        return self.digests()

    async def provide(self, local: Local) -> FlatLayer:
        """Return the layer's flat file, made when it is not there, and count one more user.

        Whoever asks for a layer that is being made gets that one; when all of them are cancelled,
        the copy ends. Raises what `flat.flatten` does; `Exhausted` names what the layer needs when
        the disk has no room for it though everything unused has gone.
        """
        self.acquire(local.digest)  # from here on the file is not removed
        try:
            return self.find(local.digest) or await self._provide(local)
        except BaseException:
            self.release(local.digest)
            raise

    def acquire(self, digest: str) -> None:
        """Count one more user of a layer that a living machine has."""
        self._users[digest] = self._users.get(digest, 0) + 1

    def release(self, digest: str) -> None:
        """Count one user less; the file stays until the bound takes it."""
        self._users[digest] -= 1
        if not self._users[digest]:
            del self._users[digest]
            now = time.time_ns()  # the kernel's own stamp is the same for some milliseconds
            with contextlib.suppress(FileNotFoundError):
                os.utime(self._path(digest), ns=(now, now))

    def find(self, digest: str) -> FlatLayer | None:
        """Return the file when this process made or checked it, and it is there in full."""
        size, path = self._sizes.get(digest), self._path(digest)
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_size == size:
                return FlatLayer(str(path), size)
        return None

    def users(self, digest: str) -> int:
        """Return how many use the layer."""
        return self._users.get(digest, 0)

    def digests(self) -> list[str]:
        """Return the digests of all layers that have a file."""
        return [path.stem for path in self._directory.glob(f"[!.]*{_SUFFIX}")]

    async def trim(self) -> None:
        """Remove unused files, oldest first, as far as there are too many bytes."""
        await self._trim(0)

    async def close(self) -> None:
        """End all copies; every file stays for the next daemon."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _path(self, digest: str) -> Path:
        return self._directory / f"{digest}{_SUFFIX}"

    async def _provide(self, local: Local) -> FlatLayer:
        copy = self._copies.get(local.digest)
        if copy is None:
            copy = self._copies[local.digest] = self._start(local)
        copy.waiting += 1
        try:
            return await asyncio.shield(copy.task)
        finally:
            copy.waiting -= 1
            if not copy.waiting:  # it is done, or nobody wants it
                copy.task.cancel()
                if self._copies.get(local.digest) is copy:
                    del self._copies[local.digest]

    def _start(self, local: Local) -> _Copy:
        task = asyncio.create_task(self._make(local))
        self._tasks.add(task)

        def finished(task: asyncio.Task[FlatLayer]) -> None:
            self._tasks.discard(task)
            if not task.cancelled():
                task.exception()  # those who wait have it; there may be none

        task.add_done_callback(finished)
        return _Copy(task)

    async def _make(self, local: Local) -> FlatLayer:
        digest = local.digest
        layout = await asyncio.to_thread(flat.plan, local)
        self._sizes[digest] = layout.size_bytes
        if made := self.find(digest):
            return made
        async with self._slots:
            await self._trim(layout.data_bytes)
            await self._make_room(local, layout.data_bytes)
            await _flatten(local, self._path(digest))
        return FlatLayer(str(self._path(digest)), layout.size_bytes)

    async def _make_room(self, local: Local, needed: int) -> None:
        """Remove unused files until the disk has room for `needed` bytes."""
        needed += self._reserve_bytes
        idle = self._idle()
        while (free := disk.free(self._directory)) < needed:
            victims = []
            while idle and free < needed:
                digest, size = idle.pop(0)
                victims.append(digest)
                free += size
            if not victims:
                raise Exhausted(
                    f"layer {local.digest[:12]} needs {needed - self._reserve_bytes} bytes as one "
                    f"file in {self._directory}, whose disk has {free} free and keeps "
                    f"{self._reserve_bytes}; remove layers or free space"
                )
            await self._remove(victims)
            idle = self._idle()  # some may have got a user meanwhile

    async def _trim(self, coming: int) -> None:
        """Remove unused files so that with `coming` bytes more the bound is kept."""
        if not self._bound_bytes:
            return
        over = self._total() + coming - self._bound_bytes
        victims = []
        for digest, size in self._idle():
            if over <= 0:
                break
            victims.append(digest)
            over -= size
        await self._remove(victims)

    def _total(self) -> int:
        """Return the bytes of all files, those that are being made included."""
        return sum(
            status.st_blocks * 512 for name, status in self._files() if not name.endswith(_GONE)
        )

    def _idle(self) -> list[tuple[str, int]]:
        """Return the unused layers and the bytes of their files, the longest unused first."""
        found = []
        for name, status in self._files():
            digest = name.removesuffix(_SUFFIX)
            if digest + _SUFFIX == name and not name.startswith(".") and digest not in self._users:
                found.append((status.st_mtime_ns, digest, status.st_blocks * 512))
        return [(digest, size) for _, digest, size in sorted(found)]

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        with os.scandir(self._directory) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # a copy ended
                    yield entry.name, entry.stat(follow_symlinks=False)

    async def _remove(self, digests: Iterable[str]) -> None:
        """Remove unused files: their names at once, what they hold in a thread."""
        gone = []
        for digest in digests:
            path = self._path(digest)
            gone.append(path.rename(path.with_name(f".{path.name}{_GONE}")))
            self._sizes.pop(digest, None)
            _log.debug("removed the flat file of layer %s", digest[:12])
        await asyncio.to_thread(_unlink, gone)


def _unlink(paths: Iterable[Path]) -> None:
    for path in paths:
        path.unlink(missing_ok=True)


async def _flatten(local: Local, path: Path) -> None:
    """Run `flat.flatten` in a thread; a cancelled call ends it and waits until nothing is left."""
    stop = threading.Event()
    running = asyncio.ensure_future(asyncio.to_thread(flat.flatten, local, path, stop))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        stop.set()
        with contextlib.suppress(Exception):
            await running
        raise
