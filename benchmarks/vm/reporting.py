"""What a guest frees, and how much of it the host has again after ten seconds."""

from __future__ import annotations

import asyncio
import contextlib
import statistics

from dsec_bench.create.image import python_root
from dsec_bench.create.sdk import Wrong
from dsec_bench.density.pausing import read_line
from dsec_bench.rootfs import PYTHON
from dsec_bench.vm.bed import MIB, Bed, Host
from dsec_bench.vm.monitors import guest_bytes, monitors

from libdsec import CommandHandle

FREED = 200 * MIB
WITHIN_S = 10.0
MEMORY_MB = 512
PROGRAM = f"""\
import sys
while sys.stdin.readline():
    held = b"x" * {FREED}
    print("held", flush=True)
    sys.stdin.readline()
    del held
    print("freed", flush=True)
"""


def measure(bed: Bed) -> None:
    with contextlib.ExitStack() as stack:
        root = python_root(stack)
        with bed.host(root, damon_min_age_s=0) as host:
            bed.context.steps.now("memory that a guest frees")
            shares = host.sdk.run(_shares(bed, host))
            bed.tell("reporting", freed_mib=FREED / MIB, within_s=WITHIN_S, shares=shares)
            bed.report.figure("fpr_returned_share", statistics.median(shares))


async def _shares(bed: Bed, host: Host) -> list[float]:
    sandbox = await host.create(memory_limit_mb=MEMORY_MB)
    words = [str(PYTHON), "-I", "-c", PROGRAM]
    python = await sandbox.commands.run(words, background=True, stdin=True)
    (pid,) = monitors(host.daemon.name)
    shares = []
    for _ in range(bed.rounds):
        await _ask(python, "held")
        full = guest_bytes(pid)
        await _ask(python, "freed")
        await asyncio.sleep(WITHIN_S)
        shares.append((full - guest_bytes(pid)) / FREED)
    await sandbox.stop()
    return shares


async def _ask(python: CommandHandle, word: str) -> None:
    await python.send_stdin("\n")
    said = await read_line(python)
    if said != word:
        raise Wrong(f"a Python said {said!r}, not {word!r}")
