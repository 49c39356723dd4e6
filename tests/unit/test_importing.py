"""Imports into the library: from a path to a name, and what is left when they fail or die."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import shutil
import socket
import sqlite3
import tarfile
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from dsecd.images import disk
from dsecd.images.chunks import ChunkWriter
from dsecd.images.importing import import_layer
from dsecd.images.known import KnownChunks
from dsecd.images.library import Library, open_library
from dsecd.images.stores.directory import DirectoryStore
from libdsec.errors import AlreadyExists, Exhausted, InvalidArgument

MTIME = 1_600_000_000


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
    with KnownChunks(place / "chunks.db") as known:
        yield Library(store, known, place / "builds", reserve=0)
    assert list((place / "builds").glob("*")) == []
    assert list((place / "store/leases").iterdir()) == []
    assert list((place / "store/tmp").iterdir()) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_text("#!/bin/sh\n")
    (root / "bin/tool").chmod(0o755)
    (root / "link").symlink_to("/bin/tool")
    os.link(root / "bin/tool", root / "bin/other")
    age(root)
    return root


def age(root: Path) -> None:
    """Give everything one time, in whole seconds, which every archive format can hold."""
    for path in (root, *root.rglob("*")):
        os.utime(path, (MTIME, MTIME), follow_symlinks=False)


def big_tar(path: Path, size: int = 40 << 20) -> Path:
    with tarfile.open(path, "w") as archive:
        for index in range(size // 200_000):
            info = tarfile.TarInfo(f"f{index}")
            info.size, info.uid, info.gid = 200_000, os.getuid(), os.getgid()
            archive.addfile(info, io.BytesIO(os.urandom(200_000)))
    return path


async def test_a_path_becomes_a_named_layer(library: Library, tree: Path) -> None:
    seen: list[int] = []
    made = await import_layer(library, "toolkit/x:1", str(tree), check=seen.append)
    assert seen == sorted(seen)
    assert seen[-1] == 2 * len("#!/bin/sh\n") or seen[-1] == len("#!/bin/sh\n")
    assert (await library.resolve("toolkit/x:1")).digest == made.digest
    assert made.manifest.kind == "toolkit"
    assert made.manifest.entries == 5
    assert made.manifest.origin.source == str(tree)
    with pytest.raises(AlreadyExists, match="replace"):
        await import_layer(library, "toolkit/x:1", str(tree))


async def test_a_copy_and_a_tar_of_a_tree_are_the_same_layer(
    library: Library, tree: Path, tmp_path: Path
) -> None:
    shutil.copytree(tree, tmp_path / "copy", symlinks=True)
    (tmp_path / "copy/bin/other").unlink()  # copytree makes two files of a hard link
    os.link(tmp_path / "copy/bin/tool", tmp_path / "copy/bin/other")
    age(tmp_path / "copy")
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.add(tree, ".")
    sources = (tree, tmp_path / "copy", tmp_path / "t.tar.gz")
    layers = [await import_layer(library, f"x:{n}", str(path)) for n, path in enumerate(sources)]
    assert len({layer.digest for layer in layers}) == 1


async def test_what_is_left_out_is_logged(
    library: Library, tree: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket(socket.AF_UNIX) as listener, caplog.at_level("INFO"):
        listener.bind(str(tree / "s"))
        made = await import_layer(library, "x", str(tree))
    assert made.manifest.entries == 5
    assert "layer x:latest: 1 sockets left out" in caplog.text


async def test_a_bad_source_is_the_callers_error(library: Library, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        await import_layer(library, "x:1", str(tmp_path / "nowhere"))
    (tmp_path / "junk").write_bytes(b"junk" * 1000)
    with pytest.raises(InvalidArgument, match="not a readable tar"):
        await import_layer(library, "x:1", str(tmp_path / "junk"))
    with pytest.raises(InvalidArgument, match="not a layer name"):
        await import_layer(library, "../x", str(tmp_path))


async def test_cancelling_an_import_leaves_nothing(library: Library, tmp_path: Path) -> None:
    tar = await asyncio.to_thread(big_tar, tmp_path / "big.tar")
    started, cancelled = threading.Event(), threading.Event()

    def check(done: int) -> None:
        started.set()
        cancelled.wait(20)

    task = asyncio.create_task(import_layer(library, "x:1", str(tar), check=check))
    await asyncio.to_thread(started.wait)
    task.cancel()
    cancelled.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await library.list() == []


async def test_parallel_imports_of_the_same_tree(library: Library, tree: Path) -> None:
    layers = await asyncio.gather(*(import_layer(library, f"x:{n}", str(tree)) for n in range(6)))
    assert len({layer.digest for layer in layers}) == 1
    assert len(await library.list()) == 6


async def test_another_process_is_seen_and_raced(
    library: Library, store: DirectoryStore, place: Path, tmp_path: Path
) -> None:
    """Of two that take one name, one gets it; of two that replace it, the later one."""
    trees = []
    for n in range(2):
        (tmp_path / f"tree{n}").mkdir()
        (tmp_path / f"tree{n}/f").write_text(str(n))
        trees.append(str(tmp_path / f"tree{n}"))
    with KnownChunks(place / "chunks.db") as known:
        other = Library(store, known, place / "builds", reserve=0)
        both = (library, other)
        results = await asyncio.gather(
            *(import_layer(who, "x:1", source) for who, source in zip(both, trees, strict=True)),
            return_exceptions=True,
        )
        (taken,) = [result for result in results if isinstance(result, BaseException)]
        assert isinstance(taken, AlreadyExists)
        (made,) = [result for result in results if not isinstance(result, BaseException)]
        assert (await library.resolve("x:1")).digest == made.digest
        for _ in range(5):
            moved = await asyncio.gather(
                *(
                    import_layer(who, "y:1", source, replace=True)
                    for who, source in zip(both, trees, strict=True)
                )
            )
            found = await store.read_name("names/y%3A1")
            assert found is not None
            assert any(row.digest.encode() in found[0] for row in moved)


# --- a full disk ---


async def test_a_full_disk_is_said_before_the_work(
    library: Library, store: DirectoryStore, place: Path, tree: Path
) -> None:
    with KnownChunks(place / "chunks.db") as known:
        full = Library(store, known, place / "builds", reserve=1 << 60)
        with pytest.raises(Exhausted, match=r"disk of .* is full; remove layers"):
            await import_layer(full, "x:1", str(tree))
    assert await library.list() == []


async def test_a_blob_takes_no_more_than_its_room(tmp_path: Path) -> None:
    with ChunkWriter(tmp_path / "blob", room=8192) as writer:
        for n in range(2):
            writer.add(io.BytesIO(bytes([n + 1]) * 8192).read, 8192)
        with pytest.raises(Exhausted, match="room for: 8192 bytes"):
            writer.finish()
    assert list(tmp_path.iterdir()) == []


async def test_room_is_halved_where_the_store_shares_the_disk(
    library: Library, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "room", lambda directory, reserve: 1000)
    assert library._room(place) == 500
    monkeypatch.setattr(disk, "shared", lambda one, other: False)
    assert library._room(place) == 1000


async def test_a_disk_that_fills_up_is_said(
    library: Library, tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        error = sqlite3.OperationalError("database or disk is full")
        error.sqlite_errorcode = sqlite3.SQLITE_FULL
        raise error

    monkeypatch.setattr(library._known, "add", fail)
    with pytest.raises(Exhausted, match="disk full while building a layer"):
        await import_layer(library, "x:1", str(tree))


# --- what dead builds leave ---


async def test_what_dead_builds_left_goes_at_the_next_start(tmp_path: Path, tree: Path) -> None:
    state = tmp_path / "state"
    async with open_library(state) as library:
        made = await import_layer(library, "x:1", str(tree))
        builds = state / "builds"
        (builds / "dead/0").mkdir(parents=True)
        (builds / "dead/0/blob").write_bytes(b"half")
        key = f"leases/{'ab' * 16}"
        (builds / "dead/lease").write_text(key)
        await library.store.swap_name(key, b"{}", None)
        async with disk.scratch(builds) as live:
            (live / "blob").write_bytes(b"ours")
            async with open_library(state) as again:
                assert [row.digest for row in await again.list()] == [made.digest]
            assert (live / "blob").read_bytes() == b"ours"
            assert [path.name for path in builds.iterdir()] == [live.name]
        assert list(builds.iterdir()) == []
        assert await library.store.read_name(key) is None


async def test_a_sweep_between_making_and_locking_costs_another_try(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, sweeps = fcntl.flock, []

    def flock(fd: int, how: int) -> None:
        if how == fcntl.LOCK_EX and not sweeps:
            sweeps.append(1)
            monkeypatch.setattr(fcntl, "flock", lock)
            disk.sweep(tmp_path)
        lock(fd, how)

    monkeypatch.setattr(fcntl, "flock", flock)
    async with disk.scratch(tmp_path) as made:
        assert made.is_dir()
        assert sweeps
        disk.sweep(tmp_path)
        assert made.is_dir()
    assert list(tmp_path.iterdir()) == []
