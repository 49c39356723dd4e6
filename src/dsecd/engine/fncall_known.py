"""Calls that have a key: each is made once, however often it is asked for."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

import msgspec

from libdsec.errors import AlreadyExists
from libdsec.model import DSecFnCallArgs, FnCallResult

KEPT_S = 600.0
KEPT_BYTES = 64 << 20  # of all results together: the oldest go first
_SMALL = 512  # bytes of a result beside what it holds

Make = Callable[[], Coroutine[Any, Any, FnCallResult]]


@dataclass(slots=True)
class _Call:
    asked: bytes  # digest of its arguments, which may be large
    task: asyncio.Task[FnCallResult]
    waiters: int = 0
    ended: float = 0.0
    size: int = 0


class KnownCalls:
    """By owner and key: calls that run, and the results of those that ran."""

    def __init__(self) -> None:
        self._running: dict[tuple[str, str], _Call] = {}
        self._ended: OrderedDict[tuple[str, str], _Call] = OrderedDict()
        self._bytes = 0

    async def once(self, owner: str, key: str, args: DSecFnCallArgs, make: Make) -> FnCallResult:
        """Return the result of the one call with this key, which `make` makes if it is the first.

        A cancelled wait leaves the call running: see `give_up`. A call that failed is forgotten.
        Raises `AlreadyExists` when the key was used for another call, and what `make` raises.
        """
        self._forget()
        place, asked = (owner, key), _digest(args)
        call = self._running.get(place) or self._ended.get(place)
        if call is None:
            call = self._running[place] = self._begin(place, asked, make)
        elif call.asked != asked:
            raise AlreadyExists(f"key {key!r} was used for a different call")
        call.waiters += 1
        try:
            return await asyncio.shield(call.task)
        finally:
            call.waiters -= 1

    def _begin(self, place: tuple[str, str], asked: bytes, make: Make) -> _Call:
        task = asyncio.get_running_loop().create_task(make(), name="fncall")
        call = _Call(asked, task)
        task.add_done_callback(lambda _: self._over(place, call))
        return call

    def give_up(self, owner: str, key: str) -> None:
        """Kill the call unless somebody else waits for it."""
        call = self._running.get((owner, key))
        if call is not None and not call.waiters:
            del self._running[owner, key]  # asked for again it is made anew
            call.task.cancel()

    def close(self) -> None:
        """Give all up."""
        for call in self._running.values():
            call.task.cancel()

    def _over(self, place: tuple[str, str], call: _Call) -> None:
        failed = call.task.cancelled() or call.task.exception() is not None
        if self._running.get(place) is not call:
            return  # given up
        del self._running[place]
        if failed:
            return
        result = call.task.result()
        parts = (result.value_json, result.stdout, result.stderr, *result.files.values())
        call.size = _SMALL + sum(map(len, parts))
        call.ended = asyncio.get_running_loop().time()
        self._ended[place] = call
        self._bytes += call.size
        self._forget()

    def _forget(self) -> None:
        oldest = asyncio.get_running_loop().time() - KEPT_S
        while self._ended:
            first = next(iter(self._ended.values()))
            if first.ended > oldest and self._bytes <= KEPT_BYTES:
                return
            self._ended.popitem(last=False)
            self._bytes -= first.size


def _digest(args: DSecFnCallArgs) -> bytes:
    return hashlib.sha256(msgspec.msgpack.encode(args, order="deterministic")).digest()
