"""Which addresses a sandbox's names have opened, and until when.

An address stays open while anybody may still use the answer that held it: its TTL as the sandbox
was told, at least `floor_s` (programs resolve once and connect later, and many keep addresses
longer than they should). An answer with other addresses adds to those of earlier ones. An address
that several names opened is closed when the last of them has expired.

Programs also keep *connections* longer than any TTL. `Sink.in_use` is asked before an address is
closed, and one in use is kept for another floor.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from dsecd.resolver.budget import Clock
from dsecd.resolver.names import Opening, Ruling
from dsecd.resolver.reserved import Address, keep
from libdsec.errors import Exhausted

FLOOR_S = 300.0

Pin = tuple[str, Address, float]  # name, address, seconds it is open from now on


class Sink(Protocol):
    """Who opens and closes addresses for one sandbox. Calls do not block for long (map updates).

    The same opening and address is admitted again to prolong it, and withdrawn once. For `ttl_s`
    new connections have to be possible; a sink may refuse them later, or keep no clock at all. The
    connections that there are have to work until the address is withdrawn.
    """

    def admit(self, opening: Opening, addresses: Sequence[Address], ttl_s: float) -> None:
        """Open `addresses`; the answer that holds them is sent after this returned.

        Raises OSError or `DSecError`; then the sandbox gets SERVFAIL.
        """

    def withdraw(self, opening: Opening, addresses: Sequence[Address]) -> None:
        """Close `addresses`. Raises nothing."""

    def in_use(self, addresses: Sequence[Address]) -> Iterable[Address]:
        """Return those of `addresses` to which the sandbox has connections now."""


class Pins:
    """The open addresses of one sandbox, by name."""

    def __init__(self, sink: Sink, clock: Clock, *, floor_s: float = FLOOR_S, most: int) -> None:
        self._sink, self._clock, self._floor_s, self._most = sink, clock, floor_s, most
        self._names: dict[str, dict[Address, float]] = {}  # until when
        self._openings: dict[str, tuple[Opening, ...]] = {}
        self._holders: dict[tuple[Opening, Address], set[str]] = {}
        self._due: list[tuple[float, str, Address]] = []  # heap; entries may be out of date
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def admit(self, name: str, ruling: Ruling, addresses: Sequence[Address], ttl_s: float) -> None:
        """Have `addresses` open for `name` for as long as an answer with `ttl_s` needs them.

        Raises `Exhausted` when the sandbox has too many, or what the sink raises; what was not
        open before is not recorded then, and what the sink opened nevertheless is closed.
        """
        if not ruling.pinned:
            return
        now = self._clock()
        needed = now + max(ttl_s, self._floor_s)
        held = self._names.get(name, {})
        short = [address for address in addresses if held.get(address, 0.0) < needed]
        if not short:
            return
        added = sum(address not in held for address in short)
        if self._count + added > self._most:
            raise Exhausted(
                f"{self._most} addresses of names are open; use fewer names, or wait until some "
                "expire"
            )
        until = needed + self._floor_s  # half of it spare: a name in use is not admitted each time
        try:
            for opening in ruling.pinned:
                self._sink.admit(opening, short, until - now)
        except BaseException:
            self._close_unheld(ruling.pinned, short)
            raise
        held = self._names.setdefault(name, held)
        self._openings[name] = ruling.pinned
        self._count += added
        for address in short:
            held[address] = until
            heapq.heappush(self._due, (until, name, address))
            for opening in ruling.pinned:
                self._holders.setdefault((opening, address), set()).add(name)

    def _close_unheld(self, openings: Iterable[Opening], addresses: Sequence[Address]) -> None:
        for opening in openings:
            unheld = [address for address in addresses if (opening, address) not in self._holders]
            if unheld:
                self._sink.withdraw(opening, unheld)

    def expire(self) -> None:
        """Close what is due. To be called every few seconds."""
        now = self._clock()
        due: set[tuple[str, Address]] = set()  # the heap may have several entries of one
        while self._due and self._due[0][0] <= now:
            _, name, address = heapq.heappop(self._due)
            if self._names.get(name, {}).get(address, now + 1) <= now:
                due.add((name, address))
        if not due:
            return
        busy = set(self._sink.in_use(sorted({address for _, address in due}, key=_order)))
        closing: dict[Opening, list[Address]] = {}
        for name, address in due:
            if address in busy:  # not prolonged: whoever asks again has it admitted again
                heapq.heappush(self._due, (now + self._floor_s, name, address))
            else:
                self._drop(name, address, closing)
        self._close(closing)

    def _drop(self, name: str, address: Address, closing: dict[Opening, list[Address]]) -> None:
        """Forget an address of a name; what nobody else holds is added to `closing`."""
        del self._names[name][address]
        self._count -= 1
        for opening in self._openings[name]:
            holders = self._holders[opening, address]
            holders.discard(name)
            if not holders:
                del self._holders[opening, address]
                closing.setdefault(opening, []).append(address)
        if not self._names[name]:
            del self._names[name], self._openings[name]

    def _close(self, closing: dict[Opening, list[Address]]) -> None:
        for opening, addresses in closing.items():
            self._sink.withdraw(opening, addresses)

    def replace(self, judge: Callable[[str], Ruling]) -> None:
        """Follow a new policy: close what it does not open, at once, connections or not.

        What it opens anew for names that are held is opened. Raises what the sink raises, after
        everything is closed; the names have to be asked for again then.
        """
        before, names = set(self._holders), self._names
        self._names, self._openings, self._holders, self._count = {}, {}, {}, 0
        for name, held in names.items():
            self._keep(name, judge(name), held)
        self._close(_by_opening(before - self._holders.keys()))
        now = self._clock()
        try:
            for (opening, address), holders in self._holders.items():
                if (opening, address) not in before:
                    until = max(self._names[name][address] for name in holders)
                    self._sink.admit(opening, [address], max(until - now, 0.0))
        except BaseException:
            self.clear()
            raise

    def _keep(self, name: str, ruling: Ruling, held: dict[Address, float]) -> None:
        """Record what `ruling` leaves of the addresses that `name` had."""
        kept = {a: held[a] for a in keep(held, private=ruling.private)} if ruling.pinned else {}
        if not kept:
            return
        self._names[name], self._openings[name] = kept, ruling.pinned
        self._count += len(kept)
        for address in kept:
            for opening in ruling.pinned:
                self._holders.setdefault((opening, address), set()).add(name)

    def clear(self) -> None:
        """Close everything."""
        closing = _by_opening(self._holders)
        self._names, self._openings, self._holders, self._due = {}, {}, {}, []
        self._count = 0
        self._close(closing)

    def held(self) -> list[Pin]:
        """Return what is open, to be journalled: a daemon that is restarted `restore`s it."""
        now = self._clock()
        return [
            (name, address, max(until - now, 0.0))
            for name, addresses in self._names.items()
            for address, until in addresses.items()
        ]

    def restore(self, pins: Iterable[Pin], judge: Callable[[str], Ruling]) -> None:
        """Open again what `held` returned, as far as the policy still says so."""
        for name, address, left_s in pins:
            ruling = judge(name)
            self.admit(name, ruling, keep([address], private=ruling.private), left_s)


def _by_opening(keys: Iterable[tuple[Opening, Address]]) -> dict[Opening, list[Address]]:
    found: dict[Opening, list[Address]] = {}
    for opening, address in keys:
        found.setdefault(opening, []).append(address)
    return found


def _order(address: Address) -> tuple[int, int]:
    return address.version, int(address)
