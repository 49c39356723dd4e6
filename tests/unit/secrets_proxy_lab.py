"""The proxy over real loopback sockets: TLS on both sides, on the loop that the daemon runs on.

The client is raw bytes, so that nothing between it and the proxy is well-behaved by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import os
import ssl
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ParamSpec

import uvloop

from dsecd.doors.gate import Limits, Refusal, bind
from dsecd.doors.upstream import Dialer, client_context
from dsecd.secrets.authority import Authority
from dsecd.secrets.exchange import Timing
from dsecd.secrets.proxy import SandboxProxy
from dsecd.secrets.secret import Header, Secret
from tests.unit.secrets_upstream import HOST, VALUE, Api

Parameters = ParamSpec("Parameters")
SECRET = Secret(HOST, (Header("Authorization", VALUE),))
OTHER = Secret("other.example.com", (Header("X-Key", "another-secret-value"),))
GET = "GET {} HTTP/1.1\r\nHost: api.example.com\r\n\r\n"
LIMITS = Limits(requests_burst=10_000)
TIMING = Timing(linger_s=0.1)
# From its first loop on uvloop keeps a pipe for signals: it is no leak of a test
with asyncio.Runner(loop_factory=uvloop.new_event_loop) as first:
    first.run(asyncio.sleep(0))


def on_uvloop(
    test: Callable[Parameters, Coroutine[Any, Any, None]],
) -> Callable[Parameters, None]:
    """Run a test on the loop that the daemon has: TLS and closing are its own there."""

    @functools.wraps(test)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> None:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(test(*args, **kwargs))

    return run


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))  # noqa: PTH208


@functools.cache
def world() -> tuple[Authority, ssl.SSLContext]:
    """Return the authority of real names, and what trusts it: to read the host's takes a while."""
    with tempfile.TemporaryDirectory() as folder:
        authority = Authority.load(Path(folder))
        authority.context(HOST)  # made in that directory, and kept
        bundle = Path(folder, "world.pem")
        bundle.write_bytes(authority.pem)
        return authority, client_context(str(bundle))


class Lab:
    """A sandbox's proxy, the real name behind it, and clients."""

    def __init__(self, directory: Path, limits: Limits, timing: Timing) -> None:
        self.refusals: list[Refusal] = []
        self.asked: list[str] = []
        self.addresses: list[str] = ["127.0.0.1"]
        real, self._trusting = world()
        self.api = Api(real.context(HOST))
        self.authority = Authority.load(directory / "daemon")
        self._limits, self._timing = limits, timing
        self.trust = ssl.create_default_context(cadata=self.authority.pem.decode())

    async def open(self) -> None:
        await self.api.start()
        dialer = Dialer(self._trusting, port=self.api.port)
        self.doors = [bind("127.0.0.1", 0, 0) for _ in range(2)]
        self.proxy = SandboxProxy(
            [SECRET, OTHER], self.doors, self.authority.context,
            find=self._find, open_link=dialer.open, on_refusal=self.refusals.append,
            limits=self._limits, timing=self._timing,
        )  # fmt: skip
        self.proxy.start()

    async def _find(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        return self.addresses

    @contextlib.asynccontextmanager
    async def connection(
        self, plain: bool = False, name: str = HOST, door: int = 0
    ) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        doors = self.doors[door]
        port = (doors.plain if plain else doors.tls).getsockname()[1]
        tls = {} if plain else {"ssl": self.trust, "server_hostname": name}
        reader, writer = await asyncio.open_connection("127.0.0.1", port, **tls)  # type: ignore[arg-type]
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    async def raw(self, request: bytes | str, plain: bool = False) -> bytes:
        """Return all that comes back until the proxy closes."""
        async with asyncio.timeout(10), self.connection(plain) as (reader, writer):
            writer.write(request.encode() if isinstance(request, str) else request)
            return await reader.read()

    async def settled(self) -> None:
        """Wait until no connection is served and the API has none."""
        async with asyncio.timeout(10):
            while self.proxy.connections or self.api.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def lab(
    directory: Path, limits: Limits = LIMITS, timing: Timing = TIMING
) -> AsyncIterator[Lab]:
    """A lab that leaves no task and no descriptor."""
    made = Lab(directory, limits, timing)
    (await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)).close()  # libuv keeps a spare one
    gc.collect()
    tasks, files = len(asyncio.all_tasks()), descriptors()
    await made.open()
    try:
        yield made
    finally:
        await made.proxy.close()
        await made.proxy.close()
        await made.api.close()
    async with asyncio.timeout(5):
        while len(asyncio.all_tasks()) > tasks or descriptors() > files:
            gc.collect()
            await asyncio.sleep(0.02)


async def head_and_body(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    """Read one answer with Content-Length."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
    return head, await reader.readexactly(length)
