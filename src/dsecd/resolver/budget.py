"""How much a sandbox may ask, and how much it can say by asking.

A name under a wildcard reaches the servers of its domain, so the labels that the sandbox chooses
are a channel out. It is bounded by what they can carry at most, not by how random they look: any
test of looks is passed by some code. A character is one of 39 (letters, digits, hyphen, underscore,
dot), 5.3 bits; asking again for a name already asked says at most which of them, and that only when
no cache answers. A name that a rule gives in full has no chosen labels and costs nothing.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import msgspec

Clock = Callable[[], float]  # seconds, monotonic

BITS_PER_CHARACTER = math.log2(39)


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one sandbox; each pair is what may come at once and what is refilled."""

    queries_burst: int = 1000  # of all kinds, beyond them the socket is not read
    queries_per_s: float = 300.0
    waiting: int = 32  # queries that wait for an upstream; of 1024 that all sandboxes share
    connections: int = 8  # TCP, others wait in the kernel's backlog
    new_names_burst: int = 60  # distinct names under wildcards
    new_names_per_minute: float = 20.0
    chosen_bits_burst: int = 16384  # what queries under wildcards can carry out
    chosen_bits_per_minute: float = 2048.0
    chosen_characters: int = 100  # of one name, before the wildcard's suffix
    known_names: int = 1024  # remembered as asked already
    pinned: int = 4096  # addresses, of all names together
    events_burst: int = 20
    events_per_s: float = 5.0


class Bucket:
    """Tokens: at most `burst`, refilled at `per_s`."""

    def __init__(self, burst: float, per_s: float, clock: Clock) -> None:
        self._burst, self._per_s, self._clock = burst, per_s, clock
        self._tokens, self._at = burst, clock()

    def has(self, amount: float = 1.0) -> bool:
        now = self._clock()
        self._tokens = min(self._burst, self._tokens + (now - self._at) * self._per_s)
        self._at = now
        return self._tokens >= amount

    def take(self, amount: float = 1.0) -> bool:
        """Take `amount` if all of it is there, else nothing."""
        if not self.has(amount):
            return False
        self._tokens -= amount
        return True


class Outflow:
    """What one sandbox says to the servers of wildcard domains by what it asks.

    `charge` is called for queries that would leave the host; what a cache answers is free.
    """

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self._limits = limits
        self._names = Bucket(limits.new_names_burst, limits.new_names_per_minute / 60, clock)
        self._bits = Bucket(limits.chosen_bits_burst, limits.chosen_bits_per_minute / 60, clock)
        self._known: OrderedDict[str, None] = OrderedDict()
        self._again_bits = math.log2(max(2, limits.known_names))

    def charge(self, name: str, chosen: str) -> bool:
        """Return whether the query may leave; `chosen` as in `Ruling`."""
        if not chosen:
            return True
        if name in self._known:
            self._known.move_to_end(name)
            return self._bits.take(self._again_bits)
        bits = len(chosen) * BITS_PER_CHARACTER
        if len(chosen) > self._limits.chosen_characters or not self._names.has():
            return False
        if not self._bits.take(bits):
            return False
        self._names.take()
        self._known[name] = None
        if len(self._known) > self._limits.known_names:
            self._known.popitem(last=False)
        return True
