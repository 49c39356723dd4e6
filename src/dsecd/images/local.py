"""Layers of the store made usable on this host: files that the kernel can mount.

A store that is a directory on a local disk is used as it is (`Direct`): image and blobs are files
there. From any other store images and chunk indexes are copied, checked against their digests, and
blobs are served by dsec-blobd, which fetches what is read (`Cached`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Collection, Coroutine
from pathlib import Path
from typing import Any, Protocol

import msgspec

from dsecd.host import mountinfo
from dsecd.images.blobd.client import Blobd
from dsecd.images.blobd.model import Trace
from dsecd.images.manifest import Manifest
from dsecd.images.stores.abc import Store
from dsecd.images.stores.verify import fetch_verified
from libdsec.errors import DSecError, Internal, NotFound

logger = logging.getLogger("dsecd.layers")
_LOCAL = ("ext4", "xfs", "btrfs", "f2fs", "bcachefs")  # file systems EROFS can mount an image from
_TRACE_MAX = 1 << 20


class Local(msgspec.Struct, frozen=True):
    """A layer at hand: its image, and its blobs in the order of the image's device table.

    Paths are text, for the journal keeps them.
    """

    digest: str
    image: str
    devices: tuple[str, ...] = ()
    served: bool = False  # the devices are files of dsec-blobd


class Provider(Protocol):
    """Brings layers to this host."""

    async def provide(self, manifest: Manifest) -> Local:
        """Return the layer's files. Raises `NotFound`, `Internal`, `Unavailable`."""

    async def unmounting(self, local: Local, kept: Collection[str]) -> None:
        """The layer is about to be unmounted; devices in `kept` belong to others, too."""


def is_local(directory: Path) -> bool:
    """Whether EROFS can mount images in `directory` and reads of it do not cross a network."""
    return mountinfo.holding(directory).type in _LOCAL


class Direct:
    """A store on a local disk, used in place."""

    def __init__(self, root: Path) -> None:
        self._root = root

    async def provide(self, manifest: Manifest) -> Local:
        local = Local(
            manifest.digest,
            str(self._root / "images" / manifest.image),
            tuple(str(self._root / "blobs" / blob.id) for blob in manifest.blobs),
        )
        sizes = (manifest.image_bytes, *(blob.size for blob in manifest.blobs))
        for path, size in zip((local.image, *local.devices), sizes, strict=True):
            _expect(path, size, manifest.digest)
        return local

    async def unmounting(self, local: Local, kept: Collection[str]) -> None:
        """Nobody serves these files."""


class Cached:
    """Any other store, behind dsec-blobd's cache."""

    def __init__(self, store: Store, blobd: Blobd, trace_s: float = 60.0) -> None:
        self._store, self._blobd, self._trace_s = store, blobd, trace_s
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._seen: set[str] = set()  # layers whose trace was replayed or is being recorded
        self._work: set[asyncio.Task[None]] = set()
        self._traces = 0

    async def provide(self, manifest: Manifest) -> Local:
        cache = self._blobd.cache
        for directory in ("images", "indexes"):
            (cache / directory).mkdir(exist_ok=True, mode=0o700)
        image = cache / "images" / f"{manifest.image}.erofs"
        await asyncio.gather(
            self._once(f"images/{manifest.image}", manifest.image, image),
            *(self._blob(blob.id) for blob in manifest.blobs),
        )
        if manifest.blobs and manifest.digest not in self._seen:
            self._seen.add(manifest.digest)
            await self._replay_or_record(manifest)  # before it is mounted: later is too late
        devices = tuple(str(self._blobd.path(blob.id)) for blob in manifest.blobs)
        return Local(manifest.digest, str(image), devices, served=True)

    async def unmounting(self, local: Local, kept: Collection[str]) -> None:
        """Stop serving what only this layer needs: reads that wait for the store fail now."""
        self._seen.discard(local.digest)
        for device in local.devices:
            if device not in kept:
                with contextlib.suppress(DSecError):
                    await self._blobd.remove(Path(device).name)

    async def close(self) -> None:
        """Give up recordings and fetches."""
        tasks = [*self._work, *self._fetches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _blob(self, blob: str) -> None:
        index = self._blobd.cache / "indexes" / blob
        await self._once(f"indexes/{blob}", blob, index)
        await self._blobd.add(blob, self._store.source(f"blobs/{blob}"))

    async def _once(self, key: str, sha256: str, target: Path) -> None:
        """Copy an object to the cache, once for all who wait for it."""
        if target.exists():
            return
        task = self._fetches.get(key)
        if task is None:
            task = asyncio.create_task(fetch_verified(self._store, key, sha256, target))
            self._fetches[key] = task
            task.add_done_callback(lambda _: self._fetches.pop(key, None))
        await asyncio.shield(task)

    async def _replay_or_record(self, manifest: Manifest) -> None:
        """Fetch ahead what an earlier sandbox read, or write down what this one will read."""
        key, blobs = f"traces/{manifest.digest}", [blob.id for blob in manifest.blobs]
        try:
            if await self._store.size(key) is not None:
                trace = msgspec.json.decode(await self._store.read(key), type=Trace)
                self._run(self._blobd.prefetch(trace), manifest)
                return
            self._traces += 1
            await self._blobd.start_trace(self._traces, blobs)
            self._run(self._record(key, self._traces, blobs), manifest)
        except (DSecError, msgspec.DecodeError) as error:
            logger.warning("no prefetch for layer %s: %s", manifest.digest[:12], error)

    async def _record(self, key: str, number: int, blobs: list[str]) -> None:
        await asyncio.sleep(self._trace_s)
        data = msgspec.json.encode(await self._blobd.stop_trace(number, blobs))
        if len(data) <= _TRACE_MAX:
            await self._store.write(key, data)

    def _run(self, work: Coroutine[Any, Any, object], manifest: Manifest) -> None:
        """Run `work` beside everything else; its failure costs time and nothing else."""

        async def guarded() -> None:
            try:
                await work
            except DSecError as error:
                logger.warning("no prefetch for layer %s: %s", manifest.digest[:12], error)

        task = asyncio.create_task(guarded())
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def _expect(path: str, size: int, digest: str) -> None:
    """Raise unless the file is there and whole."""
    try:
        found = Path(path).stat().st_size
    except FileNotFoundError as error:
        raise NotFound(
            f"{path} of layer {digest[:12]} is gone; import the layer again", path=path
        ) from error
    if found != size:
        raise Internal(
            f"{path} of layer {digest[:12]} is damaged: it has {found} bytes instead of {size}; "
            "remove the layer and import it again",
            path=path,
        )
