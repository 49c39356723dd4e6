"""Garbage in the store: what no name, no lease and no young layer leads to.

In two runs at least: the first that finds something unreferenced marks it (``trash/<id>``), a
later one, `wait_s` after the mark, looks again at names and leases and deletes it. Builds and
mounts do it the other way round, lease first and then the look at the marks, so one of the two sees
the other (`dsecd.images.marks`). A layer's manifest goes first and its blobs last: nothing that can
be found lacks a part.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Collection, Iterable

import msgspec

from dsecd.images import marks as marking
from dsecd.images import records
from dsecd.images.library import EVERYTHING
from dsecd.images.manifest import Manifest
from dsecd.images.marks import Announcement
from dsecd.images.records import Lease, Name
from dsecd.images.stores.abc import Entry, Store
from libdsec.errors import Internal, NotFound

GRACE_S = 7 * 86400.0  # a layer without a name can be had by its digest for so long
WAIT_S = 3600.0
EXPIRED_S = 86400.0  # a lease that does not hold any more is removed then: its holder may come back
_ORDER = ("layers", "images", "indexes", "blobs", "traces")


class Collected(msgspec.Struct):
    """What a run did. `freed_bytes` counts what was deleted."""

    marked: int = 0
    deleted: int = 0
    freed_bytes: int = 0


class _Live(msgspec.Struct):
    """Ids that must stay, by prefix; `blobs` also stands for their indexes."""

    layers: set[str] = msgspec.field(default_factory=set)
    images: set[str] = msgspec.field(default_factory=set)
    blobs: set[str] = msgspec.field(default_factory=set)

    def has(self, prefix: str, name: str) -> bool:
        kept = {"layers": self.layers, "traces": self.layers, "images": self.images}
        return name in kept.get(prefix, self.blobs)


async def collect(
    store: Store,
    *,
    used: Collection[str] = (),
    grace_s: float = GRACE_S,
    wait_s: float = WAIT_S,
) -> Collected:
    """Mark what is garbage and delete what was marked long enough ago.

    `used` are digests of layers that this host needs. Raises what the store raises; a run that ends
    early leaves nothing half deleted that a name leads to.
    """
    done = Collected()
    marks = {_id(entry): entry async for entry in store.list("trash/")}
    due = {name for name, mark in marks.items() if mark.modified <= time.time() - wait_s}
    async with contextlib.AsyncExitStack() as stack:
        announcement = None
        if due:
            holder = f"{socket.gethostname()}:{os.getpid()}"
            announcement = await stack.enter_async_context(marking.deleting(store, holder))
        live, building = await _survey(store, used, grace_s)
        young = time.time() - grace_s
        findable: set[str] = set()  # garbage, but not deleted yet
        held = _Live()
        for prefix in _ORDER:
            if building and prefix in ("indexes", "blobs"):
                continue
            if prefix == _ORDER[1]:
                held = await _closure(store, findable, damaged_ok=True)
            async for entry in store.list(f"{prefix}/"):
                name = _id(entry)
                if live.has(prefix, name) or entry.modified > young:
                    if name in marks and prefix != "indexes":
                        await store.delete(f"trash/{name}")
                    continue
                if name not in marks:
                    # an index shares its blob's id and mark
                    done.marked += await store.write(f"trash/{name}", b"garbage\n")
                elif name in due and not building and not held.has(prefix, name):
                    assert announcement is not None
                    await _discard(store, entry, announcement, done)
                    continue
                if prefix == "layers":
                    findable.add(name)
    await _forget_marks(store, marks)
    await store.tidy()
    return done


async def _discard(store: Store, entry: Entry, announcement: Announcement, done: Collected) -> None:
    await announcement.keep()
    await store.delete(entry.key)
    done.deleted += 1
    done.freed_bytes += entry.size


async def _forget_marks(store: Store, marks: Iterable[str]) -> None:
    """Remove the marks of what is gone."""
    for name in marks:
        sizes = [await store.size(f"{prefix}/{name}") for prefix in _ORDER]
        if all(size is None for size in sizes):
            await store.delete(f"trash/{name}")


async def _survey(store: Store, used: Collection[str], grace_s: float) -> tuple[_Live, bool]:
    """Return what must stay, and whether somebody builds a layer now."""
    roots, building = set(used), False
    now = time.time()
    async for entry in store.list("leases/"):
        found = await store.read_name(entry.key)
        if found is None:
            continue
        lease = msgspec.json.decode(found[0], type=Lease)
        if lease.expires_at < now:
            if lease.expires_at < now - EXPIRED_S:
                await store.delete(entry.key)
            continue
        roots.update(lease.layers)
        building = building or EVERYTHING in lease.blobs
    async for entry in store.list("names/"):
        found = await store.read_name(entry.key)
        if found is not None:
            roots.add(msgspec.json.decode(found[0], type=Name).digest)
    async for entry in store.list("layers/"):
        if entry.modified > now - grace_s:
            roots.add(_id(entry))
    return await _closure(store, roots), building


async def _closure(store: Store, roots: set[str], damaged_ok: bool = False) -> _Live:
    """Return all that the layers `roots` need; a damaged one is an error, or needs nothing."""
    live, pending = _Live(), list(roots)
    while pending:
        digest = pending.pop()
        if digest in live.layers:
            continue
        live.layers.add(digest)
        try:
            manifest = await _manifest(store, digest)
        except Internal:
            if not damaged_ok:
                raise
            continue
        if manifest is not None:
            live.images.add(manifest.image)
            live.blobs.update(blob.id for blob in manifest.blobs)
            pending.extend(manifest.parents)
    return live


async def _manifest(store: Store, digest: str) -> Manifest | None:
    """Return a manifest, None when it is gone. A damaged one stops the run: it may need blobs."""
    try:
        return records.decode_manifest(digest, await store.read(f"layers/{digest}"))
    except NotFound:
        return None


def _id(entry: Entry) -> str:
    return entry.key.partition("/")[2]
