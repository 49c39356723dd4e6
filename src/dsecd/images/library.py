"""The layers of a store: names, manifests, and how new ones get there.

A name leads to a layer's digest, the digest to its manifest, the manifest to image and blobs. All
but names are written once. A layer is published bottom up and its name moves last, so whatever a
name leads to is there, whoever dies meanwhile.

A build may use chunks of blobs that nothing refers to any more, while somebody collects garbage.
So it first takes a lease on everything, then looks at what it used; `dsecd.images.collect` marks
before it deletes and looks at the leases in between. Whichever comes second sees the other.
"""

from __future__ import annotations

import asyncio
import contextlib
import difflib
import functools
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec

from dsecd.images import builder, disk, marks, names, records
from dsecd.images.builder import Built, Part, Recipe
from dsecd.images.chunks import decode_index
from dsecd.images.known import KnownChunks
from dsecd.images.manifest import Manifest
from dsecd.images.model import Node
from dsecd.images.records import Lease, Name
from dsecd.images.sources.sink import Sink
from dsecd.images.stores.abc import Conflict, Store
from dsecd.images.stores.opening import open_store
from libdsec.errors import AlreadyExists, Internal, InvalidArgument, NotFound, Unavailable

logger = logging.getLogger("dsecd.layers")
RESOLVED_S = 1.0  # a name that moved elsewhere is seen after so long
PATIENCE_S = 2.0  # with the store, for a name that was resolved before
AWAY_S = 5.0  # while the store does not answer, it is asked for a name once in so long
LEASE_S = 86400.0
EVERYTHING = "*"  # in a lease: all blobs
PARALLEL_BUILDS = 2
_TRIES = 3


class Named(msgspec.Struct, frozen=True):
    """A layer under one of its names; without any, under its digest."""

    name: str
    manifest: Manifest
    created_at: float

    @property
    def digest(self) -> str:
        return self.manifest.digest


class Cancelled(Exception):
    """The caller of a build gave up."""


class _Gone(Exception):
    """A blob that the host knows of is no longer in the store."""

    def __init__(self, blob: str) -> None:
        super().__init__(blob)
        self.blob = blob


@contextlib.asynccontextmanager
async def open_library(
    state: Path, url: str = "", options: Mapping[str, Any] | None = None
) -> AsyncIterator[Library]:
    """Yield the library of the store at `url`, ``<state>/store`` when that is "".

    Several processes may have one open. What builds left that died is removed. Raises what
    `open_store` raises, `Exhausted` when the disk is full.
    """
    if not url:
        (state / "store").mkdir(parents=True, exist_ok=True, mode=0o700)
        url = str(state / "store")
    store = await open_store(url, options)
    try:
        for lease in await asyncio.to_thread(disk.sweep, state / "builds"):
            await store.delete(lease)
        with disk.full_named(f"opening {state / 'chunks.db'}"):
            known = KnownChunks(state / "chunks.db")
        with known:
            yield Library(store, known, state / "builds")
    finally:
        await store.close()


class Gate:
    """Tells work in a thread that nobody waits for it any more."""

    def __init__(self) -> None:
        self._gone = threading.Event()

    def close(self) -> None:
        self._gone.set()

    def check(self, done: int = 0) -> None:
        """Raise `Cancelled` when the caller gave up; `done` bytes so far are not looked at."""
        if self._gone.is_set():
            raise Cancelled


class Library:
    """One per daemon. `scratch` is a directory for builds; they leave `reserve` of its disk."""

    def __init__(
        self, store: Store, known: KnownChunks, scratch: Path, reserve: int = disk.RESERVE_BYTES
    ) -> None:
        self.store, self.scratch = store, scratch
        self._known, self._reserve = known, reserve
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._manifests: dict[str, Manifest] = {}
        self._resolved: dict[str, tuple[float, Named]] = {}
        self._last: dict[str, Named] = {}  # what was resolved, for when the store is away
        self.moves = 0  # of names, by this daemon
        self._builds = asyncio.Semaphore(PARALLEL_BUILDS)

    # --- names and manifests ----------------------------------------------------------------------

    def recall(self, reference: str) -> Named | None:
        """Return what `resolve` found a moment ago, None when it must look; for bursts."""
        found = self._resolved.get(reference)
        if found is None or found[0] < time.monotonic():
            return None
        return found[1]

    async def resolve(self, reference: str) -> Named:
        """Return the layer with this name, digest or unique beginning of a digest.

        While the store does not answer, what it was last is believed. Raises `NotFound` with what
        there is instead, `InvalidArgument` for an ambiguous digest.
        """
        recalled = self.recall(reference)
        if recalled is not None:
            return recalled
        last, believed_s = self._last.get(reference), RESOLVED_S
        try:
            async with asyncio.timeout(None if last is None else PATIENCE_S):
                found = await self._look_up(reference)
        except (TimeoutError, Unavailable):
            if last is None:
                raise
            logger.warning("the store does not answer: %s is taken for what it was", reference)
            found, believed_s = last, AWAY_S
        if found is None:
            self._last.pop(reference, None)
            raise NotFound(f"no layer {reference!r}; {await self._hint(reference)}", name=reference)
        self._resolved[reference] = (time.monotonic() + believed_s, found)
        self._last[reference] = found
        return found

    async def manifest(self, digest: str) -> Manifest:
        """Return the manifest of a layer. Raises `NotFound`, `Internal` when it is damaged."""
        found = self._manifests.get(digest)
        if found is None:
            found = self._manifests[digest] = await self._read_manifest(digest)
        return found

    async def _read_manifest(self, digest: str) -> Manifest:
        """Read twice what is damaged: on the way that passes, in the store it does not."""
        with contextlib.suppress(Internal):
            return records.decode_manifest(digest, await self.store.read(f"layers/{digest}"))
        return records.decode_manifest(digest, await self.store.read(f"layers/{digest}"))

    def forget(self, digest: str) -> None:
        """What is known of this layer does not hold any more: read it again."""
        self._manifests.pop(digest, None)
        self._resolved.clear()

    async def list(self) -> list[Named]:
        """Return every layer under every name, sorted by name; then those without a name."""
        rows = [named async for named in self._all_names()]
        named = {row.digest for row in rows}
        rows.sort(key=lambda row: row.name)
        async for entry in self.store.list("layers/"):
            digest = entry.key.removeprefix("layers/")
            if digest not in named:
                with contextlib.suppress(NotFound):  # collected a moment ago
                    rows.append(Named(digest, await self.manifest(digest), entry.modified))
        return rows

    async def point(self, name: str, digest: str, replace: bool = False) -> Named:
        """Let `name` point to a layer.

        Raises `AlreadyExists` when it points to another one and `replace` is not given, `NotFound`
        without such a layer.
        """
        full = names.normalise(name)
        manifest = await self.manifest(digest)
        while True:
            current = await self._read_name(full)
            if current is not None:
                known, version = current
                if known.digest == digest:
                    return Named(full, manifest, known.created_at)
                if not replace:
                    raise _taken(full)
            record = Name(digest, time.time())
            try:
                await self.store.swap_name(
                    _key(full),
                    msgspec.json.encode(record),
                    version if current is not None else None,
                )
            except Conflict:
                continue  # somebody moved it in this moment: look again
            self._moved(full)
            try:
                await marks.look(self.store, [digest])
            except NotFound:
                await self.remove(full)
                self.forget(digest)
                raise
            return Named(full, manifest, record.created_at)

    async def remove(self, reference: str) -> Named:
        """Remove a name, or by digest all names of a layer; return what it led to.

        The layer itself goes with the garbage, when nothing refers to it. Raises `NotFound`.
        """
        layer = await self.resolve(reference)
        gone = [layer.name]
        if layer.name == layer.digest or not _is_name(reference, layer.name):
            gone = [row.name async for row in self._all_names() if row.digest == layer.digest]
        self._moved(*gone)
        for name in gone:
            current = await self._read_name(name)
            if current is not None and current[0].digest == layer.digest:
                with contextlib.suppress(Conflict):  # moved elsewhere in this moment
                    await self.store.swap_name(_key(name), None, current[1])
        return layer

    def _moved(self, *full: str) -> None:
        """Names lead elsewhere: what is remembered by names, in whatever form, may be wrong."""
        self._resolved.clear()
        self._last = {key: named for key, named in self._last.items() if named.name not in full}
        self.moves += 1

    # --- making layers ----------------------------------------------------------------------------

    async def expect_free(self, name: str, replace: bool) -> str:
        """Return the full name; fail before the work, not after it. Raises `AlreadyExists`."""
        full = names.normalise(name)
        if not replace and await self._read_name(full) is not None:
            raise _taken(full)
        return full

    async def make(
        self,
        name: str | None,
        read: Callable[[Sink], Sequence[Node]],
        recipe: Recipe,
        replace: bool = False,
        gate: Gate | None = None,
        hold: Callable[[], AbstractAsyncContextManager[None]] = contextlib.nullcontext,
    ) -> Named:
        """Make layers of the trees that `read` returns, bottom first, and name the topmost.

        `read` runs in a thread, within `hold`, possibly more than once. Cancelling the call closes
        `gate` and waits for `read`, which should ask it. Raises what `read`, the writer and the
        store raise, `Exhausted` when the disk is full.
        """
        if name is not None:
            name = await self.expect_free(name, replace)
        with disk.full_named(f"building a layer in {self.scratch}"):
            async with (
                self._builds,
                disk.scratch(self.scratch) as scratch,
                self._lease([EVERYTHING], scratch),
            ):
                await self._learn_related(name if replace else None, recipe.parents)
                manifest = await self._make(read, recipe, gate, hold, scratch)
                if name is None:
                    return Named(manifest.digest, manifest, time.time())
                return await self.point(name, manifest.digest, replace)

    async def _make(
        self,
        read: Callable[[Sink], Sequence[Node]],
        recipe: Recipe,
        gate: Gate | None,
        hold: Callable[[], AbstractAsyncContextManager[None]],
        scratch: Path,
    ) -> Manifest:
        """Build and publish; return the topmost layer's manifest."""
        for number in range(_TRIES):
            place = scratch / str(number)
            place.mkdir()
            room = self._room(place)
            work = functools.partial(builder.build, read, place, self._known, recipe, room)
            async with hold():
                built = await _in_thread(work, gate)
            try:
                await self._publish(built)
            except _Gone as gone:
                self._known.remove(gone.blob)
            else:
                return built.top
        raise Unavailable("blobs vanish from the store as fast as they are used; try again")

    def _room(self, scratch: Path) -> int:
        """Return how large a new blob may become. Raises `Exhausted`."""
        room = disk.room(scratch, self._reserve)
        source = self.store.source(f"blobs/{'0' * 64}")
        if source.kind == "file" and disk.shared(scratch, Path(source.path).parent):
            room //= 2  # for a while it is there twice
        return room

    async def _publish(self, built: Built) -> None:
        """Put layers into the store, bottom up. Raises `_Gone` for a blob that is not there."""
        store, new = self.store, built.blob
        for blob in {blob for part in built.parts for blob in part.manifest.blobs}:
            if new is not None and blob.id == new.id:
                continue
            size = await store.size(f"blobs/{blob.id}")
            if size != blob.size or await marks.any_marked(store, [blob.id]):
                raise _Gone(blob.id)
        made = {one for part in built.parts for one in (part.manifest.digest, part.manifest.image)}
        if await marks.any_marked(store, made | ({new.id} if new is not None else set())):
            await marks.outlast(store)  # what is there may be about to go
        if new is not None:
            await store.write(f"indexes/{new.id}", new.index)
            await store.write(f"blobs/{new.id}", new.path)
        for part in built.parts:
            await self._publish_part(part)
        if new is not None:
            await asyncio.to_thread(self._known.add, new.id, decode_index(new.index, new.id))

    async def _publish_part(self, part: Part) -> None:
        store, manifest = self.store, part.manifest
        await store.write(f"images/{manifest.image}", part.image)
        key = f"layers/{manifest.digest}"
        self._manifests.pop(manifest.digest, None)
        if await store.size(key) is None:
            # Internal: somebody else's came first, its chunks in other places
            with contextlib.suppress(Internal):
                await store.write(key, records.encode_manifest(manifest))
        stored = await self.manifest(manifest.digest)
        for known in (stored.digest, stored.image, *(blob.id for blob in stored.blobs)):
            await store.delete(f"trash/{known}")

    async def learn(self, blob: str) -> None:
        """Know the chunks of a blob of the store from now on, so that builds use them."""
        if blob not in await asyncio.to_thread(self._known.blobs):
            index = await self.store.read(f"indexes/{blob}")
            await asyncio.to_thread(self._known.add, blob, decode_index(index, blob))

    async def _learn_related(self, name: str | None, parents: Sequence[str]) -> None:
        """Know the chunks of what a new layer lies on or replaces, whichever host made it.

        Then they are not put into the store again. What cannot be read is left out.
        """
        layers = set(parents)
        if name is not None and (current := await self._read_name(name)) is not None:
            layers.add(current[0].digest)

        async def learn(blob: str) -> None:
            with contextlib.suppress(NotFound, Internal):
                await self.learn(blob)

        async def blobs(digest: str) -> set[str]:
            with contextlib.suppress(NotFound, Internal):
                return {blob.id for blob in (await self.manifest(digest)).blobs}
            return set()

        found = set[str]().union(*await asyncio.gather(*map(blobs, layers)))
        if found:
            known = await asyncio.to_thread(self._known.blobs)
            await asyncio.gather(*map(learn, found - known))

    @contextlib.asynccontextmanager
    async def _lease(self, blobs: Sequence[str], scratch: Path) -> AsyncIterator[None]:
        """Hold a lease; should this process die, whoever sweeps `scratch` away ends it."""
        key = f"leases/{secrets.token_hex(16)}"
        (scratch / disk.LEASE).write_text(key)
        lease = Lease(holder=self._holder, expires_at=time.time() + LEASE_S, blobs=list(blobs))
        taking = asyncio.ensure_future(self.store.swap_name(key, msgspec.json.encode(lease), None))
        try:
            await asyncio.shield(taking)
            yield
        finally:
            await asyncio.wait([taking])  # of a cancelled call it is written all the same
            if taking.exception() is None:
                await self.store.delete(key)

    # --- parts ------------------------------------------------------------------------------------

    async def _read_name(self, full: str) -> tuple[Name, str] | None:
        found = await self.store.read_name(_key(full))
        if found is None:
            return None
        return msgspec.json.decode(found[0], type=Name), found[1]

    async def _all_names(self) -> AsyncIterator[Named]:
        async for entry in self.store.list("names/"):
            full = names.from_file(entry.key.removeprefix("names/"))
            current = await self._read_name(full)
            if current is not None:
                with contextlib.suppress(NotFound):
                    manifest = await self.manifest(current[0].digest)
                    yield Named(full, manifest, current[0].created_at)

    async def _look_up(self, reference: str) -> Named | None:
        with contextlib.suppress(InvalidArgument):
            full = names.normalise(reference)
            current = await self._read_name(full)
            if current is not None:
                record, _ = current
                return Named(full, await self.manifest(record.digest), record.created_at)
        prefix = names.digest_prefix(reference)
        if prefix is None:
            return None
        if names.is_digest(prefix):
            with contextlib.suppress(NotFound):
                return Named(prefix, await self.manifest(prefix), 0.0)
            return None
        found = [
            entry
            async for entry in self.store.list("layers/")
            if entry.key.startswith(f"layers/{prefix}")
        ]
        if len(found) > 1:
            raise InvalidArgument(
                f"{reference} is the beginning of {len(found)} digests; give more digits",
                field="name",
            )
        if not found:
            return None
        digest = found[0].key.removeprefix("layers/")
        return Named(digest, await self.manifest(digest), found[0].modified)

    async def _hint(self, reference: str) -> str:
        """Say what there is: close names first, else the first few."""
        known = sorted(
            [
                names.from_file(entry.key.removeprefix("names/"))
                async for entry in self.store.list("names/")
            ]
        )
        if not known:
            return "there are none yet: see dsec layer import"
        close = difflib.get_close_matches(reference, known, n=3, cutoff=0.5)
        if close:
            return "did you mean " + " or ".join(close) + "?"
        more = f" and {len(known) - 5} more" if len(known) > 5 else ""
        return "known: " + ", ".join(known[:5]) + more


async def _in_thread(work: Callable[[], Built], gate: Gate | None) -> Built:
    """Run `work`; a cancelled call still waits for it, for its files are ours to remove."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        if gate is not None:
            gate.close()
        with contextlib.suppress(Exception):
            await running
        raise


def _key(full: str) -> str:
    return f"names/{names.to_file(full)}"


def _is_name(reference: str, full: str) -> bool:
    """Whether `reference` means the name `full` and not a digest."""
    try:
        return names.normalise(reference) == full
    except InvalidArgument:
        return False


def _taken(full: str) -> AlreadyExists:
    return AlreadyExists(
        f"layer {full} exists; use replace to move the name to new content", name=full
    )
