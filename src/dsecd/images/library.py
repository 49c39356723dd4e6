"""The layers of a host as a backend uses them: the store and its mounts, kept in step.

It is the `Layers` of `dsecd.backends.abc`, and it is where a sandbox takes its lowers from::

    layer = library.acquire("base/debian:12")        # resolved, mounted, counted
    with library.mounts.lowers([layer.digest]) as fds:
        await spawner.create(plan, fds)
    ...
    library.release(layer.digest)                    # after the sandbox is gone
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from dsecd.host.layers import GRACE_S, LayerMounts
from dsecd.images.store import Layer, LayerStore, Progress
from libdsec.errors import InvalidArgument
from libdsec.model import LayerInfo


class Library:
    """Layers in `<state>/layers`, mounted below `<runtime>/layers`."""

    def __init__(self, state: Path, runtime: Path, grace_s: float = GRACE_S) -> None:
        self.mounts = LayerMounts(runtime / "layers", grace_s)
        self.store = LayerStore(state / "layers", self.mounts.users)

    def start(self) -> None:
        """Open the store and adopt mounts. Raises `Unsupported` for an unfit state directory."""
        self.store.start()
        self.mounts.start()

    def acquire(self, reference: str) -> Layer:
        """Resolve, mount and count one user, in one turn. Raises `NotFound`, `Internal`."""
        layer = self.store.resolve(reference)
        self.mounts.acquire(layer.digest, layer.path)
        return layer

    def release(self, digest: str) -> None:
        """Count one user less."""
        self.mounts.release(digest)

    def info(self, layer: Layer) -> LayerInfo:
        """Return what the wire says about `layer`."""
        return LayerInfo(
            name=layer.name,
            digest=layer.digest,
            size_bytes=layer.size_bytes,
            created_at=layer.created_at,
            in_use=self.mounts.users(layer.digest),
        )

    async def list(self) -> list[LayerInfo]:
        return [self.info(layer) for layer in self.store.list()]

    async def import_(
        self,
        name: str,
        source: str,
        replace: bool,
        progress: Callable[[Progress], None] = lambda _: None,
    ) -> LayerInfo:
        """See `LayerStore.import_`; `progress` is called in another thread."""
        path = Path(source)
        if not path.is_absolute():
            raise InvalidArgument(f"{source} is not an absolute path", field="source")
        return self.info(await self.store.import_(name, path, replace, progress))

    async def remove(self, name: str) -> None:
        """Raises `WrongState` while a sandbox uses the layer."""
        self.store.remove(name, self.mounts.drop)

    def collect(self) -> None:
        """Unmount layers nobody has used for a while; to be called now and then."""
        self.mounts.collect()

    def close(self) -> None:
        """Leave the mounts to the next daemon."""
        self.mounts.close()

    def teardown(self) -> None:
        """Unmount everything: no sandbox is left and none will come."""
        self.mounts.teardown()
