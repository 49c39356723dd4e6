"""A whole daemon with the fake backend, on a real socket, in the test's own loop."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from dsecd.backends.fake import FakeBackend
from dsecd.config import Config, Limits, Listen, Paths, Policy
from dsecd.engine.backends import Backends
from dsecd.model import Reading
from dsecd.service import Service
from tests.wire_client import WireClient


class QuietHost:
    """A host with plenty of everything; tests change `reading`."""

    cpus = 8
    files_max = 1 << 20

    def __init__(self) -> None:
        self.reading = Reading(
            memory_total_bytes=64 << 30,
            memory_available_bytes=60 << 30,
            tasks=300,
            tasks_max=4_000_000,
        )

    def read(self) -> Reading:
        return self.reading


class Bench:
    """One state directory and one backend, over any number of daemon lives."""

    def __init__(self, limits: Limits, latency_s: float, listen: Listen, policy: Policy) -> None:
        # unix socket paths are short: not below pytest's own tmp_path
        self.root = Path(tempfile.mkdtemp(prefix="dsec-"))
        self.config = Config(
            backend="fake",
            paths=Paths(runtime=str(self.root / "run"), state=str(self.root / "lib")),
            limits=limits,
            listen=listen,
            policy=policy,
        )
        self.backend = FakeBackend(latency_s)
        self.others: list[FakeBackend] = []  # beside the host's own
        self.absent: dict[str, str] = {}
        self.optional: tuple[str, ...] = ()
        self.host = QuietHost()
        self.service: Service | None = None
        self.clients: list[WireClient] = []

    async def start(self) -> Service:
        backends = Backends([self.backend, *self.others], self.absent, self.optional)
        self.service = Service(self.config, backends, self.host)
        await self.service.start()
        return self.service

    async def client(self) -> WireClient:
        client = await WireClient.connect(self.config.socket)
        self.clients.append(client)
        return client

    async def close(self, keep: bool = False) -> None:
        if self.service is not None:
            await self.service.close(keep)
            self.service = None


@contextlib.asynccontextmanager
async def bench(
    limits: Limits | None = None,
    latency_s: float = 0.0,
    listen: Listen | None = None,
    policy: Policy | None = None,
    backend: FakeBackend | None = None,
    others: Sequence[FakeBackend] = (),
) -> AsyncIterator[Bench]:
    """A running daemon with the fake backend; closed and removed afterwards."""
    made = Bench(limits or Limits(), latency_s, listen or Listen(), policy or Policy())
    made.backend = backend or made.backend
    made.others = list(others)
    try:
        await made.start()
        yield made
    finally:
        for client in made.clients:
            await client.close()
        await made.close()
        shutil.rmtree(made.root)
