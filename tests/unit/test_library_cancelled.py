"""Builds that are given up at an awkward moment."""

from __future__ import annotations

import asyncio
from pathlib import Path

from dsecd.images.builder import Recipe
from dsecd.images.known import KnownChunks
from dsecd.images.library import Library
from dsecd.images.model import directory
from dsecd.images.stores.directory import DirectoryStore


class SlowNames(DirectoryStore):
    """Writes names whether or not anybody still waits for it, as a thread does."""

    async def swap_name(self, key: str, data: bytes | None, expected: str | None) -> str:
        async def late() -> str:
            await asyncio.sleep(0.1)
            return await super(SlowNames, self).swap_name(key, data, expected)

        return await asyncio.shield(asyncio.ensure_future(late()))


async def test_a_build_cancelled_while_it_takes_its_lease_leaves_none(tmp_path: Path) -> None:
    """It used to stay for a day, in which nothing was collected."""
    store = SlowNames(tmp_path / "store")
    await store.start()
    with KnownChunks(tmp_path / "known.db") as known:
        library = Library(store, known, tmp_path / "scratch", reserve=0)
        work = asyncio.ensure_future(
            library.make(None, lambda sink: [directory()], Recipe(kind="base"))
        )
        await asyncio.sleep(0.05)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.sleep(0.2)
        assert [entry.key async for entry in store.list("leases/")] == []
    await store.close()
