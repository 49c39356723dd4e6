"""A daemon that makes microVMs, with one census around it: its pools grow and shrink meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil

from libdsec import DSecClient, DSecMicroVMRunArgs, Sandbox, SandboxInfo
from tests import leaks
from tests.system.daemon import IMAGE, Daemon, daemon

SETTLE_S = 5.0
CREATE_S = 90.0  # an emulated guest, on a busy host
MEMORY_MB = 256
QEMU = "qemu-system-x86"  # as /proc/PID/comm has it


@contextlib.asynccontextmanager
async def vm_daemon(kernel: Path, **vm: object) -> AsyncIterator[Daemon]:
    """Yield a daemon with microVMs; when it has ended nothing of it may be left."""
    own = str(os.getpid()) if os.environ.get("DSEC_LEAKS") == "own" else ""
    scope = leaks.Scope(host=True, own=own)
    before = leaks.take(scope)
    async with daemon(vm={"enabled": "yes", "kernel": str(kernel), **vm}) as running:
        yield running
    deadline = time.monotonic() + SETTLE_S
    while found := leaks.left_over(before, leaks.take(scope)):
        assert time.monotonic() < deadline, f"left behind: {found}"
        gc.collect()
        await asyncio.sleep(0.05)


async def boot(client: DSecClient, **fields: Any) -> Sandbox:
    args = {"image": IMAGE, "memory_limit_mb": MEMORY_MB, "layers": "block", **fields}
    return await client.run_microvm(DSecMicroVMRunArgs(**args), timeout=CREATE_S)


def monitor_of(host: Daemon, sandbox: str) -> int:
    """Return the host's pid of the sandbox's QEMU."""
    for pid in host.pids_of(sandbox):
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).name().startswith(QEMU):
                return pid
    raise AssertionError(f"{sandbox} has no monitor")


def jail_init_of(host: Daemon, sandbox: str) -> int:
    """Return the host's pid of the dsec-init in the sandbox's jail."""
    parent = psutil.Process(monitor_of(host, sandbox)).ppid()
    assert parent > 1
    return parent


async def failed(client: DSecClient, sandbox: str, within_s: float) -> SandboxInfo:
    """Wait until the sandbox has failed."""
    deadline = time.monotonic() + within_s
    while True:
        for info in await client.list_sandboxes(all=True):
            if info.id == sandbox and info.state == "failed":
                return info
        assert time.monotonic() < deadline, "it is still not seen to have failed"
        await asyncio.sleep(0.1)
