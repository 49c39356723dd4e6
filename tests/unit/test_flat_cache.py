"""The cache of flat files: made once, counted, bounded, and never half there."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dsecd.host import sparse
from dsecd.images import flat
from dsecd.images.flat_cache import FlatLayer, FlatLayers
from dsecd.images.local import Local
from libdsec.errors import Exhausted, Internal
from tests.unit.flat_layers import make_layer, of_files

MIB = 1 << 20
Flatten = Callable[[Local, Path, threading.Event], int]


@pytest.fixture
def layers(tmp_path: Path) -> list[Local]:
    """Layers of a little more than 1 MiB each."""
    folder = tmp_path / "store"
    folder.mkdir()
    return [make_layer(folder, of_files(os.urandom(MIB)))[1] for _ in range(4)]


def cache(tmp_path: Path, bound_bytes: int = 0, reserve_bytes: int = 0) -> FlatLayers:
    made = FlatLayers(tmp_path / "vm/layers", bound_bytes, reserve_bytes)
    made.start()
    return made


def there(tmp_path: Path) -> set[str]:
    return {entry.name for entry in (tmp_path / "vm/layers").iterdir()} - {"boot"}


def files(*layers: Local) -> set[str]:
    return {f"{local.digest}.erofs" for local in layers}


class Slow:
    """Stands in for `flat.flatten`: it begins when it may and is slow enough to be stopped."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        self.begun = threading.Event()
        self.may = threading.Event()
        self.stopped = 0
        self.was_stopped = threading.Event()
        self._real: Flatten = flat.flatten
        monkeypatch.setattr(flat, "flatten", self)

    def __call__(self, local: Local, to: Path, stop: threading.Event) -> int:
        self.calls += 1
        self.begun.set()
        while not self.may.wait(0.01) and not stop.is_set():
            pass
        try:
            return self._real(local, to, stop)
        except flat.Stopped:
            self.stopped += 1
            self.was_stopped.set()
            raise

    async def until_begun(self) -> None:
        assert await asyncio.to_thread(self.begun.wait, 10)

    async def until_stopped(self) -> None:
        assert await asyncio.to_thread(self.was_stopped.wait, 10)


async def test_a_layer_is_made_once_for_all_who_ask(
    tmp_path: Path, layers: list[Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    flats, slow = cache(tmp_path), Slow(monkeypatch)
    asking = [asyncio.create_task(flats.provide(layers[0])) for _ in range(20)]
    await slow.until_begun()
    slow.may.set()
    found = set(await asyncio.gather(*asking))
    path = tmp_path / f"vm/layers/{layers[0].digest}.erofs"
    assert found == {FlatLayer(str(path), path.stat().st_size)}
    assert found == {await flats.provide(layers[0])}
    assert slow.calls == 1
    assert flats.users(layers[0].digest) == 21
    assert there(tmp_path) == files(layers[0])


async def test_the_copy_goes_on_while_somebody_waits(
    tmp_path: Path, layers: list[Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    flats, slow = cache(tmp_path), Slow(monkeypatch)
    asking = [asyncio.create_task(flats.provide(layers[0])) for _ in range(3)]
    await slow.until_begun()
    for task in asking[:2]:
        task.cancel()
    await asyncio.gather(*asking[:2], return_exceptions=True)
    slow.may.set()
    await asking[2]
    assert (slow.calls, slow.stopped) == (1, 0)
    assert flats.users(layers[0].digest) == 1


async def test_the_copy_ends_when_nobody_waits(
    tmp_path: Path, layers: list[Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    flats, slow = cache(tmp_path), Slow(monkeypatch)
    asking = [asyncio.create_task(flats.provide(layers[0])) for _ in range(3)]
    await slow.until_begun()
    for task in asking:
        task.cancel()
    await asyncio.gather(*asking, return_exceptions=True)
    again = asyncio.create_task(flats.provide(layers[0]))  # while the first one still ends
    await slow.until_stopped()
    slow.may.set()
    await again
    await flats.close()
    assert (slow.calls, slow.stopped) == (2, 1)
    assert flats.users(layers[0].digest) == 1
    assert there(tmp_path) == files(layers[0])


async def test_close_ends_copies_and_leaves_whole_files(
    tmp_path: Path, layers: list[Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    flats = cache(tmp_path)
    await flats.provide(layers[0])
    slow = Slow(monkeypatch)
    asking = asyncio.create_task(flats.provide(layers[1]))
    await slow.until_begun()
    await flats.close()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert slow.stopped == 1
    assert there(tmp_path) == files(layers[0])


async def test_a_failure_reaches_all_and_is_not_remembered(
    tmp_path: Path, layers: list[Local]
) -> None:
    flats = cache(tmp_path)
    blob = Path(layers[0].devices[0])
    data = blob.read_bytes()
    blob.write_bytes(data[:4096])
    found = await asyncio.gather(
        *[flats.provide(layers[0]) for _ in range(3)], return_exceptions=True
    )
    assert [type(error) for error in found] == [Internal] * 3
    assert flats.users(layers[0].digest) == 0
    assert there(tmp_path) == set()
    blob.write_bytes(data)
    await flats.provide(layers[0])


async def test_the_next_daemon_finds_the_files(
    tmp_path: Path, layers: list[Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = await cache(tmp_path).provide(layers[0])
    slow = Slow(monkeypatch)
    flats = FlatLayers(tmp_path / "vm/layers")
    assert flats.start() == [layers[0].digest]
    assert await flats.provide(layers[0]) == made
    assert slow.calls == 0


async def test_leftovers_of_a_crash_go_at_the_start(tmp_path: Path, layers: list[Local]) -> None:
    await cache(tmp_path).provide(layers[0])
    for name in (f".{layers[1].digest}.erofs.0badcafe", f".{layers[2].digest}.erofs.gone"):
        (tmp_path / "vm/layers" / name).write_bytes(b"half")
    cache(tmp_path)
    assert there(tmp_path) == files(layers[0])


async def test_files_of_before_a_crash_of_the_machine_go(
    tmp_path: Path, layers: list[Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    """They were not synced: their length may be there without their content."""
    for boot in ("", "one", "two", "two"):
        monkeypatch.setattr(sparse, "boot_id", lambda boot=boot: boot)
        flats = cache(tmp_path)
        kept = there(tmp_path)
        await flats.provide(layers[0])
    assert kept == files(layers[0])
    monkeypatch.setattr(sparse, "boot_id", lambda: "three")
    cache(tmp_path)
    assert there(tmp_path) == set()
    for _ in range(2):  # not known: no file is trusted
        monkeypatch.setattr(sparse, "boot_id", lambda: "")
        await cache(tmp_path).provide(layers[0])
    cache(tmp_path)
    assert there(tmp_path) == set()


async def test_a_file_that_is_cut_short_is_made_anew(tmp_path: Path, layers: list[Local]) -> None:
    flats = cache(tmp_path)
    made = await flats.provide(layers[0])
    whole = Path(made.path).read_bytes()
    for again in (flats, cache(tmp_path)):
        Path(made.path).chmod(0o600)  # only root writes to what is read-only
        os.truncate(made.path, MIB)
        assert await again.provide(layers[0]) == made
        assert Path(made.path).read_bytes() == whole


async def test_unused_ones_go_longest_unused_first(tmp_path: Path, layers: list[Local]) -> None:
    flats = cache(tmp_path, bound_bytes=int(3.5 * MIB))
    for number, local in enumerate(layers[:3]):
        path = (await flats.provide(local)).path
        os.utime(path, (number, number))
    for local in (layers[1], layers[0], layers[2]):
        flats.release(local.digest)
    assert there(tmp_path) == files(*layers[:3])
    await flats.provide(layers[3])
    assert there(tmp_path) == files(layers[0], layers[2], layers[3])
    await flats.provide(layers[1])
    assert there(tmp_path) == files(layers[1], layers[2], layers[3])


async def test_many_machines_come_and_go(tmp_path: Path, layers: list[Local]) -> None:
    """Whoever has a file finds it whole, however often the bound takes others meanwhile."""
    flats = cache(tmp_path, bound_bytes=int(2.5 * MIB))
    whole = {}
    for local in layers:
        flat.flatten(local, tmp_path / "whole")
        whole[local.digest] = (tmp_path / "whole").read_bytes()

    async def machine(number: int) -> None:
        local = layers[number * 7 % len(layers)]
        for _ in range(5):
            made = await flats.provide(local)
            try:
                await asyncio.sleep(number % 3 / 1000)
                assert Path(made.path).read_bytes() == whole[local.digest]
            finally:
                flats.release(local.digest)
            await flats.trim()

    machines = [asyncio.create_task(machine(number)) for number in range(16)]
    await asyncio.sleep(0.02)
    for task in machines[::5]:
        task.cancel()
    found = await asyncio.gather(*machines, return_exceptions=True)
    assert {type(error) for error in found[::5]} <= {asyncio.CancelledError, type(None)}
    assert all(found[number] is None for number in range(16) if number % 5)
    await flats.trim()
    await flats.close()
    assert len(there(tmp_path)) <= 2
    assert there(tmp_path) <= files(*layers)


async def test_the_order_of_use_is_known_after_a_restart(
    tmp_path: Path, layers: list[Local]
) -> None:
    flats = cache(tmp_path)
    for local in layers[:3]:
        await flats.provide(local)
    for local in (layers[1], layers[2], layers[0]):
        flats.release(local.digest)
    flats = cache(tmp_path, bound_bytes=int(1.5 * MIB))
    await flats.trim()
    assert there(tmp_path) == files(layers[0])


async def test_what_is_in_use_stays_above_the_bound(tmp_path: Path, layers: list[Local]) -> None:
    flats = cache(tmp_path, bound_bytes=1)
    await flats.provide(layers[0])
    await flats.provide(layers[1])
    flats.release(layers[1].digest)
    flats = cache(tmp_path, bound_bytes=1)
    flats.acquire(layers[0].digest)  # a machine that lived on
    await flats.provide(layers[2])
    assert there(tmp_path) == files(layers[0], layers[2])
    flats.release(layers[0].digest)
    flats.release(layers[2].digest)
    await flats.trim()
    assert there(tmp_path) == set()


async def test_a_full_disk_takes_unused_ones_and_then_says_what_is_needed(
    tmp_path: Path, layers: list[Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    flats = cache(tmp_path, reserve_bytes=100 * MIB)
    needed = flat.plan(layers[2]).data_bytes
    for local in layers[:2]:
        await flats.provide(local)
    flats.release(layers[0].digest)

    def free(directory: Path) -> int:
        used = sum(path.stat().st_blocks * 512 for path in directory.iterdir())
        return 102 * MIB + MIB // 2 - used

    monkeypatch.setattr("dsecd.images.disk.free", free)
    await flats.provide(layers[2])
    assert there(tmp_path) == files(layers[1], layers[2])
    with pytest.raises(Exhausted, match=f"{layers[3].digest[:12]} needs {needed} bytes .* free"):
        await flats.provide(layers[3])
    assert there(tmp_path) == files(layers[1], layers[2])
    assert flats.users(layers[3].digest) == 0


async def test_a_disk_that_fills_up_meanwhile_leaves_nothing(
    tmp_path: Path, layers: list[Local], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(sparse, "copy_data", full)
    with pytest.raises(Exhausted, match=r"disk full while writing .* which takes \d+ bytes"):
        await cache(tmp_path).provide(layers[0])
    assert there(tmp_path) == set()
