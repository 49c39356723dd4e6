"""The sockets that a sandbox's queries come to, and how little they may cost the daemon.

What arrives faster than the sandbox's rate stays in the kernel's buffers, where it is dropped: a
flood then costs the daemon as many wake-ups as `RESUME_S` allows, and nobody else notices. The
sockets may have been bound in any network namespace; a socket stays in the one it was made in
(network_namespaces(7)).
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
from collections.abc import Coroutine, Sequence
from typing import Any

import msgspec

from dsecd.resolver.messages import PAYLOAD
from dsecd.resolver.queries import QUERY_MOST, Query
from dsecd.resolver.sandbox import SandboxResolver
from libdsec.errors import Unavailable

BATCH = 16  # datagrams at a time, before others have their turn
RESUME_S = 0.05
IDLE_S = 5.0  # of a TCP connection
BUFFER_BYTES = 64 << 10  # of a UDP socket: what waits for its turn


class Sockets(msgspec.Struct, frozen=True, kw_only=True):
    """A bound UDP and a listening TCP socket of one address. The listener closes them."""

    udp: socket.socket
    tcp: socket.socket


def bind(host: str, port: int = 53) -> Sockets:
    """Return sockets of `host`, made in the calling thread's network namespace.

    Bind an address, not a wildcard: a reply has the address that the socket has. Port 0 takes a
    free one, the same for both. Raises `Unavailable`.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with contextlib.ExitStack() as undo:
        try:
            tcp = undo.enter_context(_new(family, socket.SOCK_STREAM))
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tcp.bind((host, port))
            tcp.listen(16)
            udp = undo.enter_context(_new(family, socket.SOCK_DGRAM))
            udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            udp.bind((host, tcp.getsockname()[1]))
        except OSError as error:
            raise Unavailable(
                f"cannot answer DNS queries at {host} port {port}: {error.strerror}; "
                "find out what else listens there"
            ) from error
        undo.pop_all()
        return Sockets(udp=udp, tcp=tcp)


def _new(family: int, kind: int) -> socket.socket:
    sock = socket.socket(family, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
    return sock


class Listener:
    """Serves one sandbox's sockets from `start` until `close`. Belongs to one event loop."""

    def __init__(self, resolver: SandboxResolver, sockets: Sequence[Sockets]) -> None:
        self._resolver = resolver
        self._sockets = tuple(sockets)
        self._loop = asyncio.get_running_loop()
        self._tasks: set[asyncio.Task[None]] = set()
        self._paused: dict[socket.socket, asyncio.TimerHandle] = {}
        self._open: set[socket.socket] = set()
        self._closed = False
        self._connections = asyncio.Semaphore(resolver.limits.connections)

    def start(self) -> None:
        for pair in self._sockets:
            self._listen(pair.udp)
            self._spawn(self._accept(pair.tcp))

    async def close(self) -> None:
        """Stop answering and close the sockets; a second time does nothing."""
        if self._closed:
            return
        self._closed = True
        for pair in self._sockets:
            self._loop.remove_reader(pair.udp)
        for timer in self._paused.values():
            timer.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for connection in self._open:  # of tasks that had not begun
            connection.close()
        for pair in self._sockets:
            pair.udp.close()
            pair.tcp.close()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _listen(self, udp: socket.socket) -> None:
        self._paused.pop(udp, None)
        self._loop.add_reader(udp, self._read, udp)

    def _read(self, udp: socket.socket) -> None:
        """Answer what is waiting, or leave it to the kernel for a moment."""
        for _ in range(BATCH):
            if not self._resolver.rate.has():
                self._loop.remove_reader(udp)
                self._paused[udp] = self._loop.call_later(RESUME_S, self._listen, udp)
                return
            try:
                wire, peer = udp.recvfrom(PAYLOAD + 1)
            except OSError:  # nothing left, or an error that a reply of ours met
                return
            self._resolver.rate.take()
            if len(wire) > PAYLOAD:
                continue
            found = self._resolver.answer_now(wire, stream=False)
            if isinstance(found, Query):
                self._spawn(self._answer_later(udp, found, peer))
            elif found is not None:
                _send(udp, found, peer)

    async def _answer_later(self, udp: socket.socket, query: Query, peer: Any) -> None:
        _send(udp, await self._resolver.answer(query, stream=False), peer)

    async def _accept(self, tcp: socket.socket) -> None:
        while True:
            await self._connections.acquire()
            try:
                connection, _ = await self._loop.sock_accept(tcp)
            except OSError:  # gone before it was accepted, or no descriptor is free
                self._connections.release()
                await asyncio.sleep(RESUME_S)
                continue
            except BaseException:
                self._connections.release()
                raise
            self._open.add(connection)
            self._spawn(self._serve(connection))

    async def _serve(self, connection: socket.socket) -> None:
        """Answer the queries of a connection one after the other (RFC 7766 allows it)."""
        try:
            with connection, contextlib.suppress(OSError, EOFError):  # with TimeoutError
                while True:
                    await self._turn()
                    async with asyncio.timeout(IDLE_S):
                        wire = await self._receive(connection)
                    found = self._resolver.answer_now(wire, stream=True)
                    if isinstance(found, Query):
                        found = await self._resolver.answer(found, stream=True)
                    if found is None:
                        return
                    async with asyncio.timeout(IDLE_S):
                        framed = struct.pack("!H", len(found)) + found
                        await self._loop.sock_sendall(connection, framed)
        finally:
            self._open.discard(connection)
            self._connections.release()

    async def _turn(self) -> None:
        """Return when the sandbox may ask again."""
        while not self._resolver.rate.take():  # noqa: ASYNC110 - it is time that brings tokens
            await asyncio.sleep(RESUME_S)

    async def _receive(self, connection: socket.socket) -> bytes:
        """Return the next message. Raises EOFError at the end, or when it is too large."""
        (size,) = struct.unpack("!H", await self._exactly(connection, 2))
        if size > QUERY_MOST:
            raise EOFError
        return await self._exactly(connection, size)

    async def _exactly(self, connection: socket.socket, size: int) -> bytes:
        data = b""
        while len(data) < size:
            part = await self._loop.sock_recv(connection, size - len(data))
            if not part:
                raise EOFError
            data += part
        return data


def _send(udp: socket.socket, reply: bytes, peer: Any) -> None:
    with contextlib.suppress(OSError):  # a full buffer or a port that is closed: the client's loss
        udp.sendto(reply, peer)
