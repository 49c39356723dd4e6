"""Uid ranges: never two users, all of them reachable, descriptors closed."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.host.ranges import SIZE, RangePool
from libdsec.errors import Exhausted, Internal
from tests.waiting import until

START = 0x10000000


class Namespaces:
    """Stands for the kernel: descriptors of /dev/null, counted."""

    def __init__(self) -> None:
        self.made: list[tuple[int, int]] = []
        self.fail = False

    def __call__(self, uid_base: int, owner_uid: int) -> int:
        if self.fail:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.made.append((uid_base, owner_uid))
        return os.open("/dev/null", os.O_RDONLY)


def pool(count: int, ready: int = 0, kernel: Namespaces | None = None) -> RangePool:
    return RangePool(START, count, ready, kernel or Namespaces())


async def test_ids_of_a_range() -> None:
    ranges = pool(10)
    first, second = ranges.acquire(), ranges.acquire()
    assert (first.uid_base, first.owner_uid) == (START, START + SIZE - 1)
    assert second.uid_base == first.uid_base + SIZE
    await ranges.close()


async def test_ranges_come_back_oldest_first_with_their_namespace() -> None:
    kernel = Namespaces()
    ranges = pool(3, kernel=kernel)
    held = [ranges.acquire() for _ in range(3)]
    with pytest.raises(Exhausted, match="uid_range_count"):
        ranges.acquire()
    for taken in (held[1], held[0]):
        ranges.release(taken)
    assert [ranges.acquire().index for _ in range(2)] == [1, 0]
    assert len(kernel.made) == 3
    ranges.release(held[2])
    with pytest.raises(Internal, match="twice"):
        ranges.release(held[2])
    await ranges.close()


async def test_reserved_ranges_are_never_handed_out() -> None:
    ranges = pool(4)
    reserved = [ranges.reserve(0), ranges.reserve(2)]
    assert {ranges.acquire().index, ranges.acquire().index} == {1, 3}
    with pytest.raises(Exhausted):
        ranges.acquire()
    with pytest.raises(Internal, match="two users"):
        ranges.reserve(2)
    with pytest.raises(Internal, match="outside"):
        ranges.reserve(4)
    ranges.release(reserved[1])
    again = ranges.acquire()
    assert again.index == 2
    assert again.userns_fd >= 0  # a new namespace for a range whose old one is out of reach
    await ranges.close()


async def test_reserving_a_prepared_range_takes_it_from_the_ready_ones() -> None:
    ranges = pool(2, ready=2)
    ranges.start()
    await until(lambda: ranges.ready == 2)
    assert ranges.reserve(1).index == 1
    assert ranges.acquire().index == 0
    await ranges.close()


async def test_adopt_opens_the_namespace_of_a_live_init() -> None:
    ranges = pool(4)
    holder = "import os,sys; os.dup2(os.open('/dev/null', 0), 7); print(flush=True); input()"
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as init:
        assert init.stdout is not None
        init.stdout.readline()
        adopted = ranges.adopt(3, init.pid)
        init.communicate(b"\n")
    assert adopted.userns_fd >= 0
    assert ranges.adopt(2, init.pid).userns_fd == -1
    await ranges.close()


async def test_background_fill_stops_at_the_target_and_at_the_end() -> None:
    kernel = Namespaces()
    ranges = pool(5, ready=3, kernel=kernel)
    ranges.start()
    await until(lambda: ranges.ready == 3)
    await asyncio.sleep(0.01)
    assert ranges.ready == 3
    held = [ranges.acquire() for _ in range(3)]
    await until(lambda: ranges.ready == 2)
    await asyncio.sleep(0.01)
    assert ranges.ready == 2  # all five exist
    assert len(kernel.made) == 5
    assert len({taken.index for taken in held}) == 3
    await ranges.close()


async def test_failed_namespace_loses_no_range() -> None:
    kernel = Namespaces()
    ranges = pool(1, kernel=kernel)
    kernel.fail = True
    with pytest.raises(Exhausted, match="max_user_namespaces"):
        ranges.acquire()
    kernel.fail = False
    assert ranges.acquire().index == 0
    await ranges.close()


@given(st.lists(st.integers(0, 9), max_size=60))
def test_no_two_users_in_any_order(steps: list[int]) -> None:
    """0-5 acquire, 6-8 release the oldest held, 9 reserve the lowest free index."""

    async def play() -> None:
        ranges, held = pool(6), {}
        for step in steps:
            try:
                if step < 6:
                    taken = ranges.acquire()
                elif step < 9:
                    if held:
                        ranges.release(held.pop(next(iter(held))))
                    continue
                else:
                    free = [index for index in range(6) if index not in held]
                    if not free:
                        continue
                    taken = ranges.reserve(free[0])
            except Exhausted:
                assert len(held) == 6
                continue
            assert taken.index not in held
            held[taken.index] = taken
            assert ranges.held == frozenset(held)
        await ranges.close()

    asyncio.run(play())
