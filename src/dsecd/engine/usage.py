"""What a sandbox uses, beside what it may use."""

from __future__ import annotations

import asyncio

from dsecd.engine.lifecycle import ALIVE
from dsecd.engine.manager import Manager
from libdsec.errors import WrongState
from libdsec.model import Metrics


async def metrics(manager: Manager, name: str) -> Metrics:
    """Return what a live sandbox uses and may use. Raises `NotFound`, `WrongState`."""
    sandbox = manager.get(name)
    if sandbox.state not in ALIVE or sandbox.handle is None:
        raise WrongState(f"sandbox {name} is {sandbox.state}", state=sandbox.state)
    now, spec = asyncio.get_running_loop().time(), sandbox.spec  # before it is measured: for rates
    usage = await sandbox.backend.usage(sandbox.handle)
    return Metrics(
        memory_bytes=usage.memory_bytes,
        memory_shared_bytes=usage.memory_shared_bytes,
        memory_swapped_bytes=usage.memory_swapped_bytes,
        stalled=dict(usage.stalled),
        memory_limit_bytes=spec.memory_bytes,
        cpu_usage_s=usage.cpu_usage_s,
        cpu_limit=spec.cpu_cores,
        pids=usage.pids,
        pids_limit=spec.pids,
        disk_bytes=usage.disk_bytes,
        disk_limit_bytes=usage.disk_limit_bytes or spec.disk_bytes,
        oom_kills=usage.oom_kills,
        rx_bytes=usage.rx_bytes,
        tx_bytes=usage.tx_bytes,
        denied=usage.denied,
        uptime_s=now - sandbox.started,
    )
