"""Notification of out-of-memory kills without a thread, at most one descriptor per sandbox.

v1: an eventfd registered on `memory.oom_control` (cgroup-v1/memory.rst, section 10). It fires when
the limit is hit, *before* the victim is killed, so the counter is read again until it has moved.
v2: one inotify descriptor for all sandboxes, a watch on each `memory.events`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
from collections.abc import Callable
from contextlib import suppress

from dsecd.host import syscalls
from dsecd.host.cgroup_model import OomCallback, OomWatch
from dsecd.host.kernelfs import KernelFiles

_RECHECK_S = (0.0, 0.005, 0.02, 0.1, 0.5, 2.0)
_log = logging.getLogger(__name__)
Counter = Callable[[], int]


class _Counted(OomWatch):
    """Calls back when the counter has moved, and only then."""

    def __init__(self, counter: Counter, callback: OomCallback) -> None:
        self._loop = asyncio.get_running_loop()
        self._counter = counter
        self._callback = callback
        self._seen = counter()
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def _look(self, attempt: int = 0) -> None:
        """Read the counter now, and again soon while it has not moved."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._closed:
            return
        kills = self._counter()
        if kills > self._seen:
            self._seen = kills
            self._callback(kills)
        elif attempt + 1 < len(_RECHECK_S):
            self._timer = self._loop.call_later(_RECHECK_S[attempt + 1], self._look, attempt + 1)

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class EventfdWatch(_Counted):
    """v1: one eventfd; closing it unregisters it in the kernel."""

    def __init__(
        self, files: KernelFiles, memory: str, counter: Counter, callback: OomCallback
    ) -> None:
        super().__init__(counter, callback)
        self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        try:
            control = os.open(f"{memory}/memory.oom_control", os.O_RDONLY | os.O_CLOEXEC)
            try:
                files.write(f"{memory}/cgroup.event_control", f"{self._fd} {control}")
            finally:
                os.close(control)  # the registration holds the group, not this file
            self._loop.add_reader(self._fd, self._fired)
        except BaseException:
            os.close(self._fd)
            raise

    def _fired(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._fd)
        self._look()

    def close(self) -> None:
        super().close()
        if self._fd >= 0:
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1


_IN_MODIFY, _IN_IGNORED, _IN_Q_OVERFLOW = 0x2, 0x8000, 0x4000
_EVENT = struct.Struct("iIII")


class EventsHub:
    """v2: the one inotify descriptor behind every `EventsWatch` of a driver."""

    def __init__(self) -> None:
        self._fd = -1
        self._watches: dict[int, EventsWatch] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def add(self, path: str, watch: EventsWatch) -> int:
        """Watch `path`; returns the key for `discard`. Raises `OSError`."""
        if self._fd < 0:
            self._fd = syscalls.call("inotify_init1", os.O_NONBLOCK | os.O_CLOEXEC)
            self._loop = asyncio.get_running_loop()
            self._loop.add_reader(self._fd, self._readable)
        key = syscalls.call("inotify_add_watch", self._fd, os.fsencode(path), _IN_MODIFY)
        self._watches[key] = watch
        return key

    def discard(self, key: int) -> None:
        """Forget a watch; the kernel forgets it by itself when the directory goes."""
        if self._watches.pop(key, None) is not None:
            with suppress(OSError):
                syscalls.call("inotify_rm_watch", self._fd, key)

    def close(self) -> None:
        """Close the descriptor and with it all watches."""
        if self._fd >= 0:
            assert self._loop is not None
            self._loop.remove_reader(self._fd)
            os.close(self._fd)
            self._fd = -1
        self._watches.clear()

    def _readable(self) -> None:
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return
        offset = 0
        moved: set[int] = set()
        while offset < len(data):
            key, mask, _, length = _EVENT.unpack_from(data, offset)
            offset += _EVENT.size + length
            if mask & _IN_Q_OVERFLOW:
                _log.warning("inotify queue of memory.events overflowed; all are read")
                moved.update(self._watches)
            elif mask & _IN_IGNORED:
                self._watches.pop(key, None)
            else:
                moved.add(key)
        for key in moved:
            watch = self._watches.get(key)
            if watch is not None:
                watch.fired()


class EventsWatch(_Counted):
    """v2: a watch on one `memory.events`; it changes after the kill has been counted."""

    def __init__(self, hub: EventsHub, path: str, counter: Counter, callback: OomCallback) -> None:
        super().__init__(counter, callback)
        self._hub = hub
        self._key = hub.add(path, self)

    def fired(self) -> None:
        """The file changed: some event was counted, perhaps a kill."""
        self._look(len(_RECHECK_S))

    def close(self) -> None:
        super().close()
        self._hub.discard(self._key)
