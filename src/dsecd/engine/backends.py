"""What sandboxes of this daemon run in: the host's own backend, and others that stand on it.

The host's own comes first. It runs what asks for nothing else, and has what all share: layers, the
probe of the kernel. A backend may stand on it, as microVMs do, each of which is in a container of
the same id: that container's handle is in the handle of the microVM, and only the microVM's backend
ever hands it on. So `sweep` tells every backend about all sandboxes that live, and each sandbox is
used, freed and recovered through the backend that made its handle.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from dsecd import log
from dsecd.backends.abc import Backend, Capabilities, Handle, Listener
from libdsec.errors import InvalidArgument, Unsupported
from libdsec.model import CONTAINER, Feature

logger = logging.getLogger("dsecd.engine")
Need = Literal["checkpoints", "pack", "pause"]
_CANNOT: dict[Need, str] = {
    "checkpoints": "keeps no checkpoints", "pack": "keeps no layers", "pause": "cannot pause",
}  # fmt: skip


def require(backend: Backend, need: Need) -> None:
    """Raise `Unsupported` unless the capabilities of `backend` have `need`."""
    if not getattr(backend.capabilities, need):
        raise Unsupported(f"the {backend.name} backend {_CANNOT[need]}", reason="backend")


class Backends:
    """The backends of one daemon, the host's own first.

    `absent` are those that it could have, and why it has not, with what to do. One that is
    `optional` becomes absent when it does not start; the daemon goes on without it.
    """

    def __init__(
        self,
        backends: Sequence[Backend],
        absent: Mapping[str, str] | None = None,
        optional: Collection[str] = (),
    ) -> None:
        self.own = backends[0]
        self._named = {backend.name: backend for backend in backends}
        self.absent = dict(absent or {})
        self._optional = frozenset(optional)

    @property
    def names(self) -> list[str]:
        return list(self._named)

    def capabilities(self) -> dict[str, Capabilities]:
        """Return those of each backend, by its name."""
        return {name: backend.capabilities for name, backend in self._named.items()}

    # --- which one

    def find(self, asked: str) -> Backend | None:
        """Return the backend that a request means by `asked`; containers are the host's own."""
        return self._named.get(asked) or (self.own if asked == CONTAINER else None)

    def get(self, asked: str) -> Backend:
        """Return what `find` does. Raises `Unsupported` with what to do, `InvalidArgument`."""
        backend = self.find(asked)
        if backend is not None:
            return backend
        if asked not in self.absent:
            known = ", ".join([*self._named, *self.absent])
            raise InvalidArgument(f"backend: {asked!r} is none of {known}", field="backend")
        why = self.absent[asked]
        raise Unsupported(f"this host has no {asked} backend: {why}", reason=why)

    def of(self, handle: Handle) -> Backend | None:
        """Return the backend that made `handle`, None when this daemon has it no more."""
        return self._named.get(handle.backend)

    def streaming(self) -> Backend:
        """Return the first backend whose agents talk on byte streams. Raises `Unsupported`."""
        for backend in self._named.values():
            if backend.capabilities.streams:
                return backend
        raise Unsupported(
            f"function calls are not offered by the {self.own.name} backend here",
            reason="its agents have no byte streams",
        )

    # --- all of them

    async def start(self, listener: Listener) -> None:
        """Start each, the host's own first. Raises `Unsupported` with the reason."""
        for name, backend in list(self._named.items()):
            try:
                await backend.start(listener)
            except Unsupported as error:
                if name not in self._optional:
                    raise
                await backend.close()
                del self._named[name]
                self.absent[name] = error.message
                log.event(logger, logging.ERROR, "goes on without", backend=name, why=error.message)

    async def sweep(self, known: Collection[str]) -> list[str]:
        """Remove left-overs of sandboxes not in `known`: all that live, of any backend."""
        swept: list[str] = []
        for backend in self._named.values():
            swept += await backend.sweep(known)
        return swept

    def pools(self) -> dict[str, float]:
        """Return the depth of each pool; those beside the host's own have their backend's name."""
        depths = dict(self.own.pools())
        for name, backend in self._named.items():
            if backend is not self.own:
                depths |= {f"{name}_{pool}": depth for pool, depth in backend.pools().items()}
        return depths

    def features(self) -> list[Feature]:
        """Return the host's probe, then the rows that only other backends have."""
        rows: dict[str, Feature] = {}
        for backend in self._named.values():
            for row in backend.features():
                rows.setdefault(row.name, row)
        for name, why in self.absent.items():
            row = Feature(name=name, available=False, reason=why, needed_for=f"{name} sandboxes")
            rows.setdefault(name, row)
        return list(rows.values())

    async def close(self) -> None:
        """Close each, the host's own last, whatever becomes of those before it."""
        failure: Exception | None = None
        for backend in reversed(self._named.values()):
            try:
                await backend.close()
            except Exception as error:
                logger.exception("the %s backend did not close", backend.name)
                failure = failure or error
        if failure is not None:
            raise failure
