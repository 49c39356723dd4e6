"""Between whoever collects garbage and whoever needs it after all: marks, and who deletes now.

Collecting takes two runs: one marks (``trash/<id>``), a later one says that it deletes
(``leases/collect-<random>``), then looks who needs what, then deletes what was marked when it
began. Who needs a layer does it the other way round: first the lease or the name, then `look`.
Without a mark then, any run that could delete the layer has yet to look and sees the lease. With
one, a run may have looked before; so `look` waits until nobody deletes.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import time
from collections.abc import AsyncIterator, Collection

import msgspec

from dsecd.images.records import Lease
from dsecd.images.stores.abc import Store
from libdsec.errors import NotFound, Unavailable

_COLLECT = "leases/collect-"
_ANNOUNCED_S = 3600.0  # after it, whoever announced is dead
_PATIENCE_S = 30.0
_LOOK_S = 0.2


class Announcement:
    """That a run deletes. `keep` it before each deletion."""

    def __init__(self, store: Store, holder: str) -> None:
        self._store, self._holder = store, holder
        self._key = _COLLECT + secrets.token_hex(16)
        self._version: str | None = None
        self._until = 0.0

    async def keep(self) -> None:
        """Announce, and again after half of the time. Raises what the store raises."""
        if time.monotonic() < self._until - _ANNOUNCED_S / 2:
            return
        until = time.monotonic() + _ANNOUNCED_S
        lease = Lease(holder=self._holder, expires_at=time.time() + _ANNOUNCED_S)
        self._version = await self._store.swap_name(
            self._key, msgspec.json.encode(lease), self._version
        )
        self._until = until

    async def end(self) -> None:
        await self._store.delete(self._key)


@contextlib.asynccontextmanager
async def deleting(store: Store, holder: str) -> AsyncIterator[Announcement]:
    """Let others know, until the end of the block, that this run deletes."""
    announcement = Announcement(store, holder)
    try:
        await announcement.keep()
        yield announcement
    finally:
        await announcement.end()


async def look(store: Store, layers: Collection[str]) -> None:
    """Return when these layers, for which there is a lease or a name, are there to stay.

    Raises `NotFound` for one that is gone, `Unavailable` when a collection under way may take one.
    """
    await asyncio.gather(*(_look(store, digest) for digest in layers))


async def _look(store: Store, digest: str) -> None:
    size, mark = await asyncio.gather(store.size(f"layers/{digest}"), store.size(f"trash/{digest}"))
    if size is not None and mark is not None:
        await outlast(store)
        size = await store.size(f"layers/{digest}")
    if size is None:
        raise NotFound(
            f"layer {digest[:12]} was removed from the store; import or build it again",
            digest=digest,
        )


async def any_marked(store: Store, ids: Collection[str]) -> bool:
    """Whether one of these objects was found to be garbage."""
    sizes = await asyncio.gather(*(store.size(f"trash/{one}") for one in ids))
    return any(size is not None for size in sizes)


async def outlast(store: Store) -> None:
    """Wait until every run is over that deletes now. Raises `Unavailable` after a while."""
    deadline = time.monotonic() + _PATIENCE_S
    ahead = await _announced(store)
    while ahead:
        if time.monotonic() > deadline:
            raise Unavailable("garbage of the store is being deleted; try again in a minute")
        await asyncio.sleep(_LOOK_S)
        ahead &= await _announced(store)  # who came later has seen us


async def _announced(store: Store) -> set[str]:
    found = set()
    async for entry in store.list("leases/"):
        if entry.key.startswith(_COLLECT):
            read = await store.read_name(entry.key)
            if read is not None:
                lease = msgspec.json.decode(read[0], type=Lease)
                if lease.expires_at > time.time():
                    found.add(entry.key)
    return found
