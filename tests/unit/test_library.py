from __future__ import annotations

import asyncio
import io
import stat
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from dsecd.images import collect as garbage
from dsecd.images.builder import Recipe
from dsecd.images.known import KnownChunks
from dsecd.images.library import EVERYTHING, Library
from dsecd.images.manifest import Config
from dsecd.images.model import Node, directory
from dsecd.images.records import Lease
from dsecd.images.sources.sink import Sink
from dsecd.images.stores.directory import DirectoryStore
from libdsec.errors import AlreadyExists, Internal, InvalidArgument, NotFound


def tree(**files: bytes) -> Callable[[Sink], list[Node]]:
    def read(sink: Sink) -> list[Node]:
        root = directory()
        for name, content in files.items():
            chunks = sink.add(io.BytesIO(content).read, len(content))
            root.children[name.encode()] = Node(
                mode=stat.S_IFREG | 0o644, size=len(content), chunks=chunks
            )
        return [root]

    return read


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory: nothing here is about surviving a loss of power."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as made:
        yield Path(made)


@pytest.fixture
async def store(place: Path) -> AsyncIterator[DirectoryStore]:
    made = DirectoryStore(place / "store")
    await made.start()
    yield made
    await made.close()


@pytest.fixture
def library(store: DirectoryStore, place: Path) -> Iterator[Library]:
    with KnownChunks(place / "known.db") as known:
        yield Library(store, known, place / "scratch", reserve=0)


async def keys(store: DirectoryStore) -> set[str]:
    found = set()
    for prefix in ("blobs/", "indexes/", "images/", "layers/", "names/", "leases/", "trash/"):
        found |= {entry.key async for entry in store.list(prefix)}
    return found


async def test_a_layer_is_found_by_name_and_digest(library: Library) -> None:
    made = await library.make("base/x:1", tree(a=b"content"), Recipe(kind="base"))
    assert made.name == "base/x:1"
    for reference in ("base/x:1", made.digest, "sha256:" + made.digest, made.digest[:12]):
        found = await library.resolve(reference)
        assert found.manifest == made.manifest
    assert [row.name for row in await library.list()] == ["base/x:1"]
    assert library.recall("base/x:1") is not None
    assert library.recall("base/x:2") is None


async def test_nothing_but_the_layer_stays(
    library: Library, store: DirectoryStore, place: Path
) -> None:
    made = await library.make("x", tree(a=b"content"), Recipe(kind="base"))
    (blob,) = made.manifest.blobs
    assert await keys(store) == {
        f"blobs/{blob.id}",
        f"indexes/{blob.id}",
        f"images/{made.manifest.image}",
        f"layers/{made.digest}",
        "names/x%3Alatest",
    }
    assert list((place / "scratch").iterdir()) == []


async def test_the_same_tree_is_the_same_layer(library: Library) -> None:
    one = await library.make("x:1", tree(a=b"1", b=b"2"), Recipe(kind="base"))
    two = await library.make("x:2", tree(b=b"2", a=b"1"), Recipe(kind="base"))
    assert one.manifest == two.manifest


async def test_trees_of_one_source_are_stacked(library: Library) -> None:
    def read(sink: Sink) -> list[Node]:
        return [*tree(a=b"1")(sink), *tree(b=b"2")(sink)]

    config = Config(user="app")
    made = await library.make("x", read, Recipe(kind="base", config=config, parents=("f" * 64,)))
    below = await library.manifest(made.manifest.parents[1])
    assert made.manifest.parents == ["f" * 64, below.digest]
    assert below.parents == ["f" * 64]
    assert (below.config, made.manifest.config) == (Config(), config)
    assert below.blobs == made.manifest.blobs


async def test_the_same_tree_in_other_blobs_is_the_same_layer(
    library: Library, store: DirectoryStore, place: Path
) -> None:
    """Two hosts make one layer of chunks that lie in different places: the first one counts."""
    await library.make("other", tree(c=b"3", d=b"4" * 9000), Recipe(kind="base"))
    one = await library.make("x", tree(c=b"3", e=b"5"), Recipe(kind="base"))
    with KnownChunks(place / "empty.db") as known:
        elsewhere = Library(store, known, place / "scratch2", reserve=0)
        two = await elsewhere.make("y", tree(c=b"3", e=b"5"), Recipe(kind="base"))
    assert one.digest == two.digest
    assert (await library.resolve("y")).manifest == one.manifest


async def test_a_changed_file_adds_one_small_blob(library: Library) -> None:
    big = bytes(range(256)) * 1024
    one = await library.make("x:1", tree(a=big, b=b"1"), Recipe(kind="workspace"))
    two = await library.make("x:2", tree(a=big, b=b"2"), Recipe(kind="workspace"))
    (first,) = one.manifest.blobs
    assert first in two.manifest.blobs
    assert [blob.size for blob in two.manifest.blobs if blob != first] == [4096]


@pytest.mark.parametrize("related", ["replaced", "parent"])
async def test_chunks_that_another_host_put_are_not_put_again(
    library: Library, store: DirectoryStore, place: Path, related: str
) -> None:
    big = bytes(range(256)) * 1024
    one = await library.make("x:1", tree(a=big, b=b"1"), Recipe(kind="workspace"))
    with KnownChunks(place / "elsewhere.db") as known:
        other = Library(store, known, place / "scratch2", reserve=0)
        parents = (one.digest,) if related == "parent" else ()
        two = await other.make(
            "x:1" if related == "replaced" else "y:1",
            tree(a=big, b=b"2"),
            Recipe(kind="workspace", parents=parents),
            replace=True,
        )
    (first,) = one.manifest.blobs
    assert first in two.manifest.blobs
    assert [blob.size for blob in two.manifest.blobs if blob != first] == [4096]


async def test_an_index_that_cannot_be_read_is_left_out(
    library: Library, store: DirectoryStore, place: Path
) -> None:
    one = await library.make("x:1", tree(a=b"1", b=b"2"), Recipe(kind="base"))
    (blob,) = one.manifest.blobs
    await store.delete(f"indexes/{blob.id}")
    await store.write(f"indexes/{blob.id}", b"damaged")
    with KnownChunks(place / "elsewhere.db") as known:
        other = Library(store, known, place / "scratch2", reserve=0)
        two = await other.make("x:1", tree(a=b"1"), Recipe(kind="base"), replace=True)
        assert blob not in two.manifest.blobs


async def test_a_taken_name_is_moved_only_when_asked(library: Library) -> None:
    one = await library.make("x:1", tree(a=b"1"), Recipe(kind="base"))
    with pytest.raises(AlreadyExists, match="layer x:1 exists; use replace"):
        await library.make("x:1", tree(a=b"2"), Recipe(kind="base"))
    assert (await library.resolve("x:1")).digest == one.digest
    two = await library.make("x:1", tree(a=b"2"), Recipe(kind="base"), replace=True)
    assert (await library.resolve("x:1")).digest == two.digest != one.digest
    assert (await library.resolve(one.digest)).manifest == one.manifest


async def test_what_is_missing_is_named_with_what_is_there(library: Library) -> None:
    with pytest.raises(NotFound, match="there are none yet: see dsec layer import"):
        await library.resolve("base/debian:12")
    await library.make("base/debian:12", tree(), Recipe(kind="base"))
    with pytest.raises(NotFound, match="did you mean base/debian:12\\?"):
        await library.resolve("base/debain:12")
    with pytest.raises(NotFound, match="known: base/debian:12"):
        await library.resolve("f" * 64)


async def test_the_beginning_of_two_digests_is_refused(
    library: Library, store: DirectoryStore
) -> None:
    made = await library.make("x", tree(a=b"1"), Recipe(kind="base"))
    other = made.digest[:8] + ("0" * 56)
    await store.write(f"layers/{other}", b"whatever")
    with pytest.raises(InvalidArgument, match="is the beginning of 2 digests"):
        await library.resolve(made.digest[:8])


async def test_a_damaged_manifest_is_an_error(library: Library, store: DirectoryStore) -> None:
    digest = "ab" * 32
    await store.write(f"layers/{digest}", b"0" * 64 + b"\n{}")
    with pytest.raises(Internal, match=r"manifest of layer abababababab .* checksum is wrong"):
        await library.resolve(digest)


async def test_a_blob_that_vanished_is_written_again(
    library: Library, store: DirectoryStore
) -> None:
    one = await library.make("x:1", tree(a=b"1", b=b"2"), Recipe(kind="base"))
    await store.delete(f"blobs/{one.manifest.blobs[0].id}")
    two = await library.make("x:2", tree(a=b"1"), Recipe(kind="base"))
    assert await store.size(f"blobs/{two.manifest.blobs[0].id}") == two.manifest.blobs[0].size


async def test_a_marked_blob_is_not_built_upon(library: Library, store: DirectoryStore) -> None:
    one = await library.make("x:1", tree(a=b"1", b=b"2"), Recipe(kind="base"))
    await store.write(f"trash/{one.manifest.blobs[0].id}", b"garbage\n")
    two = await library.make("x:2", tree(a=b"1"), Recipe(kind="base"))
    assert one.manifest.blobs[0] not in two.manifest.blobs


async def test_removing_a_name_leaves_the_layer_to_the_collector(library: Library) -> None:
    made = await library.make("x:1", tree(a=b"1"), Recipe(kind="base"))
    await library.point("x:2", made.digest)
    await library.remove("x:1")
    assert [row.name for row in await library.list()] == ["x:2"]
    await library.remove(made.digest)
    assert [row.name for row in await library.list()] == [made.digest]


# --- garbage ---


async def test_garbage_goes_in_two_runs(library: Library, store: DirectoryStore) -> None:
    kept = await library.make("kept", tree(a=b"1"), Recipe(kind="base"))
    before = await keys(store)
    await library.make("gone", tree(a=b"1", b=b"2"), Recipe(kind="base"))
    await library.remove("gone")
    first = await garbage.collect(store, grace_s=0, wait_s=0)
    assert first.deleted == 0 < first.marked
    second = await garbage.collect(store, grace_s=0, wait_s=0)
    assert second.deleted == 4  # layer, image, index, blob
    assert second.freed_bytes > 4096
    await garbage.collect(store, grace_s=0, wait_s=0)  # forgets the marks
    assert await keys(store) == before
    assert (await library.resolve("kept")).manifest == kept.manifest


async def test_parents_and_used_layers_stay(library: Library, store: DirectoryStore) -> None:
    base = await library.make(None, tree(a=b"1"), Recipe(kind="base"))
    await library.make("snap", tree(b=b"2"), Recipe(kind="snapshot", parents=(base.digest,)))
    used = await library.make(None, tree(c=b"3"), Recipe(kind="toolkit"))
    before = await keys(store)
    for _ in range(2):
        await garbage.collect(store, used=[used.digest], grace_s=0, wait_s=0)
    assert await keys(store) == before


async def test_young_layers_and_leased_ones_stay(library: Library, store: DirectoryStore) -> None:
    made = await library.make(None, tree(a=b"1"), Recipe(kind="base"))
    for _ in range(2):
        assert (await garbage.collect(store, grace_s=60, wait_s=0)).marked == 0
    lease = Lease(holder="h", expires_at=time.time() + 60, layers=[made.digest])
    await store.swap_name("leases/host", msgspec.json.encode(lease), None)
    for _ in range(2):
        assert (await garbage.collect(store, grace_s=0, wait_s=0)).marked == 0


async def test_a_mark_goes_when_the_layer_is_wanted_again(
    library: Library, store: DirectoryStore
) -> None:
    made = await library.make("x", tree(a=b"1"), Recipe(kind="base"))
    await library.remove("x")
    await garbage.collect(store, grace_s=0, wait_s=60)
    await library.point("x", made.digest)
    await garbage.collect(store, grace_s=0, wait_s=0)
    assert not any(key.startswith("trash/") for key in await keys(store))
    assert await store.size(f"blobs/{made.manifest.blobs[0].id}") is not None


async def test_a_layer_that_can_be_found_has_its_parts_whatever_the_marks_say(
    library: Library, store: DirectoryStore
) -> None:
    """As after a run that died when it had taken the mark from the layer, but not from the rest."""
    made = await library.make("x", tree(a=b"1"), Recipe(kind="base"))
    await library.remove("x")
    await garbage.collect(store, grace_s=0, wait_s=0)
    await store.delete(f"trash/{made.digest}")
    before = {key for key in await keys(store) if not key.startswith("trash/")}
    await garbage.collect(store, grace_s=0, wait_s=0)
    assert {key for key in await keys(store) if not key.startswith("trash/")} == before
    await garbage.collect(store, grace_s=0, wait_s=0)
    assert not any(key.startswith(("layers/", "blobs/")) for key in await keys(store))


async def test_nothing_of_a_build_is_collected(library: Library, store: DirectoryStore) -> None:
    """While somebody builds, blobs are not touched, and an expired lease does not stop it."""
    one = await library.make("x", tree(a=b"1"), Recipe(kind="base"))
    await library.remove("x")
    lease = Lease(holder="h", expires_at=time.time() + 60, blobs=[EVERYTHING])
    version = await store.swap_name("leases/build", msgspec.json.encode(lease), None)
    for _ in range(2):
        await garbage.collect(store, grace_s=0, wait_s=0)
    assert await store.size(f"blobs/{one.manifest.blobs[0].id}") is not None
    late = msgspec.structs.replace(lease, expires_at=time.time() - 1)
    await store.swap_name("leases/build", msgspec.json.encode(late), version)
    for _ in range(2):
        await garbage.collect(store, grace_s=0, wait_s=0)
    assert await store.size(f"blobs/{one.manifest.blobs[0].id}") is None


async def test_builds_and_collections_at_once_lose_nothing(
    library: Library, store: DirectoryStore
) -> None:
    stop = asyncio.Event()

    async def collect_all_the_time() -> None:
        while not stop.is_set():
            await garbage.collect(store, grace_s=0, wait_s=0)

    collector = asyncio.create_task(collect_all_the_time())
    for n in range(15):
        made = await library.make(
            "x", tree(a=b"1", n=str(n).encode()), Recipe(kind="base"), replace=True
        )
        found = await library.resolve(made.digest)
        for blob in found.manifest.blobs:
            assert await store.size(f"blobs/{blob.id}") == blob.size
            assert await store.size(f"indexes/{blob.id}") is not None
    stop.set()
    await collector
