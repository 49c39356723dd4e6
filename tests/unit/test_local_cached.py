"""Layers of a shared store at hand: what is asked for, when, and what of the cache is believed."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from dsecd.backends.container_layers import ContainerLayers
from dsecd.backends.spec import Spec
from dsecd.config import Config
from dsecd.images.blobd.model import Trace
from dsecd.images.local import Cached
from dsecd.images.manifest import BlobRef, Manifest
from dsecd.images.stores.abc import Source
from dsecd.images.stores.verify import PIECE, fetch_verified
from libdsec.errors import Internal, NotFound, Unavailable, WrongState
from tests.waiting import until

IMAGE, INDEX = b"image" * 1000, b"index" * 50


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


MANIFEST = Manifest(
    digest="d" * 64,
    kind="base",
    image=digest(IMAGE),
    image_bytes=len(IMAGE),
    blobs=[BlobRef(id=digest(INDEX), size=1 << 20)],
    content_bytes=1,
    entries=1,
)


class Store:
    """Answers when `gate` opens; `asked` are the keys in order."""

    url = "store:"

    def __init__(self) -> None:
        self.objects = {f"images/{digest(IMAGE)}": IMAGE, f"indexes/{digest(INDEX)}": INDEX}
        self.asked: list[str] = []
        self.written: dict[str, bytes] = {}
        self.gate = asyncio.Event()
        self.gate.set()

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        self.asked.append(key)
        await self.gate.wait()
        if key not in self.objects:
            raise NotFound(f"no {key}")
        return self.objects[key][start:end]

    async def size(self, key: str) -> int | None:
        raise AssertionError("a request more")

    async def write(self, key: str, source: bytes) -> bool:
        self.written[key] = source
        return True

    def source(self, key: str) -> Source:
        return Source(kind="file", path=f"/{key}")


class Blobd:
    """Notes what it is asked to do."""

    def __init__(self, cache: Path) -> None:
        self.cache, self.calls = cache, []  # type: ignore[var-annotated]

    def path(self, blob: str) -> Path:
        return Path("/blobs") / blob

    watches = False

    async def hold(self, digest: str, blobs: list[str], watch: bool) -> None:
        raise WrongState("not whole", state="partial")

    def __getattr__(self, name: str) -> Any:
        async def call(*arguments: object) -> object:
            self.calls.append(name)
            return Trace((), ()) if name == "stop_trace" else None

        return call


def made(tmp_path: Path) -> tuple[Store, Blobd, Cached]:
    store, blobd = Store(), Blobd(tmp_path / "cache")
    return store, blobd, Cached(store, blobd, trace_s=0.0)  # type: ignore[arg-type]


def image_of(tmp_path: Path) -> Path:
    return tmp_path / "cache/images" / f"{digest(IMAGE)}.erofs"


async def test_all_that_a_layer_needs_is_asked_for_at_once(tmp_path: Path) -> None:
    store, blobd, cached = made(tmp_path)
    store.gate.clear()
    providing = asyncio.create_task(cached.provide(MANIFEST))
    for _ in range(20):
        await asyncio.sleep(0)
    wanted = {f"images/{MANIFEST.image}", f"indexes/{MANIFEST.blobs[0].id}", f"traces/{'d' * 64}"}
    assert set(store.asked) == wanted
    store.gate.set()
    local = await providing
    assert len(store.asked) == 3
    assert Path(local.image).read_bytes() == IMAGE
    assert blobd.calls[:2] == ["add", "start_trace"]
    await until(lambda: store.written)
    assert list(store.written) == [f"traces/{'d' * 64}"]
    await cached.close()


async def test_a_trace_is_replayed(tmp_path: Path) -> None:
    store, blobd, cached = made(tmp_path)
    blob = MANIFEST.blobs[0].id
    store.objects[f"traces/{'d' * 64}"] = msgspec.json.encode(Trace((blob,), ((0, 0, 1),)))
    await cached.provide(MANIFEST)
    await until(lambda: len(blobd.calls) > 1)
    assert blobd.calls == ["add", "prefetch"]
    await cached.close()


async def test_a_damaged_trace_costs_nothing_but_the_prefetch(tmp_path: Path) -> None:
    store, blobd, cached = made(tmp_path)
    store.objects[f"traces/{'d' * 64}"] = b"{"
    await cached.provide(MANIFEST)
    assert "start_trace" not in blobd.calls
    assert store.written == {}
    await cached.close()


async def test_a_copy_of_an_earlier_process_is_used_only_when_it_is_whole(tmp_path: Path) -> None:
    """Copies are not synced: after a crash of the machine any of them may be damaged."""
    await made(tmp_path)[2].provide(MANIFEST)
    store, _, cached = made(tmp_path)
    await cached.provide(MANIFEST)
    assert store.asked == [f"traces/{'d' * 64}"]
    for damage in (b"", IMAGE[:-1], bytes(len(IMAGE))):
        image_of(tmp_path).write_bytes(damage)
        store, _, cached = made(tmp_path)
        await cached.provide(MANIFEST)
        assert f"images/{MANIFEST.image}" in store.asked
        assert image_of(tmp_path).read_bytes() == IMAGE


async def test_a_layer_that_could_not_be_provided_can_be_later(tmp_path: Path) -> None:
    store, blobd, cached = made(tmp_path)
    image = store.objects.pop(f"images/{MANIFEST.image}")
    index = store.objects.pop(f"indexes/{MANIFEST.blobs[0].id}")
    with pytest.raises(NotFound):
        await cached.provide(MANIFEST)
    await asyncio.sleep(0.01)
    assert blobd.calls == []
    store.objects[f"images/{MANIFEST.image}"] = image
    store.objects[f"indexes/{MANIFEST.blobs[0].id}"] = index
    await cached.provide(MANIFEST)
    assert blobd.calls[:2] == ["add", "start_trace"]
    await cached.close()


async def test_a_copy_that_was_evicted_is_fetched_again(tmp_path: Path) -> None:
    store, _, cached = made(tmp_path)
    await cached.provide(MANIFEST)
    image_of(tmp_path).unlink()
    await cached.provide(MANIFEST)
    assert store.asked.count(f"images/{MANIFEST.image}") == 2
    assert image_of(tmp_path).read_bytes() == IMAGE
    await cached.close()


async def test_an_object_larger_than_it_may_be_is_damage(tmp_path: Path) -> None:
    store = Store()
    store.objects["images/x"] = bytes(3 * PIECE)
    target = tmp_path / "x"
    with pytest.raises(Internal, match="is damaged"):
        await fetch_verified(store, "images/x", digest(b"x"), target, PIECE)  # type: ignore[arg-type]
    assert store.asked == ["images/x"] * 2
    assert list(tmp_path.iterdir()) == []


async def test_a_store_that_fails_a_trace_does_not_fail_the_layer(tmp_path: Path) -> None:
    store, blobd, cached = made(tmp_path)
    read = store.read

    async def failing(key: str, start: int = 0, end: int | None = None) -> bytes:
        if key.startswith("traces/"):
            raise Unavailable("not now")
        return await read(key, start, end)

    store.read = failing  # type: ignore[method-assign]
    await cached.provide(MANIFEST)
    assert "add" in blobd.calls
    assert "start_trace" not in blobd.calls
    await cached.close()


async def test_the_names_of_an_environment_are_resolved_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    class Library:
        async def resolve(self, name: str) -> object:
            asked.append(name)
            await asyncio.Event().wait()
            raise AssertionError

    layers = ContainerLayers(Config(), mounts=None)  # type: ignore[arg-type]
    monkeypatch.setattr(layers, "library", Library(), raising=False)
    spec = SimpleNamespace(image="base/a", workspace="w", toolkits=("t", "u"))
    locating = asyncio.create_task(layers.locate(cast(Spec, spec)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert asked == ["base/a", "w", "t", "u"]
    locating.cancel()
    await asyncio.gather(locating, return_exceptions=True)
