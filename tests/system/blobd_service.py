"""A running dsec-blobd with a store and a cache of its own, for each implementation."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import tempfile
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from dsecd.images.blobd.client import Blobd, twin_command
from dsecd.images.blobd.model import Settings
from tests.system import blobd_lab as lab

_T = TypeVar("_T")
_BIN = Path(__file__).parents[2] / "src/dsecd/bin"

# DSEC_BLOBD names another build, as one with TSan
COMMANDS: dict[str, tuple[str, ...]] = {
    "c": (os.environ.get("DSEC_BLOBD", str(_BIN / "dsec-blobd")),),
    "asan": (str(_BIN / "asan/dsec-blobd"),),
    "twin": twin_command(),
}
ALL = [
    name for name in COMMANDS if name != "asan" or (_BIN / "asan/dsec-blobd").exists()
]  # built with DSEC_SANITIZE=1 only


class Service:
    """`blobd` runs; `store` and `cache` are directories."""

    def __init__(self, root: Path, kind: str) -> None:
        self.root, self.kind = root, kind
        self.store, self.cache, self.runtime = root / "store", root / "cache", root / "run"
        self.blobd = self.client()

    def client(self, *options: str, **settings: Any) -> Blobd:
        base = {"demand_ms": 5000, "attempt_ms": 2000} | settings
        return Blobd(
            self.runtime, self.cache, Settings(**base), binary=(*COMMANDS[self.kind], *options)
        )

    async def start(self, *options: str, **settings: Any) -> None:
        self.blobd = self.client(*options, **settings)
        await self.blobd.start()

    def require(self, capability: str) -> None:
        """Skip the test where the implementation says that it cannot."""
        if capability not in self.blobd.hello.capabilities:
            pytest.skip(f"the {self.kind} implementation has no {capability}")

    async def blob(self, chunks: int, seed: int = 1, odd: bool = False) -> lab.Blob:
        """Make and register a blob that is read from a file."""
        blob = lab.random_blob(self.store, self.cache, chunks, seed, odd)
        await self.blobd.add(blob.id, lab.file_source(blob))
        return blob

    def path(self, blob: lab.Blob) -> Path:
        return self.blobd.path(blob.id)

    async def read(self, blob: lab.Blob, chunk: int = 0, count: int = 1) -> bytes:
        """Return the content of chunks, without padding when it is one."""
        offset, size = blob.chunks[chunk]
        if count > 1:
            size = sum(blob.chunks[chunk + count - 1]) - offset
        return await in_thread(lambda: lab.read(self.path(blob), offset, size))

    def expect(self, blob: lab.Blob, chunk: int = 0, count: int = 1) -> bytes:
        offset, size = blob.chunks[chunk]
        if count > 1:
            size = sum(blob.chunks[chunk + count - 1]) - offset
        return blob.data[offset : offset + size]

    async def error(self, blob: lab.Blob, chunk: int = 0) -> str:
        """Return the name of the error that reading a chunk gives, "" for none."""
        offset, size = blob.chunks[chunk]
        path = self.path(blob)
        return await in_thread(lambda: lab.error_of(lambda: lab.read(path, offset, size)))

    async def close(self) -> None:
        await self.blobd.close()


async def in_thread(action: Callable[[], _T]) -> _T:
    """Reads block, and the client must go on meanwhile."""
    return await asyncio.to_thread(action)


@contextlib.asynccontextmanager
async def running(kind: str, name: str, **settings: Any) -> AsyncIterator[Service]:
    root = Path(tempfile.mkdtemp(prefix=f"{name}-", dir="/var/tmp"))
    service = Service(root, kind)
    try:
        await service.start(**settings)
        yield service
    finally:
        await service.close()
        shutil.rmtree(root)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


async def until(condition: Callable[[], Any], patience_s: float = 10.0) -> None:
    """Wait until `condition` (perhaps a coroutine function) holds."""
    deadline = asyncio.get_running_loop().time() + patience_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return
        assert asyncio.get_running_loop().time() < deadline, "it did not come to pass"
        await asyncio.sleep(0.01)
