"""Function calls in warm workers, and what one would do without them.

All are given the same function and called by the same client; the peers are not isolated from each
other's calls, except the fresh container.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from dsec_bench.create.sdk import Wrong
from dsec_bench.stats import percentile

from libdsec import DSecClient, DSecContainerRunArgs, DSecFnCallArgs

CODE = "def main(x):\n    return x + 1\n"
IMPORTS = ("asyncio", "decimal", "email.message", "json", "sqlite3", "statistics", "urllib.request")
PYTHON = "/usr/bin/python3"
CONCURRENCY = 4
WARM = 50  # calls before any is counted


@dataclass(slots=True)
class Measured:
    """Calls of one kind: how many per second with `CONCURRENCY` open, and one after the other."""

    per_s: float = 0.0
    alone_ms: list[float] = field(default_factory=list)

    @property
    def p50_ms(self) -> float:
        return percentile(self.alone_ms, 0.5) if self.alone_ms else 0.0


async def warm(client: DSecClient, image: str, seconds: float) -> Measured:
    """Calls in a pool of warm workers. Raises DSecError, Wrong."""
    args = DSecFnCallArgs(container_image=image, code=CODE, imports=list(IMPORTS), input=1)

    async def one() -> None:
        result = await client.run_fncall(args)
        if result.value != 2:
            raise Wrong(f"the call ended with {result}")

    return await _measure(one, seconds)


async def fresh(client: DSecClient, args: DSecContainerRunArgs, seconds: float) -> Measured:
    """A container and an interpreter for each call. Raises DSecError, Wrong."""
    script = "".join(f"import {name}\n" for name in IMPORTS) + CODE + "print(main(1))"

    async def one() -> None:
        async with await client.run_container(args) as sandbox:
            result = await sandbox.run(PYTHON, "-c", script)
            if result.stdout != "2\n":
                raise Wrong(f"python ended with {result}")

    return await _measure(one, seconds, warm_up=2)


async def forked(seconds: float) -> Measured:
    """A plain fork server on the host, isolated by nothing: a child of this process per call."""

    async def one() -> None:
        _fork_once()

    return await _measure(one, seconds)


def _fork_once() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.write(writing, b"%d" % _call(1))
        os._exit(0)
    os.close(writing)
    answer = os.read(reading, 16)
    os.close(reading)
    os.waitpid(pid, 0)
    if answer != b"2":
        raise Wrong(f"the fork answered {answer!r}")


def _call(value: int) -> int:
    names: dict[str, Callable[[int], int]] = {}
    exec(compile(CODE, "<call>", "exec"), names)
    return names["main"](value)


async def pooled(seconds: float) -> Measured:
    """`multiprocessing` with a process per call, which is what isolates them from each other.

    Its processes are forked by a server of its own: this one has threads, whose locks a fork keeps.
    """
    loop = asyncio.get_running_loop()
    serving = multiprocessing.get_context("forkserver")
    serving.set_forkserver_preload([__name__])
    with serving.Pool(CONCURRENCY, maxtasksperchild=1) as pool:

        async def one() -> None:
            if await loop.run_in_executor(None, pool.apply, _call, (1,)) != 2:
                raise Wrong("multiprocessing answered something else")

        return await _measure(one, seconds)


async def _measure(
    one: Callable[[], Awaitable[None]], seconds: float, warm_up: int = WARM
) -> Measured:
    """`seconds` one after the other, then `seconds` with several open."""
    found = Measured()
    await asyncio.gather(*(one() for _ in range(min(warm_up, CONCURRENCY))))
    for _ in range(warm_up):
        await one()
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        await one()
        found.alone_ms.append((time.perf_counter() - begin) * 1e3)
    count, begin = 0, time.perf_counter()
    end = begin + seconds

    async def work() -> None:
        nonlocal count
        while time.perf_counter() < end:
            await one()
            count += 1

    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    found.per_s = count / (time.perf_counter() - begin)
    return found


def interpreter() -> str:
    """Return the version that the peers on the host run, for the report."""
    return sys.version.split()[0]
