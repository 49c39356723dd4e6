"""The SDK path: libdsec in this process, dsecd in its own, as a framework uses them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import uvloop
from dsec_bench import interrupts
from dsec_bench.stats import Operation, Round

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import DSecError
from libdsec.sandbox import Sandbox

T = TypeVar("T")
COMMAND = ("/bin/true",)
CREATE_TIMEOUT_S = 120.0
LABEL = "dsec-bench"
PARALLEL = 32
STEPS = ("create", "first command", "destroy")


class Wrong(Exception):
    """A command answered, but not with what it should."""


def arguments(image: str) -> DSecContainerRunArgs:
    """Return what every sandbox of the bench is made with: the limits that the peers set too.

    A host of 24 GiB admits 4,000 of them; and they end by themselves should we not end them.
    """
    return DSecContainerRunArgs(
        container_image=image,
        memory_limit_mb=256,
        cpu_cores_limit=1.0,
        pids_limit=1024,
        disk_limit_mb=256,
        ttl_running_stop=900,
        max_lifetime_s=1800,
        labels={LABEL: str(os.getpid())},
    )


async def answer(sandbox: Sandbox) -> None:
    """Run `/bin/true` in `sandbox`. Raises Wrong when it did not succeed."""
    result = await sandbox.run(*COMMAND)
    if result.exit_code != 0:
        raise Wrong(f"true ended with {result}")


class _Load:
    """Workers that share a deadline and a list of results."""

    def __init__(self, client: DSecClient, args: DSecContainerRunArgs, seconds: float, count: int):
        self._client = client
        self._args = args
        self._left = count
        self._origin = time.perf_counter()
        self._deadline = self._origin + seconds
        self.operations: list[Operation] = []
        self.steps_ms: dict[str, list[float]] = {name: [] for name in STEPS}
        self.error = ""

    async def work(self, worker: int) -> None:
        first = True
        while self._left > 0 and (first or time.perf_counter() < self._deadline):
            first = False
            self._left -= 1
            begin = time.perf_counter()
            ok = await self._once()
            end = time.perf_counter()
            self.operations.append(Operation(worker, self._us(begin), self._us(end), ok))

    def _us(self, instant: float) -> float:
        return (instant - self._origin) * 1e6

    async def _once(self) -> bool:
        marks = [time.perf_counter()]
        sandbox: Sandbox | None = None
        try:
            sandbox = await self._client.run_container(self._args, timeout=CREATE_TIMEOUT_S)
            marks.append(time.perf_counter())
            await answer(sandbox)
            marks.append(time.perf_counter())
            await sandbox.stop()
            marks.append(time.perf_counter())
        except (DSecError, Wrong) as error:
            self.error = self.error or str(error)
            if sandbox is not None:
                with contextlib.suppress(DSecError):
                    await sandbox.stop()
            return False
        for name, start, end in zip(STEPS, marks, marks[1:], strict=False):
            self.steps_ms[name].append((end - start) * 1e3)
        return True


class Sdk:
    """The contender "dsec": one client, as many tasks as asked for."""

    name = "dsec"

    def __init__(self, endpoint: str, image: str) -> None:
        self.args = arguments(image)
        self._endpoint = endpoint
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        self._client: DSecClient | None = None

    @property
    def client(self) -> DSecClient:
        assert self._client is not None
        return self._client

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` in the client's event loop."""
        return interrupts.run(self._runner, work)

    def open(self) -> None:
        """Connect. Raises DSecError."""

        async def connect() -> DSecClient:
            client = DSecClient(self._endpoint)
            await client.open()
            return client

        self._client = self.run(connect())

    def round(self, concurrency: int, seconds: float, count: int = 1 << 30) -> Round:
        """Create → `true` → destroy for `seconds` or `count` operations."""

        async def go() -> _Load:
            load = _Load(self.client, self.args, seconds, count)
            await asyncio.gather(*(load.work(number) for number in range(concurrency)))
            return load

        load = self.run(go())
        return Round.of(load.operations, load.error, load.steps_ms)

    def fill(self, count: int, on_ready: Callable[[], None]) -> list[Sandbox]:
        """Return `count` new sandboxes that have all answered. Raises DSecError, Wrong."""

        async def go() -> list[Sandbox]:
            ready: list[Sandbox] = []
            async for outcome in self.client.run_containers(self.args, count=count):
                if isinstance(outcome, DSecError):
                    raise outcome
                ready.append(outcome)
                on_ready()
            await in_parallel(ready, answer)
            return ready

        return self.run(go())

    def stop_all(self) -> None:
        """Stop every sandbox that this bench made and the daemon still has."""
        self.run(_stop_labelled(self.client))

    def close(self) -> None:
        """Stop what is left, disconnect, end the loop. Safe after an interruption."""
        client, self._client = self._client, None
        if client is not None:
            with contextlib.suppress(DSecError, OSError):
                self.run(_stop_labelled(client))
            with contextlib.suppress(DSecError, OSError):
                self.run(client.close())
        self._runner.close()


async def in_parallel(
    sandboxes: Sequence[Sandbox], act: Callable[[Sandbox], Coroutine[Any, Any, None]]
) -> None:
    """Apply `act` to each of `sandboxes`, a few at a time."""
    gate = asyncio.Semaphore(PARALLEL)

    async def one(sandbox: Sandbox) -> None:
        async with gate:
            await act(sandbox)

    async with asyncio.TaskGroup() as group:
        for sandbox in sandboxes:
            group.create_task(one(sandbox))


async def stop(sandbox: Sandbox) -> None:
    """Stop `sandbox`; one that is gone already is no error."""
    with contextlib.suppress(DSecError):
        await sandbox.stop()


async def _stop_labelled(client: DSecClient) -> None:
    infos = await client.list_sandboxes(labels={LABEL: str(os.getpid())})
    for start in range(0, len(infos), PARALLEL):
        part = infos[start : start + PARALLEL]
        async with asyncio.TaskGroup() as group:
            for info in part:
                group.create_task(_stop_by_id(client, info.id))


async def _stop_by_id(client: DSecClient, sandbox_id: str) -> None:
    with contextlib.suppress(DSecError):
        await (await client.connect(sandbox_id)).stop()
