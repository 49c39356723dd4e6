"""A sandbox as the audit reads it: through the files API, within bounds of bytes and time.

What is read is hostile. Links are not followed by the walk, nothing but regular files is opened,
and a file or directory that cannot be had in time is noted and left out.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from dataclasses import dataclass
from typing import IO, Any, TypeVar, cast

from libdsec.audit.tree import Agent, Entry
from libdsec.errors import DSecError, NotFound
from libdsec.files import Files

T = TypeVar("T")

ROOT = "0:0"  # the audit sees all; what the agent may is judged from the modes
_KERNEL = frozenset({"/proc", "/sys", "/dev"})  # as the platform makes them
_AT_ONCE = 32  # calls; each is a process in the sandbox for its time
_ENDED = os.strerror(errno.ESRCH)  # of a process in /proc
_MAX_PROCESSES = 256
_MAX_ENVIRONMENT = 64 << 10  # bytes
_ONE_S = 30.0  # for one answer


@dataclass(frozen=True, slots=True)
class Bounds:
    """How far an audit goes: seconds in all, entries of the tree, files that are read and bytes of
    them, and bytes of one pack of git with its index, which are on the local disk for a moment.
    """

    seconds: float = 300.0
    entries: int = 2_000_000
    files: int = 20_000
    content_bytes: int = 256 << 20
    pack_bytes: int = 1 << 30


class Source:
    """Reads one sandbox; `limits` gathers what was left out."""

    def __init__(self, files: Files, bounds: Bounds) -> None:
        self._files = files
        self.bounds = bounds
        self.read_bytes = 0
        self._files_left = bounds.files
        self._bytes_left = bounds.content_bytes
        self._deadline = time.monotonic() + bounds.seconds
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._missed: dict[str, list[str]] = {}

    def miss(self, what: str, detail: str) -> None:
        """Note that something was not looked at: one sentence for each `what`."""
        self._missed.setdefault(what, []).append(detail)

    @property
    def limits(self) -> tuple[str, ...]:
        """What was not looked at, in sentences."""
        return tuple(
            f"{what}: {details[0]}" + (f" and {len(details) - 1} more" if details[1:] else "")
            for what, details in self._missed.items()
        )

    async def agent(self) -> Agent:
        """Return who commands of the sandbox run as, unless told otherwise."""
        path = "/proc/self/status"
        status = await self._within_time(lambda: self._files.read(path, "bytes"), path)
        rows = dict(line.split(b":", 1) for line in (status or b"").splitlines() if b":" in line)
        uids, gids = (rows.get(name, b"").split() for name in (b"Uid", b"Gid"))
        if len(uids) < 2 or len(gids) < 2:
            self.miss("the agent's user is not known, and taken for root", "/proc is not readable")
            return Agent()
        groups = frozenset(map(int, rows.get(b"Groups", b"").split())) | {int(gids[1])}
        return Agent(uid=int(uids[1]), gids=groups)

    async def environment(self) -> dict[str, str]:
        """Return the variables of the processes that run."""
        listed = await self._within_time(lambda: self._files.list("/proc", user=ROOT), "/proc")
        pids = [entry.name for entry in listed or () if entry.name.isdecimal()][:_MAX_PROCESSES]
        texts = await asyncio.gather(*(self._variables(pid) for pid in pids))
        return {name: value for text in texts for name, value in text}

    async def _variables(self, pid: str) -> list[tuple[str, str]]:
        path = f"/proc/{pid}/environ"
        text = await self._within_time(
            lambda: self._files.read(path, "bytes", user=ROOT, length=_MAX_ENVIRONMENT), path,
            "environments of processes not read",
        )  # fmt: skip
        pairs = (part.partition(b"=") for part in (text or b"").split(b"\0") if b"=" in part)
        return [(os.fsdecode(name), os.fsdecode(value)) for name, _, value in pairs]

    async def walk(self) -> list[Entry]:
        """Return every entry of the tree, parents first."""
        found: list[Entry] = []
        level = ["/"]
        while level:
            listings = await asyncio.gather(*map(self._listing, level))
            level = []
            for entry in (entry for listing in listings for entry in listing):
                if len(found) >= self.bounds.entries:
                    self.miss("the tree has more entries than are looked at", entry.path)
                    return found
                found.append(entry)
                if entry.type == "dir" and entry.path not in _KERNEL:
                    level.append(entry.path)
        return found

    async def _listing(self, directory: str) -> list[Entry]:
        listed = await self._within_time(
            lambda: self._files.list(directory, user=ROOT), directory, "directories not listed"
        )
        return [
            Entry(e.path, e.type, e.size, e.mode, e.uid, e.gid, e.symlink_target or "")
            for e in listed or ()
        ]

    async def read(self, path: str, length: int) -> bytes | None:
        """Return the first `length` bytes of a file, None when it cannot be read."""
        content = await self._within_time(
            lambda: self._files.read(path, "bytes", user=ROOT, length=length), path
        )
        self.read_bytes += len(content or b"")
        return content

    async def read_all(self, wanted: Iterable[tuple[str, int]]) -> dict[str, bytes]:
        """Return the beginnings of files, each (path, bytes), by path; within the bounds."""
        chosen: list[tuple[str, int]] = []
        for path, length in wanted:
            if not self._files_left or length > self._bytes_left:
                self.miss("files whose content was not looked at", path)
                continue
            self._files_left -= 1
            self._bytes_left -= length
            chosen.append((path, length))
        contents = await asyncio.gather(*(self.read(path, length) for path, length in chosen))
        return {
            path: content
            for (path, _), content in zip(chosen, contents, strict=True)
            if content is not None
        }

    @contextlib.asynccontextmanager
    async def copy(self, path: str, size: int) -> AsyncIterator[IO[bytes] | None]:
        """Yield a temporary local copy of a large file; None when it cannot be had."""
        with tempfile.TemporaryFile() as file:

            async def fill() -> bool:
                stream = await self._files.read(path, "stream", user=ROOT, length=size)
                async with contextlib.aclosing(cast(Any, stream)):
                    async for block in stream:
                        await asyncio.to_thread(file.write, block)
                        self.read_bytes += len(block)
                await asyncio.to_thread(file.flush)
                return True

            left = self._deadline - time.monotonic()
            done = await self._within_time(fill, path, seconds=left)
            yield file if done else None

    async def _within_time(
        self,
        call: Callable[[], Coroutine[Any, Any, T]],
        path: str,
        what: str = "files not read",
        seconds: float = _ONE_S,
    ) -> T | None:
        try:
            async with self._turns:
                left = self._deadline - time.monotonic()
                if left <= 0:
                    self.miss(f"not looked at after {self.bounds.seconds:g} s", path)
                    return None
                async with asyncio.timeout(min(left, seconds)):
                    return await call()
        except TimeoutError:
            self.miss(what, f"{path} (no answer in time)")
        except NotFound:
            pass  # gone since it was listed
        except DSecError as error:
            if not error.message.endswith(_ENDED):
                self.miss(what, f"{path} ({error.message})")
        return None
