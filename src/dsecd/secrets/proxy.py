"""The sockets inside a sandbox that its names with secrets lead to, and who serves them.

They are bound in the sandbox's network namespace and accepted from by the daemon: a socket stays in
the namespace it was made in (network_namespaces(7)). How many connections and requests there are at
once is bounded, and what comes faster waits in the kernel's backlog.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import ssl
import time
from collections.abc import Awaitable, Callable, Collection, Sequence

import msgspec

from dsecd.resolver.budget import Bucket, Clock
from dsecd.secrets.exchange import Exchange, Timing
from dsecd.secrets.secret import Secret
from dsecd.secrets.upstream import BUFFER_BYTES, Link
from libdsec.errors import Unavailable

TLS_PORT, PLAIN_PORT = 443, 80
HANDSHAKE_S = 30.0  # of a busy sandbox
TURN_S = 0.05  # between looks whether the rate allows another request
BACKLOG = 128

Find = Callable[[str], Awaitable[Sequence[str]]]
Open = Callable[[str, Sequence[str]], Awaitable[Link]]


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Bounds of one sandbox. A request, and a connection, each cost one of the rate."""

    connections: int = 128
    requests_burst: int = 512
    requests_per_s: float = 128.0
    events_burst: int = 20
    events_per_s: float = 5.0


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """A request that was not passed on, for the client and the log."""

    host: str
    reason: str


class Doors(msgspec.Struct, frozen=True, kw_only=True):
    """The listening sockets of one name. The proxy closes them."""

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
                raise Unavailable(
                    f"cannot listen at {address} port {port} in the sandbox: {error.strerror}"
                ) from error
            made.append(sock)
        undo.pop_all()
        return Doors(address=address, tls=made[0], plain=made[1])


class SandboxProxy:
    """Serves the names of one sandbox from `start` until `close`. Belongs to one event loop.

    `find` gives the addresses of a name that the policy lets it reach, `open_link` connects to one
    of them (`Dialer.open`), `context` gives the certificate of a name (`Authority.context`).
    """

    def __init__(
        self,
        secrets: Sequence[Secret],
        doors: Sequence[Doors],
        context: Callable[[str], ssl.SSLContext],
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
        self._loop = asyncio.get_running_loop()
        self._allowed = frozenset(secret.host for secret in secrets)
        self._free = asyncio.Semaphore(limits.connections)
        self._rate = Bucket(limits.requests_burst, limits.requests_per_s, clock)
        self._events = Bucket(limits.events_burst, limits.events_per_s, clock)
        self._acceptors: set[asyncio.Task[None]] = set()
        self._serving: dict[asyncio.Task[None], str] = {}  # whom
        self._accepted: set[socket.socket] = set()  # no transport has them yet

    @property
    def overrides(self) -> dict[str, str]:
        """What the sandbox's resolver has to answer: the address of each name."""
        return {secret.host: doors.address for secret, doors in self._served}

    @property
    def connections(self) -> int:
        return len(self._serving)

    def start(self) -> None:
        for secret, doors in self._served:
            for listening, context in ((doors.tls, self._context), (doors.plain, None)):
                task = self._loop.create_task(self._accept(listening, secret, context))
                self._acceptors.add(task)
                task.add_done_callback(self._acceptors.discard)

    def replace(self, allowed: Collection[str]) -> None:
        """Serve these names only from now on, and cut the connections of all others."""
        self._allowed = frozenset(allowed)
        for task, host in list(self._serving.items()):
            if host not in self._allowed:
                task.cancel()

    async def close(self) -> None:
        """End all connections and close the sockets; a second time does nothing."""
        tasks = [*self._acceptors, *self._serving]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for sock in self._accepted:  # whose turn had not come
            sock.close()
        self._accepted.clear()
        for _, doors in self._served:
            doors.close()

    async def _accept(
        self,
        listening: socket.socket,
        secret: Secret,
        context: Callable[[str], ssl.SSLContext] | None,
    ) -> None:
        while True:
            try:
                sock, _ = await self._loop.sock_accept(listening)
            except OSError:  # gone before it was accepted, or no descriptor is free
                await asyncio.sleep(TURN_S)
                continue
            self._accepted.add(sock)
            await self._turn()
            await self._free.acquire()
            task = self._loop.create_task(self._serve(sock, secret, context))
            self._serving[task] = secret.host
            task.add_done_callback(functools.partial(self._ended, sock))

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        if sock in self._accepted:  # it never came to a transport
            self._accepted.discard(sock)
            sock.close()
        del self._serving[task]
        self._free.release()
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler(
                {"message": "serving a sandbox's request failed", "exception": task.exception()}
            )

    async def _serve(
        self,
        sock: socket.socket,
        secret: Secret,
        context: Callable[[str], ssl.SSLContext] | None,
    ) -> None:
        tls = None if context is None else context(secret.host)
        try:
            link = await self._greet(sock, tls)
        except OSError:  # no TLS, not our authority, another name, or silence
            return
        try:
            if secret.host not in self._allowed:
                return
            exchange = Exchange(
                link, secret, dial=self._dial, turn=self._turn,
                on_refusal=lambda reason: self._report(secret.host, reason), timing=self._timing,
            )  # fmt: skip
            await exchange.serve()
        finally:
            link.abort()

    async def _greet(self, sock: socket.socket, context: ssl.SSLContext | None) -> Link:
        """Return the connection, after its handshake. Raises OSError; `sock` is closed then."""
        self._accepted.discard(sock)
        reader = asyncio.StreamReader(limit=BUFFER_BYTES, loop=self._loop)
        protocol = asyncio.StreamReaderProtocol(reader, loop=self._loop)
        wait_s = None if context is None else HANDSHAKE_S
        transport, _ = await self._loop.connect_accepted_socket(
            lambda: protocol,
            sock,
            ssl=context,
            ssl_handshake_timeout=wait_s,
            ssl_shutdown_timeout=wait_s,
        )
        transport.set_write_buffer_limits(high=BUFFER_BYTES)
        return Link(reader, asyncio.StreamWriter(transport, protocol, reader, self._loop))

    async def _dial(self, host: str) -> Link:
        return await self._open_link(host, await self._find(host))

    async def _turn(self) -> None:
        """Return when the sandbox may ask again."""
        while not self._rate.take():  # noqa: ASYNC110 - it is time that brings tokens
            await asyncio.sleep(TURN_S)

    def _report(self, host: str, reason: str) -> None:
        if self._events.take():
            self._on_refusal(Refusal(host=host, reason=reason))
