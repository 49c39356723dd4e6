"""Progress of an import, told to readers of any speed."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from dsecd.api.progress import Teller
from libdsec.model import ImportProgress


class Reader:
    """A client's end of the call; takes items only while `room` is set."""

    def __init__(self) -> None:
        self.seen: list[ImportProgress] = []
        self.room, self.last = asyncio.Event(), asyncio.Event()

    async def send(self, value: ImportProgress) -> None:
        await self.room.wait()
        self.seen.append(value)
        if value.done == 999:
            self.last.set()


async def test_a_reader_that_is_slow_sees_the_newest() -> None:
    reader = Reader()
    teller = Teller(cast(Any, reader))
    for done in range(1000):
        await asyncio.to_thread(teller.note, "reading", done, 1000)
        if done == 500:
            reader.room.set()
    await asyncio.wait_for(reader.last.wait(), 10)
    await teller.stop()
    assert len(reader.seen) < 100
    assert reader.seen[-1] == ImportProgress(stage="reading", done=999, total=1000)


async def test_a_reader_that_never_reads_holds_nothing_up() -> None:
    reader = Reader()
    teller = Teller(cast(Any, reader))
    teller.note("reading", 1, 2)
    await asyncio.sleep(0.05)
    async with asyncio.timeout(5):
        await teller.stop()
    assert reader.seen == []
