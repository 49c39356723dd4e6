"""The resolver of one daemon: what its sandboxes share, and the timer that closes addresses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from dsecd.policy.rules import NetPolicy
from dsecd.resolver import reserved
from dsecd.resolver.budget import Clock, Limits
from dsecd.resolver.listener import Listener, Sockets
from dsecd.resolver.lookup import Caching, Lookups
from dsecd.resolver.pins import Pin, Sink
from dsecd.resolver.queries import ADDRESS_TYPES
from dsecd.resolver.sandbox import Refusal, SandboxResolver
from dsecd.resolver.upstream import Forwarder, Timing, Upstream

SWEEP_S = 5.0

log = logging.getLogger(__name__)


class Served:
    """A sandbox that is answered: its resolver and its sockets."""

    def __init__(self, resolver: SandboxResolver, listener: Listener, forget: Callable[[], object]):
        self.resolver = resolver
        self._listener = listener
        self._forget = forget

    async def close(self) -> None:
        """Stop answering, close the sockets and all addresses of names."""
        self._forget()
        await self._listener.close()
        self.resolver.close()

    async def leave(self) -> list[Pin]:
        """Stop answering and close the sockets, with the addresses left open for a next daemon."""
        self._forget()
        await self._listener.close()
        return self.resolver.held()


class Resolver:
    """Serves DNS to sandboxes, from construction to `close`. Belongs to one event loop.

    `refused` are networks that no name may lead to: the host's own addresses, the pools of the
    sandboxes, the metadata services of clouds.
    """

    def __init__(
        self,
        servers: Sequence[Upstream],
        *,
        refused: Iterable[reserved.Network] = (),
        timing: Timing = Timing(),  # noqa: B008 - frozen
        caching: Caching = Caching(),  # noqa: B008 - frozen
        clock: Clock = time.monotonic,
    ) -> None:
        self._clock = clock
        self._refused = tuple(refused)
        self._lookups = Lookups(
            Forwarder(servers, timing=timing, clock=clock), caching=caching, clock=clock
        )
        self._served: dict[int, Served] = {}
        self._sweeper = asyncio.create_task(self._sweep())

    def open(
        self,
        policy: NetPolicy,
        sink: Sink,
        sockets: Sequence[Sockets],
        *,
        on_refusal: Callable[[Refusal], None],
        limits: Limits = Limits(),  # noqa: B008 - frozen
        pins: Iterable[Pin] = (),
        overrides: Mapping[str, reserved.Address] | None = None,
        relay: reserved.Address | None = None,
    ) -> Served:
        """Answer the sandbox at `sockets` from now on, which belong to the result.

        `pins` are those that a daemon before this one left. Raises what the sink raises; the
        sockets stay the caller's then.
        """
        resolver = SandboxResolver(
            policy, self._lookups, sink,
            on_refusal=on_refusal, refused=self._refused, overrides=overrides, relay=relay,
            limits=limits, clock=self._clock,
        )  # fmt: skip
        resolver.restore(pins)
        listener = Listener(resolver, sockets)
        served = Served(resolver, listener, lambda: self._served.pop(id(listener), None))
        self._served[id(listener)] = served
        listener.start()
        return served

    async def find(self, name: str, *, private: bool) -> list[reserved.Address]:
        """Return the addresses of `name` that an answer to a sandbox may hold, IPv4 first."""
        found: list[reserved.Address] = []
        for rdtype in ADDRESS_TYPES:
            answer = await self._lookups.find(name, rdtype)
            found += reserved.keep(answer.addresses, private=private, refused=self._refused)
        return found

    async def _sweep(self) -> None:
        while True:
            await asyncio.sleep(SWEEP_S)
            for served in list(self._served.values()):
                try:
                    served.resolver.expire()
                except Exception:
                    log.exception("closing the addresses of names failed")
                await asyncio.sleep(0)  # thousands of sandboxes need not be one step

    async def close(self) -> None:
        """Stop. What was not closed before is left as `Served.leave` leaves it."""
        self._sweeper.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._sweeper
        for served in list(self._served.values()):
            await served.leave()
        await self._lookups.close()
