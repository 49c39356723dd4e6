"""The v2 directories of sandboxes, `<v2 root>/<name>/<sandbox id>`, on every kind of host."""

from __future__ import annotations

import asyncio
import errno
import re

from dsecd.host.cgroup_model import SandboxCgroup
from dsecd.host.kernelfs import KernelFiles, fields
from libdsec.errors import AlreadyExists, DSecError, Exhausted, Internal, InvalidArgument, NotFound

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,127}")
# cgroup.procs lets the owner move its processes below; limits and cgroup.kill stay root's
_DELEGATED = ("", "/cgroup.procs")


class SandboxTree:
    """Makes, kills, freezes, removes and lists directories below one parent."""

    def __init__(self, files: KernelFiles, parent: str) -> None:
        self.files = files
        self.parent = parent

    def prepare(self) -> None:
        """Make the parent directory. Raises `OSError`."""
        if not self.files.exists(self.parent):
            self.files.mkdir(self.parent)

    def make(self, sandbox_id: str, owner_uid: int) -> SandboxCgroup:
        """Make and delegate a directory, and open it. Raises `DSecError`; undoes a half success."""
        path = self.group(sandbox_id).path
        try:
            self.files.mkdir(path)
        except OSError as error:
            raise _translate(error, f"make cgroup {path}") from error
        try:
            for suffix in _DELEGATED:
                self.files.chown(path + suffix, owner_uid)
            return SandboxCgroup(sandbox_id, path, self.files.open_directory(path))
        except OSError as error:
            self.files.rmdir(path)
            raise _translate(error, f"delegate cgroup {path}") from error

    def group(self, sandbox_id: str) -> SandboxCgroup:
        """Name the directory of a sandbox. Raises `InvalidArgument`."""
        if not _NAME.fullmatch(sandbox_id):
            raise InvalidArgument(f"{sandbox_id!r} cannot name a cgroup", field="id")
        return SandboxCgroup(sandbox_id, f"{self.parent}/{sandbox_id}")

    def find(self, sandbox_id: str) -> SandboxCgroup | None:
        """Return the directory of a sandbox that lived before this daemon, or None."""
        path = f"{self.parent}/{sandbox_id}"
        return SandboxCgroup(sandbox_id, path) if self.files.exists(path) else None

    def names(self) -> list[str]:
        """Return the ids of all sandboxes that have a directory."""
        return self.files.directories(self.parent) if self.files.exists(self.parent) else []

    def pids(self, path: str, below: bool = False) -> tuple[int, ...]:
        """Return the host pids in `path` and below, or only below; () when it is gone."""
        found: list[int] = []
        for directory in self._walk(path):
            if below and directory == path:
                continue
            try:
                found += [
                    int(line) for line in self.files.read(f"{directory}/cgroup.procs").split()
                ]
            except FileNotFoundError:
                continue
        return tuple(found)

    def kill(self, path: str) -> None:
        """SIGKILL everything in `path` and below, frozen or not. A missing directory is fine."""
        try:
            self.files.write(f"{path}/cgroup.kill", "1")
        except FileNotFoundError:
            return
        except OSError as error:
            raise _translate(error, f"kill cgroup {path}") from error

    async def freeze(self, path: str, timeout_s: float = 5.0) -> None:
        """Stop all processes; returns when the kernel says so. Raises `DSecError`."""
        await self._set_frozen(path, True, timeout_s)

    async def thaw(self, path: str, timeout_s: float = 5.0) -> None:
        """Let them go on. Raises `DSecError`."""
        await self._set_frozen(path, False, timeout_s)

    async def _set_frozen(self, path: str, frozen: bool, timeout_s: float) -> None:
        what = f"{'freeze' if frozen else 'thaw'} cgroup {path}"
        loop = asyncio.get_running_loop()
        deadline, delay = loop.time() + timeout_s, 0.0005
        try:
            self.files.write(f"{path}/cgroup.freeze", "1" if frozen else "0")
            while fields(self.files.read(f"{path}/cgroup.events")).get("frozen") != int(frozen):
                if loop.time() > deadline:
                    # a task in an uninterruptible wait (a hung file server) cannot be frozen
                    raise Internal(f"{what}: not done after {timeout_s} s", path=path)
                await asyncio.sleep(delay)
                delay = min(delay * 2, 0.05)
        except OSError as error:
            raise _translate(error, what) from error

    async def remove(self, path: str, timeout_s: float = 5.0) -> None:
        """Remove `path` and all below it, children first; killed processes may still be leaving.

        Raises `Internal` naming the processes that stayed.
        """
        loop = asyncio.get_running_loop()
        deadline, delay = loop.time() + timeout_s, 0.001
        while True:
            try:
                for directory in self._walk(path):
                    self._rmdir(directory)
                return
            except OSError as error:
                if error.errno not in (errno.EBUSY, errno.ENOTEMPTY):
                    raise _translate(error, f"remove cgroup {path}") from error
                if loop.time() > deadline:
                    left = ", ".join(map(str, self.pids(path)[:8])) or "none listed"
                    raise Internal(f"cgroup {path} stays busy; processes: {left}") from error
            await asyncio.sleep(delay)
            delay = min(delay * 2, 0.1)

    def _rmdir(self, path: str) -> None:
        try:
            self.files.rmdir(path)
        except FileNotFoundError:
            return

    def _walk(self, path: str) -> list[str]:
        """Return `path` and every directory below, deepest first; [] when it is gone."""
        try:
            children = self.files.directories(path)
        except FileNotFoundError:
            return []
        return [d for child in children for d in self._walk(f"{path}/{child}")] + [path]


def _translate(error: OSError, what: str) -> DSecError:
    """Return the error of ours for a failed cgroup operation."""
    if error.errno == errno.ENOENT:
        return NotFound(f"{what}: no such cgroup")
    if error.errno == errno.EEXIST:
        return AlreadyExists(f"{what}: it exists")
    if error.errno in (errno.ENOSPC, errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE):
        return Exhausted(f"{what}: {error.strerror}")
    return Internal(f"{what}: {error.strerror}")
