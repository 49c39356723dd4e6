"""What the daemon knows of names: one cache and one query at a time for all its sandboxes.

Sharing tells a sandbox, by the time an answer takes, whether another one asked for the same allowed
name of late; what crosses that way is far below what two sandboxes say to each other by load.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from typing import Protocol

import dns.rcode
import dns.rdatatype
import msgspec

from dsecd.resolver.budget import Clock
from dsecd.resolver.messages import Answer
from libdsec.errors import DSecError

log = logging.getLogger(__name__)

_Key = tuple[str, int]  # name, type of record


class Asker(Protocol):
    """`Forwarder`, or a test's."""

    async def ask(self, name: str, rdtype: int) -> Answer:
        """Return the answer. Raises `DSecError`."""


class Caching(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of the cache. `weight`: an entry counts one, and one for each alias and address."""

    weight: int = 65536
    least_s: float = 5.0  # a server that says 0 is not asked for every connection
    most_s: float = 3600.0
    negative_s: float = 10.0  # without a word from upstream
    negative_most_s: float = 60.0
    failure_s: float = 1.0
    flights: int = 2048  # different questions waited for at once


class Lookups:
    """Answers by (name, type). Belongs to one event loop; `close` ends its tasks."""

    def __init__(
        self,
        asker: Asker,
        *,
        caching: Caching = Caching(),  # noqa: B008 - frozen
        clock: Clock = time.monotonic,
    ) -> None:
        self._asker, self._caching, self._clock = asker, caching, clock
        self._known: OrderedDict[_Key, tuple[float, Answer]] = OrderedDict()  # until when
        self._weight = 0
        self._flights: dict[_Key, asyncio.Task[Answer]] = {}

    def known(self, name: str, rdtype: int) -> Answer | None:
        """Return what the cache has, with the TTL that is left, None when it has to be asked."""
        key = (name, rdtype)
        entry = self._known.get(key)
        if entry is None:
            return None
        left_s = entry[0] - self._clock()
        if left_s <= 0:
            self._forget(key)
            return None
        self._known.move_to_end(key)
        return msgspec.structs.replace(entry[1], ttl_s=left_s)

    def flying(self, name: str, rdtype: int) -> bool:
        """Return whether an upstream is being asked this already."""
        return (name, rdtype) in self._flights

    async def find(self, name: str, rdtype: int) -> Answer:
        """Return the answer, asking at most once however many wait. A failure is SERVFAIL."""
        key = (name, rdtype)
        known = self.known(name, rdtype)
        if known is not None:
            return known
        flight = self._flights.get(key)
        if flight is None:
            if len(self._flights) >= self._caching.flights:
                return Answer(rcode=dns.rcode.SERVFAIL, ttl_s=0.0)
            flight = asyncio.create_task(self._ask(key))
            self._flights[key] = flight
            flight.add_done_callback(lambda _: self._flights.pop(key, None))
        return await asyncio.shield(flight)  # one that gives up takes nothing from the others

    async def _ask(self, key: _Key) -> Answer:
        try:
            answer = await self._asker.ask(*key)
        except DSecError as error:
            log.info("%s", error.message)
            answer = Answer(rcode=dns.rcode.SERVFAIL, ttl_s=0.0)
        except Exception:
            log.exception("looking up %s failed", key[0])
            answer = Answer(rcode=dns.rcode.SERVFAIL, ttl_s=0.0)
        answer = msgspec.structs.replace(answer, ttl_s=self._lifetime(answer))
        self._remember(key, answer)
        return answer

    def _lifetime(self, answer: Answer) -> float:
        caching = self._caching
        if answer.rcode == dns.rcode.SERVFAIL:
            return caching.failure_s
        if answer.addresses:
            return min(max(answer.ttl_s, caching.least_s), caching.most_s)
        if not answer.ttl_s:
            return caching.negative_s
        return min(max(answer.ttl_s, caching.least_s), caching.negative_most_s)

    def _remember(self, key: _Key, answer: Answer) -> None:
        self._forget(key)
        self._known[key] = (self._clock() + answer.ttl_s, answer)
        self._weight += _weight(answer)
        while self._weight > self._caching.weight:
            self._forget(next(iter(self._known)))

    def _forget(self, key: _Key) -> None:
        entry = self._known.pop(key, None)
        if entry is not None:
            self._weight -= _weight(entry[1])

    async def close(self) -> None:
        """Give up what is still asked for; who waits for it is cancelled."""
        flights = list(self._flights.values())
        for flight in flights:
            flight.cancel()
        await asyncio.gather(*flights, return_exceptions=True)


def _weight(answer: Answer) -> int:
    return 1 + len(answer.chain) + len(answer.addresses)
