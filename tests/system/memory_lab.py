"""A sandbox that holds memory, and where that is."""

from __future__ import annotations

import asyncio

import pytest

from dsecd.host import zram
from dsecd.host.kernelfs import KernelFiles
from libdsec.model import Metrics
from tests.wire_client import WireClient

FILES = KernelFiles()
MIB = 1 << 20
HELD = 48 * MIB
needs_zram = pytest.mark.skipif(bool(zram.missing(FILES)), reason=zram.missing(FILES) or "there")


async def metrics(client: WireClient, name: str) -> Metrics:
    found: Metrics = await client.call("sandbox.metrics", {"id": name}, kind=Metrics)
    return found


async def hold(client: WireClient, name: str) -> None:
    """Have a background shell of the sandbox hold `HELD` in a variable, and tell when it does.

    It waits without a child: until one has run another program, it shares all of the shell's
    memory, and what two processes map is not paged out.
    """
    script = (
        f"mkfifo /tmp/say; x=$(head -c {HELD} /dev/zero | tr '\\0' x); echo ${{#x}} > /tmp/held; "
        "read -r go < /tmp/say; echo ${#x} > /tmp/said; sleep 1000"
    )
    await client.call(
        "exec.start",
        {"cid": "holder", "argv": [b"sh", b"-c", script.encode()], "background": True},
        name,
    )
    for _ in range(600):
        done = await client.run(name, "cat", "/tmp/held")
        if done.exit_code == 0 and str(HELD).encode() in done.stdout:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("the sandbox did not get its memory")


async def still_held(client: WireClient, name: str) -> None:
    """Have the shell of `hold` say how much it holds: all of it."""
    await client.run(name, "sh", "-c", "echo go > /tmp/say")
    for _ in range(200):
        said = await client.run(name, "cat", "/tmp/said")
        if said.exit_code == 0 and said.stdout.strip():
            break
        await asyncio.sleep(0.05)
    assert said.stdout.strip() == str(HELD).encode()


async def swapped(client: WireClient, name: str, at_least: int, wait_s: float = 20.0) -> Metrics:
    for _ in range(int(wait_s / 0.25)):
        found = await metrics(client, name)
        if found.memory_swapped_bytes >= at_least:
            return found
        await asyncio.sleep(0.25)
    raise AssertionError(f"only {found.memory_swapped_bytes >> 20} MiB were paged out: {found}")
