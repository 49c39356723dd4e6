"""Asking the host's resolvers, none of which is trusted to be well or even to be itself.

A query has a random id, a source port that the kernel picks at random (one socket a query), and
letters of random case (draft-vixie-dnsext-dns0x20): what comes off the path has to guess all three.
A server that does not repeat the case is asked over TCP instead. One that fails is asked last for a
while.
"""

from __future__ import annotations

import asyncio
import ipaddress
import secrets
import socket
import struct
import time
from collections.abc import Iterable, Sequence

import dns.name
import dns.rcode
import dns.rdatatype
import msgspec

from dsecd.resolver import messages
from dsecd.resolver.budget import Clock
from dsecd.resolver.messages import Answer, BadAnswer, Truncated
from libdsec.errors import InvalidArgument, Unavailable

STRAYS_MOST = 32  # datagrams that are no response to us, before TCP is used: somebody guesses
_EDNS_REFUSED = (dns.rcode.FORMERR, dns.rcode.NOTIMP)


class Upstream(msgspec.Struct, frozen=True):
    """A recursive resolver. The daemon reaches loopback ones too, unlike sandboxes."""

    host: str
    port: int = 53


class Timing(msgspec.Struct, frozen=True, kw_only=True):
    """Clients give up after 2 s, ask again (resolv.conf of sandboxes), and meet the same query."""

    try_s: float = 0.7  # of each upstream in turn, doubled with each round
    total_s: float = 3.9
    rounds: int = 3
    penalty_s: float = 10.0


def upstreams(servers: Iterable[str]) -> tuple[Upstream, ...]:
    """Return the upstreams of the configuration. Raises `InvalidArgument`."""
    found = []
    for server in servers:
        try:
            found.append(Upstream(str(ipaddress.ip_address(server))))
        except ValueError as error:
            raise InvalidArgument(
                f"{server!r} is no IP address; write the addresses of DNS servers",
                field="network.resolvers",
            ) from error
    return tuple(found)


class Forwarder:
    """Asks upstreams, at most `concurrent` queries at once. Belongs to one event loop."""

    def __init__(
        self,
        servers: Sequence[Upstream],
        *,
        timing: Timing = Timing(),  # noqa: B008 - frozen
        concurrent: int = 1024,
        clock: Clock = time.monotonic,
    ) -> None:
        self._servers = tuple(servers)
        self._timing = timing
        self._clock = clock
        self._free = asyncio.Semaphore(concurrent)
        self._shunned: dict[Upstream, float] = {}  # until when
        self._plain: set[Upstream] = set()  # do not know EDNS

    async def ask(self, name: str, rdtype: int) -> Answer:
        """Return the answer for `name`. Raises `Unavailable` when no upstream gives one."""
        if not self._servers:
            raise Unavailable("the host has no DNS server; set network.resolvers")
        reason: Exception | None = None
        try:
            async with asyncio.timeout(self._timing.total_s), self._free:
                for attempt in range(self._timing.rounds):
                    for server in self._order():
                        try:
                            answer = await self._try(server, name, rdtype, attempt)
                            self._shunned.pop(server, None)
                            return answer
                        except (BadAnswer, OSError, EOFError) as error:  # with TimeoutError
                            reason = error
                            self._shunned[server] = self._clock() + self._timing.penalty_s
        except TimeoutError as error:
            reason = reason or error
        raise Unavailable(f"no DNS server answered for {name}: {reason!r}") from reason

    def _order(self) -> list[Upstream]:
        """Return the upstreams in their order, those that failed of late last."""
        now = self._clock()
        return sorted(self._servers, key=lambda server: self._shunned.get(server, 0.0) > now)

    async def _try(self, server: Upstream, name: str, rdtype: int, attempt: int) -> Answer:
        async with asyncio.timeout(self._timing.try_s * 2**attempt):
            try:
                return await self._exchange(server, name, rdtype)
            except BadAnswer as error:
                if server in self._plain or error.rcode not in _EDNS_REFUSED:
                    raise
                self._plain.add(server)
                return await self._exchange(server, name, rdtype)

    async def _exchange(self, server: Upstream, name: str, rdtype: int) -> Answer:
        asked = mixed_case(name)
        identity = secrets.randbelow(1 << 16)
        wire = messages.make_query(asked, rdtype, identity, edns=server not in self._plain)
        response = await _datagram(server, wire, identity)
        if response is not None and _same_case(response, wire):
            try:
                return messages.read_answer(response, asked, rdtype)
            except Truncated:
                pass
        try:
            return messages.read_answer(await _stream(server, wire, identity), asked, rdtype)
        except Truncated as error:
            raise BadAnswer("truncated over TCP") from error


def mixed_case(name: str) -> dns.name.Name:
    """Return `name` with each letter upper or lower case at random."""
    bits = secrets.randbits(len(name))
    return dns.name.from_text(
        "".join(char.upper() if bits >> at & 1 else char for at, char in enumerate(name)) + "."
    )


def _same_case(response: bytes, query: bytes) -> bool:
    """Return whether both have the same question, or differ in more than its letters' case."""
    end = query.index(0, 12)
    ours, theirs = query[12:end], response[12:end]
    return ours == theirs or ours.lower() != theirs.lower()


async def _datagram(server: Upstream, wire: bytes, identity: int) -> bytes | None:
    """Return the response over UDP; None when too many came that were none. Raises OSError."""
    loop = asyncio.get_running_loop()
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as sock:
        sock.connect((server.host, server.port))  # the kernel drops what others send
        await loop.sock_sendall(sock, wire)
        for _ in range(STRAYS_MOST):
            response = await loop.sock_recv(sock, messages.RESPONSE_MOST + 1)
            if messages.echoes(response, identity):
                return response
    return None


async def _stream(server: Upstream, wire: bytes, identity: int) -> bytes:
    """Return the response over TCP. Raises OSError, EOFError, `BadAnswer`."""
    reader, writer = await asyncio.open_connection(server.host, server.port)
    try:
        writer.write(struct.pack("!H", len(wire)) + wire)
        (size,) = struct.unpack("!H", await reader.readexactly(2))
        if size > messages.RESPONSE_MOST:
            raise BadAnswer(f"{size} bytes are no answer about addresses")
        response = await reader.readexactly(size)
    finally:
        writer.transport.abort()  # nothing more is expected, and nobody waits for the close
    if not messages.echoes(response, identity):
        raise BadAnswer("the response has another id")
    return response
