"""The layer that jails of virtual machine monitors have as their root."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from pathlib import Path

from dsecd.backends.abc import Layers
from dsecd.host import vmm_tree
from libdsec.errors import AlreadyExists, NotFound, Unsupported
from libdsec.model import LayerImport

logger = logging.getLogger("dsecd.vm")


class JailImage:
    """Made of the monitor `program` when it is first asked for; `name` is "" until then."""

    def __init__(self, program: str, state: Path) -> None:
        self._program, self._state = program, state
        self.name = ""
        self._importing = asyncio.Lock()

    def program(self) -> Path:
        """Return where the monitor is installed. Raises `Unsupported`."""
        found = shutil.which(self._program)
        if found is None:
            raise Unsupported(
                f"{self._program} is not installed: {vmm_tree.PACKAGE}", reason="qemu"
            )
        return Path(found)

    async def provide(self, layers: Layers) -> str:
        """Return the name of the layer, made when it is not there. Raises `Unsupported`."""
        async with self._importing:
            if self.name:
                return self.name
            tree = await asyncio.to_thread(vmm_tree.survey, self.program())
            try:
                await layers.get(tree.name)
            except NotFound:
                await self._import(layers, tree)
            self.name = tree.name
            return tree.name

    async def _import(self, layers: Layers, tree: vmm_tree.Tree) -> None:
        place = Path(await asyncio.to_thread(tempfile.mkdtemp, prefix="jail-", dir=self._state))
        try:
            await asyncio.to_thread(vmm_tree.assemble, tree, place)
            with contextlib.suppress(AlreadyExists):  # another host of the store was quicker
                await layers.import_(LayerImport(name=tree.name, source=str(place)))
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
        logger.info("made the jail of virtual machines: %s", tree.name)
