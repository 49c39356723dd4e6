"""Serves the names with secrets of one sandbox at their doors inside."""

from __future__ import annotations

import functools
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import h11

from dsecd.doors.gate import PLAIN_PORT, TLS_PORT, Arrival, Doors, Gate, Limits, Refusal
from dsecd.doors.link import Link
from dsecd.resolver.budget import Clock
from dsecd.secrets.exchange import Exchange, Timing
from dsecd.secrets.secret import Secret

Find = Callable[[str], Awaitable[Sequence[str]]]
Open = Callable[[str, Sequence[str]], Awaitable[Link]]
Context = Callable[[str], ssl.SSLContext]


class SandboxProxy:
    """Serves the names of one sandbox from `start` until `close`. Belongs to one event loop.

    `find` gives the addresses of a name that the policy lets it reach, `open_link` connects to one
    of them (`Dialer.open`), `context` gives the certificate of a name (`Authority.context`).
    """

    def __init__(
        self,
        secrets: Sequence[Secret],
        doors: Sequence[Doors],
        context: Context,
        *,
        find: Find,
        open_link: Open,
        on_refusal: Callable[[Refusal], None],
        limits: Limits = Limits(),  # noqa: B008 - frozen
        timing: Timing = Timing(),  # noqa: B008 - frozen
        clock: Clock = time.monotonic,
    ) -> None:
        self._served = tuple(zip(secrets, doors, strict=True))
        self._context, self._find, self._open_link = context, find, open_link
        self._on_refusal, self._timing = on_refusal, timing
        self._allowed = frozenset(secret.host for secret in secrets)
        self._gate = Gate(limits, clock)

    @property
    def overrides(self) -> dict[str, str]:
        """What the sandbox's resolver has to answer: the address of each name."""
        return {secret.host: doors.address for secret, doors in self._served}

    @property
    def connections(self) -> int:
        return self._gate.connections

    def start(self) -> None:
        for secret, doors in self._served:
            tls = functools.partial(self._serve, secret, self._context)
            plain = functools.partial(self._serve, secret, None)
            self._gate.open(doors.tls, TLS_PORT, tls, secret.host)
            self._gate.open(doors.plain, PLAIN_PORT, plain, secret.host)

    def replace(self, allowed: Collection[str]) -> None:
        """Serve these names only from now on, and cut the connections of all others."""
        self._allowed = frozenset(allowed)
        self._gate.cut(lambda host, _: host in self._allowed)

    async def close(self) -> None:
        """End all connections and close the sockets; a second time does nothing."""
        await self._gate.close()
        for _, doors in self._served:
            doors.close()

    async def _serve(self, secret: Secret, context: Context | None, arrival: Arrival) -> None:
        # fails where there is no TLS, not our authority, another name, or silence
        link = await arrival.link(None if context is None else context(secret.host))

        def grant(_: h11.Request) -> Secret:
            return secret

        try:
            if secret.host not in self._allowed:
                return
            exchange = Exchange(
                link, grant, dial=self._dial, turn=self._gate.turn,
                on_refusal=lambda reason: self._report(secret.host, reason), timing=self._timing,
            )  # fmt: skip
            await exchange.serve()
        finally:
            link.abort()

    async def _dial(self, host: str) -> Link:
        return await self._open_link(host, await self._find(host))

    def _report(self, host: str, reason: str) -> None:
        if self._gate.may_report():
            self._on_refusal(Refusal(host=host, reason=reason))
