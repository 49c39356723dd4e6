"""Twin: a run of chunks that is being brought."""

from __future__ import annotations

from collections import Counter

import trio


class Fetch:
    """A run of chunks that is on its way; `moved` is set whenever some of them have come."""

    def __init__(self, first: int, end: int, demand: bool, deadline: float) -> None:
        self.first, self.end, self.demand, self.deadline = first, end, demand, deadline
        self.moved = trio.Event()
        self.failed = False  # for good: reads that wait need not try again
        self.wanted: Counter[int] = Counter()  # chunks that reads wait for

    def wake(self) -> None:
        """Let the reads that wait look again."""
        moved, self.moved = self.moved, trio.Event()
        moved.set()
