"""A store that goes away, fails, or whose servant is killed: sandboxes go on, no byte is wrong."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import random
import secrets
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import DSecError, Unavailable
from tests.system.daemon import IMAGE, Daemon, daemon, make_rootfs, until
from tests.system.remote_lab import Remote, blobd_processes, random_files, remote

pytestmark = pytest.mark.root
FILES, SIZE = 24, 1 << 20
ENVIRONMENT = DSecContainerRunArgs(
    container_image=IMAGE, toolkits=["toolkit/data:1"], memory_limit_mb=32
)
CUT_S = 60.0


@pytest.fixture
def dice() -> random.Random:
    seed = int(os.environ.get("DSEC_SEED", "0")) or secrets.randbelow(1 << 30) + 1
    print(f"DSEC_SEED={seed}")
    return random.Random(seed)


def sums(directory: Path) -> list[str]:
    return [
        hashlib.sha256((directory / f"file{n}").read_bytes()).hexdigest()
        for n in range(len(list(directory.iterdir())))
    ]


async def read(box: Sandbox, number: int) -> str:
    """Return the digest of a file as it is read inside, "" for an I/O error and nothing else."""
    done = await box.run("sha256sum", f"/data/file{number}")
    if done.exit_code == 0:
        return str(done.stdout).split()[0]
    # of the program's own pages it is a SIGBUS
    assert done.signal == signal.SIGBUS or os.strerror(errno.EIO) in done.stderr, done
    return ""


# --- kill -9 during a burst -----------------------------------------------------------------------


class Burst:
    """Creates, each of which reads files and compares their digests, whatever is killed."""

    def __init__(
        self, host: Daemon, client: DSecClient, digests: list[str], dice: random.Random
    ) -> None:
        self.host, self.client, self.digests, self.dice = host, client, digests, dice
        self.reads = self.failed = self.cut_off = 0
        self.boxes: list[Sandbox] = []

    async def create(self) -> None:
        await asyncio.sleep(self.dice.uniform(0, 3))
        box = await self.client.run_container(ENVIRONMENT)
        self.boxes.append(box)
        for number in self.dice.sample(range(FILES), 3):
            await self.check(box, number)

    async def check(self, box: Sandbox, number: int) -> None:
        """Read until it is read; an error may come before, a wrong byte may not."""
        for _ in range(300):
            try:
                found = await read(box, number)
            except Unavailable:  # dsecd was killed under the call
                self.cut_off += 1
            else:
                self.reads += 1
                if found:
                    assert found == self.digests[number]
                    return
                self.failed += 1
            await asyncio.sleep(0.1)
        raise AssertionError(f"{box.id} cannot read file{number}")

    async def kill(self, rounds: int) -> None:
        """Kill dsec-blobd (worker, keeper or both), dsecd, or one of each, at random moments."""
        for number in range(rounds):
            await asyncio.sleep(self.dice.uniform(0.1, 0.6))
            await until(lambda: blobd_processes(self.host))  # dsecd starts it again
            served = blobd_processes(self.host)
            what = ("blobd", "dsecd", "one of each")[number % 3]
            if what == "one of each":  # the FUSE connection ends with the last of them
                served = self.dice.sample(served, 1)
            for process in served if what != "dsecd" else ():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGKILL)
            if what != "blobd":
                self.host.kill()
                await self.host.start()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    random_files(tmp_path / "data", FILES, SIZE)
    return tmp_path / "data"


@pytest.fixture
async def reader(tmp_path: Path, data: Path) -> AsyncIterator[tuple[Daemon, DSecClient]]:
    """A daemon that reads a shared directory through dsec-blobd; another one made the layers."""
    shared = str(tmp_path / "store")
    async with (
        daemon(store={"url": shared}) as builder,
        DSecClient(f"unix:{builder.socket}") as client,
    ):
        await client.layers.import_("toolkit/data:1", str(data), at="/data")
    sections = {"store": {"url": shared}, "cache": {"use": "always"}}
    async with (
        daemon(base=False, **sections) as host,
        DSecClient(f"unix:{host.socket}") as client,
    ):
        yield host, client


async def test_no_wrong_byte_is_read_when_blobd_and_dsecd_are_killed_during_a_burst(
    reader: tuple[Daemon, DSecClient], data: Path, dice: random.Random
) -> None:
    host, client = reader
    burst = Burst(host, client, sums(data), dice)
    async with asyncio.TaskGroup() as group:
        group.create_task(burst.kill(6))
        for _ in range(100):
            group.create_task(burst.create())
    assert len({box.id for box in burst.boxes}) == 100
    assert burst.reads - burst.failed == 300
    await until(lambda: len(host.cgroups()) == 100, 30)
    for box in dice.sample(burst.boxes, 10):  # those of before the kills, too
        await burst.check(box, dice.randrange(FILES))
    await asyncio.gather(*(box.stop() for box in burst.boxes))
    assert host.remains() == []
    print(f"reads {burst.reads}, of them EIO {burst.failed}, cut off {burst.cut_off}")


async def test_when_dsecd_and_blobd_die_at_once_the_next_sandbox_reads(
    reader: tuple[Daemon, DSecClient], data: Path
) -> None:
    """The FUSE connection dies with its last holder, and the mounts on it: for the old ones EIO."""
    host, client = reader
    digests, old = sums(data), await client.run_container(ENVIRONMENT)
    assert await read(old, 0) == digests[0]
    assert host.process is not None
    host.process.send_signal(signal.SIGSTOP)  # or it would start dsec-blobd again
    for process in blobd_processes(host):
        process.kill()
    host.kill()
    await until(lambda: not blobd_processes(host))  # killed is not yet dead
    await host.start()
    async with await client.run_container(ENVIRONMENT) as fresh:
        assert [await read(fresh, n) for n in range(3)] == digests[:3]
        assert await read(old, 0) in ("", digests[0])
        assert await read(old, 1) == ""
    assert "died together" in host.log()
    await old.stop()
    assert host.remains() == []


# --- the store cut off ----------------------------------------------------------------------------


@pytest.fixture
def bucket(tmp_path: Path) -> Iterator[Remote]:
    with remote(tmp_path, timeout_s=8) as made:
        yield made


@pytest.mark.slow
@pytest.mark.timeout(240)
async def test_sandboxes_go_on_while_the_store_is_cut_off_for_60_s(
    bucket: Remote, tmp_path: Path
) -> None:
    data, rootfs = tmp_path / "data", tmp_path / "rootfs"
    random_files(data, 4, 4 << 20)
    make_rootfs(rootfs)
    async with bucket.host() as (_, client):
        await client.layers.import_(IMAGE, str(rootfs))
        await client.layers.import_("toolkit/data:1", str(data), at="/data")
        await client.layers.import_("toolkit/never:1", str(data), at="/never")
    digests = sums(data)
    async with bucket.host() as (host, client), await client.run_container(ENVIRONMENT) as box:
        other = await client.run_container(ENVIRONMENT)
        assert await read(box, 0) == await read(other, 0) == digests[0]
        bucket.cut("stall")
        begun = time.monotonic()
        waiting = asyncio.create_task(read(box, 1))  # of what nobody has fetched yet
        await while_cut_off(client, other, digests)
        bucket.cut("reset")  # another kind of away, with nothing let through between
        bucket.proxy.healed.set()
        await asyncio.sleep(2)
        assert not waiting.done()
        await while_cut_off(client, other, digests)
        await asyncio.sleep(max(0.0, begun + CUT_S - time.monotonic()))
        assert not waiting.done()
        bucket.proxy.heal()
        assert await asyncio.wait_for(waiting, 30) == digests[1]
        assert await read(box, 2) == digests[2]
        await client.layers.import_("toolkit/more:1", str(data), at="/more", replace=True)
        await other.stop()
        unused = DSecContainerRunArgs(container_image=IMAGE, toolkits=["toolkit/never:1"])
        async with await client.run_container(unused) as fresh:
            done = await fresh.run("sha256sum", "/never/file3")
            assert done.stdout.split()[0] == digests[3]
    assert host.remains() == []


async def while_cut_off(client: DSecClient, box: Sandbox, digests: list[str]) -> None:
    """What is on this host works at once, what is not says so and may be tried again."""
    async with asyncio.timeout(5):
        assert await read(box, 0) == digests[0]
        await box.run_shell("echo kept > /root/file", check=True)
        point = await box.checkpoint()
        (branch,) = await box.branch(1, point)
        assert await branch.files.read("/root/file") == "kept\n"
        await branch.stop()
        await box.rollback(point)
    await asyncio.sleep(1.5)  # what was resolved a moment ago is not believed for longer
    async with asyncio.timeout(10):
        async with await client.run_container(ENVIRONMENT) as known:
            assert await read(known, 0) == digests[0]
    absent = DSecContainerRunArgs(container_image="base/unheard-of:1")
    calls = (
        client.layers.import_("toolkit/new:1", str(Path(__file__).parent), at="/new"),
        client.run_container(absent),
    )
    for error in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(error, Unavailable), error
        assert error.retryable
        assert "127.0.0.1" in error.message  # the store, by name


@pytest.mark.timeout(120)
async def test_dsecd_stops_while_the_store_is_cut_off(bucket: Remote, tmp_path: Path) -> None:
    """An unmount waits for reads under way, and those for a store that may never answer."""
    random_files(tmp_path / "data", 2, 4 << 20)
    make_rootfs(tmp_path / "rootfs")
    async with bucket.host() as (_, client):
        await client.layers.import_(IMAGE, str(tmp_path / "rootfs"))
        await client.layers.import_("toolkit/data:1", str(tmp_path / "data"), at="/data")
    async with bucket.host() as (host, client):
        box = await client.run_container(ENVIRONMENT)
        bucket.cut("stall")
        waiting = asyncio.ensure_future(box.run("sha256sum", "/data/file1"))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        assert await host.end(timeout_s=30) == 0
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        assert host.remains() == []
        bucket.proxy.heal()


# --- each request of a create fails in turn -------------------------------------------------------


class NthRequest:
    """The n-th request from now on fails in a way of its own, or all from there on."""

    def __init__(self, bucket: Remote, number: int, fault: str, on: bool = False) -> None:
        self.left, self.fault, self.on, self.met = number, fault, on, False
        bucket.proxy.fault = self

    def __call__(self, method: str, path: str) -> str:
        if "/leases/" in path or ("/traces/" in path and method == "PUT"):
            return ""  # of the host, at times of their own
        self.left -= 1
        if self.left == 0 or (self.on and self.left < 0):
            self.met = True
            return self.fault
        return ""


def left_in_cache(host: Daemon) -> list[str]:
    """Copies that were begun."""
    cache = host.state / "cache"
    return [str(path) for place in ("images", "indexes") for path in (cache / place).glob(".*")]


@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("fault", "on"), [("403", False), ("403", True), ("reset", False), ("corrupt", False)]
)
async def test_a_create_leaks_nothing_whichever_of_its_requests_fails(
    bucket: Remote, tmp_path: Path, fault: str, on: bool
) -> None:
    """A refusal fails the create; what passes by itself (one reset, one flipped bit) does not."""
    most = 16
    make_rootfs(tmp_path / "rootfs")
    async with bucket.host() as (_, client):
        await client.layers.import_(IMAGE, str(tmp_path / "rootfs"))
        for n in range(1, most):
            random_files(tmp_path / f"tool{n}", 1, 50_000)
            await client.layers.import_(f"toolkit/t{n}:1", str(tmp_path / f"tool{n}"), at="/data")
    async with bucket.host() as (host, client):
        async with await client.run_container(DSecContainerRunArgs(container_image=IMAGE)) as box:
            await box.run("true", check=True)  # the base is there
        failed = 0
        for n in range(1, most):
            args = DSecContainerRunArgs(container_image=IMAGE, toolkits=[f"toolkit/t{n}:1"])
            order = NthRequest(bucket, n, fault, on)
            (box,) = await asyncio.gather(client.run_container(args), return_exceptions=True)
            if on:
                bucket.proxy.heal()
            if isinstance(box, Sandbox):
                assert await read(box, 0) in ("", *sums(tmp_path / f"tool{n}"))
                await box.stop()
            else:
                failed += 1
                assert isinstance(box, DSecError)
                assert "403" in str(box)
            assert host.remains() == []
            bucket.proxy.heal()
            # what it asked for beside the request that failed comes, or fails, after it
            await until(lambda: left_in_cache(host) == [])
            async with await client.run_container(args) as again:
                assert await read(again, 0) == sums(tmp_path / f"tool{n}")[0]
            if not order.met:
                break
        assert not order.met
        assert n > 5  # a name, a manifest, an image, an index, a trace, a chunk
        assert failed == 0 if fault != "403" else failed >= 4
        assert host.remains() == []
