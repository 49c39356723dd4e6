"""Idle Pythons, paused: what each still holds of the host, and how soon it answers again.

Each Python has imported what agents' tools import, holds some megabytes, and waits for a line to
answer. They are paused as they come, so that more of them fit than their memory would allow.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from dsec_bench.create.daemon import own_resident_bytes
from dsec_bench.create.memory import settled_bytes
from dsec_bench.create.sdk import Sdk, Wrong
from dsec_bench.density.footprint import Host, host
from dsec_bench.density.idle import short
from dsec_bench.machine import meminfo
from dsec_bench.rootfs import PYTHON

from libdsec import CommandHandle
from libdsec.sandbox import Sandbox

HELD_BYTES = 4 << 20
PROGRAM = f"""\
import asyncio, email, http.client, json, sys, urllib.request
held = b"x" * {HELD_BYTES}
print("ready", flush=True)
for line in sys.stdin:
    print(len(held), flush=True)
"""


@dataclass(slots=True)
class Result:
    """Of each sandbox: what was charged to it running and paused (bytes), and the milliseconds
    that pausing took, and then from a line to its answer; from the call of a command to its end.

    `used_bytes` is what the host had in use before and after, what it compressed included, and
    `hosts` what of that is zram.
    """

    running: list[int] = field(default_factory=list)
    paused: list[int] = field(default_factory=list)
    swapped: list[int] = field(default_factory=list)
    pause_ms: list[float] = field(default_factory=list)
    answer_ms: list[float] = field(default_factory=list)
    command_ms: list[float] = field(default_factory=list)
    used_bytes: list[int] = field(default_factory=list)
    hosts: list[Host] = field(default_factory=list)
    notes: set[str] = field(default_factory=set)
    why: str = ""  # it ended early


def measure(sdk: Sdk, wanted: int, asked: int, on_done: Callable[[int], None]) -> Result:
    """Have `wanted` paused Pythons, and resume `asked` of them, half by a line, half by a command.

    `on_done` takes how many more are paused.
    """
    result, paused = Result(), list[tuple[Sandbox, CommandHandle]]()
    try:
        _look(result)
        while len(paused) < wanted and not result.why:
            paused.append(sdk.run(_one(sdk, result)))
            result.why = short(meminfo())
            on_done(1)
        _look(result)
        every = max(1, len(paused) // asked)
        for number, (sandbox, python) in enumerate(paused[::every][:asked]):
            sdk.run(_by_command(sandbox, result) if number % 2 else _by_line(python, result))
    finally:
        sdk.stop_all()
    return result


def _look(result: Result) -> None:
    result.used_bytes.append(settled_bytes() - own_resident_bytes())
    result.hosts.append(host())


async def _one(sdk: Sdk, result: Result) -> tuple[Sandbox, CommandHandle]:
    """Return a paused sandbox with a Python that waits."""
    sandbox = await sdk.client.run_container(sdk.args)
    python = await start(sandbox)
    begin = time.perf_counter()
    paused = await sandbox.pause()
    result.pause_ms.append((time.perf_counter() - begin) * 1e3)
    result.running.append(paused.memory_before_bytes)
    result.paused.append(paused.memory_bytes)
    result.swapped.append(paused.memory_swapped_bytes)
    result.notes.update(paused.notes)
    return sandbox, python


async def start(sandbox: Sandbox) -> CommandHandle:
    """Start a Python; returns when it waits for a line."""
    words = [str(PYTHON), "-I", "-c", PROGRAM]
    python = await sandbox.commands.run(words, background=True, stdin=True)
    if await read_line(python) != "ready":
        raise Wrong("a Python did not start")
    return python


async def read_line(python: CommandHandle) -> str:
    """Return the next line of its output, "" at the end."""
    async for output in python:
        return output.data.decode().strip()
    return ""


async def _by_line(python: CommandHandle, result: Result) -> None:
    begin = time.perf_counter()
    await python.send_stdin("\n")
    if await read_line(python) != str(HELD_BYTES):
        raise Wrong("a Python that was paused did not answer")
    result.answer_ms.append((time.perf_counter() - begin) * 1e3)


async def _by_command(sandbox: Sandbox, result: Result) -> None:
    begin = time.perf_counter()
    done = await sandbox.run("/bin/true")
    if done.exit_code != 0:
        raise Wrong(f"true ended with {done}")
    result.command_ms.append((time.perf_counter() - begin) * 1e3)
