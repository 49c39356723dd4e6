"""How far a layer that is being made is, told to a client that may read slowly or not at all."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from dsecd.api.local import LocalCall
from dsecd.images.tool import Report
from libdsec.model import ImportProgress
from libdsec.model_layers import ImportStage

_EVERY_S = 0.2
_FIRST_S = 0.01  # short work is seen at least once


@contextlib.asynccontextmanager
async def told(call: LocalCall) -> AsyncIterator[Report]:
    """Yield what passes progress on to the client of `call`, until the block ends."""
    teller = Teller(call)
    try:
        yield teller.note
    finally:
        await teller.stop()


class Teller:
    """Sends the newest of what is noted, a few times a second; what comes between is left out."""

    def __init__(self, call: LocalCall) -> None:
        self._call = call
        self._newest: tuple[ImportStage, int, int] | None = None
        self._task = asyncio.create_task(self._tell())

    def note(self, stage: ImportStage, done: int, total: int) -> None:
        """Remember how far it is. Cheap, and from any thread."""
        self._newest = (stage, done, total)

    async def stop(self) -> None:
        """Send no more; the answer follows."""
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _tell(self) -> None:
        told = None
        while True:
            newest = self._newest
            if newest is not None and newest != told:
                stage, done, total = told = newest
                await self._call.send(ImportProgress(stage=stage, done=done, total=total))
            await asyncio.sleep(_EVERY_S if told else _FIRST_S)
