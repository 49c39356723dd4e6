"""A relay over real sockets, with OpenSSL on both sides of it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import ipaddress
import ssl
from collections.abc import AsyncIterator, Iterable, Sequence
from pathlib import Path
from typing import Any

from dsecd.doors.gate import Limits, Refusal, bind
from dsecd.doors.link import Link
from dsecd.doors.reach import Reach
from dsecd.doors.upstream import Dialer
from dsecd.policy import compile as compiling
from dsecd.policy import language
from dsecd.policy.rules import NetPolicy
from dsecd.relay.relay import SandboxRelay
from dsecd.resolver.reserved import Address
from dsecd.secrets.authority import Authority
from tests.unit.secrets_proxy_lab import TIMING, descriptors, head_and_body

HOST, SAME_LENGTH = "api.example.com", "bad.example.org"
GET = "GET /{} HTTP/1.1\r\nHost: {}\r\n\r\n"
SWITCHED = b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n"
BIG = 8 << 20


def policy(*rules: dict[str, Any]) -> NetPolicy:
    value = {"network": {"check_names": True, "rules": list(rules)}}
    return compiling.compile_policy(language.from_object(value)).net


ALLOWED = policy(
    {"allow": HOST}, {"allow": "*.wild.example"}, {"allow": "tls.example.com", "ports": [443]}
)


def port_of(server: asyncio.Server) -> int:
    return int(server.sockets[0].getsockname()[1])


class Lab:
    """A relay; behind it one server for all names, by TLS and by HTTP, as of a content network."""

    def __init__(self, directory: Path, limits: Limits) -> None:
        self.refusals: list[Refusal] = []
        self.named: list[str | None] = []  # by SNI, of each handshake
        self.heads: list[bytes] = []
        self.asked: list[str] = []
        self.addresses: list[Address] = [ipaddress.ip_address("127.0.0.1")]
        self.open = 0
        self.authority = Authority.load(directory)
        self.trust = ssl.create_default_context(cadata=self.authority.pem.decode())
        self.context = self.authority.context(HOST)
        self.context.sni_callback = lambda _sock, name, _context: self.named.append(name)
        self._limits = limits

    async def start(self) -> None:
        self.tls = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=self.context)
        self.http = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.doors = bind("127.0.0.1", 0, 0)
        self.ports = {443: port_of(self.tls), 80: port_of(self.http)}
        self.relay = SandboxRelay(
            self.doors, Reach(ALLOWED), find=self._find,
            open_tls=functools.partial(self._open, 443),
            open_http=functools.partial(self._open, 80),
            on_refusal=self.refusals.append, limits=self._limits, timing=TIMING,
        )  # fmt: skip
        self.relay.start()

    async def close(self) -> None:
        await self.relay.close()
        await self.relay.close()
        for server in (self.tls, self.http):
            server.close()
        async with asyncio.timeout(5):
            while self.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _find(self, host: str) -> Iterable[Address]:
        self.asked.append(host)
        return self.addresses

    async def _open(self, port: int, host: str, addresses: Sequence[str]) -> Link:
        return await Dialer(None, port=self.ports[port]).open(host, addresses)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                self.heads.append(head)
                if head.startswith(b"GET /hang"):
                    await reader.read()
                if head.startswith(b"GET /switch"):
                    writer.write(SWITCHED)
                    continue
                if head.startswith(b"POST"):
                    await reader.readexactly(BIG)
                text = bytes(BIG) if head.startswith(b"GET /big") else b"yes"
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(text) + text)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.close()

    async def connect(
        self, port: int, name: str | None = HOST
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Connect by TLS, or at port 80 without."""
        sock = self.doors.tls if port == 443 else self.doors.plain
        more: dict[str, Any] = {"ssl": self.trust, "server_hostname": name} if port == 443 else {}
        return await asyncio.open_connection("127.0.0.1", sock.getsockname()[1], **more)

    async def bare(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        port = self.doors.tls.getsockname()[1]
        return await asyncio.open_connection("127.0.0.1", port)

    async def get(self, port: int, path: str = "ok", host: str = HOST) -> bytes:
        reader, writer = await self.connect(port, host)
        writer.write(GET.format(path, host).encode())
        try:
            return (await head_and_body(reader))[1]
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def settled(self) -> None:
        """Wait until the relay and the servers have no connection."""
        async with asyncio.timeout(10):
            while self.relay.connections or self.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def lab(directory: Path, limits: Limits = Limits()) -> AsyncIterator[Lab]:  # noqa: B008
    """A lab that leaves no task, no descriptor and no failure of the loop's."""
    made = Lab(directory, limits)
    failures: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, found: failures.append(found))
    (await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)).close()  # libuv keeps a spare one
    gc.collect()
    tasks, files = len(asyncio.all_tasks()), descriptors()
    await made.start()
    try:
        yield made
    finally:
        await made.close()
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > tasks or descriptors() > files:
            gc.collect()
            await asyncio.sleep(0.02)
    assert failures == []


def hello(name: str | None) -> tuple[bytes, ssl.SSLObject, ssl.MemoryBIO, Any]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)  # a default one reads the host's authorities
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=name)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read(), client, incoming, outgoing


async def shake(
    client: ssl.SSLObject, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO,
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter,
) -> None:  # fmt: skip
    """Go on with a handshake whose first flight was sent."""
    async with asyncio.timeout(10):
        while True:
            try:
                client.do_handshake()
                writer.write(outgoing.read())
                return
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                incoming.write(await reader.read(65536))
