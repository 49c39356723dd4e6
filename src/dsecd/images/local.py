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
from dsecd.images.chunks import index_most
from dsecd.images.copies import Copies
from dsecd.images.manifest import BlobRef, Config, Manifest
from dsecd.images.stores.abc import Store
from dsecd.images.stores.verify import fetch_verified, holds
from libdsec.errors import DSecError, Exhausted, Internal, NotFound, Unsupported, WrongState

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


class Located(msgspec.Struct, frozen=True):
    """An environment whose layers are at hand, bottom first."""

    config: Config
    layers: tuple[Local, ...]


class Provider(Protocol):
    """Brings layers to this host."""

    async def provide(self, manifest: Manifest) -> Local:
        """Return the layer's files. Raises `NotFound`, `Internal`, `Unavailable`."""

    async def unmounting(self, local: Local, kept: Collection[str]) -> None:
        """The layer is about to be unmounted; devices in `kept` belong to others, too."""

    async def held(self) -> list[str]:
        """Return the digests of layers for whose mounts something is held back."""

    async def release(self, digest: str, local: Local | None, kept: Collection[str]) -> None:
        """End that: the layer is not mounted any more, or never was."""


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

    async def held(self) -> list[str]:
        return []

    async def release(self, digest: str, local: Local | None, kept: Collection[str]) -> None:
        """Nothing is held back."""


class Cached:
    """Any other store, behind dsec-blobd's cache.

    A layer whose chunks are all in the cache is mounted on the files there, which dsec-blobd then
    leaves alone; any other one on files that dsec-blobd serves, until its next mount.

    What a layer needs is asked for at once, as soon as its manifest says what that is. Copies are
    not synced: one that an earlier process made is checked before its first use.
    """

    def __init__(
        self, store: Store, blobd: Blobd, copies_bytes: int = 0, trace_s: float = 60.0
    ) -> None:
        """`copies_bytes`: bound of images and indexes that are not in use, 0: none."""
        self._store, self._blobd, self._trace_s = store, blobd, trace_s
        self._fetches: dict[str, asyncio.Task[None]] = {}
        self._proved: set[Path] = set()  # copies fetched or checked by this process
        self._seen: set[str] = set()  # layers whose trace was replayed or is being recorded
        self._work: set[asyncio.Task[None]] = set()
        self._traces = 0
        self._direct = is_local(blobd.cache)
        self._copies = Copies(blobd.cache, copies_bytes)

    async def provide(self, manifest: Manifest) -> Local:
        image = self._blobd.cache / "images" / f"{manifest.image}.erofs"
        await asyncio.gather(
            self._once(f"images/{manifest.image}", manifest.image, image, manifest.image_bytes),
            self._serve(manifest),
        )
        whole = await self._hold(manifest)
        place = self._blobd.cached if whole else self._blobd.path
        devices = tuple(str(place(blob.id)) for blob in manifest.blobs)
        return Local(manifest.digest, str(image), devices, served=not whole)

    async def unmounting(self, local: Local, kept: Collection[str]) -> None:
        """Stop serving what only this layer needs: reads that wait for the store fail now."""
        if local.served:
            await self._remove(local, kept)

    async def held(self) -> list[str]:
        return await self._blobd.holds()

    async def release(self, digest: str, local: Local | None, kept: Collection[str]) -> None:
        await self._blobd.release(digest)
        if local is not None:
            await self._remove(local, kept)

    async def _remove(self, local: Local, kept: Collection[str]) -> None:
        self._seen.discard(local.digest)
        needed = {Path(device).name for device in kept}  # served or not
        for device in local.devices:
            if (blob := Path(device).name) not in needed:
                with contextlib.suppress(DSecError):
                    await self._blobd.remove(blob)

    async def _hold(self, manifest: Manifest) -> bool:
        """Keep the blobs in the cache for the layer's mount; False unless all of them are whole.

        With pre-access they need not be.
        """
        blobs = [blob.id for blob in manifest.blobs]
        if not self._direct or not blobs:
            return False
        try:
            await self._blobd.hold(manifest.digest, blobs, watch=self._blobd.watches)
        except (WrongState, Exhausted, Unsupported):  # not whole; enough is held; too old
            return False
        return True

    async def trim(self, used: Collection[str]) -> None:
        """Remove copies that nobody needs while there are too many.

        `used`: paths of images and devices of all layers that are mounted or about to be. Not to be
        called while a layer is provided.
        """
        names = {Path(path).name for path in used}
        names.update(await self._blobd.blobs())  # it reads their indexes when it starts again
        self._proved -= await asyncio.to_thread(self._copies.trim, names)

    async def close(self) -> None:
        """Give up recordings and fetches."""
        tasks = [*self._work, *self._fetches.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _serve(self, manifest: Manifest) -> None:
        """Have the blobs served; fetch ahead what an earlier sandbox read of them, or record."""
        blobs = [self._blob(blob) for blob in manifest.blobs]
        if not blobs or manifest.digest in self._seen:
            await asyncio.gather(*blobs)
            return
        self._seen.add(manifest.digest)
        try:
            trace, *_ = await asyncio.gather(self._trace(manifest), *blobs)
            await self._replay_or_record(manifest, trace)  # before it is mounted: later is too late
        except BaseException:
            self._seen.discard(manifest.digest)
            raise

    async def _blob(self, blob: BlobRef) -> None:
        index = self._blobd.cache / "indexes" / blob.id
        await self._once(f"indexes/{blob.id}", blob.id, index, index_most(blob.size))
        await self._blobd.add(blob.id, self._store.source(f"blobs/{blob.id}"))

    async def _once(self, key: str, sha256: str, target: Path, most: int) -> None:
        """Have a proved copy of an object in the cache, made once for all who wait for it."""
        if target in self._proved and target.exists():
            return
        task = self._fetches.get(key)
        if task is None:
            task = asyncio.create_task(self._copy(key, sha256, target, most))
            self._fetches[key] = task
            task.add_done_callback(lambda _: self._fetches.pop(key, None))
        await asyncio.shield(task)

    async def _copy(self, key: str, sha256: str, target: Path, most: int) -> None:
        if target.exists() and not await asyncio.to_thread(holds, target, sha256):
            logger.warning("%s is damaged; it is fetched again", target)
            target.unlink(missing_ok=True)
        if not target.exists():
            await fetch_verified(self._store, key, sha256, target, most)
        self._proved.add(target)

    async def _trace(self, manifest: Manifest) -> Trace | None:
        """Return what an earlier sandbox of the layer read, None when that is not known."""
        try:
            data = await self._store.read(f"traces/{manifest.digest}", 0, _TRACE_MAX)
            return msgspec.json.decode(data, type=Trace)
        except NotFound:
            return None
        except (DSecError, msgspec.DecodeError) as error:
            _unaided(manifest, error)
            return Trace((), ())  # there may be one: a recording would be in vain

    async def _replay_or_record(self, manifest: Manifest, trace: Trace | None) -> None:
        key, blobs = f"traces/{manifest.digest}", [blob.id for blob in manifest.blobs]
        if trace is not None:
            self._run(self._blobd.prefetch(trace), manifest)
            return
        try:
            self._traces += 1
            await self._blobd.start_trace(self._traces, blobs)
            self._run(self._record(key, self._traces, blobs), manifest)
        except DSecError as error:
            _unaided(manifest, error)

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
                _unaided(manifest, error)

        task = asyncio.create_task(guarded())
        self._work.add(task)
        task.add_done_callback(self._work.discard)


def _unaided(manifest: Manifest, error: Exception) -> None:
    logger.warning("no prefetch for layer %s: %s", manifest.digest[:12], error)


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
