"""What this host needs of a store that others share: a lease on the layers it has mounted.

``leases/host-<id>``, more parts of it ``leases/host-<id>-<n>``; the id is random and lies in the
state directory. A layer is added before its first mount, in one write for all that wait; layers
are dropped when the lease is renewed. It holds for days and is renewed every hour, so neither
clocks that differ nor a store that is away for hours end it.

What an earlier daemon of the state directory listed and this one does not have mounted is kept for
`INHERITED_S`, since it may belong to another host: that of the directory of which ours is a copy.
As soon as two write one lease, each at its own time, one finds the other's and takes a new id.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import msgspec

from dsecd.images import marks
from dsecd.images.records import Lease
from dsecd.images.stores.abc import Conflict, Store
from libdsec.errors import DSecError, NotFound, Unavailable

logger = logging.getLogger("dsecd.layers")
HELD_S = 3 * 86400.0
RENEW_S = 3600.0
RETRY_S = 60.0
INHERITED_S = 4 * RENEW_S
PART = 256  # layers; a record holds 64 KiB
_CLOSE_S = 10.0
_TRIES = 3


class _Taken(Exception):
    """Somebody else writes our lease."""


class _Part(msgspec.Struct):
    """One record of the lease: what it lists, and its version, None when it is not there."""

    version: str | None = None
    layers: set[str] = msgspec.field(default_factory=set)


class HostLease:
    """Usable after `start`. `used` returns the layers that are mounted or may be at any moment;
    `lost` is told of one that went while the lease could not be renewed.
    """

    def __init__(
        self,
        store: Store,
        state: Path,
        used: Callable[[], Iterable[str]],
        lost: Callable[[str], None],
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store, self._file = store, state / "host-id"
        self._used, self._lost, self._clock = used, lost, clock
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._id = ""
        self._parts: list[_Part] = []
        self._added: dict[int, set[str]] = {}  # by part, what a write is about to add
        self._inherited: set[str] = set()
        self._inherited_until = 0.0
        self._needed: collections.Counter[str] = collections.Counter()  # by `needing`
        self._writing = asyncio.Lock()
        self._until = 0.0  # what is listed is held for so long
        self._renewing: asyncio.Task[None] | None = None

    @property
    def id(self) -> str:
        return self._id

    async def start(self) -> None:
        """Take over the lease of an earlier daemon. Raises what the store raises."""
        self._id = await asyncio.to_thread(_read_id, self._file)
        self._until = await self._find()
        self._inherited = self._listed() - set(self._used())
        self._inherited_until = self._clock() + INHERITED_S
        await self.renew()
        self._renewing = asyncio.create_task(self._keep_renewing())

    async def close(self, leave_nothing: bool) -> None:
        """End; with `leave_nothing` nothing is mounted any more, and nothing is needed."""
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        try:
            async with asyncio.timeout(_CLOSE_S):
                if leave_nothing and not self._inherited:
                    async with self._writing:
                        await asyncio.gather(*(self._delete(n) for n in range(len(self._parts))))
                    return
                if not leave_nothing:  # what is listed stays mounted
                    self._inherited, self._inherited_until = self._listed(), math.inf
                await self.renew()  # it may be long until the next daemon
        except (DSecError, TimeoutError) as error:
            logger.warning("the lease of this host stays in the store as it is: %s", error)

    @contextlib.contextmanager
    def needing(self, layers: Collection[str]) -> Iterator[None]:
        """Within the block `layers` count as used, so that they get into the lease."""
        self._needed.update(layers)
        try:
            yield
        finally:
            self._needed.subtract(layers)
            self._needed += collections.Counter()  # drops those at 0

    async def secure(self, layers: Collection[str]) -> None:
        """Return when `layers`, used or needed, are in the lease and in the store to stay.

        Raises `NotFound` for one that is gone, and what the store raises.
        """
        while not self._holds(layers):
            gap = False
            async with self._writing:
                if not self._holds(layers):  # a write for others may have done it
                    gap = await self._write(grow=True)
            if gap:
                await self._look_again()
        await marks.look(self._store, layers)

    async def renew(self) -> None:
        """List what is used now, for the whole time again. Raises what the store raises."""
        async with self._writing:
            if self._clock() >= self._inherited_until:
                self._inherited.clear()
            gap = await self._write(grow=False)
        if gap:
            await self._look_again()

    def _holds(self, layers: Collection[str]) -> bool:
        return self._clock() < self._until and self._listed().issuperset(layers)

    def _listed(self) -> set[str]:
        return set().union(*(part.layers for part in self._parts))

    async def _keep_renewing(self) -> None:
        delay = RENEW_S
        while True:
            await asyncio.sleep(delay)
            try:
                await self.renew()
                delay = RENEW_S
            except DSecError as error:
                left = max(0.0, self._until - self._clock()) / 3600
                logger.warning(
                    "cannot renew the lease of this host, which holds for %.0f h: %s", left, error
                )
                delay = RETRY_S

    async def _look_again(self) -> None:
        """For a time nothing kept the layers: say which are gone."""
        for digest in list(self._used()):
            try:
                await marks.look(self._store, [digest])
            except NotFound:
                logger.error(
                    "layer %s was collected while this host had no lease in the store: what its "
                    "sandboxes have not read yet, they cannot read; import or build it again",
                    digest[:12],
                )
                self._lost(digest)
            except DSecError as error:
                logger.warning("cannot look whether layer %s is there: %s", digest[:12], error)

    # --- the record, with the lock held -----------------------------------------------------------

    async def _write(self, grow: bool) -> bool:
        """Bring the lease to what is needed; return whether for a time there was none.

        `grow`: layers are added and none dropped, and only the parts that change are written.
        """
        expired = self._clock() >= self._until
        grow = grow and not expired
        wanted = {*self._needed, *self._used(), *self._inherited}
        if grow:
            wanted |= self._listed()
        self._share_out(wanted)
        changed = set(self._added) if grow else set(range(len(self._parts)))
        try:
            return await self._put(changed, whole=not grow) or expired
        except _Taken:
            logger.warning(
                "another host writes the lease of this state directory, as if one were a copy of "
                "the other; this one takes a new id"
            )
            self._id = await asyncio.to_thread(_new_id, self._file)
            for part in self._parts:
                part.version = None
            return await self._put(set(range(len(self._parts))), whole=True) or expired

    def _share_out(self, wanted: set[str]) -> None:
        """Drop from the parts what is not wanted; what is new is listed only after `_put`."""
        self._added = {}
        missing = sorted(wanted - self._listed())
        for part in self._parts:
            part.layers &= wanted
        number = 0
        while missing or not self._parts:
            if number == len(self._parts):
                self._parts.append(_Part())
            room = PART - len(self._parts[number].layers)
            if room > 0:
                self._added[number] = set(missing[:room])
                missing = missing[room:]
            number += 1

    async def _put(self, numbers: Collection[int], whole: bool) -> bool:
        """Write these parts; `whole`: all of them, and the last ones go when they are empty.

        Returns whether one had vanished.
        """
        until = self._clock() + HELD_S
        puts = (self._put_part(number, until) for number in sorted(numbers))
        gone = await asyncio.gather(*puts, return_exceptions=True)
        for outcome in sorted(
            (one for one in gone if isinstance(one, BaseException)),
            key=lambda one: not isinstance(one, _Taken),
        ):
            raise outcome
        if whole:
            self._until = until
            while len(self._parts) > 1 and not self._parts[-1].layers:
                await self._delete(len(self._parts) - 1)
                self._parts.pop()
        return any(gone)

    async def _put_part(self, number: int, until: float) -> bool:
        """Write one part; return whether it had vanished. Raises `_Taken`."""
        part, gone = self._parts[number], False
        layers = part.layers | self._added.get(number, set())
        lease = Lease(holder=self._holder, expires_at=until, layers=sorted(layers))
        for _ in range(_TRIES):
            try:
                part.version = await self._store.swap_name(
                    self._key(number), msgspec.json.encode(lease), part.version
                )
            except Conflict:
                found = await self._store.read_name(self._key(number))
                if found is None:
                    gone, part.version = True, None
                elif msgspec.json.decode(found[0], type=Lease).holder == self._holder:
                    part.version = found[1]  # of a write whose answer was lost
                else:
                    raise _Taken from None
            else:
                part.layers = layers
                return gone
        raise Unavailable("the lease of this host in the store moves too often; try again")

    async def _find(self) -> float:
        """Read what an earlier daemon wrote; return until when it holds, now without any."""
        untils = []
        prefix = self._key(0)
        async for entry in self._store.list("leases/"):
            if not re.fullmatch(rf"{prefix}(-[0-9]{{1,4}})?", entry.key):
                continue
            number = int(entry.key[len(prefix) + 1 :] or 0)
            found = await self._store.read_name(entry.key)
            if found is not None:
                while len(self._parts) <= number:
                    self._parts.append(_Part())
                lease = msgspec.json.decode(found[0], type=Lease)
                self._parts[number] = _Part(found[1], set(lease.layers))
                untils.append(lease.expires_at)
        return min(untils, default=self._clock())

    async def _delete(self, number: int) -> None:
        await self._store.delete(self._key(number))

    def _key(self, number: int) -> str:
        return f"leases/host-{self._id}" + (f"-{number}" if number else "")


def _read_id(file: Path) -> str:
    """Return the id in `file`, a new one when there is none."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        found = file.read_text().strip()
        if re.fullmatch("[0-9a-f]{32}", found):
            return found
    return _new_id(file)


def _new_id(file: Path) -> str:
    made = secrets.token_hex(16)
    temporary = file.with_name(f".{file.name}.{made}")
    temporary.write_text(f"{made}\n")
    temporary.replace(file)
    return made
