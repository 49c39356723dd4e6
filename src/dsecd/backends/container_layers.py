"""The layers that containers of this host are made of: store, library, mounts.

`locate` brings an environment's files to the host and may take a while; mounting them is
synchronous and follows in the same turn of the event loop, so nothing can come in between.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from dsecd.backends.spec import Spec
from dsecd.config import Config
from dsecd.host import preaccess, probe
from dsecd.host.layers import LayerMounts, fit_for_images
from dsecd.images import collapse, importing, names
from dsecd.images.blobd.client import Blobd
from dsecd.images.blobd.model import Settings
from dsecd.images.collect import GRACE_S, WAIT_S, collect
from dsecd.images.environment import Environment, compose
from dsecd.images.hostlease import HostLease
from dsecd.images.library import Library, Named, open_library
from dsecd.images.local import Cached, Direct, Local, Located, Provider, is_local
from dsecd.images.pulls import Pulls
from dsecd.images.tool import Report, unreported
from libdsec.errors import AlreadyExists, DSecError, NotFound, Unsupported
from libdsec.model import Collected, ImageConfig, LayerCollapse, LayerImport, LayerInfo

logger = logging.getLogger("dsecd.layers")
LOCATED_S = 1.0  # a name that moved is seen after so long
Key = tuple[str, ...]


class ContainerLayers:
    """`abc.Layers`, and what the backend needs of them. Usable after `start`."""

    def __init__(self, config: Config, mounts: LayerMounts) -> None:
        self._config, self._mounts = config, mounts
        self._locals: dict[str, Local] = {}
        self._located: dict[Key, tuple[float, int, Located]] = {}  # until, at which move of names
        self._open = contextlib.AsyncExitStack()
        self._pulls = Pulls(self._pull)
        self._retiring = asyncio.Lock()
        self._providing = 0
        self._blobd: Blobd | None = None
        self._provider: Provider
        self._cached: Cached | None = None
        self._lease: HostLease | None = None  # of a store that others may share
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
        else:
            self._blobd = await self._start_blobd()
            self._provider = self._cached = Cached(
                self.library.store, self._blobd, self._config.cache.copies_bytes
            )
        if config.store.url:
            await self._start_lease()

    async def _start_lease(self) -> None:
        lease = HostLease(self.library.store, self._config.state, self._used, self._lost)
        try:
            await lease.start()
        except Unsupported as error:
            logger.warning(
                "no lease in the store: what is collected on another host may be in use here: %s",
                error,
            )
        else:
            self._lease = lease

    async def _start_blobd(self) -> Blobd:
        cache = self._config.cache
        directory = Path(cache.directory or self._config.state / "cache")
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        fit_for_images(directory)
        if pre_access := cache.on_demand == "pre-access":
            _expect_pre_access(directory)
        blobd = Blobd(
            self._config.runtime,
            directory,
            Settings(cache_bytes=cache.chunks_bytes),
            pre_access=pre_access,
        )
        blobd.hand_over(self.library.store.source(f"blobs/{'0' * 64}"))
        if not await blobd.adopt():
            await blobd.start()
            if dead := self._mounts.drop_served():
                logger.error(
                    "dsec-blobd and dsecd died together: sandboxes that use one of %d layers get "
                    "I/O errors for what they have not read; start them anew",
                    len(dead),
                )
            if blobd.unwatched:
                await self._drop_unwatched(blobd)
        return blobd

    async def _drop_unwatched(self, blobd: Blobd) -> None:
        """Do not let others have what was read while nobody filled it (pre-access)."""
        layers = set(await blobd.holds()) & set(self._mounts.digests())
        for digest in layers:
            self._mounts.drop(digest)
        if layers:
            logger.error(
                "dsec-blobd and dsecd died together: sandboxes that use one of the layers %s may "
                "have read zeros since (pre-access); stop them",
                ", ".join(sorted(digest[:12] for digest in layers)),
            )

    async def close(self, leave_nothing: bool) -> None:
        """End our tasks; with `leave_nothing`, dsec-blobd too, else it serves on."""
        await self._pulls.close()
        self._locals.clear()
        if self._lease is not None:
            await self._lease.close(leave_nothing)
        if self._cached is not None:
            await self._cached.close()
        if self._blobd is not None:
            await (self._blobd.close() if leave_nothing else self._blobd.detach())
        await self._open.aclose()

    # --- for the backend --------------------------------------------------------------------------

    def recall(self, spec: Spec, aged: bool = False) -> Located | None:
        """Return what `locate` found a moment ago for an equal environment.

        With `aged` the last that it found, for a caller who has just asked: a moment may end, or
        the machine stand still for one, between two questions.
        """
        found = self._located.get(_key(spec))
        if found is None:
            return None
        until, moves, located = found
        fresh = time.monotonic() <= until and moves == self.library.moves
        return located if fresh or aged else None

    async def pull(self, spec: Spec, report: Report) -> None:
        """Import the image of `spec` if only a registry has it."""
        if importing.is_registry(spec.image):
            await self._base(spec.image, report)

    async def locate(self, spec: Spec) -> Located:
        """Return the environment of `spec` with its layers on this host, fetched where needed.

        An image that is no layer but names a registry is imported first. Raises `NotFound`,
        `InvalidArgument`, and what store and registry raise.
        """
        named = [name for name in (spec.workspace, *spec.toolkits) if name]
        base, *others = await asyncio.gather(
            self._base(spec.image), *(self.library.resolve(name) for name in named)
        )
        above = [layer.manifest for layer in others]
        workspace = above.pop(0) if spec.workspace else None
        environment = compose(base.manifest, workspace, above)
        located = await self._provide(environment)
        if len(self._located) > 1000:
            self._located.clear()
        self._located[_key(spec)] = (time.monotonic() + LOCATED_S, self.library.moves, located)
        return located

    async def _provide(self, environment: Environment) -> Located:
        while self._retiring.locked():
            async with self._retiring:  # what is being given up may be what we need
                pass
        self._providing += 1
        try:
            # again, should one be forgotten meanwhile
            while missing := [one for one in environment.layers if one not in self._locals]:
                await self._bring(missing)
        finally:
            self._providing -= 1
        return Located(
            environment.config, tuple(self._locals[digest] for digest in environment.layers)
        )

    async def _bring(self, missing: Sequence[str]) -> None:
        """Bring layers to the host while the lease is taken; when either fails, none is used."""
        lease = self._lease
        with lease.needing(missing) if lease is not None else contextlib.nullcontext():
            secured, fetched = await asyncio.gather(
                lease.secure(missing) if lease is not None else _nothing(),
                self._fetch(missing),
                return_exceptions=True,
            )
            for outcome in (secured, fetched):
                if isinstance(outcome, NotFound):  # it may have been made anew, of other blobs
                    for digest in missing:
                        self.library.forget(digest)
            if isinstance(secured, BaseException):
                raise secured
            if isinstance(fetched, BaseException):
                raise fetched
            self._locals.update(zip(missing, fetched, strict=True))

    async def _fetch(self, missing: Sequence[str]) -> Sequence[Local]:
        manifests = await asyncio.gather(*(self.library.manifest(one) for one in missing))
        return await asyncio.gather(*(self._provider.provide(one) for one in manifests))

    def _used(self) -> set[str]:
        return {*self._locals, *self._mounts.digests()}

    def _lost(self, digest: str) -> None:
        self.library.forget(digest)
        self.forget(digest)

    async def _base(self, reference: str, report: Report = unreported) -> Named:
        try:
            return await self.library.resolve(reference.removeprefix("docker://"))
        except NotFound:
            if not importing.is_registry(reference):
                raise
        return await self._pulls.get(reference.removeprefix("docker://"), report)

    async def _pull(self, name: str, report: Report) -> Named:
        with contextlib.suppress(AlreadyExists):  # another host was quicker
            return await self._import(name, f"docker://{name}", False, "", report)
        return await self.library.resolve(name)

    @contextlib.asynccontextmanager
    async def mounted(self, environment: Environment) -> AsyncIterator[list[int]]:
        """Lend mounts of all layers, bottom first, as sandboxes have them."""
        located, held = await self._provide(environment), []
        try:
            for layer in located.layers:
                try:
                    self._mounts.acquire(layer.digest, layer.image, layer.devices, layer.served)
                except DSecError:
                    self.forget(layer.digest)
                    raise
                held.append(layer.digest)
            with self._mounts.lowers(held) as lowers:
                yield lowers
        finally:
            for digest in held:
                self._mounts.release(digest)

    def forget(self, digest: str) -> None:
        """The layer's files may be gone: look again at its next use."""
        self._locals.pop(digest, None)
        self._located.clear()

    async def unmount_idle(self) -> None:
        """Unmount the layers that nobody has used for long. Raises `StepError`."""
        if self._providing:
            return  # a later look will do
        async with self._retiring:
            idle = dict(self._mounts.retire())
            # Those that are in no mount, too: their create failed before it. All are forgotten in
            # this turn, so that nobody mounts one of them while we wait.
            leaving = {*idle, *(self._locals.keys() - set(self._mounts.digests()))}
            locals_ = {digest: self._locals.get(digest) for digest in leaving}
            for digest in leaving:
                self.forget(digest)
            kept = self._mounts.devices()
            for digest, local in locals_.items():
                if local is not None:
                    await self._provider.unmounting(local, kept)
                if digest in idle:
                    await asyncio.to_thread(idle[digest])
            held = await self._provider.held()
            mounted = {*self._mounts.digests(), *self._mounts.attached()} if held else set()
            for digest in held:
                if digest not in mounted:
                    await self._provider.release(digest, locals_.get(digest), kept)
            if self._cached is not None:
                await self._cached.trim(self._files() | kept)

    def _files(self) -> set[str]:
        """Return the files of all layers at hand or mounted."""
        files = self._mounts.images()
        for local in self._locals.values():
            files.update((local.image, *local.devices))
        return files

    # --- for operators ----------------------------------------------------------------------------

    async def stats(self) -> dict[str, float]:
        if self._blobd is None:
            return {}
        counted, holds = await asyncio.gather(self._blobd.stats(), self._blobd.holds())
        return {**counted, "holds": len(holds), "restarts": self._blobd.restarts}

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

    async def collapse(self, args: LayerCollapse, report: Report = unreported) -> LayerInfo:
        await self.library.expect_free(args.to, args.replace)
        top = (await self.library.resolve(args.name)).manifest
        if not top.parents:
            return self._info(await self.library.point(args.to, top.digest, args.replace))
        digests = (*top.parents, top.digest)
        stack = await asyncio.gather(*(self.library.manifest(digest) for digest in digests))
        async with self.mounted(Environment(digests, top.config)) as lowers:
            made = await collapse.collapse(
                self.library, args.to, stack, lowers, replace=args.replace, report=report
            )
        return self._info(made)

    async def remove(self, name: str) -> None:
        await self.library.remove(name)
        self._located.clear()

    async def collect(self, grace_s: float | None, wait_s: float | None) -> Collected:
        """Collect garbage in the store; layers mounted here stay."""
        done = await collect(
            self.library.store,
            used=self._used(),
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


async def _nothing() -> None:
    pass


def _expect_pre_access(cache: Path) -> None:
    """Raise `Unsupported` unless reads of files in `cache` can wait for us."""
    feature = probe.feature("pre_access")
    try:
        if not feature.available:
            raise Unsupported("this kernel cannot", reason=feature.reason)
        preaccess.try_on(cache)
    except Unsupported as error:
        reason = str(error.detail.get("reason"))
        raise Unsupported(
            f'cache.on_demand = "pre-access" does not work in {cache}: {reason}; set it to "fuse"',
            reason=reason,
        ) from error


def _key(spec: Spec) -> Key:
    return (spec.image, spec.workspace, *spec.toolkits)
