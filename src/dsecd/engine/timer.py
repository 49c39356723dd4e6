"""One heap of deadlines for all sandboxes, behind one loop timer.

Deadlines move with every call into a sandbox; the heap does not. An entry only says "look at this
sandbox then"; the owner answers with its present deadline, and the entry is pushed again if that is
later. So a call costs no heap operation, and ten thousand sandboxes cost one loop timer. Entries of
the forgotten stay until they come up, a day for the default idle timeout, or until most are such.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable

SPARE = 1024  # entries of the forgotten that are not worth clearing out
Look = Callable[[str], float | None]  # name → next deadline (loop time), None: nothing to wait for


class Timer:
    """Calls `look(name)` not before the time last watched for; `look` returns the next one."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._heap: list[tuple[float, str]] = []
        self._next: dict[str, float] = {}
        self._handle: asyncio.TimerHandle | None = None
        self._armed = 0.0
        self._closed = False

    def watch(self, name: str, when: float) -> None:
        """Look at `name` at loop time `when`, or earlier if that was asked before."""
        current = self._next.get(name)
        if self._closed or (current is not None and current <= when):
            return
        self._next[name] = when
        heapq.heappush(self._heap, (when, name))
        self._arm()

    def forget(self, name: str) -> None:
        """Stop looking at `name`; its entry in the heap is skipped when it comes up."""
        self._next.pop(name, None)
        if len(self._heap) > 2 * len(self._next) + SPARE:
            self._heap = [(when, name) for name, when in self._next.items()]
            heapq.heapify(self._heap)

    def close(self) -> None:
        self._closed = True
        if self._handle is not None:
            self._handle.cancel()
        self._heap.clear()
        self._next.clear()

    def __len__(self) -> int:
        return len(self._next)

    def _arm(self) -> None:
        if not self._heap or self._closed:
            return
        when = self._heap[0][0]
        if self._handle is not None:
            if self._armed <= when:
                return
            self._handle.cancel()
        self._armed = when
        self._handle = asyncio.get_running_loop().call_at(when, self._fire)

    def _fire(self) -> None:
        self._handle = None
        now = asyncio.get_running_loop().time()
        # the loop's clock is rounded: an entry a hair in the future is due
        while self._heap and self._heap[0][0] <= now + 0.001:
            when, name = heapq.heappop(self._heap)
            if self._next.get(name) != when:
                continue  # forgotten, or replaced by an earlier entry
            del self._next[name]
            following = self._look(name)
            if following is not None:
                self.watch(name, max(following, now + 0.001))
        self._arm()
