"""Names while the store does not answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsecd.images import library as module
from dsecd.images.builder import Recipe
from dsecd.images.known import KnownChunks
from dsecd.images.library import Library
from dsecd.images.manifest import Config
from dsecd.images.model import directory
from dsecd.images.stores.directory import DirectoryStore
from libdsec.errors import NotFound, Unavailable
from tests.waiting import let_pass, on_the_loops_clock


class Failing(DirectoryStore):
    """`away`: "raises" says so, "stalls" says nothing."""

    away = ""

    async def read_name(self, key: str) -> tuple[bytes, str] | None:
        if self.away == "stalls":
            await asyncio.sleep(600)
        if self.away:
            raise Unavailable("the store is away")
        return await super().read_name(key)


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Failing]:
    made = Failing(tmp_path / "store")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
async def library(
    store: Failing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Library]:
    for name, value in (("RESOLVED_S", 0.0), ("AWAY_S", 60), ("PATIENCE_S", 60)):
        monkeypatch.setattr(module, name, value)
    on_the_loops_clock(monkeypatch, module)
    with KnownChunks(tmp_path / "known.db") as known:
        made = Library(store, known, tmp_path / "scratch", reserve=0)
        for name in ("base/a:1", "base/b:1"):
            recipe = Recipe(kind="base", config=Config(env={"of": name}))
            await made.make(name, lambda _: [directory()], recipe)
        yield made


@pytest.mark.parametrize("away", ["raises", "stalls"])
async def test_a_known_name_is_believed_while_the_store_is_away(
    library: Library, store: Failing, away: str
) -> None:
    known = await library.resolve("base/a:1")
    store.away = away
    for _ in range(2):
        asked = asyncio.ensure_future(library.resolve("base/a:1"))
        await asyncio.sleep(0.01)
        if not asked.done():
            let_pass(90)
        assert await asyncio.wait_for(asked, 5) == known
    assert library.recall("base/a:1") == known  # a burst waits once
    store.away = "raises"
    with pytest.raises(Unavailable, match="away"):
        await library.resolve("base/b:1")  # nobody asked for it before
    let_pass(90)
    store.away = ""
    moved = await library.point("base/a:1", (await library.resolve("base/b:1")).digest, True)
    assert (await library.resolve("base/a:1")).digest == moved.digest


async def test_a_name_removed_here_is_not_believed(library: Library, store: Failing) -> None:
    for name in ("base/a:1", "base/b:1"):
        await library.resolve(name)
    await library.remove("base/a:1")
    store.away = "raises"
    with pytest.raises(Unavailable):
        await library.resolve("base/a:1")
    assert (await library.resolve("base/b:1")).name == "base/b:1"
    store.away = ""
    with pytest.raises(NotFound):
        await library.resolve("base/a:1")


async def test_a_manifest_damaged_on_the_way_is_read_again(
    store: Failing, library: Library, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = await library.resolve("base/a:1")
    read, damaged = store.read, [1]

    async def flip(key: str, start: int = 0, end: int | None = None) -> bytes:
        data = await read(key, start, end)
        if key.startswith("layers/") and damaged and damaged.pop():
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data

    monkeypatch.setattr(store, "read", flip)
    library.forget(known.digest)
    assert await library.manifest(known.digest) == known.manifest
    assert damaged == []
