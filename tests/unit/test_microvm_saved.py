"""MicroVMs that are saved and taken up again: what is journalled, kept and removed, and when."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsecd.backends import microvm, microvm_machine, microvm_saved
from dsecd.backends.abc import Handle, Instance
from dsecd.backends.microvm_holding import Held, decode
from dsecd.backends.microvm_plan import RAM_INSIDE
from dsecd.backends.spec import Spec
from dsecd.host import vm_ram
from dsecd.host.vm_plan import Ram
from libdsec.errors import Exhausted, Internal, InvalidArgument, NotFound, Unavailable
from tests.unit.microvm_bed import ID, MIB, Bed, spec, until

BRANCH = "s0-n0-1-2"


@pytest.fixture
async def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bed]:
    made = Bed(tmp_path)
    monkeypatch.setattr(microvm.vm_disks, "root_of", lambda pid: made.root)
    monkeypatch.setattr(microvm_machine, "EXPLAIN_S", 0.05)
    monkeypatch.setattr(vm_ram, "take_ram", lambda pid, size, to: to.write_bytes(b"memory"))
    monkeypatch.setattr(vm_ram, "used_bytes", lambda pid, size: 6)
    monkeypatch.setattr(vm_ram, "fill_ram", lambda pid, size, source: source.read_bytes())
    await made.start()
    yield made
    await made.backend.close()
    made.vmm.end()


class Journal:
    """What was saved of one sandbox, with what its machine had done by then."""

    def __init__(self, bed: Bed) -> None:
        self._bed = bed
        self.handles: list[Handle] = []
        self.failing = False

    async def save(self, handle: Handle) -> None:
        if self.failing:
            raise Internal("the journal cannot be written")
        self.handles.append(handle)
        self._bed.vmm.machine.did.append("journal")

    @property
    def held(self) -> Held:
        return decode(self.handles[-1])


def saved(bed: Bed) -> list[str]:
    return sorted(path.name for path in (bed.config.state / "vm/saved").iterdir())


def disk(bed: Bed) -> Path:
    return bed.root / "vm/upper.img"


def asked(bed: Bed) -> list[str]:
    return [op for op, _ in bed.vmm.agent.asked]


async def next_daemon(bed: Bed, handle: Handle) -> Instance | None:
    await bed.backend.close()
    bed.backend = bed.make()
    await bed.start()
    found = await bed.backend.recover(handle)
    await bed.backend.sweep({ID})
    return found


def branch_of(checkpoint: str, **vm: object) -> Spec:
    return msgspec.structs.replace(spec(**vm), checkpoint=f"{ID}/{checkpoint}")


async def branch(bed: Bed, asked_for: Spec) -> Handle:
    if not bed.backend.located(asked_for):
        await bed.backend.locate(asked_for)
    handle = bed.backend.prepare(BRANCH, asked_for)
    disk(bed).unlink()  # all jails of this bed are one directory
    return (await bed.backend.create(handle, asked_for)).handle


# --- checkpoints ----------------------------------------------------------------------------------


async def test_a_checkpoint_has_memory_devices_and_disks_of_one_moment(bed: Bed) -> None:
    handle, journal = await bed.create(spec(data_disk_bytes=32 * MIB)), Journal(bed)
    made = await bed.backend.checkpoint(handle, journal.save)
    assert bed.vmm.machine.did == ["boot", "stop", "save", "cont", "journal"]
    assert (made.id, made.method) == ("c1", "memory")
    assert 0 < made.frozen_ms <= made.took_ms
    (place,) = saved(bed)
    assert [one.place for one in journal.held.checkpoints] == [place]
    there = bed.config.state / "vm/saved" / place
    assert sorted(path.name for path in there.iterdir()) == [
        "data.img",
        "ram",
        "state",
        "upper.img",
    ]
    assert (there / "upper.img").stat().st_size == 64 * MIB
    assert list((bed.root / "vm").glob("state")) == [], "the jail keeps nothing of it"
    assert [one.id for one in bed.backend.checkpoints(handle)] == ["c1"]


async def test_a_deleted_checkpoint_leaves_nothing_and_its_name_is_not_used_again(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    for _ in range(2):
        await bed.backend.checkpoint(handle, journal.save)
    await bed.backend.delete_checkpoint(handle, "c2", journal.save)
    assert len(saved(bed)) == 1
    with pytest.raises(NotFound, match="there are: c1"):
        await bed.backend.delete_checkpoint(handle, "c2", journal.save)
    assert (await bed.backend.checkpoint(handle, journal.save)).id == "c3"
    await bed.backend.destroy(handle)
    assert saved(bed) == []


async def test_a_checkpoint_that_fails_leaves_nothing_and_the_guest_running(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    journal.failing = True
    with pytest.raises(Internal):
        await bed.backend.checkpoint(handle, journal.save)
    assert (saved(bed), bed.backend.checkpoints(handle)) == ([], [])
    monkeypatch.setattr(microvm_saved.disk, "room", lambda directory: MIB)
    monkeypatch.setattr(vm_ram, "used_bytes", lambda pid, size: 2 * MIB)
    with pytest.raises(Exhausted, match="delete checkpoints"):
        await bed.backend.checkpoint(handle, journal.save)
    assert saved(bed) == []
    assert bed.vmm.machine.did == ["boot", "stop", "save", "cont", "stop", "cont"]


async def test_what_a_daemon_had_not_journalled_goes_and_the_guest_goes_on(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    await bed.backend.checkpoint(handle, journal.save)
    for left in (".half", "whole"):
        (bed.config.state / "vm/saved" / left).mkdir()
    (bed.root / "vm/state").write_bytes(b"half of one")
    bed.vmm.state = "saved"  # it died before it let the guest go on
    assert await next_daemon(bed, journal.handles[-1]) is not None
    assert bed.vmm.machine.did == ["boot", "cont"]
    assert saved(bed) == [journal.held.checkpoints[0].place]
    await bed.backend.checkpoint(journal.handles[-1], journal.save)
    assert len(saved(bed)) == 2


# --- rollback -------------------------------------------------------------------------------------


async def test_a_rollback_brings_back_disks_and_memory(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    before = disk(bed).read_bytes()
    made = await bed.backend.checkpoint(handle, journal.save)
    disk(bed).write_bytes(b"changed")
    first = bed.vmm.machine
    await bed.backend.rollback(handle, made.id, journal.save)
    assert first.did[-2:] == ["journal", "close"], "known before the monitor is ended"
    assert decode(journal.handles[-2]).returning == journal.held.checkpoints[0].place
    assert bed.vmm.machine.did == ["load", "cont", "journal"]
    assert journal.held.returning == ""
    assert disk(bed).read_bytes() == before
    assert asked(bed)[:2] == ["sys.ping", "vm.clock"]
    with pytest.raises(NotFound):
        await bed.backend.rollback(handle, "c9", journal.save)


async def test_the_next_daemon_finishes_a_rollback(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    before = disk(bed).read_bytes()
    made = await bed.backend.checkpoint(handle, journal.save)
    await bed.backend.rollback(handle, made.id, journal.save)
    begun = next(one for one in journal.handles if decode(one).returning)
    disk(bed).unlink()  # where the one before it died
    found = await next_daemon(bed, begun)
    assert found is not None
    assert decode(found.handle).returning == ""
    assert disk(bed).read_bytes() == before
    assert bed.vmm.machine.did[:2] == ["load", "cont"]


async def test_a_rollback_that_fails_half_way_is_the_end(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pid: int, size: int, source: Path) -> None:
        raise Internal("no memory")

    handle, journal = await bed.create(spec()), Journal(bed)
    made = await bed.backend.checkpoint(handle, journal.save)
    monkeypatch.setattr(vm_ram, "fill_ram", fail)
    with pytest.raises(Internal, match="no memory"):
        await bed.backend.rollback(handle, made.id, journal.save)
    await until(lambda: bool(bed.ears.deaths))
    assert "did not go back" in bed.ears.deaths[0][1].reason
    await bed.backend.destroy(handle)
    assert saved(bed) == []


# --- branches -------------------------------------------------------------------------------------


async def test_a_branch_stands_on_the_checkpoint_and_is_told_who_it_is(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    made = await bed.backend.checkpoint(handle, journal.save)
    (place,) = saved(bed)
    other = await branch(bed, branch_of(made.id))
    bind = next(bind for bind in bed.jail.specs[-1].binds if bind.target == RAM_INSIDE)
    assert bind.source.endswith(f"saved/{place}/ram")
    assert bind.read_only
    plan = bed.vmm.plans[-1]
    assert plan.incoming
    assert plan.ram == Ram(path=RAM_INSIDE, shared=False, read_only=True)
    assert (plan.balloon, plan.free_page_reporting) == (True, True)
    assert bed.vmm.machine.did == ["load", "cont"]
    told = dict(bed.vmm.agent.asked)["vm.renew"]
    names = {name for name, _, _ in told["files"]}
    assert names >= {"etc/hosts", "etc/hostname", "etc/machine-id", "etc/resolv.conf"}
    assert msgspec.msgpack.decode(told["config"])["sandbox"] == BRANCH
    assert bed.users() == 2
    await bed.backend.destroy(handle)
    assert saved(bed) == [place], "the branch stands on it"
    await bed.backend.destroy(other)
    assert (saved(bed), bed.users()) == ([], 0)


async def test_a_branch_is_the_machine_that_was_saved(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    made = await bed.backend.checkpoint(handle, journal.save)
    await bed.backend.locate(branch_of(made.id))
    for wanted, field in (
        (branch_of(made.id, vcpus=3), "vcpus"),
        (branch_of(made.id, data_disk_bytes=MIB), "data_disk_mb"),
        (msgspec.structs.replace(branch_of(made.id), memory_bytes=64 * MIB), "memory_limit_mb"),
        (msgspec.structs.replace(branch_of(made.id), network="nat"), "network"),
    ):
        with pytest.raises(InvalidArgument, match=field):
            bed.backend.prepare(BRANCH, wanted)
    with pytest.raises(NotFound, match="no checkpoint"):
        bed.backend.prepare(BRANCH, branch_of("c9"))
    prepared = bed.backend.prepare(BRANCH, branch_of(made.id))
    bed.backend.release(prepared)
    await bed.backend.destroy(handle)
    assert (saved(bed), bed.jail.prepared, bed.users()) == ([], set(), 0)


async def test_a_branch_keeps_its_memory_over_a_restart(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    made = await bed.backend.checkpoint(handle, journal.save)
    (place,) = saved(bed)
    other = await branch(bed, branch_of(made.id))
    await bed.backend.delete_checkpoint(handle, made.id, journal.save)
    bed.vmm.state = "running"
    assert await next_daemon(bed, other) is not None
    assert saved(bed) == [place]
    await bed.backend.destroy(other)
    assert saved(bed) == []


# --- pause ----------------------------------------------------------------------------------------


async def test_a_pause_ends_the_monitor_once_it_is_journalled(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    first = bed.vmm.machine
    await bed.backend.pause(handle, journal.save)
    assert first.did == ["boot", "stop", "save", "journal", "close"]
    assert (journal.held.paused, [journal.held.saved]) == (True, saved(bed))
    await bed.backend.resume(handle, journal.save)
    assert bed.vmm.machine.did == ["load", "journal", "cont"], "its disks change from there on"
    assert (journal.held.paused, journal.held.saved) == (False, "")
    assert saved(bed) == []
    assert asked(bed)[0] == "vm.clock"
    await bed.backend.resume(handle, journal.save)  # again: nothing to do
    assert bed.vmm.machine.did == ["load", "journal", "cont"]
    assert bed.ears.deaths == []


async def test_a_pause_that_fails_leaves_the_guest_running(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    journal.failing = True
    with pytest.raises(Internal):
        await bed.backend.pause(handle, journal.save)
    assert bed.vmm.machine.did == ["boot", "stop", "save", "cont"]
    assert saved(bed) == []


async def test_a_paused_machine_is_taken_up_by_the_next_daemon_when_it_is_called(bed: Bed) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    await bed.backend.pause(handle, journal.save)
    found = await next_daemon(bed, journal.handles[-1])
    assert found is not None
    assert found.paused
    assert len(saved(bed)) == 1
    await bed.backend.resume(handle, journal.save)
    assert asked(bed)[:2] == ["sys.ping", "vm.clock"]
    assert saved(bed) == []


async def test_a_resumption_that_fails_leaves_it_paused(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(pid: int, size: int, source: Path) -> None:
        raise OSError(28, "No space left on device")

    handle, journal = await bed.create(spec()), Journal(bed)
    await bed.backend.pause(handle, journal.save)
    with monkeypatch.context() as broken:
        broken.setattr(vm_ram, "fill_ram", fail)
        with pytest.raises(Unavailable, match="No space left"):
            await bed.backend.resume(handle, journal.save)
    assert journal.held.paused
    await asyncio.sleep(0.1)
    assert bed.ears.deaths == []
    await bed.backend.resume(handle, journal.save)
    assert not journal.held.paused


async def test_a_branch_that_pauses_has_memory_of_its_own_afterwards(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle, journal = await bed.create(spec()), Journal(bed)
    made = await bed.backend.checkpoint(handle, journal.save)
    other = await branch(bed, branch_of(made.id))
    await bed.backend.destroy(handle)
    (base,) = saved(bed)
    taken: list[Path] = []

    def take(pid: int, base: Path, to: Path) -> None:
        taken.append(base)
        to.write_bytes(b"memory")

    monkeypatch.setattr(microvm_saved.vm_pages, "own_bytes", lambda pid, base: 0)
    monkeypatch.setattr(microvm_saved.vm_pages, "take_pages", take)
    await bed.backend.pause(other, journal.save)
    assert [path.parent.name for path in taken] == [base]
    assert [journal.held.saved] == saved(bed) != [base]
    await bed.backend.resume(other, journal.save)
    assert bed.vmm.plans[-1].ram == Ram()
    assert saved(bed) == []
