"""Commands in a live sandbox, and sandboxes that outlive their daemon."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

from dsec_bench.create.daemon import Daemon
from dsec_bench.create.sdk import COMMAND, CREATE_TIMEOUT_S, Sdk, answer
from dsec_bench.toolchain import compile_c

from libdsec.errors import DSecError, Unavailable
from libdsec.sandbox import Sandbox

WARM_UP = 50
RETRY_S = 0.02
READOPT_PARALLEL = 64


def roundtrips_ms(sdk: Sdk, count: int) -> list[float]:
    """Return the times of `count` runs of `true`, one after the other, in one sandbox."""

    async def go() -> list[float]:
        sandbox = await sdk.client.run_container(sdk.args, timeout=CREATE_TIMEOUT_S)
        try:
            times = []
            for number in range(WARM_UP + count):
                begin = time.perf_counter()
                await answer(sandbox)
                if number >= WARM_UP:
                    times.append((time.perf_counter() - begin) * 1e3)
            return times
        finally:
            await sandbox.stop()

    return sdk.run(go())


def process_ms(count: int) -> list[float]:
    """Return the times of `count` vfork + exec + wait of the host's `true`, from C."""
    argv = [str(compile_c("load.c")), "-c", "1", "-n", str(WARM_UP + count), "--", *COMMAND]
    lines = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.splitlines()
    times = [(int(end) - int(start)) / 1e3 for _, start, end, _ in map(str.split, lines)]
    return times[WARM_UP:]


@dataclass(slots=True)
class Readoption:
    """Seconds since the SIGKILL: until the first of the sandboxes answered, and until all did."""

    live: int
    first_s: float
    all_s: float
    lost: int


def readopt(daemon: Daemon, sdk: Sdk, live: int, on_ready: Callable[[], None]) -> Readoption:
    """Kill the daemon with `live` sandboxes, start it again, and wait for every one's answer.

    The client is not told: it finds its connection broken and dials again.
    """
    sandboxes = sdk.fill(live, on_ready)
    begin = time.perf_counter()
    daemon.kill()
    daemon.start()

    async def go() -> Readoption:
        await _until_answer(sandboxes[0])
        first = time.perf_counter() - begin
        gate = asyncio.Semaphore(READOPT_PARALLEL)
        lost = 0

        async def check(number: int) -> None:
            nonlocal lost
            async with gate:
                try:
                    await _until_answer(sandboxes[number])
                except DSecError:
                    lost += 1

        await asyncio.gather(*(check(number) for number in range(1, live)))
        return Readoption(live, first, time.perf_counter() - begin, lost)

    return sdk.run(go())


async def _until_answer(sandbox: Sandbox) -> None:
    """Run `true`, again while the daemon is not reachable yet. Raises other errors."""
    deadline = time.perf_counter() + 60
    while True:
        try:
            await answer(sandbox)
        except Unavailable:
            if time.perf_counter() > deadline:
                raise
            await asyncio.sleep(RETRY_S)
        else:
            return
