"""``client.layers``: the images that sandboxes are made of."""

from __future__ import annotations

from typing import TypeAlias

from libdsec import model
from libdsec.link import Link

LayerInfos: TypeAlias = list[model.LayerInfo]


class Layers:
    """The layers of the daemon's host."""

    def __init__(self, link: Link) -> None:
        self._link = link

    async def list(self) -> LayerInfos:
        """Return every layer with its digest, size and number of sandboxes that use it."""
        return await self._link.call("layer.list", {}, list[model.LayerInfo], retry=True)

    async def import_(self, name: str, source: str, *, replace: bool = False) -> model.LayerInfo:
        """Make layer `name` of `source`, a directory or tar file on the daemon's host.

        Takes as long as it takes. Raises `AlreadyExists` when the name is taken, unless `replace`.
        """
        args = model.LayerImport(name=name, source=source, replace=replace)
        return await self._link.call("layer.import", args, model.LayerInfo, timeout_s=0)

    async def remove(self, name: str) -> None:
        """Remove layer `name`. Raises `NotFound`, or `WrongState` while a sandbox uses it."""
        await self._link.call("layer.remove", model.LayerRef(name=name), type(None))
