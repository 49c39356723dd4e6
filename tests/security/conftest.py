"""One sandbox of a Debian base per module, with an ordinary user and the attack kit inside."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import os
import re
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from tests import leaks
from tests.system.compat.debian import IMAGE, build, lend
from tests.system.daemon import Daemon, daemon

USER = "agent"
_KIT = Path(__file__).with_name("kit.py")
SETTLE_S = 5.0
LIMITS: dict[str, Any] = {
    "memory_limit_mb": 512,
    "cpu_cores_limit": 1,
    "disk_limit_mb": 256,
    "pids_limit": 200,
}


@dataclass
class Target:
    """A daemon, its client, and the sandbox that is attacked."""

    daemon: Daemon
    client: DSecClient
    sandbox: Sandbox

    def init(self, sandbox: Sandbox) -> int:
        """Return the host's pid of the sandbox's PID 1 (not the smallest: pids wrap)."""
        for pid in self.daemon.pids_of(sandbox.id):
            with contextlib.suppress(OSError):  # it has just ended
                status = Path(f"/proc/{pid}/status").read_text()
                if re.search(r"^NSpid:.*\t1$", status, re.MULTILINE):
                    return pid
        raise AssertionError("no PID 1")

    async def sibling(self, **args: Any) -> Sandbox:
        """Make another sandbox, prepared in the same way."""
        run = DSecContainerRunArgs(container_image=IMAGE, **{**LIMITS, **args})
        sandbox = await self.client.run_container(run, timeout=60)
        await sandbox.files.write("/attack/kit.py", _KIT.read_text())
        await sandbox.run_shell(f"useradd -m {USER}", check=True)
        return sandbox


async def attack(sandbox: Sandbox, script: str, user: str = "root", timeout: float = 60) -> Any:
    """Run `script` (Python, everything of kit.py imported) inside; return what it `report`s."""
    whole = "import sys; sys.path.insert(0, '/attack')\nfrom kit import *\n" + script
    done = await sandbox.run("python3", "-c", whole, user=user, timeout=timeout)
    assert done.ok, f"{done}\n{done.stdout}\n{done.stderr}"
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """One census per module, around `target`: its daemon's pools grow and shrink between tests."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def target() -> AsyncIterator[Target]:
    """The module's sandbox: tests leave it as they found it, or take a `sibling`."""
    layer = await build()
    own = str(os.getpid()) if os.environ.get("DSEC_LEAKS") == "own" else ""
    scope = leaks.Scope(host=True, own=own)
    before = leaks.take(scope)
    async with daemon() as running:
        await lend(layer, running.state)
        async with DSecClient(f"unix:{running.socket}") as client:
            made = Target(running, client, None)  # type: ignore[arg-type]
            made.sandbox = await made.sibling()
            yield made
    deadline = time.monotonic() + SETTLE_S
    while found := leaks.left_over(before, leaks.take(scope)):
        assert time.monotonic() < deadline, f"left behind: {found}"
        gc.collect()
        await asyncio.sleep(0.05)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def box(target: Target) -> Sandbox:
    return target.sandbox
