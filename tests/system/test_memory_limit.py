"""A host at the limit of its memory: who answers, who is killed, who is refused. In the guest."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from dsecd.host import pressure
from libdsec import Exhausted, Sandbox
from tests.system.user_view import View, viewed

pytestmark = [
    pytest.mark.vm,
    pytest.mark.root,
    pytest.mark.skipif(
        "DSEC_TEST_GUEST" not in os.environ, reason="takes all memory of the host: for a guest"
    ),
]
MIB = 1 << 20
WHOLE = pressure.memory().total_bytes // MIB  # of which the host itself uses some
PATIENCE = float(os.environ.get("DSEC_TEST_PATIENCE", "1"))

# what dd reads it holds until it is written; one read(2) gives 2 GiB at most
TAKE = "dd if=/dev/zero bs={mib}M count=1 iflag=fullblock"


async def answered(view: View, times: list[float]) -> None:
    """Have the daemon and a sandbox answer again and again, until cancelled."""
    while True:
        start = time.monotonic()
        assert (await view.sandbox.run("echo", "here", timeout=20 * PATIENCE)).stdout == "here\n"
        assert (await view.sandbox.get_info()).state == "running"
        times.append(time.monotonic() - start)
        await asyncio.sleep(0.05)


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process of the host that holds 100 MiB."""
    script = "import time; held = b'x' * (100 << 20); time.sleep(10_000)"
    with subprocess.Popen([sys.executable, "-c", script]) as made:
        yield made
        made.kill()


async def test_a_host_at_its_limit_refuses_and_kills_only_in_sandboxes(
    bystander: subprocess.Popen[bytes],
) -> None:
    async with viewed({"reclaim": {"target_percent": 70, "swap": "off"}}) as view:
        times: list[float] = []
        others = asyncio.create_task(answered(view, times))
        hogs = [await view.another(memory_limit_mb=WHOLE) for _ in range(2)]
        await refused_while_full(view, hogs[0])
        script = f"{TAKE.format(mib=WHOLE)} of=/dev/null"
        ends = await asyncio.gather(*(hog.run_shell(script, timeout=60 * PATIENCE) for hog in hogs))
        others.cancel()
        with pytest.raises(asyncio.CancelledError):
            await others
        assert len(times) > 5
        assert [end.oom_killed for end in ends] == [True, True]
        for hog in hogs:  # the sandbox of a victim goes on
            assert (await hog.get_metrics()).oom_kills >= 1
            assert (await hog.run("echo", "on")).stdout == "on\n"
        assert (await view.sandbox.get_metrics()).oom_kills == 0
        assert view.daemon.process is not None
        assert view.daemon.process.poll() is None
        assert bystander.poll() is None


async def refused_while_full(view: View, hog: Sandbox) -> None:
    """Have `hog` hold most of what is free: the host takes no sandbox, and one when it let go."""
    most = pressure.memory().available_bytes // MIB * 3 // 4
    held = await hog.commands.run(f"{TAKE.format(mib=most)} | sleep 10000", background=True)
    refusal = await refused(view, True)
    assert refusal is not None
    assert refusal.retryable
    assert refusal.detail["limit"] == "memory"
    await held.kill()
    assert not await refused(view, False)


async def refused(view: View, wanted: bool) -> Exhausted | None:
    """Return why no other sandbox is taken, or that one is, when it is as `wanted`, or at last."""
    for _ in range(100):
        found = None
        try:
            await (await view.another()).stop()
        except Exhausted as error:
            found = error
        if bool(found) == wanted:
            break
        await asyncio.sleep(0.1 * PATIENCE)
    return found
