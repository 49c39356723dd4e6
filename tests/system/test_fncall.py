"""Function calls in warm workers: what they give, their limits, and that nothing of one stays."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import socket
import time
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import psutil
import pytest
import pytest_asyncio

from libdsec import DSecClient, DSecContainerRunArgs, DSecFnCallArgs
from libdsec.errors import (
    AlreadyExists,
    DSecError,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
)
from tests.system import fncall_traces
from tests.system.compat.debian import SMALL, build, lend
from tests.system.daemon import Daemon, daemon, until
from tests.system.test_user_cli import Shell

pytestmark = [pytest.mark.root, pytest.mark.asyncio]
ROUNDS = 2000


@pytest_asyncio.fixture
async def running() -> AsyncIterator[Daemon]:
    layer = await build(SMALL)
    async with daemon(base=False, fncall={"workers": 4, "workers_each": 2}) as made:
        await lend(layer, made.state)
        yield made


@pytest_asyncio.fixture
async def client(running: Daemon) -> AsyncIterator[DSecClient]:
    async with DSecClient(f"unix:{running.socket}") as made:
        yield made


def call(code: str, **more: object) -> DSecFnCallArgs:
    return DSecFnCallArgs(container_image=SMALL, code=code, **more)  # type: ignore[arg-type]


@pytest.mark.vm
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
    code = "import time\ndef main():\n  print('so far', flush=True); time.sleep(99)"
    for timeout_s in (0.5, 2.0, 8.0):  # a busy machine may need longer to come as far as the print
        began = time.monotonic()
        late = await client.run_fncall(call(code, timeout_s=timeout_s))
        assert time.monotonic() - began - timeout_s < 9.5
        assert late.timed_out
        assert late.signal == 9
        if late.stdout:
            break
    assert late.stdout == b"so far\n"
    full = await client.run_fncall(call("def main(): print('y' * 5000)", output_limit_kb=1))
    assert full.output_truncated
    assert len(full.stdout) == 1024
    loop = await client.run_fncall(call("def main():\n  while True: pass", cpu_limit_s=1))
    assert loop.signal in (9, 24)


async def test_the_command_prints_the_value_and_ends_as_the_call(
    running: Daemon, tmp_path: Path
) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "import sys\n"
        "def main(x):\n    print('said')\n    return {'sum': sum(x)}\n"
        "def leave(): sys.exit(7)\n"
        "def loop():\n    while True: pass\n"
    )
    dsec, words = Shell(running), ("fncall", "run", SMALL, str(file))
    assert await dsec(*words, "--input", "[1, 2]") == 'said\n{"sum": 3}\n'
    shown = await dsec.json(*words, "--input", "[3]", "--import", "json")
    assert (shown["value"], shown["stdout"], shown["exit_code"]) == ({"sum": 3}, "said\n", 0)
    await dsec(*words, "--entry", "leave", code=7)
    await dsec(*words, "--entry", "loop", "--timeout", "0.5", code=124)
    await dsec(*words, "--input", "[1", code=2)


async def test_code_is_a_module_and_its_value_is_json(client: DSecClient) -> None:
    code = (
        "from __future__ import annotations\n"
        "from dataclasses import asdict, dataclass\n"
        "@dataclass\n"
        "class Point:\n"
        "    x: int\n"
        "def main(x): return asdict(Point(x))\n"
    )
    assert (await client.run_fncall(call(code, input=3))).value == {"x": 3}
    endless = await client.run_fncall(call("def main(): return float('nan')"))
    assert (endless.exit_code, endless.value_json) == (1, b"")
    assert b"ValueError" in endless.stderr
    large = await client.run_fncall(call("def main(x): return len(x)", input="y" * (3 << 20)))
    assert large.value == 3 << 20


async def test_what_an_import_prints_is_not_of_the_calls(client: DSecClient) -> None:
    args = call("def main(): print('mine')", imports=["this"])
    for _ in range(2):
        assert (await client.run_fncall(args)).stdout == b"mine\n"


async def test_the_c_library_knows_the_number_of_the_calls_thread(client: DSecClient) -> None:
    """It is the owner of recursive mutexes, which a thread with the zygote's number would share."""
    code = (
        "import ctypes, threading\n"
        "def main():\n"
        "    libc = ctypes.CDLL(None)\n"
        "    mutex, kind = (ctypes.c_int * 16)(), (ctypes.c_int * 4)()\n"
        "    libc.pthread_mutexattr_init(kind)\n"
        "    libc.pthread_mutexattr_settype(kind, 1)\n"
        "    libc.pthread_mutex_init(mutex, kind)\n"
        "    libc.pthread_mutex_lock(mutex)\n"
        "    return [mutex[2], threading.get_native_id()]\n"
    )
    assert (await client.run_fncall(call(code))).value == [2, 2]


@pytest.mark.vm
async def test_memory_limit_is_reported_and_the_pool_goes_on(client: DSecClient) -> None:
    args = call("def main(): return len(bytearray(900 << 20))", memory_limit_mb=128)
    done = await client.run_fncall(args)
    assert (done.signal, done.oom_killed) == (9, True)
    assert (await client.run_fncall(call("def main(): return 3", memory_limit_mb=128))).value == 3


async def test_a_program_and_a_module_function(client: DSecClient) -> None:
    args = DSecFnCallArgs(container_image=SMALL, argv=["sh", "-c", "cat; id -u"], input={"a": 1})
    done = await client.run_fncall(args)
    assert (done.exit_code, done.stdout) == (0, b'{"a":1}65534\n')
    named = DSecFnCallArgs(
        container_image=SMALL, entry="statistics:mean", imports=["statistics"], input=[1, 2, 6]
    )
    assert (await client.run_fncall(named)).value == 3


async def test_map_keeps_the_order_and_bounds_what_is_open(client: DSecClient) -> None:
    args = call("import time\ndef main(x): time.sleep(0.02 if x % 3 else 0); return x * x")
    found = [done.value async for done in client.map_fncall(args, range(40), concurrency=4)]
    assert found == [x * x for x in range(40)]


async def test_what_cannot_be_is_said(client: DSecClient) -> None:
    with pytest.raises(InvalidArgument, match="exactly one"):
        await client.run_fncall(DSecFnCallArgs(container_image=SMALL))
    with pytest.raises(InvalidArgument, match="relative path"):
        await client.run_fncall(call("def main(): pass", files={"../x": b""}))
    with pytest.raises(Unsupported, match="no_such_module"):
        await client.run_fncall(call("def main(): pass", imports=["no_such_module"]))


async def test_imports_that_forks_would_share_are_refused(client: DSecClient) -> None:
    """What a call writes to such memory the next would find; locks of threads would stay held."""
    modules = {
        "sharing": "import mmap\nkept = mmap.mmap(-1, 4096)\n",
        "threaded": "import threading, time\n"
        "threading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n",
    }
    sandbox = await client.run_container(DSecContainerRunArgs(container_image=SMALL))
    for name, text in modules.items():
        await sandbox.files.write(f"/usr/lib/python3/dist-packages/{name}.py", text)
    await sandbox.pack_diff("snapshot/modules")
    await sandbox.stop()
    args = msgspec.structs.replace(call("def main(): pass"), container_image="snapshot/modules")
    for name, why in (("sharing", "shares memory"), ("threaded", "threads")):
        with pytest.raises(Unsupported, match=why):
            await client.run_fncall(msgspec.structs.replace(args, imports=[name]))
    late = msgspec.structs.replace(args, code="def main():\n import sharing, threaded; return 1")
    assert (await client.run_fncall(late)).value == 1


async def test_a_call_given_up_is_killed(client: DSecClient, running: Daemon) -> None:
    args = call("import time\ndef main(x=0): time.sleep(x); return 1", timeout_s=600)
    assert (await client.run_fncall(args)).ok
    await rest(running)
    slow = asyncio.create_task(client.run_fncall(msgspec.structs.replace(args, input=300)))
    await until(lambda: told(running, 'dsec_fncall{what="idle"}') == 0)  # a worker has it
    slow.cancel()
    with pytest.raises(asyncio.CancelledError):
        await slow
    for _ in range(4):
        assert (await client.run_fncall(args)).value == 1
    assert len(await workers(running)) <= 2  # that of the call killed serves again


def told(running: Daemon, metric: str) -> int:
    """Return a number that the daemon tells of itself, as it is now."""
    with socket.socket(socket.AF_UNIX) as asking:
        asking.connect(str(running.runtime / "metrics.sock"))
        asking.sendall(b"GET / HTTP/1.1\r\n\r\n")
        text = b"".join(iter(lambda: asking.recv(1 << 16), b"")).decode()
    lines = dict(line.rpartition(" ")[::2] for line in text.splitlines())
    return int(lines.get(metric, "0"))


async def rest(running: Daemon) -> None:
    """Wait until all workers wait for a call: that is a little after the answer to the last one.

    A call that comes earlier has another worker made.
    """
    names = [f'dsec_fncall{{what="{what}"}}' for what in ("workers", "idle")]
    await until(lambda: 0 < told(running, names[0]) == told(running, names[1]))


async def workers(running: Daemon) -> list[str]:
    """Ids of workers made so far, when all of them rest: no client is told."""

    def found() -> list[str]:
        return re.findall(r'"message":"created".*?"sandbox":"([^"]+)"', running.log())

    await rest(running)
    made = told(running, "dsec_creates_total")
    await until(lambda: len(found()) == made)  # the log is written a little later
    return found()


def keepers(running: Daemon) -> dict[int, list[int]]:
    """Pid on the host of each keeper of calls, and of its Python children: zygote, then call."""
    found: dict[int, list[int]] = {}
    for pid in (pid for sandbox in running.cgroups() for pid in running.pids_of(sandbox)):
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            if process.name() == "dsec-fncall":
                children = [each for each in process.children() if each.name() == "python3"]
                children.sort(key=psutil.Process.create_time)  # not by pid: these wrap
                if children:
                    found[pid] = [each.pid for each in children]
    return found


async def test_no_client_reaches_a_worker(client: DSecClient, running: Daemon) -> None:
    """A command in there could stay, and read the next call."""
    assert (await client.run_fncall(call("def main(): return 1"))).ok
    (name,) = await workers(running)
    assert await client.list_sandboxes() == []
    with pytest.raises(NotFound):
        await client.connect(name)
    link = client._link
    for op, args in (
        ("exec.run", {"cid": "x", "argv": ["id"]}), ("files.read", {"path": "/etc/passwd"}),
        ("net.forward", {"port": 1}), ("fncall.serve", {"argv": ["id"]}),
    ):  # fmt: skip
        with pytest.raises(NotFound):
            await link.call(op, args, dict, target=name)
    for op in ("sandbox.stop", "sandbox.metrics", "sandbox.checkpoint", "sandbox.get"):
        with pytest.raises(NotFound):
            await link.call(op, {"id": name}, dict)
    assert (await client.run_fncall(call("def main(): return 2"))).value == 2
    assert await workers(running) == [name]


async def test_no_client_starts_a_keeper_in_its_own_sandbox(client: DSecClient) -> None:
    """Its channel would be a descriptor, which no client can send."""
    async with await client.run_container(DSecContainerRunArgs(container_image=SMALL)) as sandbox:
        with pytest.raises(InvalidArgument, match="one descriptor"):
            await client._link.call("fncall.serve", {"argv": [b"id"]}, dict, target=sandbox.id)


@pytest.mark.parametrize("victim", ["keeper", "zygote"])
async def test_a_broken_worker_is_replaced(
    client: DSecClient, running: Daemon, victim: str
) -> None:
    args = call("import time\ndef main(x=0): time.sleep(x); return 1")
    assert (await client.run_fncall(args)).value == 1
    await rest(running)
    ((keeper, children),) = keepers(running).items()
    slow = asyncio.create_task(client.run_fncall(msgspec.structs.replace(args, input=60)))
    await until(lambda: told(running, 'dsec_fncall{what="idle"}') == 0)  # the worker has it
    os.kill(keeper if victim == "keeper" else children[0], signal.SIGKILL)
    with pytest.raises(Unavailable, match="again"):
        await slow
    assert (await client.run_fncall(args)).value == 1


@pytest.mark.parametrize("victim", ["zygote", "call"])
async def test_no_call_goes_to_a_worker_that_broke_while_it_waited(
    client: DSecClient, running: Daemon, victim: str
) -> None:
    args = call("def main(): return 1")
    assert (await client.run_fncall(args)).value == 1
    await rest(running)
    ((_, (zygote, waiting)),) = keepers(running).items()
    os.kill(zygote if victim == "zygote" else waiting, signal.SIGKILL)
    await until(lambda: "worker dropped" in running.log())
    assert (await client.run_fncall(args)).value == 1
    assert len(await workers(running)) == 2


@pytest.mark.vm
async def test_workers_end_with_the_daemon(client: DSecClient, running: Daemon) -> None:
    assert (await client.run_fncall(call("def main(): return 1"))).ok
    (name,) = await workers(running)
    (keeper,) = keepers(running)
    await running.end(signal.SIGKILL)
    await running.start()
    async with DSecClient(f"unix:{running.socket}") as again:
        with pytest.raises(NotFound):
            await again.connect(name)
        await until(lambda: not psutil.pid_exists(keeper))  # its parent may not know it yet
        assert (await again.run_fncall(call("def main(): return 2"))).value == 2


async def test_a_call_with_a_key_is_made_once(client: DSecClient, running: Daemon) -> None:
    args = call("import os, time\ndef main(): time.sleep(0.3); return os.urandom(8).hex()", key="k")
    one, two = await asyncio.gather(client.run_fncall(args), client.run_fncall(args))
    assert one.value == two.value
    async with DSecClient(f"unix:{running.socket}") as lost:
        asking = asyncio.create_task(lost.run_fncall(msgspec.structs.replace(args, key="l")))
        await asyncio.sleep(0.1)
        await lost.close()
        with contextlib.suppress(DSecError, asyncio.CancelledError):
            await asking
    again = msgspec.structs.replace(args, key="l")
    first, second = await client.run_fncall(again), await client.run_fncall(again)
    assert first.value == second.value != one.value
    with pytest.raises(AlreadyExists):
        await client.run_fncall(msgspec.structs.replace(args, input=1))


async def test_environments_do_not_share_workers(client: DSecClient, running: Daemon) -> None:
    args = call("def main(): return 1")
    for wanted in (args, msgspec.structs.replace(args, pool="b"), args):
        assert (await client.run_fncall(wanted)).ok
        await rest(running)
    assert len(set(await workers(running))) == 2


async def test_connections_of_a_call_are_not_found_by_the_next(
    client: DSecClient, running: Daemon
) -> None:
    """What the kernel keeps of them outlives the processes: the worker is not used again."""
    code = (
        "import socket\n"
        "def main(x):\n"
        "    tables = [open(f'/proc/net/{n}').read() for n in ('tcp', 'tcp6', 'udp', 'udp6')]\n"
        "    if x:\n"
        "        server = socket.create_server(('127.0.0.1', 4321))\n"
        "        mine = socket.create_connection(('127.0.0.1', 4321))\n"
        "        theirs, _ = server.accept()\n"
        "        mine.close(); theirs.close()\n"
        "    return [l for table in tables for l in table.splitlines() if ':10E1' in l]\n"
    )
    for connects in (True, False, True, True, False):
        done = await client.run_fncall(call(code, network="nat", input=connects))
        assert done.ok, done.stderr
        assert done.value == []
    assert len(await workers(running)) > 3


async def test_two_thousand_rounds_find_nothing_of_the_call_before(
    client: DSecClient, running: Daemon
) -> None:
    """Each call looks for traces of any call before it, then leaves some of its own.

    In the same two workers all the time: one that was replaced would have nothing to find.
    """
    seed = random.randrange(1 << 32)
    chance = random.Random(seed)
    plans = [
        {"mark": f"m{n}", "kinds": chance.sample(fncall_traces.KINDS, 5), "nice": os.nice(0)}
        for n in range(ROUNDS)
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
    assert len(await workers(running)) == 2
    missing = set(fncall_traces.KINDS) - set(planted) - set(fncall_traces.REFUSED)
    assert not missing, f"these could never be planted, so nothing was tested: {missing}"
