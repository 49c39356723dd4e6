"""The sockets inside a sandbox that some of its names lead to, and the bounds of who comes.

They are bound in the sandbox's network namespace and accepted from by the daemon: a socket stays in
the namespace it was made in (network_namespaces(7)). How many connections and requests there are at
once is bounded, and what comes faster waits in the kernel's backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import socket
import ssl
import time
from collections.abc import Awaitable, Callable

import msgspec

from dsecd.doors.link import BUFFER_BYTES, Link
from dsecd.resolver.budget import Bucket, Clock
from libdsec.errors import Unavailable

TLS_PORT, PLAIN_PORT = 443, 80
HANDSHAKE_S = 30.0  # of a busy sandbox
TURN_S = 0.05  # between looks whether the rate allows another request
BACKLOG = 128
TRIES = 8  # addresses for one name: an old one is free again only when its sockets are


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one sandbox. A request, and a connection, each cost one of the rate."""

    connections: int = 128
    requests_burst: int = 512
    requests_per_s: float = 128.0
    events_burst: int = 20
    events_per_s: float = 5.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """What was not passed on, for the client and the log."""

    host: str
    reason: str


class Doors(msgspec.Struct, frozen=True, kw_only=True):
    """The listening sockets of one address. Who serves them closes them."""

    address: str
    tls: socket.socket
    plain: socket.socket

    def close(self) -> None:
        self.tls.close()
        self.plain.close()


def bind(address: str, tls_port: int = TLS_PORT, plain_port: int = PLAIN_PORT) -> Doors:
    """Return the sockets of an IPv4 address, in the calling thread's network namespace.

    Raises `Unavailable`. Other ports are for tests.
    """
    with contextlib.ExitStack() as undo:
        made = []
        for port in (tls_port, plain_port):
            try:
                sock = undo.enter_context(
                    socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
                )
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.bind((address, port))
                sock.listen(BACKLOG)
            except OSError as error:
                hint = "; end what listens at that port" if error.errno == errno.EADDRINUSE else ""
                raise Unavailable(
                    f"cannot listen at {address} port {port} in the sandbox: {error.strerror}{hint}"
                ) from error
            made.append(sock)
        undo.pop_all()
        return Doors(address=address, tls=made[0], plain=made[1])


def bind_free(network: int, number: int) -> Doors:
    """Return the sockets of the first address 127.`network`.ATTEMPT.`number` that is free.

    Anybody inside may take any of them while no daemon runs. Raises `Unavailable`.
    """
    for attempt in range(TRIES - 1):
        with contextlib.suppress(Unavailable):
            return bind(f"127.{network}.{attempt}.{number}")
    return bind(f"127.{network}.{TRIES - 1}.{number}")


class Arrival:
    """An accepted connection. `host` is whom it is for, "" while that is not known."""

    def __init__(self, sock: socket.socket, host: str, port: int) -> None:
        self.host, self.port = host, port
        self._sock: socket.socket | None = sock

    async def link(self, context: ssl.SSLContext | None = None) -> Link:
        """Return the connection, after its handshake. Raises OSError; it is closed then."""
        sock, self._sock = self._sock, None
        assert sock is not None
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=BUFFER_BYTES, loop=loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        wait_s = None if context is None else HANDSHAKE_S
        transport, _ = await loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=context,
            ssl_handshake_timeout=wait_s,
            ssl_shutdown_timeout=wait_s,
        )
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        return Link(reader, asyncio.StreamWriter(transport, protocol, reader, loop))

    def drop(self) -> None:
        """Close what never came to a transport."""
        if self._sock is not None:
            self._sock.close()
            self._sock = None


Serve = Callable[[Arrival], Awaitable[None]]


class Gate:
    """Accepts for one sandbox, from `open` until `close`. Belongs to one event loop.

    Each connection is a task of its own, which is cancelled to cut it.
    """

    def __init__(self, limits: Limits, clock: Clock = time.monotonic) -> None:
        self._loop = asyncio.get_running_loop()
        self._free = asyncio.Semaphore(limits.connections)
        self._rate = Bucket(limits.requests_burst, limits.requests_per_s, clock)
        self._events = Bucket(limits.events_burst, limits.events_per_s, clock)
        self._acceptors: set[asyncio.Task[None]] = set()
        self._serving: dict[asyncio.Task[None], Arrival] = {}
        self._waiting: set[Arrival] = set()  # for their turn

    @property
    def connections(self) -> int:
        return len(self._serving)

    def open(self, listening: socket.socket, port: int, serve: Serve, host: str = "") -> None:
        """Have `serve` called for each connection; what of it fails is its own affair."""
        task = self._loop.create_task(self._accept(listening, port, serve, host))
        self._acceptors.add(task)
        task.add_done_callback(self._acceptors.discard)

    def cut(self, allowed: Callable[[str, int], bool]) -> None:
        """End the connections for hosts and ports that are not allowed any more."""
        for task, arrival in list(self._serving.items()):
            if arrival.host and not allowed(arrival.host, arrival.port):
                task.cancel()

    async def close(self) -> None:
        """End all connections; the listening sockets stay. A second time does nothing."""
        tasks = [*self._acceptors, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for arrival in self._waiting:
            arrival.drop()
        self._waiting.clear()

    async def turn(self) -> None:
        """Return when the sandbox may ask again."""
        while not self._rate.take():  # noqa: ASYNC110 - it is time that brings tokens
            await asyncio.sleep(TURN_S)

    def may_report(self) -> bool:
        """Say whether another refusal may become an event."""
        return self._events.take()

    async def _accept(self, listening: socket.socket, port: int, serve: Serve, host: str) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listening)
            except OSError:  # gone before it was accepted, or no descriptor is free
                await asyncio.sleep(TURN_S)
                continue
            arrival = Arrival(sock, host, port)
            self._waiting.add(arrival)
            await self.turn()
            await self._free.acquire()
            self._waiting.discard(arrival)
            task = self._loop.create_task(_run(serve, arrival))
            self._serving[task] = arrival
            task.add_done_callback(functools.partial(self._ended, arrival))

    def _ended(self, arrival: Arrival, task: asyncio.Task[None]) -> None:
        arrival.drop()
        del self._serving[task]
        self._free.release()
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler(
                {"message": "serving a sandbox's request failed", "exception": task.exception()}
            )


async def _run(serve: Serve, arrival: Arrival) -> None:
    with contextlib.suppress(OSError):  # the other side is gone
        await serve(arrival)
