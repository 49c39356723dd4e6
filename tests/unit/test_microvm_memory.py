"""How far a guest's balloon goes up, and that it always goes down again."""

from __future__ import annotations

import pytest

from dsecd.backends import microvm_memory
from dsecd.backends.microvm_memory import MIB, SPARED_BYTES, limit_for, shrink
from dsecd.host.vm_plan import VmMemory
from libdsec.errors import Unavailable
from tests.unit.microvm_fakes import FakeMachine

FULL = 256 * MIB


def memory(*, free: int, available: int, limit: int = FULL) -> VmMemory:
    return VmMemory(
        limit_bytes=limit, total_bytes=FULL, free_bytes=free * MIB, available_bytes=available * MIB
    )


class Guest(FakeMachine):
    """Gives `rate` bytes between two looks, down to `least`; it fails after `answers` looks."""

    def __init__(self, *, rate: int = 64 * MIB, least: int = 0, answers: int = 1000) -> None:
        super().__init__(lambda event: None)
        self.asked: list[int] = []
        self.actual = FULL
        self._rate, self._least, self._answers = rate, least, answers

    async def balloon(self, limit_bytes: int) -> None:
        self.asked.append(limit_bytes)

    async def memory(self) -> VmMemory:
        if self._answers == 0:
            raise Unavailable("gone")
        self._answers -= 1
        self.actual = max(self.asked[-1], self._least, self.actual - self._rate)
        return memory(free=20, available=120, limit=self.actual)


def test_what_is_free_does_not_count_as_given() -> None:
    assert limit_for(memory(free=100, available=200), 30 * MIB) == FULL - 130 * MIB


def test_a_guest_keeps_some_of_what_it_could_spare() -> None:
    assert limit_for(memory(free=100, available=200), FULL) == FULL - 200 * MIB + SPARED_BYTES
    assert limit_for(memory(free=10, available=20), FULL) == FULL


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microvm_memory, "LOOK_S", 0.0)


async def test_the_balloon_goes_up_as_far_as_wanted_and_down_again() -> None:
    guest = Guest()
    await shrink(guest, FULL, 50 * MIB)
    assert guest.asked == [FULL, FULL - 70 * MIB, FULL]
    assert guest.actual <= FULL - 70 * MIB


async def test_a_guest_that_gives_no_more_is_not_waited_for() -> None:
    guest = Guest(least=FULL - 30 * MIB)
    await shrink(guest, FULL, 50 * MIB)
    assert guest.actual == FULL - 30 * MIB
    assert guest.asked[-1] == FULL


async def test_the_balloon_goes_down_when_the_guest_fails() -> None:
    guest = Guest(rate=MIB, answers=3)
    with pytest.raises(Unavailable):
        await shrink(guest, FULL, 50 * MIB)
    assert guest.asked[-1] == FULL
