"""dsec-blobd as dsecd sees it: started or adopted, watched, asked.

`Blobd` owns the FUSE mount `<runtime>/blobs`. It keeps a copy of the connection's descriptor, and
so does the keeper process of dsec-blobd, so each survives the death of the other: the keeper starts
a dead worker again by itself; when both are dead, `Blobd` starts a new pair that takes the
connection over. Registrations are kept by dsec-blobd below `<runtime>/blobd`. After a restart of
dsecd, `adopt()` finds the running one and asks it for the descriptor.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsecd.host import fuse, preaccess, processes
from dsecd.images.blobd import handover
from dsecd.images.blobd.channel import VERSION, Channel
from dsecd.images.blobd.model import BlobState, Hello, Settings, Trace
from dsecd.images.stores.abc import Source
from libdsec.errors import DSecError, Internal, Unavailable, Unsupported

_log = logging.getLogger(__name__)
_T = TypeVar("_T")
_START_S = 10.0  # until a started process must answer
_RETRY_S = 0.005
_RESTARTS_DELAY_MAX_S = 5.0
_WATCH = b"\xa5watch\xc3"  # in a kept request: true
_RANGES_AT_ONCE = 2000  # in one request; about 20 bytes each


class Blobd:
    """See the module. All calls may raise `Unavailable` while the process cannot be started."""

    def __init__(
        self,
        runtime: Path,
        cache: Path,
        settings: Settings | None = None,
        *,
        binary: Sequence[str] = (),
        pre_access: bool = False,
        place: Callable[[int], None] | None = None,
    ) -> None:
        """`binary`: the command in front of the options; empty: the C program of this package.

        `pre_access`: let layers be mounted on files that are not whole (`hold`, `watch`).
        `place` gets the pid of each process that is started: to move it into a cgroup.
        """
        self.directory = runtime / "blobs"
        self.cache = cache
        self.restarts = 0
        self.unwatched = False  # it was started, and mounts may have been read without it before
        self._runtime, self._settings = runtime, settings or Settings()
        self._binary = tuple(binary) or (str(Path(__file__).parents[2] / "bin/dsec-blobd"),)
        self._place = place
        self._control, self._state = runtime / "blobd.sock", runtime / "blobd"
        self._credentials = runtime / "blobd-credentials"
        self._fuse = -1
        self._group: tuple[int, int] | None = None  # of fanotify, and its slots
        self._pre_access = pre_access
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfds = [-1, -1]  # of the keeper and of the worker
        self._channel: Channel | None = None
        self._hello: Hello | None = None
        self._ready = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Mount the directory and start the process, or adopt the one that runs.

        Raises `Internal` when it does not answer.
        """
        if await self.adopt():
            return
        while fuse.connection(self.directory):  # of a connection whose processes are all gone
            await asyncio.to_thread(fuse.unmount, self.directory)
        for path in (self.directory, self._state, self.cache):
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        await asyncio.to_thread(self._mount)
        try:
            self._spawn(take_over=False)
            await self._connect(_START_S)
        except BaseException:
            await self._abandon()
            raise
        self._watcher = asyncio.create_task(self._watch())

    async def adopt(self) -> bool:
        """Take over a process that an earlier dsecd started; False when there is none."""
        try:
            await self._connect(0.0)
        except Unavailable:
            return False
        self._fuse = await self._descriptor(0)
        if "pre_access" in self.hello.capabilities:
            self._group = (await self._descriptor(1), await self._descriptor(2))
        elif self._pre_access:
            _log.warning("pre-access is not used before dsec-blobd is started anew")
        self._watcher = asyncio.create_task(self._watch())
        return True

    async def _descriptor(self, which: int) -> int:
        """Ask for a copy of what must not be closed while anything is mounted."""
        _, fds = await self._channel_now().call("descriptor", {"which": which})
        return fds[0]

    async def detach(self) -> None:
        """Leave the process running for the next dsecd."""
        await self._stop_watching()
        self._forget()

    async def close(self) -> None:
        """End the process and the mount. What still reads from it gets an error."""
        await self._stop_watching()
        with contextlib.suppress(DSecError):
            if self._channel is not None and not self._channel.lost.is_set():
                await self._channel.call("shutdown", {})
        await self._abandon()
        self._credentials.unlink(missing_ok=True)

    async def _stop_watching(self) -> None:
        if self._watcher is not None:
            self._watcher.cancel()
            await asyncio.gather(self._watcher, return_exceptions=True)
            self._watcher = None

    async def _abandon(self) -> None:
        if self._process is not None:
            for _ in range(200):  # it ends after `shutdown`, at the latest now
                if self._process.poll() is not None:
                    break
                await asyncio.sleep(_RETRY_S)
            self._process.terminate()
            while self._process.poll() is None:  # noqa: ASYNC110 - as the spawner's
                await asyncio.sleep(_RETRY_S)
        self._forget()
        await self._unmount()

    def _forget(self) -> None:
        if self._channel is not None:
            self._channel.close()
        self._know(0, 0)
        if self._fuse >= 0:
            os.close(self._fuse)
        self._fuse = -1
        for fd in self._group or ():
            os.close(fd)
        self._group = None
        self._process = None
        self._ready.clear()

    async def _unmount(self) -> None:
        with contextlib.suppress(OSError):
            await asyncio.to_thread(fuse.unmount, self.directory)

    def _mount(self) -> None:
        self._fuse = fuse.mount(self.directory, "dsec-blobs")
        # what is mounted and was watched must be, whatever is wanted now
        self.unwatched = any(_WATCH in path.read_bytes() for path in self._state.glob("*.hold"))
        if self._pre_access or self.unwatched:
            self._group = (preaccess.open_group(), os.memfd_create("dsec-blobd-slots"))

    def _spawn(self, take_over: bool) -> None:
        options = {
            "--fuse-fd": str(self._fuse),
            "--control": str(self._control),
            "--state": str(self._state),
            "--cache": str(self.cache),
            "--connection": fuse.connection(self.directory),
        }
        if self._group is not None:
            options |= {"--group-fd": str(self._group[0]), "--slots-fd": str(self._group[1])}
        command = [*self._binary, *(word for pair in options.items() for word in pair)]
        self._process = subprocess.Popen(
            command + ["--take-over"] * take_over,
            pass_fds=[self._fuse, *(self._group or ())],
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # it outlives the daemon
            env={k: v for k, v in os.environ.items() if not k.startswith("AWS_")},
            cwd="/",
        )
        if self._place is not None:
            self._place(self._process.pid)

    def _know(self, *pids: int) -> None:
        """Hold on to the identities of keeper and worker (0: none)."""
        for fd in self._pidfds:
            if fd >= 0:
                os.close(fd)
        self._pidfds = [processes.open_pidfd(pid, lambda: True) if pid else -1 for pid in pids]

    def _keeper_is_dead(self) -> bool:
        if self._process is not None:
            return self._process.poll() is not None  # which also reaps it
        return self._pidfds[0] < 0 or processes.exited(self._pidfds[0])

    def _end_worker(self) -> None:
        """Nobody would start it again, and two must not serve one cache."""
        if self._pidfds[1] >= 0:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfds[1], signal.SIGKILL)

    async def _connect(self, patience_s: float) -> None:
        """Connect and agree on the version and the settings. Raises `Unavailable`, `Internal`."""
        deadline = asyncio.get_running_loop().time() + patience_s
        while True:
            try:
                channel = Channel.connect(self._control)
                async with asyncio.timeout(_START_S):  # it accepted: it is there, if slow
                    await self._greet(channel)
                break
            except (Unavailable, TimeoutError) as error:
                if self._process is not None and self._process.poll() is not None:
                    raise Internal(
                        f"dsec-blobd does not start (status {self._process.returncode}); its log "
                        "lines above say why"
                    ) from error
                late = asyncio.get_running_loop().time() >= deadline
                if late or self._keeper_is_dead():  # nobody is left who would start a worker
                    raise Unavailable("dsec-blobd does not answer") from error
                await asyncio.sleep(_RETRY_S)
        self._channel = channel
        self._ready.set()

    async def _greet(self, channel: Channel) -> None:
        try:
            answer, _ = await channel.call("hello", {"version": VERSION})
            self._hello = msgspec.convert(answer, Hello)
            await channel.call("configure", msgspec.to_builtins(self._settings))
        except BaseException:
            channel.close()
            raise
        self._know(self._hello.keeper, self._hello.pid)

    async def _watch(self) -> None:
        """Reconnect when the worker died, start both again when its keeper is dead too."""
        delay = _RETRY_S
        while True:
            await self._channel_now().lost.wait()
            self._ready.clear()
            self.restarts += 1
            _log.error("dsec-blobd died; reads wait until it serves again")
            while not self._ready.is_set():
                try:
                    if self._keeper_is_dead():
                        self._end_worker()
                        self._spawn(take_over=True)
                    await self._connect(_START_S)
                    delay = _RETRY_S
                except (DSecError, OSError) as error:
                    if delay > _RETRY_S:  # the first time, the keeper may just have been dying
                        _log.error("dsec-blobd does not come back: %s", error)
                    await asyncio.sleep(delay)
                    delay = min(2 * delay, _RESTARTS_DELAY_MAX_S)

    def _channel_now(self) -> Channel:
        if self._channel is None:
            raise Unavailable("dsec-blobd was not started")
        return self._channel

    # --- requests -------------------------------------------------------------------------------

    @property
    def hello(self) -> Hello:
        """Who answered last. Raises `Unavailable` before `start` or `adopt`."""
        if self._hello is None:
            raise Unavailable("dsec-blobd was not started")
        return self._hello

    async def _call(self, operation: str, kind: type[_T], **arguments: Any) -> _T:
        """Ask; every operation may be asked twice, so one that a death cut off is."""
        for last in (False, True):
            try:
                async with asyncio.timeout(_START_S):
                    await self._ready.wait()
                answer, fds = await self._channel_now().call(operation, arguments)
                for fd in fds:
                    os.close(fd)
                return msgspec.convert(answer, kind)
            except (Unavailable, TimeoutError) as error:
                if last or isinstance(error, TimeoutError):
                    raise Unavailable(f"dsec-blobd cannot be reached: {error}") from error
                await asyncio.sleep(_RETRY_S)
        raise AssertionError("unreachable")

    def path(self, blob: str) -> Path:
        """The file that EROFS opens as a device."""
        return self.directory / blob

    def cached(self, blob: str) -> Path:
        """The same of a blob that a layer holds."""
        return self.cache / "blobs" / blob

    async def configure(self, settings: Settings) -> None:
        await self._call("configure", dict, **msgspec.to_builtins(settings))
        self._settings = settings

    async def add(self, blob: str, source: Source) -> BlobState:
        """Register a blob whose index is at `<cache>/indexes/<id>`; again: change its source.

        Raises `NotFound` without the index, `InvalidArgument` when it is not that of the id.
        """
        fields = msgspec.to_builtins(handover.readable(source, self._credentials))
        return await self._call("add", BlobState, id=blob, source=fields)

    def hand_over(self, source: Source, environ: Mapping[str, str] = os.environ) -> None:
        """Let dsec-blobd have the keys for such sources; before the first `add`.

        Raises `Unsupported` when it cannot have them.
        """
        handover.expect_readable(source)
        if source.credentials == "environment":
            self._runtime.mkdir(parents=True, exist_ok=True)
            handover.save(self._credentials, environ)

    async def remove(self, blob: str) -> None:
        """Forget a blob; its cached chunks go when room is needed.

        Raises `WrongState` when it is pinned or held. Reads that wait for the store end with an
        error. An unmount waits for reads under way, so remove the blobs that nothing else uses
        before it, not after.
        """
        await self._call("remove", dict, id=blob)

    async def pin(self, blob: str) -> BlobState:
        """Never evict its chunks."""
        return await self._call("pin", BlobState, id=blob)

    async def unpin(self, blob: str) -> BlobState:
        return await self._call("unpin", BlobState, id=blob)

    @property
    def watches(self) -> bool:
        """Whether `hold` can watch."""
        return self._pre_access and "pre_access" in self.hello.capabilities

    async def hold(self, layer: str, blobs: Sequence[str], watch: bool = False) -> None:
        """Keep the files of `blobs` in the cache as they are, for `layer` to be mounted on them.

        All are held or none; again: in place of what the layer held. `watch`: chunks may be
        missing, and are brought when the mount that follows reads them; zeros are read instead
        when no process of dsec-blobd and dsecd is left. Raises `WrongState` unless all chunks are
        present or watched, `Exhausted` when layers would hold more than half of the bound,
        `Unsupported` by the dsec-blobd of an earlier version that still runs.
        """
        if "hold" not in self.hello.capabilities:
            raise Unsupported("this dsec-blobd cannot hold blobs", reason="of an earlier version")
        await self._call("hold", dict, layer=layer, blobs=list(blobs), watch=watch)

    async def release(self, layer: str) -> None:
        """The layer is unmounted: what it held may be evicted."""
        await self._call("release", dict, layer=layer)

    async def holds(self) -> list[str]:
        """Return the layers that hold blobs."""
        if "hold" not in self.hello.capabilities:
            return []
        return await self._list("holds", "layers")

    async def stat(self, blob: str) -> BlobState:
        return await self._call("stat", BlobState, id=blob)

    async def blobs(self) -> list[str]:
        """Return the ids of all registered blobs."""
        return await self._list("list", "ids")

    async def _list(self, operation: str, key: str) -> list[str]:
        found: list[str] = []
        while True:
            part = await self._call(operation, dict, **{"from": len(found)})
            found += part[key]
            if len(found) >= part["total"] or not part[key]:
                return found

    async def stats(self) -> dict[str, int]:
        """Return the counters of the process; they begin at 0 in each."""
        return await self._call("stats", dict[str, int])

    async def prefetch(self, trace: Trace, priority: int = 0) -> int:
        """Queue what a trace names, in its order; return how many ranges were queued."""
        queued = 0
        for at in range(0, len(trace.ranges), _RANGES_AT_ONCE):
            ranges = trace.ranges[at : at + _RANGES_AT_ONCE]
            part = await self._call(
                "prefetch", dict[str, int], blobs=trace.blobs, ranges=ranges, priority=priority
            )
            queued += part["queued"]
        return queued

    async def prefetch_whole(self, blob: str, priority: int = 0) -> None:
        """Queue every chunk of a blob."""
        state = await self.stat(blob)
        await self.prefetch(Trace((blob,), ((0, 0, state.chunks),)), priority)

    async def start_trace(self, number: int, blobs: Iterable[str]) -> None:
        """Record in which order chunks of `blobs` are read from now on.

        What EROFS has in its page cache is not read from here, so begin before the mount.
        """
        await self._call("trace_start", dict, trace=number, blobs=list(blobs))

    async def stop_trace(self, number: int, blobs: Iterable[str]) -> Trace:
        """Return what trace `number` over `blobs` has recorded, and end it."""
        ranges: list[tuple[int, int, int]] = []
        while True:
            part = await self._call("trace_read", dict, trace=number, **{"from": len(ranges)})
            ranges += [(a, b, c) for a, b, c in part["ranges"]]
            if len(ranges) >= part["total"] or not part["ranges"]:
                break
        await self._call("trace_stop", dict, trace=number)
        return Trace(tuple(blobs), tuple(ranges))


def twin_command() -> tuple[str, ...]:
    """Return the `binary` of the Python twin."""
    return (sys.executable, "-m", "dsecd.images.blobd.twin")
