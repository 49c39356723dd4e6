"""A DNS server for tests, over real UDP and TCP sockets of loopback, that behaves as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterable

import dns.flags
import dns.message
import dns.name
import dns.rrset

from dsecd.resolver import Upstream, bind

Behaviour = Callable[["dns.message.Message", bool], Iterable[bytes]]


def record(owner: object, rdtype: str, *data: str, ttl: int = 60) -> dns.rrset.RRset:
    return dns.rrset.from_text_list(owner, ttl, "IN", rdtype, data)


def response(
    query: dns.message.Message, *answer: dns.rrset.RRset, rcode: int = 0, flags: int = 0
) -> dns.message.Message:
    message = dns.message.make_response(query, recursion_available=True)
    message.set_rcode(rcode)
    message.flags |= flags
    message.answer += answer
    return message


def address(*addresses: str, ttl: int = 60) -> Behaviour:
    """Answer every A question with `addresses`, AAAA with nothing."""

    def behave(query: dns.message.Message, stream: bool) -> Iterable[bytes]:
        question = query.question[0]
        found = [record(question.name, "A", *addresses, ttl=ttl)] if question.rdtype == 1 else []
        return [response(query, *found).to_wire()]

    return behave


class FakeUpstream:
    """Answers with what `behaviour` yields, in one datagram or one message each."""

    def __init__(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        self.asked: list[tuple[dns.message.Message, bool]] = []
        self.wires: list[bytes] = []
        self.ports: list[int] = []
        self._sockets = bind("127.0.0.1", 0)
        self.place = Upstream("127.0.0.1", self._sockets.udp.getsockname()[1])
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def names(self) -> list[str]:
        return [query.question[0].name.to_text().lower() for query, _ in self.asked]

    def _respond(self, wire: bytes, stream: bool) -> Iterable[bytes]:
        query = dns.message.from_wire(wire)
        self.asked.append((query, stream))
        self.wires.append(wire)
        return self.behaviour(query, stream)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            wire, peer = self._sockets.udp.recvfrom(65535)
            self.ports.append(peer[1])
            for reply in self._respond(wire, False):
                self._sockets.udp.sendto(reply, peer)

    async def _accept(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            connection, _ = await loop.sock_accept(self._sockets.tcp)
            task = asyncio.create_task(self._serve(connection))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _serve(self, connection: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        with connection, contextlib.suppress(OSError):
            wire = await loop.sock_recv(connection, 65535)
            for reply in self._respond(wire[2:], True):
                await loop.sock_sendall(connection, struct.pack("!H", len(reply)) + reply)

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[FakeUpstream]:
        loop = asyncio.get_running_loop()
        loop.add_reader(self._sockets.udp, self._read)
        accept = asyncio.create_task(self._accept())
        try:
            yield self
        finally:
            loop.remove_reader(self._sockets.udp)
            tasks = [accept, *self._tasks]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            self._sockets.udp.close()
            self._sockets.tcp.close()
