"""The loop that has idle sandboxes give memory back, against the fake backend."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest

from dsecd.backends.abc import Capabilities
from dsecd.backends.fake import FakeSandbox
from dsecd.backends.spec import Spec
from dsecd.config import Limits, Reclaim
from dsecd.engine.admission import Admission
from dsecd.engine.reclaiming import LOOKED_AT, Reclaimer
from dsecd.engine.request import compile_spec
from dsecd.host import vitals
from dsecd.host.pageout import mappings
from dsecd.model import Reading
from dsecd.resources.reclaim import Round
from libdsec.errors import Exhausted
from libdsec.model import DSecContainerRunArgs, HostStats
from tests.unit.engine_fixtures import Bench, QuietHost, bench

MIB, GIB = 1 << 20, 1 << 30
CONFIG = Reclaim(trim_after_s=0.01, rest_s=0.01, pause_after_s=0)


async def make(made: Bench, count: int, memory_bytes: int) -> list[FakeSandbox]:
    client = await made.client()
    for number in range(count):
        await client.create(f"key-{number}")
    found = list(made.backend.sandboxes.values())
    for sandbox in found:
        sandbox.memory_bytes = memory_bytes
    return found


def fill(made: Bench, used: float) -> None:
    """Have the host use that share of its memory, and admission see it now."""
    total = made.host.reading.memory_total_bytes
    free = int(total * (1 - used))
    made.host.reading = msgspec.structs.replace(made.host.reading, memory_available_bytes=free)
    assert made.service is not None
    made.service.manager.admission._reading = None


def reclaimer(made: Bench, config: Reclaim = CONFIG) -> Reclaimer:
    assert made.service is not None
    return Reclaimer(made.service.manager, config)


async def rounds(subject: Reclaimer, count: int) -> list[Round]:
    """Rounds with time for a sandbox to become idle in between."""
    found = []
    for _ in range(count):
        await asyncio.sleep(0.02)
        found.append(await subject.round())
    return found


async def test_below_the_target_no_sandbox_is_even_looked_at() -> None:
    async with bench() as made:
        (sandbox,) = await make(made, 1, 300 * MIB)
        found = await rounds(reclaimer(made), 3)
        assert all(not one.decisions for one in found)
        assert sandbox.swapped_bytes == 0


async def test_above_the_target_idle_sandboxes_give_memory() -> None:
    async with bench() as made:
        sandboxes = await make(made, 3, 300 * MIB)
        fill(made, 0.9)
        subject = reclaimer(made)
        first, second = await rounds(subject, 2)
        assert first.decisions == ()  # one look says nothing about who is busy
        assert len(second.decisions) == 3
        assert all(sandbox.swapped_bytes == 256 * MIB for sandbox in sandboxes)
        registry = made.service.registry if made.service else None
        assert registry is not None
        assert registry.reclaims.values == {"trim": 3}
        assert registry.reclaim_freed.values[""] == 3 * 256 * MIB
        assert "dsec_reclaims_total" in registry.render()


async def test_a_sandbox_with_an_open_call_or_busy_processes_is_left_alone() -> None:
    async with bench() as made:
        called, busy, idle = await make(made, 3, 300 * MIB)
        assert made.service is not None
        made.service.manager.enter(called.name)
        fill(made, 0.9)
        subject = reclaimer(made)
        await rounds(subject, 1)
        busy.cpu_usage_s += 5.0
        (found,) = await rounds(subject, 1)
        assert [decision.sandbox for decision in found.decisions] == [idle.name]


async def test_a_call_that_comes_after_the_decision_wins() -> None:
    async with bench() as made:
        first, second = await make(made, 2, 300 * MIB)
        fill(made, 0.9)
        subject, trim = reclaimer(made), made.backend.trim
        manager = made.service.manager if made.service else None
        assert manager is not None

        async def enter_the_other(handle: object, want: int) -> int:
            other = second if handle.sandbox == first.name else first  # type: ignore[attr-defined]
            if not manager.live[other.name].calls:
                manager.enter(other.name)
            return await trim(handle, want)  # type: ignore[arg-type]

        made.backend.trim = enter_the_other  # type: ignore[method-assign]
        await rounds(subject, 2)
        assert sorted((first.swapped_bytes, second.swapped_bytes)) == [0, 256 * MIB]


async def test_those_with_nothing_to_give_make_room_for_others() -> None:
    """Only so many are looked at in a round; the same ones must not fill it each time."""
    async with bench() as made:
        sandboxes = await make(made, LOOKED_AT + 4, MIB)
        for last in sandboxes[-4:]:  # the least cold
            last.memory_bytes = 100 * MIB
        fill(made, 0.9)
        await rounds(reclaimer(made, Reclaim(trim_after_s=0.01, rest_s=60, pause_after_s=0)), 5)
        assert all(last.swapped_bytes for last in sandboxes[-4:])


async def test_decisions_are_logged_with_their_reason(caplog: pytest.LogCaptureFixture) -> None:
    async with bench() as made:
        await make(made, 1, 300 * MIB)
        fill(made, 0.9)
        with caplog.at_level(logging.INFO, "dsecd.reclaim"):
            await rounds(reclaimer(made), 2)
        found = [record for record in caplog.records if record.getMessage() == "trim"]
        assert len(found) == 1
        assert "idle for" in str(vars(found[0]))


async def test_a_failed_trim_does_not_end_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as made:
        await make(made, 1, 300 * MIB)
        fill(made, 0.9)
        subject = reclaimer(made, msgspec.structs.replace(CONFIG, period_s=0.02))
        tried = asyncio.Event()

        async def fail(handle: object, want: int) -> int:
            tried.set()
            raise RuntimeError("a fault")

        monkeypatch.setattr(made.backend, "trim", fail)
        subject.start()
        try:
            for _ in range(2):
                await asyncio.wait_for(tried.wait(), 5)
                tried.clear()
        finally:
            await subject.close()


async def test_stats_report_overcommit() -> None:
    async with bench() as made:
        await make(made, 2, MIB)
        client = await made.client()
        found = await client.call("host.stats", {}, kind=HostStats)
        assert found.memory_overcommit == pytest.approx(
            found.memory_requested_bytes / found.memory_total_bytes, abs=1e-4
        )
        assert found.memory_requested_bytes > 0


def admission(used: float, relief: int) -> Admission:
    host = QuietHost()
    total = host.reading.memory_total_bytes
    host.reading = Reading(
        memory_total_bytes=total,
        memory_available_bytes=int(total * (1 - used)),
        tasks=1,
        tasks_max=1 << 20,
    )
    made = Admission(Limits(), host, {"container": Capabilities()}, reserve_bytes=16 * MIB)
    made.bound_by(0.85, lambda: relief)
    return made


def spec() -> Spec:
    return compile_spec("s0-n0-1-1", DSecContainerRunArgs(container_image="x"))


def test_admission_goes_by_measured_memory() -> None:
    admission(0.84, 0).take(spec(), creating=0)
    with pytest.raises(Exhausted, match="target_percent"):
        admission(0.86, 0).take(spec(), creating=0)


def test_admission_counts_on_what_idle_sandboxes_can_give() -> None:
    admission(0.86, GIB).take(spec(), creating=0)


def test_admission_counts_those_that_are_being_made() -> None:
    used = 0.85 - 0.001  # 65 MiB below
    admission(used, 0).take(spec(), creating=1)
    with pytest.raises(Exhausted, match="target_percent"):
        admission(used, 0).take(spec(), creating=10)


def test_private_mappings_only_the_anonymous_first() -> None:
    text = (
        "55d0-55e0 r-xp 00000000 08:01 123 /usr/bin/python3\n"
        "7f00-7f10 rw-p 00000000 00:00 0 [heap]\n"
        "7f20-7f30 rw-s 00000000 00:01 9 /dev/shm/x\n"
        "7f40-7f50 r--p 00000000 00:00 0 [vvar]\n"
    )
    assert mappings(text) == [(0x7F00, 0x7F10), (0x55D0, 0x55E0)]


def test_protection_from_the_oom_killer_says_whether_it_worked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(self: Path, text: str) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "write_text", refuse)
    assert vitals.protect_from_oom() is False
