"""The pool around the spawners: slots of v1 groups, deaths, cancellation."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dsecd.host import spawner
from dsecd.host.plan import FileWrite
from dsecd.host.spawner import SpawnerPool
from dsecd.policy import seccomp
from libdsec.errors import DSecError, Internal, Unavailable
from tests.system.spawner_lab import BINARY, CGROUPS, build_base, compile_c, open_lab

pytestmark = pytest.mark.root
V1 = ("memory", "pids", "cpu")


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("spawner")
    init = compile_c(Path(__file__).with_name("spawner_init.c"), folder / "init")
    return build_base(folder), init


@dataclass(frozen=True)
class Slot:
    procs_paths: tuple[str, ...]

    @property
    def folders(self) -> list[Path]:
        return [Path(path).parent for path in self.procs_paths]


class Slots:
    """Numbered sets of groups below one directory in each hierarchy."""

    def __init__(self) -> None:
        self.name = f"dsec-fp-{os.getpid()}"
        self.free: list[Slot] = []
        self.taken: list[Slot] = []
        for number in range(6):
            folders = [CGROUPS / kind / self.name / f"slot-{number}" for kind in V1]
            for folder in folders:
                folder.mkdir(parents=True)
            self.free.append(Slot(tuple(str(folder / "cgroup.procs") for folder in folders)))
        self.all = list(self.free)

    def take(self) -> Slot:
        slot = self.free.pop()
        self.taken.append(slot)
        return slot

    def give(self, slot: Slot) -> None:
        self.taken.remove(slot)
        self.free.append(slot)

    def remove(self) -> None:
        for slot in self.all:
            for folder in slot.folders:
                folder.rmdir()
        for kind in V1:
            (CGROUPS / kind / self.name).rmdir()


@pytest.fixture
def slots() -> Iterator[Slots]:
    if not (CGROUPS / "memory").is_dir():
        pytest.skip("no v1 controllers on this host")
    made = Slots()
    yield made
    made.remove()


async def test_a_container_lives_in_the_slot_that_was_reserved(
    tmp_path: Path, parts: tuple[Path, Path], slots: Slots
) -> None:
    async with open_lab(tmp_path, *parts, take_slot=slots.take, return_slot=slots.give) as lab:
        slot = await lab.pool.reserve()
        assert isinstance(slot, Slot)
        limit = FileWrite(str(slot.folders[0] / "memory.limit_in_bytes"), str(64 << 20))
        spawned = await lab.create("a", slot, writes=(limit,))
        for folder in slot.folders:
            await _until(lambda folder=folder: _pids(folder) == [spawned.pid])
        limit_file = slot.folders[0] / "memory.limit_in_bytes"
        assert int(limit_file.read_text()) == 64 << 20
        await lab.destroy("a", spawned)
        slots.give(slot)  # what the engine does once the container is gone
    assert not slots.taken


async def test_a_slot_outlives_a_failed_or_given_up_creation(
    tmp_path: Path, parts: tuple[Path, Path], slots: Slots
) -> None:
    async with open_lab(tmp_path, *parts, take_slot=slots.take, return_slot=slots.give) as lab:
        for _ in range(8):  # more often than there are slots
            slot = await lab.pool.reserve()
            with pytest.raises(Internal):
                await lab.create("a", slot, fail_step="masks")
            lab.pool.cancel(await lab.pool.reserve())
        assert len(slots.taken) == 2  # one for each creator
    assert not slots.taken


async def test_a_creator_moves_on_later_while_another_is_free(
    tmp_path: Path,
    parts: tuple[Path, Path],
    slots: Slots,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_lab(tmp_path, *parts, take_slot=slots.take, return_slot=slots.give) as lab:
        reserved = [await lab.pool.reserve()]
        spawned = [await lab.create("a", reserved[0])]
        assert len(slots.taken) == 2  # the container's, and the other creator's
        await _until(lambda: len(lab.pool._free) == 2)
        assert len(slots.taken) == 3
        monkeypatch.setattr(spawner, "_REST_S", 3600.0)  # not while we look
        for name, taken in (("b", 3), ("c", 4)):
            reserved.append(await lab.pool.reserve())
            spawned.append(await lab.create(name, reserved[-1]))
            assert len(slots.taken) == taken  # at "c" none is free: at once
        for name, one, slot in zip("abc", spawned, reserved, strict=True):
            await lab.destroy(name, one)
            slots.give(slot)
    assert not slots.taken


async def test_a_slot_of_the_callers_own_is_left_to_the_container(
    tmp_path: Path, parts: tuple[Path, Path], slots: Slots
) -> None:
    async with open_lab(tmp_path, *parts) as lab:
        slot = slots.take()
        spawned = await lab.create("a", slot)
        for folder in slot.folders:
            await _until(lambda folder=folder: _pids(folder) == [spawned.pid])
        await lab.destroy("a", spawned)
        slots.give(slot)


async def test_a_spawner_that_dies_is_replaced(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    async with open_lab(tmp_path, *parts) as lab:
        keeper = await lab.create("keeper")
        killed = [*lab.pool._creators, *lab.pool._destroyers, *lab.pool._rerooters]
        for worker in killed:
            worker._process.kill()
        with pytest.raises(Unavailable):
            await asyncio.wait_for(lab.pool.destroy(_nothing()), 5)
        await _until(lambda: all(worker.lost for worker in killed))
        await _until(lambda: len(lab.pool._free) == 2 and len(lab.pool._destroyers) == 1)
        await _until(lambda: len(lab.pool._rerooters) == 1)
        assert await lab.say("keeper", "echo alive") == (0, "alive\n")
        async with lab.container("a"):
            pass
        await lab.destroy("keeper", keeper)


async def test_a_cancelled_creation_leaves_nothing(
    tmp_path: Path, parts: tuple[Path, Path]
) -> None:
    async with open_lab(tmp_path, *parts) as lab:
        for number in range(10):
            name = f"c{number}"
            task = asyncio.create_task(lab.create(name))
            for _ in range(number):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await _until(lambda: len(lab.pool._free) == 2)
            await lab.destroy(name, None)
        assert not list((lab.folder / "sb").iterdir())


async def test_a_spawner_that_cannot_start_says_why(tmp_path: Path) -> None:
    pool = SpawnerPool(
        str(BINARY), 1, init=str(tmp_path / "absent"), base_filter=seccomp.base_filter()
    )
    with pytest.raises(Internal, match="step 'open' failed: No such file"):
        await pool.start()


@pytest.mark.parametrize("bad", [b"", b"\1" * 12, bytes(8), bytes(8 * 4097)])
async def test_a_spawner_without_its_filter_does_not_start(
    tmp_path: Path, parts: tuple[Path, Path], bad: bytes
) -> None:
    with pytest.raises(Internal, match="step 'seccomp' failed: Invalid argument"):
        async with open_lab(tmp_path, *parts, base_filter=bad):
            pass


async def test_a_closed_pool_refuses(tmp_path: Path, parts: tuple[Path, Path]) -> None:
    async with open_lab(tmp_path, *parts) as lab:
        pool = lab.pool
    with pytest.raises(DSecError):
        await pool.destroy(_nothing())


def _nothing() -> object:
    from dsecd.host.plan import DestroyPlan

    return DestroyPlan(sandbox="none")


def _pids(folder: Path) -> list[int]:
    return [int(line) for line in (folder / "cgroup.procs").read_text().split()]


async def _until(condition: object) -> None:
    assert callable(condition)
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about within 5 s")
