"""The relay of one sandbox: serves one address inside for all names that its policy opens."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence

import h11

from dsecd.doors.gate import Arrival, Doors, Gate, Limits, Refusal
from dsecd.doors.link import GOODBYE_S, Link
from dsecd.doors.reach import Reach
from dsecd.policy.rules import CHECKED_PORTS
from dsecd.relay.hello import BadHello
from dsecd.relay.tls import UNRECOGNIZED, Crossing, read_hello
from dsecd.resolver.budget import Clock
from dsecd.resolver.reserved import Address
from dsecd.secrets import heads
from dsecd.secrets.exchange import Exchange, Timing
from dsecd.secrets.heads import Refused
from dsecd.secrets.secret import Secret
from libdsec.errors import DSecError

HELLO_S = 20.0  # for a hello to come
HTTP, TLS = CHECKED_PORTS

Find = Callable[[str], Awaitable[Iterable[Address]]]
Open = Callable[[str, Sequence[str]], Awaitable[Link]]


class SandboxRelay:
    """Serves from `start` until `close`. Belongs to one event loop.

    `reach` is what the policy says, `find` gives the addresses of a name; `open_tls` and
    `open_http` connect to one of them over TCP (`Dialer.open`).
    """

    def __init__(
        self,
        doors: Doors,
        reach: Reach,
        *,
        find: Find,
        open_tls: Open,
        open_http: Open,
        on_refusal: Callable[[Refusal], None],
        limits: Limits = Limits(),  # noqa: B008 - frozen
        timing: Timing = Timing(),  # noqa: B008 - frozen
        clock: Clock = time.monotonic,
    ) -> None:
        self._doors, self._reach, self._find = doors, reach, find
        self._open_tls, self._open_http = open_tls, open_http
        self._on_refusal, self._timing = on_refusal, timing
        self._gate = Gate(limits, clock)

    @property
    def address(self) -> str:
        """What the sandbox's resolver has to answer."""
        return self._doors.address

    @property
    def connections(self) -> int:
        return self._gate.connections

    def start(self) -> None:
        self._gate.open(self._doors.tls, TLS, self._serve_tls)
        self._gate.open(self._doors.plain, HTTP, self._serve_http)

    def replace(self, reach: Reach) -> None:
        """Follow another policy: cut the connections to names that it does not open."""
        self._reach = reach
        self._gate.cut(self._opens)

    async def close(self) -> None:
        """End all connections and close the sockets; a second time does nothing."""
        await self._gate.close()
        self._doors.close()

    async def _serve_tls(self, arrival: Arrival) -> None:
        client = await arrival.link()
        try:
            async with asyncio.timeout(HELLO_S):
                arrival.host, hello = await read_hello(client.reader)
            await self._cross(client, arrival.host, hello)
        except BadHello as error:
            self._report(arrival.host, str(error))
            await client.send(UNRECOGNIZED)
            await client.finish(GOODBYE_S)
        except DSecError as error:
            self._report(arrival.host, error.message)
        finally:
            client.abort()

    async def _cross(self, client: Link, host: str, hello: bytes) -> None:
        """Raises `BadHello`, `DSecError`, OSError."""
        if not self._opens(host, TLS):
            raise BadHello(_closed(host, TLS))
        server = await self._open_tls(host, await self._addresses(host, TLS))
        try:
            await server.send(hello)
            await Crossing(client, server, host).serve()
        finally:
            server.abort()

    async def _serve_http(self, arrival: Arrival) -> None:
        client = await arrival.link()

        def grant(request: h11.Request) -> Secret:
            arrival.host = host = heads.named_host(request)
            if not self._opens(host, HTTP):
                raise Refused(403, _closed(host, HTTP))
            return Secret(host, ())

        async def dial(host: str) -> Link:
            return await self._open_http(host, await self._addresses(host, HTTP))

        try:
            exchange = Exchange(
                client, grant, dial=dial, turn=self._gate.turn,
                on_refusal=lambda reason: self._report(arrival.host, reason),
                timing=self._timing,
            )  # fmt: skip
            await exchange.serve()
        finally:
            client.abort()

    def _opens(self, host: str, port: int) -> bool:
        return self._reach.ruling(host, port) is not None

    async def _addresses(self, host: str, port: int) -> list[str]:
        return self._reach.allowed(await self._find(host), port)

    def _report(self, host: str, reason: str) -> None:
        if self._gate.may_report():
            self._on_refusal(Refusal(host=host, reason=reason))


def _closed(host: str, port: int) -> str:
    return f"the policy does not allow {host} at tcp port {port}"
