"""Memory of real microVMs: what guests share, what goes back to the host, what is told."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import DSecClient, Sandbox
from tests.system.daemon import Daemon, make_rootfs
from tests.system.vm_lab import boot, monitor_of, vm_daemon

pytestmark = [pytest.mark.root, pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]
MIB = 1 << 20
LARGE = "base/large:1"
SHARED = 24 * MIB  # of the layer, beside its programs
HELD = 32 * MIB
COLD_S = 4  # DAMON's age: two of its rounds
WITHIN_S = 30.0  # promised are 10, on a host that is not busy
RECLAIMED_S = 60.0  # an emulated guest looks at 32 MiB in a second


@dataclass
class Guests:
    host: Daemon
    first: Sandbox
    second: Sandbox


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """One census for the module, around its daemon."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def guests(
    guest_kernel: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Guests]:
    root = tmp_path_factory.mktemp("large") / "root"
    root.mkdir()
    make_rootfs(root)
    (root / "large").write_bytes(os.urandom(SHARED))
    async with (
        vm_daemon(guest_kernel, damon_min_age_s=COLD_S) as host,
        DSecClient(f"unix:{host.socket}") as client,
    ):
        await client.layers.import_(LARGE, str(root))
        async with (
            await boot(client, image=LARGE, layers="pmem") as first,
            await boot(client, image=LARGE, layers="pmem") as second,
        ):
            yield Guests(host, first, second)


async def do(box: Sandbox, command: str) -> str:
    done = await box.run_shell(command, timeout=60)
    assert done.ok, f"{done.ending}: {done.stderr}"
    return done.stdout.strip()


def layer_in(pid: int) -> tuple[int, int]:
    """Return Rss and Pss of what the monitor `pid` maps of layers (proc_pid_smaps(5))."""
    found, ours = {"Rss": 0, "Pss": 0}, False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in found and ours:
            found[name] += int(value.split()[0]) * 1024
        elif "-" in name.split()[0]:
            ours = "/vm/layer" in line
    return found["Rss"], found["Pss"]


def memory_in(pid: int) -> int:
    """Return what the host holds of a guest's memory: of the monitor's files, layers are not."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/{pid}/status has no RssShmem")


async def until(true: Callable[[], bool], within_s: float, what: Callable[[], str]) -> None:
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, what()
        await asyncio.sleep(0.25)


async def test_a_layer_is_in_memory_once_and_its_share_is_told(guests: Guests) -> None:
    for box in (guests.first, guests.second):
        await do(box, "cat /large > /dev/null")
    for box in (guests.first, guests.second):
        rss, pss = layer_in(monitor_of(guests.host, box.id))
        assert rss >= SHARED
        assert 0.45 * rss < pss < 0.6 * rss
        told = (await box.get_metrics()).memory_shared_bytes
        assert pss * 0.9 < told < pss + 32 * MIB  # the monitor's own programs are shared, too


async def test_what_a_guest_frees_the_host_has_again(guests: Guests) -> None:
    pid = monitor_of(guests.host, guests.first.id)
    await do(guests.first, f"head -c {HELD} /dev/zero > /dev/shm/held")
    full = memory_in(pid)
    assert full > HELD
    await do(guests.first, "rm /dev/shm/held")
    most = full - HELD * 8 // 10
    await until(lambda: memory_in(pid) < most, WITHIN_S, lambda: f"{memory_in(pid)} > {most}")


async def test_what_a_guest_does_not_use_the_host_has_again(guests: Guests) -> None:
    """Pages of files, and memory of processes: that is compressed, and comes back."""
    pid, box = monitor_of(guests.host, guests.second.id), guests.second
    before = memory_in(pid)
    text = "x=$(head -c 24000000 /dev/zero | tr '\\0' x); echo held > /tmp/held"
    holder = f"{text}; while [ ! -e /tmp/say ]; do sleep 1; done; echo ${{#x}} > /tmp/said"
    await box.commands.run(["sh", "-c", holder], background=True)
    await do(box, f"head -c {HELD} /dev/zero > /root/file; sync")
    await do(box, "until [ -e /tmp/held ]; do sleep 0.2; done")
    # some may have gone again: the file is old when the process took long
    full = max(memory_in(pid), before + HELD + 24_000_000)
    most = full - (HELD + 24_000_000) * 7 // 10
    await until(lambda: memory_in(pid) < most, RECLAIMED_S, lambda: f"{memory_in(pid)} > {most}")
    # the file is most of that, and the process may follow in a later round
    paged_out = "until awk 'NR==2 && $4*1024 > 12000000 {ok=1} END {exit !ok}' /proc/swaps"
    swaps = await do(box, f"{paged_out}; do sleep 0.5; done; tail -n 1 /proc/swaps")
    assert swaps.split()[0].endswith("zram0")
    said = "touch /tmp/say; until [ -s /tmp/said ]; do sleep 0.2; done; cat /tmp/said"
    assert await do(box, said) == "24000000"
    assert await do(box, "wc -c < /root/file") == str(HELD)
