"""Reclaim from real sandboxes: memory goes to swap and comes back; the daemon's swap lives on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from dsecd.host import pageout, swap, vitals, zram
from dsecd.host.pressure import memory
from tests.system.daemon import Daemon, daemon, until
from tests.system.memory_lab import FILES, HELD, MIB, hold, metrics, needs_zram, still_held, swapped
from tests.wire_client import WireClient

# a target that the host is above, however much is free
ALWAYS = {"when": "always", "trim_after_s": 1.0, "period_s": 0.5, "pause_after_s": 0.0}
ZRAM = {"swap": "zram", "swap_mb": 256}

pytestmark = pytest.mark.root


@pytest.mark.vm
@needs_zram
async def test_an_idle_sandbox_gives_its_memory_and_gets_it_back() -> None:
    async with daemon(reclaim=ZRAM | ALWAYS) as made:
        client = await made.client()
        info = await client.create("a", image="base/busybox:1")
        async with in_use(client, info.id):
            await hold(client, info.id)
            before = await metrics(client, info.id)
        assert before.memory_bytes >= HELD
        after = await swapped(client, info.id, HELD * 3 // 4)
        assert after.memory_bytes <= before.memory_bytes - HELD // 2
        await until(lambda: '"trim"' in made.log())  # said when it is done
        await still_held(client, info.id)


async def test_without_swap_anonymous_memory_stays_and_is_not_asked_for_again() -> None:
    if swap.active(FILES):
        pytest.skip("the host has swap")
    async with daemon(reclaim={"swap": "off"} | ALWAYS) as made:
        client = await made.client()
        info = await client.create("a", image="base/busybox:1")
        async with in_use(client, info.id):
            await hold(client, info.id)
        await until(lambda: '"trim"' in made.log())
        await asyncio.sleep(6)
        found = await metrics(client, info.id)
        assert found.memory_swapped_bytes == 0
        assert found.memory_bytes >= HELD
        assert made.log().count('"trim"') == 1


@contextlib.asynccontextmanager
async def in_use(client: WireClient, name: str) -> AsyncIterator[None]:
    """An open call: of the sandbox nothing is asked meanwhile, however long it takes."""
    call = client.open("exec.run", {"cid": "use", "argv": [b"sleep", b"1000"]}, name)
    yield
    await client.call("exec.kill", {"cid": "use"}, name)
    await call.answer()


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
