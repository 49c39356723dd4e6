"""Imports from registries under way. Whoever asks for one that is under way shares it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from dsecd.images.library import Named
from dsecd.images.tool import Report
from libdsec.errors import DSecError
from libdsec.model_layers import ImportStage

logger = logging.getLogger("dsecd.images")


class _Pull:
    """One import, and whom it reports to."""

    def __init__(self) -> None:
        self.reports: tuple[Report, ...] = ()  # replaced as a whole: read in other threads
        self.last: tuple[ImportStage, int, int] | None = None
        self.task: asyncio.Task[Named]

    def report(self, stage: ImportStage, done: int, total: int) -> None:
        self.last = (stage, done, total)
        for report in self.reports:
            report(stage, done, total)


class Pulls:
    """`pull(name, report)` imports an image by its name in a registry."""

    def __init__(self, pull: Callable[[str, Report], Awaitable[Named]]) -> None:
        self._pull = pull
        self._running: dict[str, _Pull] = {}

    async def get(self, name: str, report: Report) -> Named:
        """Return the layer made of the image, telling `report` how far it is meanwhile.

        A cancelled wait leaves the import to those that wait, too, or come back for it. Raises what
        `pull` raises.
        """
        pull = self._running.get(name)
        if pull is None:  # the first of perhaps thousands that ask for it
            pull = self._running[name] = _Pull()
            pull.task = asyncio.create_task(self._run(name, pull))
        pull.reports = (*pull.reports, report)
        if pull.last is not None:
            report(*pull.last)
        try:
            return await asyncio.shield(pull.task)
        finally:
            left = list(pull.reports)
            left.remove(report)
            pull.reports = tuple(left)

    async def _run(self, name: str, pull: _Pull) -> Named:
        logger.info("importing %s from its registry", name)
        try:
            return await self._pull(name, pull.report)
        except DSecError as error:  # those who asked may all be gone
            logger.warning("%s is not imported: %s", name, error.message)
            raise
        finally:
            del self._running[name]

    async def close(self) -> None:
        """Cancel what is under way; the programs that fetch are dead afterwards."""
        tasks = [pull.task for pull in self._running.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
