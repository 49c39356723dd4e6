"""Network namespaces of sandboxes: made ahead, held only as descriptors, recycled when clean.

A namespace belongs to the host's user namespace, so root inside a sandbox has no network capability
in it; what programs may expect anyway (ping, ports below 1024) is given by sysctls, once. Nothing
names a namespace but its descriptor and the processes in it: a killed daemon leaves none.

Making one costs about 0.45 ms and destroying one 0.25 ms of kernel threads (copy_net_ns,
cleanup_net), which is why they are pooled, and why unusable ones are closed at a bounded pace.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsecd import fastpath
from dsecd.host import syscalls
from dsecd.host.settle import settle
from libdsec.errors import Internal, NotFound, Unavailable

CLONE_NEWNET = 0x40000000
# ping_group_range is kept in ids of the initial user namespace (net/ipv4/sysctl_net_ipv4.c), its
# largest value is 2^31 - 1: every id of the ranges, which start at 2^28, is inside.
SYSCTLS = (
    ("/proc/sys/net/ipv4/ping_group_range", "0 2147483647"),
    ("/proc/sys/net/ipv4/ip_unprivileged_port_start", "0"),
)
# Connections of a namespace lie in the host's one table of 2^15 buckets and more, which each look
# at them walks (0.3 ms). Namespaces made in one with this setting have their own (Linux 6.1).
CONNECTION_TABLE = ("/proc/sys/net/ipv4/tcp_child_ehash_entries", "1024")
QUIET_S = 0.02  # refill only when nobody has asked for this long
TEARDOWN_BATCH = 32  # namespaces handed to cleanup_net ...
TEARDOWN_INTERVAL_S = 0.05  # ... per interval

RETRY_S = 1.0

_T = TypeVar("_T")
log = logging.getLogger(__name__)


class Netns(msgspec.Struct, frozen=True):
    """A network namespace by its descriptor; `recycled`: another sandbox had it before."""

    fd: int
    recycled: bool = False


class NetnsStats(msgspec.Struct, frozen=True, kw_only=True):
    """Totals since start, and what is held now."""

    created: int
    recycled: int
    discarded: int
    free: int
    lent: int
    closing: int


def open_current() -> int:
    """Return a descriptor of the calling thread's network namespace."""
    return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def enter(fd: int) -> None:
    """Move the calling thread into the network namespace `fd`, for good. Raises OSError."""
    syscalls.call("setns", fd, CLONE_NEWNET)


@contextlib.contextmanager
def inside(fd: int, home: int) -> Iterator[None]:
    """Run the block with the calling thread in namespace `fd`; `home` is where it came from."""
    enter(fd)
    try:
        yield
    finally:
        try:
            enter(home)
        except OSError:
            # A thread of a root daemon that configures the wrong network is worse than a
            # restart, which sandboxes survive.
            os.abort()


def set_sysctls(fd: int, home: int) -> None:
    """Give the namespace its `SYSCTLS`: /proc/sys/net shows the opener's own namespace."""
    with inside(fd, home):
        for path, value in SYSCTLS:
            file = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(file, value.encode())
            finally:
                os.close(file)


def _make_mother(make: Callable[[], int], home: int) -> int:
    """Return a namespace whose children have small tables; -1 on a kernel that has no such thing.

    The setting is a namespace's own: the host's, which others make theirs in, stays as it is.
    """
    path, value = CONNECTION_TABLE
    if not Path(path).exists():
        return -1
    mother = make()
    try:
        with inside(mother, home):
            Path(path).write_text(value)
    except BaseException:
        os.close(mother)
        raise
    return mother


class NetnsPool:
    """Lends namespaces. All methods belong to the event loop; system calls run in two threads.

    `acquire` takes a free one, or makes one; `release` takes it back.
    """

    def __init__(
        self,
        depth: int,
        *,
        make: Callable[[], int] = fastpath.make_netns,
    ) -> None:
        self._depth = depth
        self._make_fd = make
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="netns")
        self._home = open_current()
        self._mother = -1  # the namespace in which those of sandboxes are made
        self._free: deque[int] = deque()
        self._lent: dict[int, Netns] = {}
        self._closing: deque[int] = deque()
        self._fresh: set[int] = set()  # free ones that no sandbox had yet
        self._busy: set[asyncio.Future[Any]] = set()
        self._wanted = asyncio.Event()
        self._unwanted = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_acquire = 0.0
        self._created = self._recycled = self._discarded = 0
        self._closed = False

    def start(self) -> None:
        """Begin to fill the pool and to close unusable namespaces, in the background.

        Raises `OSError` when the kernel makes no namespace.
        """
        self._mother = _make_mother(self._make_fd, self._home)
        self._tasks = [asyncio.create_task(self._fill()), asyncio.create_task(self._tear_down())]
        self._wanted.set()

    async def acquire(self) -> Netns:
        """Return a namespace with loopback up. Raises `Unavailable` when the kernel makes none."""
        if self._closed:
            raise Unavailable("the daemon is stopping")
        self._last_acquire = asyncio.get_running_loop().time()
        if 2 * len(self._free) <= self._depth:  # what is lent now comes back and wants its place
            self._wanted.set()
        if self._free:
            fd = self._free.popleft()
            recycled = fd not in self._fresh
            self._fresh.discard(fd)
        else:
            fd, recycled = await self._make_one(), False
        netns = Netns(fd, recycled)
        self._lent[fd] = netns
        return netns

    def release(self, netns: Netns, clean: bool) -> None:
        """Take `netns` back once its sandbox's processes are gone; a second time does nothing.

        `clean` is `SpawnReply.clean`: whether the sandbox left nothing in it. One that is not (a
        TIME_WAIT socket keeps it so for 60 s) is closed.
        """
        if self._lent.get(netns.fd) is not netns:
            return
        del self._lent[netns.fd]
        if clean and not self._closed and len(self._free) < self._depth:
            self._recycled += 1
            self._free.append(netns.fd)
        else:
            self._discard(netns.fd)

    def adopt(self, init_pid: int) -> Netns:
        """Return the namespace in which the running process `init_pid` is, as lent.

        The caller holds a pidfd, so the pid is not another process's. Raises `NotFound` when it is
        gone, `Internal` when it is in the daemon's own namespace.
        """
        try:
            fd = os.open(f"/proc/{init_pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESRCH):
                raise NotFound(f"process {init_pid} is gone") from error
            raise Internal(f"network namespace of process {init_pid}: {error}") from error
        if os.path.sameopenfile(fd, self._home):
            os.close(fd)
            raise Internal(f"process {init_pid} is in the host's network namespace")
        netns = Netns(fd, True)
        self._lent[fd] = netns
        return netns

    async def run_inside(self, netns: Netns, work: Callable[[], None]) -> None:
        """Have `work`, which must not block, called by a thread that is in `netns`.

        A cancelled caller waits for it all the same: what it makes it has to put where it is found.
        """

        def enter_and_work() -> None:
            with inside(netns.fd, self._home):
                work()

        future = self._submit(enter_and_work)
        cancelled = await settle(future)
        future.result()
        if cancelled:
            raise asyncio.CancelledError

    def stats(self) -> NetnsStats:
        return NetnsStats(
            created=self._created,
            recycled=self._recycled,
            discarded=self._discarded,
            free=len(self._free),
            lent=len(self._lent),
            closing=len(self._closing),
        )

    async def close(self) -> None:
        """Close every descriptor; namespaces of running sandboxes live on in their processes."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        while self._busy:  # a descriptor that a thread works on has no owner yet
            await asyncio.wait(self._busy)
        self._threads.shutdown()
        await asyncio.sleep(0)  # let the callers of that work give their descriptors back
        self._closing += [*self._free, *self._lent, self._home]
        if self._mother >= 0:
            self._closing.append(self._mother)
        self._free.clear()
        self._lent.clear()
        self._close_queue()

    # --- in threads ---------------------------------------------------------------------------

    def _submit(self, work: Callable[[], _T]) -> asyncio.Future[_T]:
        future = asyncio.get_running_loop().run_in_executor(self._threads, work)
        self._busy.add(future)
        future.add_done_callback(self._busy.discard)
        return future

    def _make(self) -> int:
        if self._mother < 0:
            fd = self._make_fd()
        else:
            with inside(self._mother, self._home):
                fd = self._make_fd()
        try:
            set_sysctls(fd, self._home)
        except BaseException:
            os.close(fd)
            raise
        return fd

    async def _make_one(self) -> int:
        """Return a new namespace's descriptor. Raises `Unavailable`."""
        future = self._submit(self._make)
        cancelled = await settle(future)
        error = future.exception()
        if error is None:
            self._created += 1
        if cancelled or self._closed:
            if error is None:
                self._discard(future.result())
            if cancelled:
                raise asyncio.CancelledError
            raise Unavailable("the daemon is stopping")
        if error is not None:
            raise Unavailable(f"no network namespace: {error}") from error
        return future.result()

    # --- background ---------------------------------------------------------------------------

    def _discard(self, fd: int) -> None:
        self._closing.append(fd)
        self._unwanted.set()
        if self._closed:
            self._close_queue()

    def _close_queue(self) -> None:
        while self._closing:
            os.close(self._closing.popleft())

    async def _fill(self) -> None:
        """Keep `depth` namespaces free, made one at a time and only while nobody asks for any."""
        loop = asyncio.get_running_loop()
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            while len(self._free) < self._depth:
                quiet_s = loop.time() - self._last_acquire
                if quiet_s < QUIET_S:
                    await asyncio.sleep(QUIET_S - quiet_s)
                    continue
                try:
                    fd = await self._make_one()
                except Unavailable:
                    log.exception("cannot refill the pool of network namespaces")
                    await asyncio.sleep(RETRY_S)
                    continue
                self._fresh.add(fd)
                self._free.append(fd)

    async def _tear_down(self) -> None:
        """Close what cannot be used again, `TEARDOWN_BATCH` at a time.

        cleanup_net holds locks that making a namespace needs: a burst of thousands of closes would
        stall creation for seconds. What waits here costs the same memory as what the kernel queues.
        """
        while True:
            await self._unwanted.wait()
            self._unwanted.clear()
            while self._closing:
                for _ in range(min(TEARDOWN_BATCH, len(self._closing))):
                    os.close(self._closing.popleft())
                    self._discarded += 1
                await asyncio.sleep(TEARDOWN_INTERVAL_S)
