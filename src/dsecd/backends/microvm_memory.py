"""Taking memory back from a guest that runs: by its balloon, which goes up and down again.

Going up it takes what is free and then, as any allocation, what caches hold; the host drops those
pages at once. Afterwards the guest has all of it again, as pages that cost the host nothing until
they are used.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

from dsecd.host.vm_plan import Machine, VmMemory
from libdsec.errors import Unavailable

MIB = 1 << 20
SPARED_BYTES = 24 * MIB  # of what the guest could free: it goes on without waiting for memory
UP_S = 3.0  # for the balloon; an emulated guest gives some 100 MiB a second
LOOK_S = 0.05
STUCK = 6  # looks in a row without progress: the guest has no more


def limit_for(memory: VmMemory, want_bytes: int) -> int:
    """Return what the balloon is to leave of a guest, to free `want_bytes` of what it uses."""
    spare = memory.available_bytes - SPARED_BYTES
    # what is free may have been handed back already: it is taken first, and does not count
    taken = max(0, min(spare, memory.free_bytes + want_bytes))
    return memory.limit_bytes - taken


async def shrink(machine: Machine, full_bytes: int, want_bytes: int) -> None:
    """Return when the guest has given `want_bytes`, or all it can spare."""
    await machine.balloon(full_bytes)  # an earlier daemon may have left it up
    before = await machine.memory()
    limit = limit_for(before, want_bytes)
    if limit >= before.limit_bytes:
        return
    try:
        await machine.balloon(limit)
        await _reached(machine, limit)
    finally:
        with contextlib.suppress(Unavailable):
            await machine.balloon(full_bytes)


async def _reached(machine: Machine, limit: int) -> None:
    deadline, last, stuck = time.monotonic() + UP_S, 0, 0
    while time.monotonic() < deadline and stuck < STUCK:
        await asyncio.sleep(LOOK_S)
        now = (await machine.memory()).limit_bytes
        if now <= limit:
            return
        stuck = stuck + 1 if now == last else 0
        last = now
