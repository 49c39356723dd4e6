"""The pool of network namespaces: what is lent, what is recycled, what is thrown away."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from dsecd import fastpath
from dsecd.host import netns
from dsecd.host.netns import Netns, NetnsPool
from libdsec.errors import Internal, NotFound, Unavailable
from tests.system.network_lab import command, connect, listen, read

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root"),
]
RANGE_ROOT = 268435456  # root inside the first sandbox


def open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[NetnsPool]:
    before = open_files()
    made = NetnsPool(4)
    made.start()
    yield made
    await made.close()
    assert open_files() == before, "a descriptor was left open"


async def until(condition: object) -> None:
    assert callable(condition)
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not happen in 5 s")


def give_back(pool: NetnsPool, ns: Netns) -> None:
    """What the backend does with the spawner's answer."""
    pool.release(ns, fastpath.netns_reusable(ns.fd))


async def test_loopback_is_up_and_nothing_else_is_there(pool: NetnsPool) -> None:
    ns = await pool.acquire()
    for address, version in (("127.0.0.1", 4), ("::1", 6)):
        with listen(ns.fd, address, 8080, version):
            connect(ns.fd, address, 8080, version).close()
    assert command(ns.fd, "ip", "-o", "link").count("\n") == 1


async def test_the_pool_fills_itself_and_lends_what_it_has(pool: NetnsPool) -> None:
    await until(lambda: pool.stats().free == 4)
    made = pool.stats().created
    lent = await asyncio.gather(*(pool.acquire() for _ in range(4)))
    assert pool.stats().created == made
    assert not any(ns.recycled for ns in lent)
    await until(lambda: pool.stats().free == 4)


async def test_a_burst_beyond_the_pool_is_served_with_distinct_ones(pool: NetnsPool) -> None:
    lent = await asyncio.gather(*(pool.acquire() for _ in range(60)))
    assert len({ns.fd for ns in lent}) == 60
    assert len({os.fstat(ns.fd).st_ino for ns in lent}) == 60
    for ns in lent:
        give_back(pool, ns)
    await until(lambda: pool.stats().closing == 0)


async def test_a_clean_one_is_recycled(pool: NetnsPool) -> None:
    await until(lambda: pool.stats().free == 4)  # none is being made
    pool._depth = 0  # no refill: the released one is the next
    while pool.stats().free:
        await pool.acquire()
    ns = await pool.acquire()
    with listen(ns.fd, "127.0.0.1", 8080):
        pass
    pool._depth = 1
    give_back(pool, ns)
    give_back(pool, ns)  # a second time does nothing
    again = await pool.acquire()
    assert again.recycled
    assert os.fstat(again.fd).st_ino == os.fstat(ns.fd).st_ino
    assert pool.stats().recycled == 1


@pytest.mark.parametrize("left", ["socket", "time_wait", "address", "interface", "route", "rules"])
async def test_what_a_sandbox_left_is_not_given_to_the_next(pool: NetnsPool, left: str) -> None:
    ns = await pool.acquire()
    pool._depth = 8
    kept: list[socket.socket] = []
    if left == "socket":
        kept.append(listen(ns.fd, "127.0.0.1", 8080))
    elif left == "time_wait":
        with listen(ns.fd, "127.0.0.1", 8080) as server:
            client = connect(ns.fd, "127.0.0.1", 8080)
            peer, _ = server.accept()
            client.close()  # the side that closes first keeps TIME_WAIT
            peer.close()
            await asyncio.sleep(0.05)
    elif left == "address":
        command(ns.fd, "ip", "address", "add", "10.0.0.1/8", "dev", "lo")
    elif left == "interface":
        command(ns.fd, "ip", "link", "add", "left0", "type", "veth", "peer", "name", "left1")
    elif left == "route":
        command(ns.fd, "ip", "route", "add", "blackhole", "10.0.0.0/8")
    else:
        command(ns.fd, "nft", "add", "table", "inet", "left")
    give_back(pool, ns)
    assert pool.stats().recycled == 0
    await until(lambda: pool.stats().discarded == 1)
    for sock in kept:
        sock.close()


async def test_teardown_is_bounded(pool: NetnsPool) -> None:
    lent = [await pool.acquire() for _ in range(netns.TEARDOWN_BATCH * 2 + 10)]
    pool._depth = 0
    for ns in lent:
        give_back(pool, ns)
    await asyncio.sleep(0)
    assert pool.stats().closing >= netns.TEARDOWN_BATCH
    await until(lambda: pool.stats().discarded >= len(lent))


async def test_a_running_sandbox_is_adopted(pool: NetnsPool) -> None:
    ns = await pool.acquire()
    inode = os.fstat(ns.fd).st_ino
    sleeper = await asyncio.create_subprocess_exec(
        "nsenter", f"--net=/proc/self/fd/{ns.fd}", "sleep", "60", pass_fds=[ns.fd]
    )
    try:
        path = Path(f"/proc/{sleeper.pid}/ns/net")
        await until(lambda: path.stat().st_ino == inode)
        adopted = pool.adopt(sleeper.pid)
        assert os.fstat(adopted.fd).st_ino == inode
        give_back(pool, adopted)
    finally:
        sleeper.kill()
        await sleeper.wait()
    with pytest.raises(NotFound):
        pool.adopt(sleeper.pid)
    with pytest.raises(Internal, match="host's network namespace"):
        pool.adopt(os.getpid())


async def test_a_cancelled_acquire_loses_nothing(pool: NetnsPool) -> None:
    pool._depth = 0
    tasks = [asyncio.create_task(pool.acquire()) for _ in range(20)]
    await asyncio.sleep(0.001)
    for task in tasks:
        task.cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert pool.stats().lent == sum(isinstance(r, netns.Netns) for r in results)


async def test_a_kernel_that_makes_no_more_is_reported() -> None:
    def refuse() -> int:
        raise OSError(28, "No space left on device")

    pool = NetnsPool(0, make=refuse)
    with pytest.raises(Unavailable, match="No space left"):
        await pool.acquire()
    await pool.close()
    with pytest.raises(Unavailable, match="stopping"):
        await pool.acquire()


async def test_low_ports_and_ping_are_given_to_root_inside(pool: NetnsPool) -> None:
    """Root inside has no network capability: it is an ordinary id outside."""
    ns = await pool.acquire()
    assert read(ns.fd, "/proc/sys/net/ipv4/ip_unprivileged_port_start") == "0"
    script = (
        "import socket\n"
        "socket.socket().bind(('127.0.0.1', 80))\n"
        "for family, proto, kind, to in ((2, 1, 8, '127.0.0.1'), (10, 58, 128, '::1')):\n"
        "    ping = socket.socket(family, socket.SOCK_DGRAM, proto)\n"
        "    ping.settimeout(20)\n"
        "    ping.sendto(bytes([kind, 0, 0, 0, 0, 1, 0, 1]), (to, 0))\n"
        "    print(ping.recv(100)[0])\n"
    )
    ids = [f"--reuid={RANGE_ROOT}", f"--regid={RANGE_ROOT}", "--clear-groups"]
    answer = command(
        ns.fd, "setpriv", *ids, "--bounding-set=-all", "/usr/bin/python3", "-c", script
    )
    assert answer.split() == ["0", "129"]


async def test_the_thread_comes_back(pool: NetnsPool) -> None:
    """Setting sysctls visits the namespace: every thread must return to the host's."""
    await asyncio.gather(*(pool.acquire() for _ in range(20)))
    home = Path("/proc/self/ns/net").stat().st_ino

    def seen() -> set[int]:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):  # one of an earlier test has ended only now
                found.add((task / "ns/net").stat().st_ino)
        return found

    await until(lambda: seen() == {home})  # the pool may be at filling itself
