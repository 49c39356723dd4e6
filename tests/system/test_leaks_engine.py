"""faults.md, "Leaks and crashes"."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dsecd.host.plan import STEPS
from libdsec import model
from libdsec.errors import DSecError, NotFound
from tests.system.daemon import IMAGE, daemon, until
from tests.wire_client import WireClient

pytestmark = pytest.mark.root

CLIENT = """
import asyncio, sys
sys.path.insert(0, {repository!r})
from tests.wire_client import WireClient
from libdsec import model
async def main():
    client = await WireClient.connect({socket!r})
    for i in range({count}):
        client.open("sandbox.create", model.CreateArgs(
            key=f"orphan{{i}}", args=model.DSecContainerRunArgs(container_image={image!r})))
    await client.writer.drain()
    print("sent", flush=True)
    await asyncio.sleep(60)
asyncio.run(main())
"""


def start_client(socket: str, count: int) -> subprocess.Popen[bytes]:
    text = CLIENT.format(repository=str(Path.cwd()), socket=socket, count=count, image=IMAGE)
    return subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE)


async def test_a_client_killed_before_the_answer_leaves_no_orphan() -> None:
    async with daemon() as d:
        client = start_client(str(d.socket), 20)
        assert client.stdout is not None
        assert client.stdout.readline() == b"sent\n"
        client.send_signal(signal.SIGSTOP)  # it reads no answer
        await until(lambda: len(d.cgroups()) == 20)
        client.kill()
        client.wait()
        client.stdout.close()
        await until(lambda: d.remains() == [], 15)


async def test_lifetime_is_enforced_on_the_server() -> None:
    async with daemon(limits={"default_idle_s": 0.5}) as d:
        client = await WireClient.connect(d.socket)
        await client.create("k", IMAGE)
        client.abort()
        await until(lambda: d.remains() == [], 10)


@pytest.mark.parametrize("network", ["none", "nat"])
async def test_a_create_that_fails_half_way_leaks_nothing(network: str) -> None:
    async with daemon() as d:
        await d.end()
        # every step of the spawner fails once, in turn
        await d.start(crash_at="fail-each-step")
        client = await d.client()
        for n, step in enumerate(STEPS):
            # "spool" and the like fail before, "exec" after there is a process
            with pytest.raises(DSecError, match=step):
                await client.create(f"k{n}", IMAGE, network=network)
            assert d.remains() == [], step
        good = await client.create("good", IMAGE, network=network)
        assert (await client.run(good.id, "true")).exit_code == 0


async def test_create_and_give_up_over_and_over_leaks_nothing() -> None:
    async with daemon() as d:
        client = await d.client()
        args = model.DSecContainerRunArgs(container_image=IMAGE)
        for i in range(60):
            call = client.open("sandbox.create", model.CreateArgs(key=f"k{i}", args=args))
            await asyncio.sleep(i % 7 / 2000)
            call.cancel()
        await until(lambda: not any(not call.done.done() for call in client.calls.values()))
        for info in await client.list():
            await client.stop(info.id)
        await until(lambda: d.remains() == [])


async def test_no_sandbox_sticks_in_creating_or_stopping() -> None:
    async with daemon() as d:
        client = await d.client()
        infos = await asyncio.gather(*(client.create(f"k{i}", IMAGE) for i in range(20)))
        for info in infos:  # frozen by whoever: stop must not wait for a thaw
            for base in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
                path = f"{base}/{d.name}/{info.id}/cgroup.freeze"
                if os.path.exists(path):  # noqa: PTH110
                    with open(path, "w") as file:  # noqa: PTH123
                        file.write("1")
        begun = time.monotonic()
        stopped = await asyncio.gather(*(client.stop(info.id) for info in infos))
        assert {found.state for found in stopped} == {"stopped"}
        assert time.monotonic() - begun < 10
        assert d.remains() == []


async def test_a_failed_layer_is_visible_to_the_client() -> None:
    async with daemon() as d:
        client = await d.client()
        with pytest.raises(DSecError) as caught:
            await client.call("layer.import", model.LayerImport(name="base/x:1", source="/absent"))
        assert "/absent" in caught.value.message
        with pytest.raises(DSecError, match="base/x:1"):
            await client.create("k", "base/x:1")


async def test_left_overs_of_nobody_are_swept_at_start() -> None:
    async with daemon() as d:
        d.kill()
        stray = "s0-t0-1-0zzzz"
        directory = d.runtime / "sb" / stray
        directory.mkdir(parents=True)
        (directory / "file").write_text("x")
        for base in ("/sys/fs/cgroup/unified", "/sys/fs/cgroup"):
            if os.path.exists(f"{base}/cgroup.controllers"):  # noqa: PTH110
                os.makedirs(f"{base}/{d.name}/{stray}", exist_ok=True)  # noqa: PTH103
                break
        await d.start()
        assert d.remains() == []
        assert "left-over" in d.log()


async def test_a_layer_removed_in_use_stays_for_its_sandboxes() -> None:
    async with daemon() as d:
        client = await d.client()
        info = await client.create("k", IMAGE)
        await client.call("layer.remove", model.LayerRef(name=IMAGE))
        for _ in range(2):
            await client.call("layer.collect", model.CollectArgs(grace_s=0, wait_s=0))
        assert (await client.run(info.id, "true")).exit_code == 0
        with pytest.raises(NotFound):
            await client.create("k2", IMAGE)
