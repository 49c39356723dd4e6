"""Listens on the unix socket and on TCP, greets clients and routes their calls.

A request with a target goes to that sandbox's channel (`proxy`), any other to `operations`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import ssl
import stat

import msgspec

from dsecd import __version__
from dsecd.api.auth import Gatekeeper
from dsecd.api.connection import ClientConnection, OpenCall
from dsecd.api.local import LocalCall
from dsecd.api.operations import Operations
from dsecd.api.proxy import ProxiedCall
from dsecd.config import Config, split_address
from dsecd.engine.fncall import Pools
from dsecd.engine.manager import Manager
from libdsec import model, wire
from libdsec.errors import DSecError, Exhausted, InvalidArgument, Unavailable, Unsupported

logger = logging.getLogger("dsecd.api")
DRAIN_S = 5.0  # for answers under way when the daemon ends
_hello = msgspec.msgpack.Decoder(model.Hello)


class Server:
    """The daemon's front. Implements `connection.Router`."""

    def __init__(
        self, config: Config, manager: Manager, gatekeeper: Gatekeeper, fncalls: Pools
    ) -> None:
        self.calls_per_connection = config.listen.calls_per_connection
        self.connections: set[ClientConnection] = set()
        self._config, self._manager, self._gatekeeper = config, manager, gatekeeper
        self._operations = Operations(manager, fncalls).table
        self._listeners: list[asyncio.Server] = []
        self._closing = False
        self._idle: asyncio.Event | None = None  # closing, and no connection is left

    async def start(self) -> None:
        """Listen. Raises `Unavailable` when an address cannot be had."""
        try:
            await self._listen_unix()
            if self._config.listen.tcp:
                await self._listen_tcp()
        except OSError as error:
            raise Unavailable(f"cannot listen: {error}") from error

    async def _listen_unix(self) -> None:
        path, loop = self._config.socket, asyncio.get_running_loop()
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISSOCK(path.lstat().st_mode):
                raise Unavailable(f"{path} exists and is not a socket: remove it")
            path.unlink()  # of a daemon that was killed; a live one holds the state lock
        # made unreachable, then opened to whom it may concern: there is no moment of mode 0777
        mask = os.umask(0o177)
        try:
            server = await loop.create_unix_server(self._unix_connection, str(path), backlog=4096)
        finally:
            os.umask(mask)
        if self._gatekeeper.gid is not None:
            os.chown(path, -1, self._gatekeeper.gid)
        path.chmod(self._config.listen.mode)
        self._listeners.append(server)

    async def _listen_tcp(self) -> None:
        listen = self._config.listen
        context = None
        if listen.tls_cert:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            try:
                context.load_cert_chain(listen.tls_cert, listen.tls_key)
            except (OSError, ssl.SSLError) as error:
                raise InvalidArgument(
                    f"listen.tls_cert {listen.tls_cert}: {error}", field="listen.tls_cert"
                ) from error
        host, port = split_address(listen.tcp)
        loop = asyncio.get_running_loop()
        server = await loop.create_server(
            self._tcp_connection, host, port, ssl=context, backlog=4096
        )
        self._listeners.append(server)

    @property
    def ports(self) -> list[int]:
        """TCP ports in use (of `listen.tcp` with port 0, for tests)."""
        names = [sock.getsockname() for server in self._listeners for sock in server.sockets]
        return [name[1] for name in names if isinstance(name, tuple)]

    def _unix_connection(self) -> ClientConnection:
        return ClientConnection(self, self._gatekeeper.peer)

    def _tcp_connection(self) -> ClientConnection:
        return ClientConnection(self, None)

    async def close(self) -> None:
        """Stop listening, give answers under way a moment, drop the connections."""
        self._closing = True
        self._idle = asyncio.Event()
        for server in self._listeners:
            server.close()
        for connection in tuple(self.connections):
            connection.close()
        if self.connections:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DRAIN_S):
                    await self._idle.wait()
        for connection in tuple(self.connections):
            connection.abort()
        self._config.socket.unlink(missing_ok=True)

    # --- Router

    def greet(self, connection: ClientConnection, args: msgspec.Raw) -> msgspec.Raw:
        """Answer `hello`: versions and authorisation. Raises `DSecError`."""
        try:
            hello = _hello.decode(args)
        except msgspec.DecodeError as error:
            raise InvalidArgument(f"hello: {error}", field="hello") from error
        if hello.protocol != wire.PROTOCOL:
            raise Unsupported(
                f"this dsecd speaks protocol {wire.PROTOCOL}, the client {hello.protocol}",
                reason="install matching versions",
            )
        if connection.principal is None:
            connection.principal = self._gatekeeper.token(hello.token)
        if len(self.connections) > self._config.listen.connections:
            raise Exhausted("too many connections to this daemon")
        return wire.pack(
            model.Welcome(
                protocol=wire.PROTOCOL,
                server=f"dsecd/{__version__}",
                node=self._config.node,
                capabilities=self._manager.backends.names,
            )
        )

    def open(self, connection: ClientConnection, request: wire.Request) -> OpenCall | None:
        """Start a call; None when it is answered already. Raises `DSecError`."""
        registry = self._manager.registry
        try:
            if request.target:
                return self._open_proxied(connection, request)
            operation = self._operations.get(request.op)
            if operation is None:
                raise Unsupported(f"unknown operation {request.op!r}", reason="not of this daemon")
            registry.calls.add(request.op)
            args = operation.decode(request.args)
            call = LocalCall(connection, request.id, operation.handler, registry)
            if not operation.quick:
                call.begin(args)
                return call
            connection.reply(request.id, wire.pack(operation.handler(call, args)))
            return None
        except DSecError as error:
            registry.errors.add(error.code)
            raise

    def _open_proxied(self, connection: ClientConnection, request: wire.Request) -> OpenCall | None:
        manager = self._manager
        manager.registry.calls.add("sandbox")  # the client chooses the name: no label of its own
        sandbox = manager.enter(request.target)
        connection.fresh.discard(request.target)
        call = ProxiedCall(manager, sandbox, connection, request)
        connection.calls[request.id] = call
        try:
            call.begin(request)
        except BaseException:
            del connection.calls[request.id]
            manager.leave(sandbox)
            raise
        return None  # registered above: the agent may have answered already

    def opened(self, connection: ClientConnection) -> None:
        """A client is there. One whose TLS handshake fails never is: nobody would close it."""
        self.connections.add(connection)

    def closed(self, connection: ClientConnection) -> None:
        """A client is gone. What it created and perhaps never heard of becomes unclaimed."""
        self.connections.discard(connection)
        if self._idle is not None and not self.connections:
            self._idle.set()
        if not connection.reset or self._closing:
            return
        for name in connection.fresh:
            sandbox = self._manager.live.get(name)
            if sandbox is not None and sandbox.calls == 0:
                sandbox.claims -= 1
                self._manager.abandon(sandbox, self._config.limits.unclaimed_grace_s)
