"""Twin: the registered blobs, the bound on the cache, and the fetches (cache.c, fetch.c, jobs.c).

Everything runs on one trio event loop; only the store is read in threads. So no step between two
awaits is interrupted, and the C code's care about readers and eviction is not needed here.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import heapq
import logging
import os
import random
from collections import Counter
from pathlib import Path

import trio

from dsecd.host import sparse
from dsecd.images.blobd import twin_source
from dsecd.images.blobd.model import Settings
from dsecd.images.blobd.twin_blob import GROUP, PRESENT, SUSPECT, Blob, read_source
from dsecd.images.blobd.twin_fetch import Fetch
from dsecd.images.blobd.twin_source import LastingFault, PassingFault
from libdsec.errors import Exhausted, NotFound, WrongState

_log = logging.getLogger("dsec-blobd")
_LASTING_TRIES = 3
_PREFETCH_TRIES = 3
_PREFETCH_S = 30.0
_DISK_FULL = 4 << 20


class Failed(Exception):
    """A read that has to fail; the reason is in the log."""


class Cache:
    """The directory; see images.md's host cache for its layout."""

    def __init__(self, directory: Path, nursery: trio.Nursery) -> None:
        for name in ("blobs", "maps", "indexes"):
            (directory / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.directory, self.settings = directory, Settings()
        self.blobs: dict[str, Blob] = {}
        self.counters: Counter[str] = Counter()
        self.latency_s = 0.0
        self.holds: dict[str, tuple[str, ...]] = {}  # layer: blobs whose files are its devices
        self._nodes: dict[int, Blob] = {}
        self._leaving: dict[str, Blob] = {}  # removed, and still being fetched
        self._nursery = nursery
        self._boot = sparse.boot_id()
        self._threads = trio.CapacityLimiter(20)
        self._hand: tuple[int, int] = (0, 0)  # blob, group
        self._queue: list[tuple[int, int, Blob, int, int]] = []
        self._queued, self.pending = 0, 0
        self._some = trio.Event()
        self.traces: dict[int, tuple[list[Blob], set[tuple[int, int]], list[list[int]]]] = {}
        for _ in range(self.settings.prefetch_threads):
            nursery.start_soon(self._serve_prefetches)

    # --- registry -------------------------------------------------------------------------------

    def add(self, name: str, source: dict[str, object]) -> Blob:
        """Register a blob, or change the source of one."""
        checked = read_source(source)
        if name in self.blobs:
            self.blobs[name].source = checked
            return self.blobs[name]
        blob = self._leaving.pop(name, None) or Blob(self.directory, name, checked, self._boot)
        blob.source = checked
        if blob.nodeid in self._nodes:
            self._leaving[name] = blob
            self._close_if_left(blob)
            raise WrongState(f"another blob has the number of {name}", state="collision")
        self.blobs[name] = self._nodes[blob.nodeid] = blob
        return blob

    def remove(self, name: str) -> None:
        blob = self.find(name)
        if blob.pinned or self.held(name):
            raise WrongState(f"the blob {name} is pinned or held", state="pinned")
        del self.blobs[name], self._nodes[blob.nodeid]
        self._leaving[name] = blob
        for fetch in set(blob.busy.values()):
            fetch.wake()  # reads that wait end
        self._close_if_left(blob)

    def _close_if_left(self, blob: Blob) -> None:
        """Close a removed blob when no fetch writes to it any more."""
        if not blob.busy and self._leaving.get(blob.id) is blob:
            del self._leaving[blob.id]
            blob.close()

    def held(self, name: str) -> bool:
        return any(name in blobs for blobs in self.holds.values())

    def hold(self, layer: str, names: tuple[str, ...]) -> None:
        """Keep the files of whole blobs as they are; see holds.c."""
        blobs = [self.find(name) for name in names]
        for blob in blobs:
            if blob.present != len(blob.chunks):
                raise WrongState(f"chunks of blob {blob.id} are missing", state="partial")
        others = {name for other in self.holds if other != layer for name in self.holds[other]}
        size = sum(self.blobs[name].length for name in others | set(names))
        limit = self.settings.cache_bytes
        if limit and size > limit / 2:
            raise Exhausted("mounted layers hold half of the cache's bound already")
        self.holds[layer] = names

    def find(self, name: str) -> Blob:
        if name not in self.blobs:
            raise NotFound(f"no blob {name} is registered")
        return self.blobs[name]

    def node(self, nodeid: int) -> Blob | None:
        return self._nodes.get(nodeid)

    # --- room -----------------------------------------------------------------------------------

    def _foreign(self) -> list[Path]:
        kept = self.blobs.keys() | self._leaving.keys()
        return [path for path in (self.directory / "blobs").iterdir() if path.name not in kept]

    def used(self) -> int:
        foreign = sum(path.stat().st_blocks * 512 for path in self._foreign())
        return foreign + sum(blob.bytes for blob in self.blobs.values())

    def _evict(self) -> int:
        """Free something; return the bytes, 0 when there is nothing left to free."""
        for path in self._foreign():
            size = path.stat().st_blocks * 512
            path.unlink()
            (self.directory / "maps" / path.name).unlink(missing_ok=True)
            return size
        blobs = list(self.blobs.values())
        number, group = self._hand
        for _ in range(2 * sum(blob.length // GROUP + 1 for blob in blobs) + 1):
            if number >= len(blobs) or group > blobs[number].length // GROUP:
                number, group = (number + 1) % max(1, len(blobs)), 0
            freed = self._pass(blobs[number], group) if blobs else 0
            group += 1
            self._hand = number, group
            if freed:
                self.counters["evicted_bytes"] += freed
                return freed
        return 0

    def _pass(self, blob: Blob, group: int) -> int:
        if blob.pinned or self.held(blob.id):
            return 0
        if group in blob.referenced:
            blob.referenced.discard(group)
            return 0
        return blob.evict(group)

    def _reserve(self, size: int) -> None:
        limit = self.settings.cache_bytes
        while limit and self.used() + size > limit:
            if not self._evict():
                self.counters["no_room"] += 1
                raise LastingFault("the cache is full of what must not be evicted")

    def _write(self, blob: Blob, offset: int, data: bytes) -> None:
        done, tries = 0, 3
        while done < len(data):
            try:
                done += os.pwrite(blob.data, data[done:], offset + done)  # short on a full disk
            except OSError as error:
                tries -= 1
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                freed = 0
                while tries and full and freed < len(data) + _DISK_FULL and (more := self._evict()):
                    freed += more
                if not freed:
                    _log.error("cannot write to the cache: %s", error)
                    raise LastingFault("no room in the cache") from error

    # --- reads ----------------------------------------------------------------------------------

    async def read(self, blob: Blob, offset: int, size: int) -> bytes:
        """Return checked bytes. Raises `Failed`."""
        size = min(size, blob.length - offset)
        if size <= 0:
            return b""
        first, last = blob.find(offset), blob.find(offset + size - 1)
        self.counters["reads"] += 1
        self._note(blob, first, last)
        hit = True
        with trio.move_on_after(self.settings.demand_ms / 1000):
            while missing := [i for i in range(first, last + 1) if blob.state(i) != PRESENT]:
                hit = False
                for chunk in missing:
                    if chunk not in blob.busy:
                        self._demand(blob, chunk)
                await self._wait(blob, missing[0])
            self.counters["hits" if hit else "waits"] += 1
            blob.referenced.update(blob.chunks[i].offset // GROUP for i in range(first, last + 1))
            return os.pread(blob.data, size, offset)
        self.counters["read_errors"] += 1
        self.counters["deadline_errors"] += 1
        _log.error("a read had no answer of the store in time")
        raise Failed

    async def _wait(self, blob: Blob, chunk: int) -> None:
        fetch = blob.busy.get(chunk)
        if fetch is None:
            return
        fetch.wanted[chunk] += 1
        try:
            await fetch.moved.wait()
        finally:
            fetch.wanted[chunk] -= 1
        if blob.id not in self.blobs:
            raise Failed
        if fetch.failed and blob.state(chunk) != PRESENT and fetch.demand:
            self.counters["read_errors"] += 1
            raise Failed

    # --- fetches --------------------------------------------------------------------------------

    def _window(self) -> int:
        least, most = self.settings.fetch_min, self.settings.fetch_max
        if self.pending or self.latency_s <= 0.002:
            return least
        return max(least, most if self.latency_s > 0.004 else most // 2)

    def _missing(self, blob: Blob, chunk: int) -> bool:
        return chunk not in blob.busy and blob.state(chunk) != PRESENT

    def _demand(self, blob: Blob, chunk: int) -> None:
        window = self._window()
        start = blob.chunks[chunk].offset // window * window
        first, end = chunk, chunk + 1
        while (
            first > 0 and self._missing(blob, first - 1) and blob.chunks[first - 1].offset >= start
        ):
            first -= 1
        while (
            end < len(blob.chunks)
            and self._missing(blob, end)
            and blob.chunks[end].offset < start + window
        ):
            end += 1
        fetch = self._begin(blob, first, end, self.settings.demand_ms / 1000, demand=True)
        self._nursery.start_soon(self._run, blob, fetch)

    def _begin(self, blob: Blob, first: int, end: int, patience_s: float, demand: bool) -> Fetch:
        fetch = Fetch(first, end, demand, trio.current_time() + patience_s)
        for i in range(first, end):
            blob.busy[i] = fetch
        return fetch

    async def _run(self, blob: Blob, fetch: Fetch) -> None:
        """Bring the chunks of `fetch`, or fail."""
        for i in range(fetch.first, fetch.end):
            if blob.state(i) == SUSPECT:
                self._prove(blob, i)
        lasting = tries = 0
        while True:
            tries += 1
            fault = await self._attempt(blob, fetch)
            left = self._release(blob, fetch)
            if not left:
                break
            self.counters["fetch_faults"] += 1
            lasting = lasting + 1 if isinstance(fault, LastingFault) else 0
            late = trio.current_time() >= fetch.deadline
            if late or lasting >= _LASTING_TRIES or (not fetch.demand and tries >= _PREFETCH_TRIES):
                _log.error("chunks cannot be had: %s", fault)
                fetch.failed = isinstance(fault, LastingFault)
                for i in left:
                    del blob.busy[i]
                break
            wait = min(2.0, 0.04 * 2**tries) * random.uniform(0.5, 1.0)
            await trio.sleep(max(0, min(wait, fetch.deadline - trio.current_time())))
        fetch.moved.set()
        self._close_if_left(blob)

    def _prove(self, blob: Blob, chunk: int) -> None:
        if blob.prove(chunk):
            self.counters["verified_chunks"] += 1
            blob.set_present(chunk)
        else:
            blob.set_absent(chunk)

    def _release(self, blob: Blob, fetch: Fetch) -> list[int]:
        """Let waiting reads look again; return the chunks that are still to be had."""
        left = []
        for i in range(fetch.first, fetch.end):
            if blob.busy.get(i) is not fetch:
                continue
            if blob.state(i) == PRESENT or (fetch.demand and not fetch.wanted[i]):
                del blob.busy[i]
            else:
                left.append(i)
        fetch.wake()
        return left

    async def _attempt(self, blob: Blob, fetch: Fetch) -> Exception | None:
        fault: Exception | None = None
        at = fetch.first
        while at < fetch.end:
            if blob.busy.get(at) is not fetch or blob.state(at) == PRESENT:
                at += 1
                continue
            end = at + 1
            while end < fetch.end and blob.busy.get(end) is fetch and blob.state(end) != PRESENT:
                end += 1
            try:
                await self._bring(blob, fetch, at, end)
            except (PassingFault, LastingFault) as error:
                fault = error
            at = end
        return fault

    async def _bring(self, blob: Blob, fetch: Fetch, first: int, end: int) -> None:
        offset, size = (
            blob.chunks[first].offset,
            blob.chunks[end - 1].end - blob.chunks[first].offset,
        )
        left = max(0.001, fetch.deadline - trio.current_time())
        timeout = min(left, self.settings.attempt_ms / 1000)
        self.counters["fetches"] += 1
        try:
            with trio.fail_after(timeout):
                data, latency = await trio.to_thread.run_sync(
                    twin_source.read, blob.source, offset, size, timeout,
                    abandon_on_cancel=True, limiter=self._threads,
                )  # fmt: skip
        except trio.TooSlowError as error:
            raise PassingFault("no answer in time") from error
        self.latency_s += (latency - self.latency_s) / (8 if self.latency_s else 1)
        self.counters["fetched_bytes"] += size
        damaged = False
        for i in range(first, end):
            place = blob.chunks[i]
            content = data[place.offset - offset :][: place.size]
            if hashlib.sha256(content).digest() != place.digest:
                self.counters["damaged_chunks"] += 1
                damaged = True
                continue
            self._reserve(place.end - place.offset)
            self._write(blob, place.offset, content.ljust(place.end - place.offset, b"\0"))
            blob.set_present(i)
        if damaged:
            raise LastingFault("the store's bytes are not those of the index")

    # --- prefetches and traces ------------------------------------------------------------------

    def prefetch(self, blob: Blob, first: int, count: int, priority: int) -> None:
        self._queued += 1
        self.pending += 1
        heapq.heappush(self._queue, (-priority, self._queued, blob, first, first + count))
        self._some.set()

    async def _serve_prefetches(self) -> None:
        while True:
            while not self._queue:
                self._some = trio.Event()
                await self._some.wait()
            _, _, blob, first, end = heapq.heappop(self._queue)
            with contextlib.suppress(Failed):
                await self._prefetch_one(blob, first, end)
            self.pending -= 1

    async def _prefetch_one(self, blob: Blob, at: int, end: int) -> None:
        while at < end:
            if not self._missing(blob, at):
                at += 1
                continue
            to = at + 1
            limit = blob.chunks[at].offset + self.settings.fetch_min
            while to < end and self._missing(blob, to) and blob.chunks[to].offset < limit:
                to += 1
            self.counters["prefetched_chunks"] += to - at
            await self._run(blob, self._begin(blob, at, to, _PREFETCH_S, demand=False))
            at = to

    def _note(self, blob: Blob, first: int, last: int) -> None:
        for blobs, seen, ranges in self.traces.values():
            if blob not in blobs:
                continue
            number = blobs.index(blob)
            for chunk in range(first, last + 1):
                if (number, chunk) in seen:
                    continue
                seen.add((number, chunk))
                if ranges and ranges[-1][0] == number and sum(ranges[-1][1:]) == chunk:
                    ranges[-1][2] += 1
                else:
                    ranges.append([number, chunk, 1])
