"""The layers that containers of this host are made of: store, library, mounts.

`locate` brings an environment's files to the host and may take a while; mounting them is
synchronous and follows in the same turn of the event loop, so nothing can come in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from pathlib import Path

import msgspec

from dsecd.config import Config
from dsecd.host.layers import LayerMounts, fit_for_images
from dsecd.images import importing, manifest, names
from dsecd.images.blobd.client import Blobd
from dsecd.images.blobd.model import Settings
from dsecd.images.collect import GRACE_S, WAIT_S, collect
from dsecd.images.environment import Environment, compose
from dsecd.images.library import Library, Named, open_library
from dsecd.images.local import Cached, Direct, Local, Provider, is_local
from dsecd.images.tool import Report, unreported
from dsecd.model import Spec
from libdsec.errors import AlreadyExists, NotFound
from libdsec.model import Collected, ImageConfig, LayerImport, LayerInfo

logger = logging.getLogger("dsecd.layers")
LOCATED_S = 1.0  # a name that moved is seen after so long
Key = tuple[str, ...]


class Located(msgspec.Struct, frozen=True):
    """An environment whose layers are at hand, bottom first."""

    config: manifest.Config
    layers: tuple[Local, ...]


class ContainerLayers:
    """`abc.Layers`, and what the backend needs of them. Usable after `start`."""

    def __init__(self, config: Config, mounts: LayerMounts) -> None:
        self._config, self._mounts = config, mounts
        self._locals: dict[str, Local] = {}
        self._located: dict[Key, tuple[float, Located]] = {}
        self._open = contextlib.AsyncExitStack()
        self._pulls: dict[str, asyncio.Task[Named]] = {}
        self._retiring = asyncio.Lock()
        self._providing = 0
        self._blobd: Blobd | None = None
        self._provider: Provider
        self._cached: Cached | None = None
        self.library: Library

    async def start(self) -> None:
        """Open the store and what serves it. Raises what the store raises, `Unsupported`."""
        config, state = self._config, self._config.state
        url = config.store.url or str(state / "store")
        opening = open_library(state, config.store.url, config.store.options)
        self.library = await self._open.enter_async_context(opening)
        root = None if url.startswith("s3:") else Path(url.removeprefix("file://"))
        if not config.store.url:
            fit_for_images(state / "store")
        direct = config.cache.use == "auto"
        if direct and root is not None and is_local(root):
            self._provider = Direct(root)
            return
        self._blobd = await self._start_blobd()
        self._provider = self._cached = Cached(self.library.store, self._blobd)

    async def _start_blobd(self) -> Blobd:
        cache = self._config.cache
        directory = Path(cache.directory or self._config.state / "cache")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fit_for_images(directory)
        blobd = Blobd(
            self._config.runtime,
            directory,
            Settings(cache_bytes=cache.size_mb << 20),
        )
        if not await blobd.adopt():
            await blobd.start()
        return blobd

    async def close(self, leave_nothing: bool) -> None:
        """End our tasks; with `leave_nothing`, dsec-blobd too, else it serves on."""
        for task in self._pulls.values():
            task.cancel()
        await asyncio.gather(*self._pulls.values(), return_exceptions=True)
        if self._cached is not None:
            await self._cached.close()
        if self._blobd is not None:
            await (self._blobd.close() if leave_nothing else self._blobd.detach())
        await self._open.aclose()

    # --- for the backend --------------------------------------------------------------------------

    def recall(self, spec: Spec) -> Located | None:
        """Return what `locate` found a moment ago for an equal environment."""
        found = self._located.get(_key(spec))
        if found is None or found[0] < time.monotonic():
            return None
        return found[1]

    async def locate(self, spec: Spec) -> Located:
        """Return the environment of `spec` with its layers on this host, fetched where needed.

        An image that is no layer but names a registry is imported first. Raises `NotFound`,
        `InvalidArgument`, and what store and registry raise.
        """
        base = await self._base(spec.image)
        workspace = await self.library.resolve(spec.workspace) if spec.workspace else None
        toolkits = [await self.library.resolve(toolkit) for toolkit in spec.toolkits]
        environment = compose(
            base.manifest,
            workspace.manifest if workspace else None,
            [toolkit.manifest for toolkit in toolkits],
        )
        located = await self._provide(environment)
        if len(self._located) > 1000:
            self._located.clear()
        self._located[_key(spec)] = (time.monotonic() + LOCATED_S, located)
        return located

    async def _provide(self, environment: Environment) -> Located:
        while self._retiring.locked():
            async with self._retiring:  # what is being given up may be what we need
                pass
        self._providing += 1
        try:
            missing = [digest for digest in environment.layers if digest not in self._locals]
            manifests = await asyncio.gather(*(self.library.manifest(one) for one in missing))
            provided = await asyncio.gather(*(self._provider.provide(one) for one in manifests))
        finally:
            self._providing -= 1
        self._locals.update(zip(missing, provided, strict=True))
        return Located(
            environment.config, tuple(self._locals[digest] for digest in environment.layers)
        )

    async def _base(self, reference: str) -> Named:
        try:
            return await self.library.resolve(reference.removeprefix("docker://"))
        except NotFound:
            if not importing.is_registry(reference):
                raise
        name = reference.removeprefix("docker://")
        task = self._pulls.get(name)
        if task is None:  # the first of perhaps thousands that ask for it
            task = self._pulls[name] = asyncio.create_task(self._pull(name))
            task.add_done_callback(lambda _: self._pulls.pop(name, None))
        return await asyncio.shield(task)

    async def _pull(self, name: str) -> Named:
        logger.info("importing %s from its registry", name)
        with contextlib.suppress(AlreadyExists):  # another host was quicker
            return await self._import(name, f"docker://{name}", False, "", unreported)
        return await self.library.resolve(name)

    def forget(self, digest: str) -> None:
        """The layer's files may be gone: look again at its next use."""
        self._locals.pop(digest, None)
        self._located.clear()

    async def unmount_idle(self) -> None:
        """Unmount the layers that nobody has used for long. Raises `StepError`."""
        if self._providing:
            return  # a later look will do
        async with self._retiring:
            for digest, unmount in self._mounts.retire():
                local = self._locals.get(digest)
                self.forget(digest)
                if local is not None:
                    mounted = (self._locals.get(other) for other in self._mounts.digests())
                    kept = {device for one in mounted if one is not None for device in one.devices}
                    await self._provider.unmounting(local, kept)
                await asyncio.to_thread(unmount)

    # --- for operators ----------------------------------------------------------------------------

    async def list(self) -> list[LayerInfo]:
        return [self._info(named) for named in await self.library.list()]

    async def get(self, name: str) -> LayerInfo:
        if names.digest_prefix(name) is None:
            names.normalise(name)  # says what is wrong with it
        return self._info(await self.library.resolve(name))

    async def import_(self, args: LayerImport, report: Report = unreported) -> LayerInfo:
        made = await self._import(args.name, args.source, args.replace, args.at, report)
        return self._info(made)

    async def _import(
        self, name: str, source: str, replace: bool, at: str, report: Report
    ) -> Named:
        return await importing.import_layer(
            self.library, name, source, replace=replace, insecure=True, at=at, report=report
        )

    async def remove(self, name: str) -> None:
        await self.library.remove(name)
        self._located.clear()

    async def collect(self, grace_s: float | None, wait_s: float | None) -> Collected:
        """Collect garbage in the store; layers mounted here stay."""
        done = await collect(
            self.library.store,
            used=self._mounts.digests(),
            grace_s=GRACE_S if grace_s is None else grace_s,
            wait_s=WAIT_S if wait_s is None else wait_s,
        )
        return Collected(marked=done.marked, deleted=done.deleted, freed_bytes=done.freed_bytes)

    def _info(self, named: Named) -> LayerInfo:
        return LayerInfo(
            name=named.name,
            digest=named.digest,
            size_bytes=named.manifest.content_bytes,
            created_at=named.created_at,
            in_use=self._mounts.users(named.digest),
            config=ImageConfig(**msgspec.structs.asdict(named.manifest.config)),
        )


def _key(spec: Spec) -> Key:
    return (spec.image, spec.workspace, *spec.toolkits)
