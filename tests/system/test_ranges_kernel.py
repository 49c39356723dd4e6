"""Uid ranges with real user namespaces, and pressure triggers: what needs the kernel itself."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from dsecd import fastpath
from dsecd.host import pressure
from dsecd.host.ranges import INIT_USERNS_FD, RangePool
from tests.system.daemon import until

START = 0x7F000000


def end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)


@pytest.mark.root
@pytest.mark.needs("user_namespaces")
async def test_range_maps_its_ids_and_is_adopted_from_a_live_process() -> None:
    ranges = RangePool(START, 8, ready=2)
    ranges.start()
    await until(lambda: ranges.ready == 2)
    taken = ranges.acquire()
    namespace = os.fstat(taken.userns_fd).st_ino
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.dup2(taken.userns_fd, INIT_USERNS_FD)
        os.write(writer, b"x")
        signal.pause()
        os._exit(0)
    os.read(reader, 1)
    await ranges.close()  # the daemon is gone, the sandbox is not

    again = RangePool(START, 8, ready=0)
    adopted = again.adopt(taken.index, child)
    assert os.fstat(adopted.userns_fd).st_ino == namespace
    assert again.acquire().index != taken.index
    end(child)
    again.release(adopted)
    assert again.ready == 1
    await again.close()
    os.close(reader)
    os.close(writer)


@pytest.mark.root
@pytest.mark.needs("user_namespaces")
def test_namespace_ids_are_those_of_the_range() -> None:
    fd = fastpath.make_userns(START, START + 65535)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        import ctypes

        ctypes.CDLL(None).setns(fd, 0x10000000)
        os.write(writer, Path("/proc/self/uid_map").read_bytes())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as file:
        assert file.read().split() == ["0", str(START), "65535"]
    os.waitpid(child, 0)
    os.close(fd)


@pytest.mark.root
@pytest.mark.needs("psi_triggers")
async def test_trigger_fires_under_cpu_pressure() -> None:
    fired = asyncio.Event()
    trigger = pressure.Trigger("cpu", 0.05, fired.set)
    hogs = []
    for _ in range((os.cpu_count() or 1) * 2):
        pid = os.fork()
        if pid == 0:
            last = time.monotonic() + 20
            while time.monotonic() < last:
                pass
            os._exit(0)
        hogs.append(pid)
    try:
        await asyncio.wait_for(fired.wait(), 10)
    finally:
        for pid in hogs:
            end(pid)
        trigger.close()
        trigger.close()
