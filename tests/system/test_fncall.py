"""Function calls in warm workers: what they give, their limits, and that nothing of one stays."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecFnCallArgs
from libdsec.errors import InvalidArgument, Unsupported
from tests.system import fncall_traces
from tests.system.compat.debian import IMAGE, build, lend
from tests.system.daemon import Daemon, daemon

pytestmark = [pytest.mark.root, pytest.mark.asyncio]
ROUNDS = 2000


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Daemon]:
    layer = await build()
    async with daemon(base=False, fncall={"workers": 4, "workers_each": 2}) as made:
        await lend(layer, made.state)
        yield made


@pytest_asyncio.fixture
async def client(running: Daemon) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{running.socket}") as made:
        yield made


def call(code: str, **more: object) -> DSecFnCallArgs:
    return DSecFnCallArgs(container_image=IMAGE, code=code, **more)  # type: ignore[arg-type]


async def test_value_output_and_files(client: DSecClient) -> None:
    code = (
        "import json, os, sys\n"
        "def main(x):\n"
        "    print('said'); print('warned', file=sys.stderr)\n"
        "    os.mkdir('out'); open('out/a', 'w').write(open('in/b').read() * 2)\n"
        "    warm = 'json' in sys.modules\n"
        "    return {'x': x, 'cwd': os.getcwd(), 'uid': os.getuid(), 'json': warm}\n"
    )
    args = call(code, input=[1, "é"], files={"in/b": b"ab"}, outputs=["out/a", "none"])
    done = await client.run_fncall(args)
    assert done.ok, done.stderr
    assert done.value == {"x": [1, "é"], "cwd": "/tmp/work", "uid": 65534, "json": True}
    assert (done.stdout, done.stderr) == (b"said\n", b"warned\n")
    assert done.files == {"out/a": b"abab"}
    assert 0 < done.run_s < 5
    assert done.restored_s > 0


async def test_how_a_call_ends(client: DSecClient) -> None:
    raised = await client.run_fncall(call("def main(): return 1 / 0"))
    assert (raised.exit_code, raised.value) == (1, None)
    assert b"ZeroDivisionError" in raised.stderr
    left = await client.run_fncall(call("import sys\ndef main(): sys.exit(7)"))
    assert left.exit_code == 7
    shot = await client.run_fncall(call("import os\ndef main(): os.kill(os.getpid(), 15)"))
    assert (shot.exit_code, shot.signal, shot.timed_out) == (None, 15, False)
    began = time.monotonic()
    code = "import time\ndef main():\n  print('so far', flush=True); time.sleep(99)"
    late = await client.run_fncall(call(code, timeout_s=0.5))
    assert late.timed_out
    assert (late.signal, late.stdout) == (9, b"so far\n")
    assert time.monotonic() - began < 10
    full = await client.run_fncall(call("def main(): print('y' * 5000)", output_limit_kb=1))
    assert full.output_truncated
    assert len(full.stdout) == 1024
    loop = await client.run_fncall(call("def main():\n  while True: pass", cpu_limit_s=1))
    assert loop.signal in (9, 24)


async def test_memory_limit_is_reported_and_the_pool_goes_on(client: DSecClient) -> None:
    args = call("def main(): return len(bytearray(900 << 20))", memory_limit_mb=128)
    done = await client.run_fncall(args)
    assert (done.signal, done.oom_killed) == (9, True)
    assert (await client.run_fncall(call("def main(): return 3", memory_limit_mb=128))).value == 3


async def test_a_program_and_a_module_function(client: DSecClient) -> None:
    args = DSecFnCallArgs(container_image=IMAGE, argv=["sh", "-c", "cat; id -u"], input={"a": 1})
    done = await client.run_fncall(args)
    assert (done.exit_code, done.stdout) == (0, b'{"a":1}65534\n')
    named = DSecFnCallArgs(
        container_image=IMAGE, entry="statistics:mean", imports=["statistics"], input=[1, 2, 6]
    )
    assert (await client.run_fncall(named)).value == 3


async def test_map_keeps_the_order_and_bounds_what_is_open(client: DSecClient) -> None:
    args = call("import time\ndef main(x): time.sleep(0.02 if x % 3 else 0); return x * x")
    found = [done.value async for done in client.map_fncall(args, range(40), concurrency=4)]
    assert found == [x * x for x in range(40)]


async def test_what_cannot_be_is_said(client: DSecClient) -> None:
    with pytest.raises(InvalidArgument, match="exactly one"):
        await client.run_fncall(DSecFnCallArgs(container_image=IMAGE))
    with pytest.raises(InvalidArgument, match="relative path"):
        await client.run_fncall(call("def main(): pass", files={"../x": b""}))
    with pytest.raises(Unsupported, match="no_such_module"):
        await client.run_fncall(call("def main(): pass", imports=["no_such_module"]))


async def test_a_call_given_up_is_ended_and_its_worker_replaced(client: DSecClient) -> None:
    args = call("import time\ndef main(x=0): time.sleep(x); return 1")
    task = asyncio.create_task(client.run_fncall(args))
    slow = asyncio.create_task(
        client.run_fncall(call("import time\ndef main(): time.sleep(300)", timeout_s=600))
    )
    await task
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    for _ in range(4):
        assert (await client.run_fncall(args)).value == 1


async def test_a_dead_zygote_is_replaced(client: DSecClient, running: Daemon) -> None:
    args = call("def main(): return 1")
    assert (await client.run_fncall(args)).value == 1
    (worker,) = [s for s in await client.list_sandboxes() if s.labels.get("dsec.fncall")]
    sandbox = await client.connect(worker.id)
    await sandbox.run("sh", "-c", "kill -9 $(pidof python3)", user="root")
    outcomes = [await asyncio.gather(client.run_fncall(args), return_exceptions=True)]
    assert outcomes
    assert (await client.run_fncall(args)).value == 1


async def test_workers_end_with_the_daemon(client: DSecClient, running: Daemon) -> None:
    assert (await client.run_fncall(call("def main(): return 1"))).ok
    await running.end(signal.SIGKILL)
    await running.start()
    async with DSecClient(f"unix:{running.socket}") as again:
        for _ in range(200):
            if not await again.list_sandboxes():
                break
            await asyncio.sleep(0.1)
        assert await again.list_sandboxes() == []


async def test_two_thousand_rounds_find_nothing_of_the_call_before(client: DSecClient) -> None:
    """Each call looks for traces of any call before it, then leaves some of its own."""
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    plans = [
        {"mark": f"m{n}", "kinds": chance.sample(fncall_traces.KINDS, 5)} for n in range(ROUNDS)
    ]
    args = call(
        Path(fncall_traces.__file__).read_text(), imports=["socket", "mmap", "ctypes", "subprocess"]
    )
    planted: dict[str, int] = {}
    number = 0
    async for done in client.map_fncall(args, plans, concurrency=4):
        assert done.ok, (seed, number, done)
        assert done.value["found"] == [], (seed, number)
        for kind in done.value["planted"]:
            planted[kind] = planted.get(kind, 0) + 1
        number += 1
    assert number == ROUNDS
    missing = set(fncall_traces.KINDS) - set(planted) - set(fncall_traces.REFUSED)
    assert not missing, f"these could never be planted, so nothing was tested: {missing}"
