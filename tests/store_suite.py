"""What every store must do: one suite, run by each kind in its own test file.

A test file subclasses `StoreSuite` and gives the fixture `open_another`, which opens the same store
once more, as another host would.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from dsecd.images.stores.abc import Conflict, Entry, Store
from dsecd.images.stores.verify import fetch_verified, read_verified
from libdsec.errors import Internal, InvalidArgument, NotFound

ROOT = Path(__file__).parents[1]
Opener = Callable[[], Awaitable[Store]]


def fresh(prefix: str = "blobs") -> str:
    """Return a key that was never used."""
    return f"{prefix}/{secrets.token_hex(32)}"


def name() -> str:
    return f"names/base%2Fdebian%3A{secrets.token_hex(6)}"


def can(store: Store, feature: str) -> bool:
    return next((row.available for row in store.features if row.name == feature), True)


async def listed(store: Store, prefix: str) -> dict[str, Entry]:
    return {entry.key: entry async for entry in store.list(prefix)}


async def increment(store: Store, key: str) -> int:
    """Add one to the number kept under a name, whoever else does; return the tries."""
    tries = 0
    while True:
        tries += 1
        found = await store.read_name(key)
        data, version = found or (b"0", None)
        try:
            await store.swap_name(key, b"%d" % (int(data) + 1), version)
        except Conflict:
            continue
        return tries


# One writer of its own process; what it needs comes as arguments
INCREMENTER = """
import asyncio, json, sys
from dsecd.images.stores.opening import open_store
from tests.store_suite import increment
async def main(url, options, key, times):
    store = await open_store(url, json.loads(options))
    for _ in range(int(times)):
        await increment(store, key)
asyncio.run(main(*sys.argv[1:]))
"""
WRITER = """
import asyncio, json, pathlib, sys
from dsecd.images.stores.opening import open_store
async def main(url, options, key, file):
    store = await open_store(url, json.loads(options))
    print("begin", flush=True)
    await store.write(key, pathlib.Path(file))
    print("end", flush=True)
asyncio.run(main(*sys.argv[1:]))
"""


def start(program: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """Start one of the programs above."""
    path = f"{ROOT / 'src'}:{ROOT}"
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        env=os.environ | {"PYTHONPATH": path} | environment,
        stdout=subprocess.PIPE,
    )


def file_of(path: Path, size: int) -> str:
    """Write `size` random bytes to `path`, and return their digest."""
    digest = hashlib.sha256()
    with path.open("wb") as file:
        for _ in range(0, size, 1 << 20):
            piece = os.urandom(min(1 << 20, size - file.tell()))
            digest.update(piece)
            file.write(piece)
    return digest.hexdigest()


class StoreSuite:
    """Objects, names and what is refused."""

    @pytest.fixture
    def out(self, tmp_path: Path) -> Path:
        path = tmp_path / "out"
        path.mkdir()
        return path

    @pytest.fixture
    async def store(self, open_another: Opener) -> AsyncIterator[Store]:
        made = await open_another()
        yield made
        await made.close()

    # --- objects ----------------------------------------------------------------------------

    async def test_object_is_read_whole_and_in_ranges(self, store: Store) -> None:
        key, data = fresh(), os.urandom(300_000)
        assert await store.size(key) is None
        assert await store.write(key, data) is True
        assert await store.size(key) == 300_000
        assert await store.read(key) == data
        assert await store.read(key, 70_000) == data[70_000:]
        assert await store.read(key, 65_536, 131_072) == data[65_536:131_072]
        assert await store.read(key, 299_990, 400_000) == data[299_990:]
        assert await store.read(key, 5, 5) == b""
        assert await store.read(key, 300_000) == await store.read(key, 400_000, 400_001) == b""

    async def test_object_is_written_once(self, store: Store, tmp_path: Path) -> None:
        key = fresh("images")
        (tmp_path / "first").write_bytes(b"first")
        assert await store.write(key, tmp_path / "first") is True
        assert await store.write(key, b"other") is False
        assert await store.read(key) == b"first"

    async def test_empty_object(self, store: Store) -> None:
        key = fresh()
        assert await store.write(key, b"") is True
        assert await store.size(key) == 0
        assert await store.read(key) == b""

    async def test_object_of_another_size_is_damage(self, store: Store) -> None:
        key = fresh()
        await store.write(key, b"half")
        with pytest.raises(Internal, match=r"4 bytes.* instead of 5"):
            await store.write(key, b"whole")

    async def test_missing_object(self, store: Store, out: Path) -> None:
        key = fresh()
        for call in (store.read(key), store.read(key, 0, 5), store.read(key, 7, 7)):
            with pytest.raises(NotFound, match=key):
                await call
        with pytest.raises(NotFound, match=key):
            await fetch_verified(store, key, "0" * 64, out / "target")
        await store.delete(key)
        assert list(out.iterdir()) == []

    async def test_of_many_writers_of_an_object_one_is_first(
        self, store: Store, open_another: Opener
    ) -> None:
        stores = [store, *[await open_another() for _ in range(3)]]
        key, data = fresh(), os.urandom(100_000)
        new = await asyncio.gather(*(stores[i % 4].write(key, data) for i in range(12)))
        assert await store.read(key) == data
        assert new.count(True) == 1 or not can(store, "store_create")
        for other in stores[1:]:
            await other.close()

    async def test_listing_and_deletion(self, store: Store) -> None:
        kept = {fresh("layers"): size for size in (0, 1, 70_000)}
        for key, size in kept.items():
            await store.write(key, b"x" * size)
        gone = fresh("layers")
        await store.write(gone, b"gone")
        await store.delete(gone)
        await store.delete(gone)
        found = await listed(store, "layers/")
        assert {key: found[key].size for key in kept} == kept
        assert gone not in found
        assert all(abs(entry.modified - time.time()) < 60 for entry in found.values())
        assert await store.write(gone, b"again") is True

    async def test_listing_of_more_than_a_page(self, store: Store) -> None:
        wanted = {fresh("traces") for _ in range(1_030)}
        pending = iter(wanted)

        async def put() -> None:
            for key in pending:
                await store.write(key, b"t")

        await asyncio.gather(*(put() for _ in range(8)))
        keys = [entry.key async for entry in store.list("traces/")]
        assert wanted <= set(keys)
        assert len(keys) == len(set(keys))

    async def test_large_object_from_a_file_and_back(self, store: Store, out: Path) -> None:
        """Above the size at which S3 puts go in parts."""
        key, source, target = fresh(), out / "source", out / "target"
        digest = file_of(source, (80 << 20) + 12_345)
        assert await store.write(key, source) is True
        assert await store.write(key, source) is False
        await fetch_verified(store, key, digest, target)
        assert target.read_bytes() == source.read_bytes()
        assert sorted(path.name for path in out.iterdir()) == ["source", "target"]
        await store.delete(key)

    async def test_damaged_object_is_named_and_leaves_nothing(
        self, store: Store, out: Path
    ) -> None:
        key, digest = fresh("images"), hashlib.sha256(b"right").hexdigest()
        await store.write(key, b"wrong")
        for fetch in (
            fetch_verified(store, key, digest, out / "target"),
            read_verified(store, key, digest),
        ):
            with pytest.raises(Internal, match=rf"{key} .*{digest}") as caught:
                await fetch
            assert hashlib.sha256(b"wrong").hexdigest() in caught.value.message
        assert list(out.iterdir()) == []

    # --- names ------------------------------------------------------------------------------

    async def test_a_name_moves_by_compare_and_swap(self, store: Store) -> None:
        key = name()
        assert await store.read_name(key) is None
        first = await store.swap_name(key, b"one", None)
        assert await store.read_name(key) == (b"one", first)
        second = await store.swap_name(key, b"two", first)
        assert await store.read_name(key) == (b"two", second)
        for expected in (None, first, "never"):
            with pytest.raises(Conflict, match=key):
                await store.swap_name(key, b"three", expected)
        assert await store.read_name(key) == (b"two", second)

    async def test_a_name_that_came_back_is_not_the_same(self, store: Store) -> None:
        key = name()
        first = await store.swap_name(key, b"a", None)
        second = await store.swap_name(key, b"b", first)
        await store.swap_name(key, b"a", second)
        with pytest.raises(Conflict):
            await store.swap_name(key, b"c", first)

    async def test_a_name_is_deleted_and_made_again(self, store: Store) -> None:
        key = name()
        first = await store.swap_name(key, b"one", None)
        assert (await listed(store, "names/"))[key].size == 3
        await store.swap_name(key, None, first)
        assert await store.read_name(key) is None
        assert key not in await listed(store, "names/")
        with pytest.raises(Conflict, match="is not there"):
            await store.swap_name(key, b"two", first)
        second = await store.swap_name(key, b"one", None)
        assert second != first
        assert await store.read_name(key) == (b"one", second)

    async def test_a_lease_moves_and_leaves_nothing(self, store: Store) -> None:
        key = f"leases/{secrets.token_urlsafe(16)}"
        version = await store.swap_name(key, b"until 5", None)
        await store.swap_name(key, b"until 9", version)
        assert key in await listed(store, "leases/")
        await store.delete(key)
        await store.delete(key)
        assert await store.read_name(key) is None
        assert key not in await listed(store, "leases/")

    async def test_of_twenty_writers_one_wins_each_round(
        self, store: Store, open_another: Opener
    ) -> None:
        stores = [store]
        if not any(row.reason == "single_writer = true" for row in store.features):
            stores += [await open_another() for _ in range(3)]  # else: nothing between hosts
        key, version = name(), None
        for turn in range(5):
            data = [b"%d of writer %d" % (turn, writer) for writer in range(20)]
            done = await asyncio.gather(
                *(
                    stores[writer % len(stores)].swap_name(key, data[writer], version)
                    for writer in range(20)
                ),
                return_exceptions=True,
            )
            won = [writer for writer, result in enumerate(done) if isinstance(result, str)]
            assert len(won) == 1, done
            assert sum(isinstance(result, Conflict) for result in done) == 19, done
            version = str(done[won[0]])
            assert await store.read_name(key) == (data[won[0]], version)
        for other in stores[1:]:
            await other.close()

    async def test_no_update_of_twenty_writers_is_lost(self, store: Store) -> None:
        key = name()
        await asyncio.gather(*(increment(store, key) for _ in range(20)))
        found = await store.read_name(key)
        assert found
        assert found[0] == b"20"

    # --- what is refused --------------------------------------------------------------------

    @pytest.mark.parametrize(
        "key",
        [
            "", "blobs", "blobs/", "blobs/..", "blobs/../names/x", "/blobs/" + "0" * 64, "tmp/x",
            "blobs/" + "A" * 64, "blobs/" + "0" * 63, "blobs/" + "0" * 64 + "/x", "other/x",
            "blobs/" + "0" * 64 + "\n", "names/..", "names/.x", "names/a/b", "names/ä", "names/a\0",
            "names/" + "x" * 251, "leases/a.b",
        ],
    )  # fmt: skip
    async def test_keys_are_checked(self, store: Store, key: str) -> None:
        for call in (
            store.read(key), store.size(key), store.write(key, b""), store.delete(key),
            store.read_name(key), store.swap_name(key, b"x", None),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument):
                await call
        with pytest.raises(InvalidArgument):
            store.source(key)

    async def test_objects_do_not_move_and_names_are_not_objects(self, store: Store) -> None:
        for call in (
            store.swap_name(fresh(), b"x", None), store.read_name(fresh()), store.read(name()),
            store.write(name(), b"x"), store.delete(name()), store.swap_name(name(), b"", None),
            store.swap_name(name(), b"x" * 65_537, None), store.read(fresh(), 5, 4),
            store.read(fresh(), -1), anext(aiter(store.list("blobs"))),
        ):  # fmt: skip
            with pytest.raises(InvalidArgument):
                await call

    async def test_a_source_that_is_not_there(self, store: Store, tmp_path: Path) -> None:
        with pytest.raises(InvalidArgument, match=r"cannot read .*absent"):
            await store.write(fresh(), tmp_path / "absent")
