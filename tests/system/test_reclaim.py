"""Reclaim from real sandboxes: memory goes to swap and comes back; the daemon's swap lives on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsecd.host import pageout, swap, vitals, zram
from dsecd.host.kernelfs import KernelFiles
from dsecd.host.pressure import memory
from libdsec.model import Metrics
from tests.system.daemon import Daemon, daemon, until
from tests.wire_client import WireClient

FILES = KernelFiles()
MIB = 1 << 20
HELD = 48 * MIB
# a target that the host is above, however much is free
ALWAYS = {"when": "always", "trim_after_s": 1.0, "period_s": 0.5, "pause_after_s": 0.0}
ZRAM = {"swap": "zram", "swap_mb": 256}

pytestmark = pytest.mark.root
needs_zram = pytest.mark.skipif(bool(zram.missing(FILES)), reason=zram.missing(FILES) or "there")


async def metrics(client: WireClient, name: str) -> Metrics:
    found: Metrics = await client.call("sandbox.metrics", {"id": name}, kind=Metrics)
    return found


async def hold(client: WireClient, name: str) -> None:
    """Have a background shell of the sandbox hold `HELD` in a variable, and tell when it does."""
    script = (
        f"x=$(head -c {HELD} /dev/zero | tr '\\0' x); echo ${{#x}} > /tmp/held; "
        "while [ ! -e /tmp/say ]; do sleep 1; done; echo ${#x} > /tmp/said; sleep 1000"
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


async def swapped(client: WireClient, name: str, at_least: int, wait_s: float = 20.0) -> Metrics:
    for _ in range(int(wait_s / 0.25)):
        found = await metrics(client, name)
        if found.memory_swapped_bytes >= at_least:
            return found
        await asyncio.sleep(0.25)
    raise AssertionError(f"only {found.memory_swapped_bytes >> 20} MiB were paged out: {found}")


@pytest.mark.vm
@needs_zram
async def test_an_idle_sandbox_gives_its_memory_and_gets_it_back() -> None:
    async with daemon(reclaim=ZRAM | ALWAYS) as made:
        client = await made.client()
        info = await client.create("a", image="base/busybox:1")
        await hold(client, info.id)
        before = await metrics(client, info.id)
        assert before.memory_bytes >= HELD
        after = await swapped(client, info.id, HELD * 3 // 4)
        assert after.memory_bytes <= before.memory_bytes - HELD // 2
        await until(lambda: '"trim"' in made.log())  # said when it is done
        await client.run(info.id, "touch", "/tmp/say")
        for _ in range(200):
            said = await client.run(info.id, "cat", "/tmp/said")
            if said.exit_code == 0 and said.stdout.strip():
                break
            await asyncio.sleep(0.05)
        assert said.stdout.strip() == str(HELD).encode()  # all of it is still there


async def test_without_swap_anonymous_memory_stays_and_is_not_asked_for_again() -> None:
    if swap.active(FILES):
        pytest.skip("the host has swap")
    async with daemon(reclaim={"swap": "off"} | ALWAYS) as made:
        client = await made.client()
        info = await client.create("a", image="base/busybox:1")
        await hold(client, info.id)
        await asyncio.sleep(6)
        found = await metrics(client, info.id)
        assert found.memory_swapped_bytes == 0
        assert found.memory_bytes >= HELD
        assert made.log().count('"trim"') == 1


@needs_zram
async def test_swap_outlives_a_killed_daemon_and_goes_with_the_last_sandbox() -> None:
    async with daemon(reclaim=ZRAM) as made:
        client = await made.client()
        info = await client.create("a", image="base/busybox:1")
        (path,) = ours(made)
        made.kill()
        assert path in swap.active(FILES)
        await made.start()
        client = await made.client()
        assert ours(made) == [path]
        assert (await client.get(info.id)).state == "running"
    assert path not in swap.active(FILES)
    assert int(path.removeprefix("/dev/zram")) not in zram.numbers()


def ours(made: Daemon) -> list[str]:
    record = swap.Swap(swap.Wanted(), made.runtime / "swap.json", made.state)._load()
    return [path for path in swap.active(FILES) if record and swap.identity(path) == record.uuid]


@pytest.mark.vm
async def test_accounting_shows_shared_memory_and_pressure() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image="base/busybox:1")
        found = await metrics(client, info.id)
        assert found.memory_bytes > 0
        assert found.memory_shared_bytes > 0  # dsec-init, which all sandboxes map
        assert found.memory_shared_bytes < memory().total_bytes
        assert set(found.stalled) == {"cpu", "memory", "io"}


async def test_the_host_kills_in_sandboxes_before_the_daemon() -> None:
    async with daemon() as made:
        client = await made.client()
        info = await client.create("a", image="base/busybox:1")
        assert made.process is not None
        own = int(Path(f"/proc/{made.process.pid}/oom_score_adj").read_text())
        done = await client.run(info.id, "cat", "/proc/self/oom_score_adj")
        assert int(done.stdout) >= 500 > own
        before = int(Path("/proc/self/oom_score_adj").read_text())
        assert own == (-900 if vitals.protect_from_oom() else before)
        Path("/proc/self/oom_score_adj").write_text(str(before))


def test_pageout_takes_no_more_than_wanted() -> None:
    """Of a process of our own, with swap for as long as it takes."""
    assert pageout.pageout(2**22 + 1, MIB) == 0  # no such process
