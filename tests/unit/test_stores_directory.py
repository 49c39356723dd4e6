"""The store in a directory: the suite, and what only a file system can do wrong."""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from dsecd.images.stores import directory, record
from dsecd.images.stores.abc import Conflict, Source, Store
from dsecd.images.stores.directory import KEEP_S, DirectoryStore
from dsecd.images.stores.opening import open_store
from dsecd.images.stores.retry import retry
from dsecd.images.stores.workers import Workers
from libdsec.errors import (
    DSecError,
    Exhausted,
    Internal,
    InvalidArgument,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from tests.store_suite import Opener, StoreSuite, fresh, listed, name
from tests.waiting import let_pass, on_the_loops_clock, until


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "a store"


@pytest.fixture
def open_another(root: Path) -> Opener:
    return lambda: open_store(str(root))


@pytest.fixture
async def store(open_another: Opener) -> AsyncIterator[Store]:
    made = await open_another()
    yield made
    await made.close()


class TestDirectory(StoreSuite):
    """On whatever the temporary directory lies on."""


def failing(monkeypatch: pytest.MonkeyPatch, what: str, number: int, times: int = 10**6) -> None:
    """Let `os.<what>` fail with errno `number`, the first `times`."""
    real: Callable[..., Any] = getattr(os, what)
    left = [times]

    def call(*arguments: Any, **options: Any) -> Any:
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(number, os.strerror(number))
        return real(*arguments, **options)

    monkeypatch.setattr(os, what, call)


async def test_faults_that_pass_are_tried_again(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = fresh()
    failing(monkeypatch, "fsync", errno.EIO, 2)
    assert await store.write(key, b"data") is True
    failing(monkeypatch, "pread", errno.ESTALE, 2)
    assert await store.read(key) == b"data"


@pytest.mark.parametrize(
    ("number", "kind", "hint"),
    [
        (errno.ENOSPC, Exhausted, "free space"),
        (errno.EDQUOT, Exhausted, "quota"),
        (errno.EROFS, PermissionDenied, "Read-only"),
        (errno.EFBIG, Internal, "EFBIG"),
    ],
)
async def test_faults_that_stay_are_explained_and_leave_nothing(
    store: Store,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    kind: type[DSecError],
    hint: str,
) -> None:
    key = fresh()
    failing(monkeypatch, "write", number)
    with pytest.raises(kind, match=hint):
        await store.write(key, b"data")
    with pytest.raises(kind, match=hint):
        await store.swap_name(name(), b"data", None)
    monkeypatch.undo()
    assert await store.size(key) is None
    assert list((root / "tmp").iterdir()) == []
    assert await listed(store, "names/") == {}


async def test_a_fault_that_does_not_pass_is_retryable(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_loops_clock(monkeypatch, sys.modules[retry.__module__])
    store = await open_store(str(root), {"timeout_s": 60})
    failing(monkeypatch, "fsync", errno.EIO)
    writing = asyncio.ensure_future(store.write(fresh(), b"data"))
    await asyncio.sleep(0.3)
    assert not writing.done()
    let_pass(90)
    with pytest.raises(Unavailable, match="Input/output error; tried") as caught:
        await writing
    assert caught.value.retryable
    await store.close()


async def test_a_mount_that_went_away(store: Store, root: Path) -> None:
    (root / "blobs").rmdir()
    for call in (store.size(fresh()), store.read(fresh()), store.write(fresh(), b"x")):
        with pytest.raises(Unavailable, match="is the file system mounted"):
            await call
    for gone in ("names", "leases"):
        (root / gone).rmdir()
    with pytest.raises(Unavailable, match="is the file system mounted"):
        await store.read_name(name())


async def test_a_file_system_without_hard_links(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "link", errno.EPERM)
    with pytest.raises(Unsupported, match="no hard links"):
        await open_store(str(root))


async def test_repeated_link_of_ours_counts_as_done(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may repeat a link whose answer was lost, and report EEXIST."""
    real = os.link

    def twice(source: Any, target: Any, **options: Any) -> None:
        real(source, target, **options)
        real(source, target, **options)

    monkeypatch.setattr(os, "link", twice)
    key = name()
    assert await store.write(fresh(), b"data") is True
    version = await store.swap_name(key, b"one", None)
    assert await store.read_name(key) == (b"one", version)


async def test_lost_answer_of_a_move_is_recognised(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.link
    failures = [1]

    def late(source: Any, target: Any, **options: Any) -> None:
        real(source, target, **options)
        if failures.pop() if failures else 0:
            raise OSError(errno.EIO, "the answer was lost")

    key = name()
    monkeypatch.setattr(os, "link", late)
    version = await store.swap_name(key, b"one", None)
    assert await store.read_name(key) == (b"one", version)


async def test_leftovers_go_after_a_day(store: Store, root: Path) -> None:
    old, new = root / "tmp/old", root / "tmp/new"
    scratch = root / "tmp/name"
    scratch.mkdir()
    for path in (old, new, scratch / "0"):
        path.write_bytes(b"half")
    for path in (old, scratch):
        os.utime(path, (0, time.time() - KEEP_S - 60))
    await (await open_store(str(root))).close()
    assert list((root / "tmp").iterdir()) == [new]
    os.utime(new, (0, time.time() - KEEP_S - 60))
    await store.tidy()  # of a daemon that is not started anew for months
    assert list((root / "tmp").iterdir()) == []


async def test_old_versions_go_after_a_day(store: Store, root: Path) -> None:
    key = name()
    version = None
    for number in range(4):
        version = await store.swap_name(key, b"%d" % number, version)
    files = sorted((root / key).iterdir())
    assert [int(path.name) for path in files] == [0, 1, 2, 3, 4]
    for path in files[:3]:
        os.utime(path, (0, time.time() - KEEP_S - 60))
    version = await store.swap_name(key, b"last", version)
    # 2 was superseded by 3 just now; 1 by 2 more than a day ago
    assert [int(path.name) for path in sorted((root / key).iterdir())] == [2, 3, 4, 5]
    assert await store.read_name(key) == (b"last", version)


async def test_a_writer_stuck_for_days_does_not_win(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It links a number that has been and gone: it takes the link back, and nobody saw it."""
    stuck, other = await open_store(str(root)), await open_store(str(root))
    key = name()
    first = await stuck.swap_name(key, b"first", None)
    real, gate, reached = directory._link, threading.Event(), threading.Event()

    def wait(temporary: Path, target: Path) -> bool:
        if threading.current_thread() in stuck._workers._threads:  # type: ignore[attr-defined]
            reached.set()
            assert gate.wait(20)
        return real(temporary, target)

    monkeypatch.setattr(directory, "_link", wait)
    late = asyncio.ensure_future(stuck.swap_name(key, b"late", first))
    await asyncio.to_thread(reached.wait, 20)
    version = first
    for number in range(3):
        version = await other.swap_name(key, b"%d" % number, version)
    for path in sorted((root / key).iterdir()):
        os.utime(path, (0, time.time() - KEEP_S - 60))
    version = await other.swap_name(key, b"newest", version)
    gate.set()
    with pytest.raises(Conflict):
        await late
    assert await other.read_name(key) == (b"newest", version)
    assert 2 not in [int(path.name) for path in (root / key).iterdir()]
    await stuck.close()
    await other.close()


async def test_readers_never_see_a_name_missing_while_it_moves(store: Store) -> None:
    key = name()
    version = await store.swap_name(key, b"0", None)
    done = False

    async def move() -> None:
        nonlocal done, version
        for number in range(100):
            version = await store.swap_name(key, b"%d" % number, version)
        done = True

    mover = asyncio.ensure_future(move())
    while not done:
        assert await store.read_name(key) is not None
    await mover


async def test_damaged_record_of_a_name(store: Store, root: Path) -> None:
    key = name()
    await store.swap_name(key, b"data", None)
    path = max((root / key).iterdir())
    body = path.read_bytes()
    path.unlink()
    for damaged in (b"", body[:-1], body[:20], body.replace(b"data", b"date")):
        path.write_bytes(damaged)
        with pytest.raises(Internal, match="is damaged"):
            await store.read_name(key)
    path.write_bytes(body)
    assert record.decode(body).data == b"data"
    assert await store.read_name(key)


async def test_foreign_files_are_not_listed(store: Store, root: Path) -> None:
    (root / "blobs/.nfs000123").write_bytes(b"")
    (root / "names/.trash").mkdir()
    (root / "names/empty").mkdir()
    assert await listed(store, "blobs/") == await listed(store, "names/") == {}


async def test_stalled_file_system_costs_bounded_time_and_threads(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a hard NFS mount whose server is gone; the event loop goes on, and it recovers."""
    on_the_loops_clock(monkeypatch, sys.modules[Workers.__module__])
    store = await open_store(str(root), {"timeout_s": 60, "threads": 3})
    assert isinstance(store, DirectoryStore)
    key = fresh()
    await store.write(key, b"data")
    gate, real, stuck = threading.Event(), os.pread, []

    def stall(*arguments: Any) -> bytes:
        stuck.append(threading.current_thread())
        gate.wait(20)
        return real(*arguments)

    monkeypatch.setattr(os, "pread", stall)
    reading = [asyncio.ensure_future(store.read(key)) for _ in range(10)]
    await until(lambda: len(stuck) == 3)
    assert not any(one.done() for one in reading)
    let_pass(90)
    results = await asyncio.gather(*reading, return_exceptions=True)
    assert all(isinstance(result, Unavailable) for result in results), results
    assert "is its server or mount alive" in str(results[0])
    assert not gate.is_set()
    assert len(store._workers._threads) == 3
    gate.set()
    assert await store.read(key) == b"data"
    await store.close()
    for thread in store._workers._threads:
        await asyncio.to_thread(thread.join, 5)
        assert not thread.is_alive()


async def test_a_write_that_was_given_up_does_not_appear_later(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_loops_clock(monkeypatch, sys.modules[Workers.__module__])
    store = await open_store(str(root), {"timeout_s": 60})
    gate, real, stuck = threading.Event(), os.fsync, []

    def stall(fd: int) -> None:
        stuck.append(fd)
        gate.wait(20)
        real(fd)

    monkeypatch.setattr(os, "fsync", stall)
    key, moved = fresh(), name()
    for number, call in enumerate(
        (store.write(key, b"data"), store.swap_name(moved, b"data", None))
    ):
        asked = asyncio.ensure_future(call)  # type: ignore[arg-type, var-annotated]
        await until(lambda: len(stuck) > number)  # noqa: B023
        let_pass(90)
        with pytest.raises(Unavailable):
            await asked
    gate.set()
    await until(lambda: not list((root / "tmp").iterdir()))
    await asyncio.sleep(0.2)
    assert await store.size(key) is None
    assert await store.read_name(moved) is None
    assert list((root / "tmp").iterdir()) == []
    await store.close()


async def test_where_blobd_finds_an_object(store: Store, root: Path) -> None:
    key = fresh()
    await store.write(key, b"data")
    source = store.source(key)
    assert source == Source(kind="file", path=str(root / key))
    assert Path(source.path).read_bytes() == b"data"


async def test_only_the_owner_can_look_inside(store: Store, root: Path) -> None:
    """Layers may hold secrets."""
    await store.write(fresh(), b"data")
    await store.swap_name(name(), b"data", None)
    for path in (root, *root.rglob("*")):
        assert path.stat().st_mode & 0o077 == 0, path


async def test_address_with_file_scheme(root: Path) -> None:
    store = await open_store(root.as_uri())
    assert store.url == root.as_uri()
    assert (root / "blobs").is_dir()
    await store.close()


async def test_a_closed_store(root: Path) -> None:
    store = await open_store(str(root))
    await store.close()
    with pytest.raises(Unavailable, match="closed"):
        await store.size(fresh())


@pytest.mark.parametrize("url", ["relative", "file://host/x", "ftp://x/y", "", "file:relative"])
async def test_addresses_that_are_no_store(url: str) -> None:
    with pytest.raises(InvalidArgument):
        await open_store(url)
