"""Ranges of host user ids, one per sandbox, each with the user namespace that maps it.

Range `i` is the 65,536 host ids from `start + i * 65536`; inside they are 0 to 65534, and the last
host id owns the namespace without being mapped in it. A namespace costs a clone to make and has no
state that could leak (keyrings are filtered, sysctls locked), so it is kept with its range.
Ranges are used again oldest first: a file left by mistake meets its id as late as possible.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from libdsec.errors import DSecError, Exhausted, Internal

SIZE = 65536
INIT_USERNS_FD = 7  # docs/protocol.md: where dsec-init holds the namespace
_log = logging.getLogger(__name__)
MakeUserns = Callable[[int, int], int]


@dataclass
class Range:
    """`userns_fd` is open as long as the pool is, or -1 for a reserved range."""

    index: int
    uid_base: int
    owner_uid: int
    userns_fd: int = -1


class RangePool:
    """Hands out ranges and takes them back. `start()` fills it ahead, in the event loop."""

    def __init__(
        self, start: int, count: int, ready: int = 64, make_userns: MakeUserns | None = None
    ) -> None:
        """`start` is the first host id, `count` how many ranges there are, `ready` how many are
        prepared ahead. `make_userns(uid_base, owner_uid)` returns a descriptor or raises OSError.
        """
        if make_userns is None:
            from dsecd import fastpath

            make_userns = fastpath.make_userns
        self._make_userns = make_userns
        self._start = start
        self._count = count
        self._target = min(ready, count)
        self._next = 0
        self._ready: deque[Range] = deque()  # with a namespace
        self._bare: deque[int] = deque()  # seen before, namespace not at hand
        self._held: dict[int, Range] = {}
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    @property
    def ready(self) -> int:
        """How many ranges wait with their namespace."""
        return len(self._ready)

    @property
    def held(self) -> frozenset[int]:
        """The indexes in use."""
        return frozenset(self._held)

    def acquire(self) -> Range:
        """Return a free range with its namespace. Never waits. Raises `Exhausted`."""
        taken = self._ready.popleft() if self._ready else self._open(self._free_index())
        self._held[taken.index] = taken
        if 2 * len(self._ready) <= self._target:  # what is held comes back too
            self._wake.set()
        return taken

    def release(self, taken: Range) -> None:
        """Give a range back; no process may run under its ids any more."""
        if self._held.pop(taken.index, None) is None:
            raise Internal(f"uid range {taken.index} released twice")
        if taken.userns_fd >= 0:
            self._ready.append(taken)
        else:
            self._bare.append(taken.index)

    def reserve(self, index: int) -> Range:
        """Take range `index` for a sandbox of an earlier daemon. Raises `Internal` if in use."""
        if not 0 <= index < self._count:
            raise Internal(f"uid range {index} is outside the {self._count} configured")
        if index in self._held:
            raise Internal(f"uid range {index} has two users")
        taken = self._take(index)
        self._held[index] = taken
        return taken

    def adopt(self, index: int, init_pid: int) -> Range:
        """Take range `index` with the namespace that the live dsec-init `init_pid` holds.

        When it can no longer be opened the range is reserved without one.
        """
        taken = self.reserve(index)
        if taken.userns_fd < 0:
            with suppress(OSError):
                path = f"/proc/{init_pid}/fd/{INIT_USERNS_FD}"
                taken.userns_fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        return taken

    def start(self) -> None:
        """Begin to fill in the background, after every `adopt` and `reserve` of a recovery."""
        self._wake.set()
        self._task = asyncio.get_running_loop().create_task(self._fill(), name="uid-ranges")

    async def close(self) -> None:
        """Stop filling and close every descriptor; namespaces in use live on with their users."""
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task
            self._task = None
        for taken in [*self._ready, *self._held.values()]:
            if taken.userns_fd >= 0:
                os.close(taken.userns_fd)
                taken.userns_fd = -1
        self._ready.clear()
        self._held.clear()

    async def _fill(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                while len(self._ready) < self._target and not self._used_up():
                    self._ready.append(self._open(self._free_index()))
                    await asyncio.sleep(0)
            except DSecError as error:
                _log.warning("cannot prepare uid ranges: %s", error.message)
                await asyncio.sleep(1.0)

    def _used_up(self) -> bool:
        return not self._bare and self._next >= self._count

    def _free_index(self) -> int:
        """Return an index that nobody has; new ones before used ones. Raises `Exhausted`."""
        while self._next < self._count:
            index = self._next
            self._next += 1
            if index not in self._held and index not in self._bare:
                return index
        if self._bare:
            return self._bare.popleft()
        raise Exhausted(
            f"all {self._count} uid ranges are in use; raise pools.uid_range_count or stop some"
        )

    def _take(self, index: int) -> Range:
        """Return the free range `index`, with its namespace if that is at hand."""
        for waiting in self._ready:
            if waiting.index == index:
                self._ready.remove(waiting)
                return waiting
        with suppress(ValueError):
            self._bare.remove(index)
        return self._range(index)

    def _open(self, index: int) -> Range:
        made = self._range(index)
        try:
            made.userns_fd = self._make_userns(made.uid_base, made.owner_uid)
        except OSError as error:
            self._bare.append(index)
            raise Exhausted(
                f"cannot make a user namespace: {error.strerror}; see user.max_user_namespaces"
            ) from error
        except DSecError:
            self._bare.append(index)
            raise
        return made

    def _range(self, index: int) -> Range:
        base = self._start + index * SIZE
        return Range(index, base, base + SIZE - 1)
