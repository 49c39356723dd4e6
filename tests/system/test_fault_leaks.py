"""faults.md, "Leaks and crashes": as users of libdsec meet them, and as the host sees them.

Crashes at every step of a create, failing steps and clients killed on the wire level are in
test_recovery.py and test_leaks_engine.py.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import psutil
import pytest

from libdsec import DSecClient, DSecContainerRunArgs, DSecError, NotFound, Sandbox
from tests.system.daemon import IMAGE, Daemon, daemon, until
from tests.system.user_view import first_process, viewed

pytestmark = pytest.mark.root

ROOT = Path(__file__).parents[2]
ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=16)

USER = """
import asyncio, sys
from libdsec import DSecClient, DSecContainerRunArgs
async def main():
    async with DSecClient(sys.argv[1]) as client:
        args = DSecContainerRunArgs(container_image=sys.argv[2], ttl_running_stop=1.0)
        async with await client.run_container(args) as sandbox:
            print(sandbox.id, flush=True)
            await asyncio.sleep(600)
asyncio.run(main())
"""


def control_files(d: Daemon, sandbox: str, name: str) -> list[Path]:
    trees = (Path("/sys/fs/cgroup/unified"), Path("/sys/fs/cgroup"))
    return [p for tree in trees if (p := tree / d.name / sandbox / name).exists()][:1]


async def eventually(condition: Callable[[], object], what: str) -> None:
    """As `until`, for what may take long on a busy host."""
    try:
        await until(condition, 30)
    except AssertionError:
        pytest.fail(what)


async def test_left_over_network_namespaces_do_not_delay_the_next_start() -> None:
    """Sandboxes with interfaces died with their daemon: the next one frees all and serves."""
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        nat = DSecContainerRunArgs(container_image=IMAGE, network="nat", memory_limit_mb=16)
        boxes = await asyncio.gather(*(client.run_container(nat) for _ in range(40)))
        d.kill()
        for box in boxes:
            for file in control_files(d, box.id, "cgroup.kill"):
                file.write_text("1")
        # one that is still about to die would be found alive, and die later
        await eventually(lambda: not any(d.pids_of(box.id) for box in boxes), "not killed")
        await d.start()  # it answers: its start does not wait for the kernel's clean-up
        again = await client.run_container(nat)
        assert (await again.run("ip", "addr")).exit_code == 0
        assert {info.id for info in await client.list_sandboxes()} == {again.id}
        await again.stop()
        assert d.remains() == []


async def test_a_restart_does_not_forget_running_sandboxes() -> None:
    async with viewed(memory_limit_mb=32) as view:
        boxes = [view.sandbox, *[await view.another(memory_limit_mb=16) for _ in range(9)]]
        firsts = [first_process(view.daemon, box.id) for box in boxes]
        for _ in range(3):
            await view.daemon.restart()
            assert {box.id for box in boxes} == {
                info.id for info in await view.client.list_sandboxes()
            }
            assert [(await box.run("echo", box.id)).stdout.strip() for box in boxes] == [
                box.id for box in boxes
            ]
        assert [first_process(view.daemon, box.id) for box in boxes] == firsts


async def test_a_live_sandbox_that_does_not_answer_is_not_judged_dead() -> None:
    """Frozen by somebody, or starved: alive is what the kernel says is alive."""
    async with viewed() as view:
        box, d = view.sandbox, view.daemon
        await box.files.write("/mark", "kept")
        (freeze,) = control_files(d, box.id, "cgroup.freeze")
        freeze.write_text("1")
        try:
            await d.restart()
            assert (await box.get_info()).state == "running"
            stuck = asyncio.ensure_future(box.run("cat", "/mark"))
            await asyncio.sleep(1)
            assert (await box.get_info()).state == "running"
        finally:
            freeze.write_text("0")
        assert (await asyncio.wait_for(stuck, 30)).stdout == "kept"


async def test_a_death_is_seen_before_the_next_call() -> None:
    async with viewed() as view:
        events = view.client.events()
        event = asyncio.ensure_future(anext(events))
        call = asyncio.ensure_future(view.sandbox.run("sleep", "600"))
        await asyncio.sleep(0)  # both are asked for
        await view.sandbox.run("true")  # and this after them
        os.kill(first_process(view.daemon, view.sandbox.id), signal.SIGKILL)
        seen = await asyncio.wait_for(event, 10)
        assert (seen.kind, seen.sandbox) == ("failed", view.sandbox.id)
        with pytest.raises(DSecError, match="init"):
            await asyncio.wait_for(call, 10)
        await events.aclose()
        await eventually(lambda: view.daemon.remains() == [], "a dead sandbox is not freed")


async def test_sigkill_of_the_client_skips_its_cleanup_and_the_server_enforces_it() -> None:
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        command = [sys.executable, "-c", USER, f"unix:{d.socket}", IMAGE]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        user = await asyncio.create_subprocess_exec(
            *command, stdout=subprocess.PIPE, env=environment
        )
        assert user.stdout is not None
        name = (await user.stdout.readline()).decode().strip()
        user.kill()
        await user.wait()
        await eventually(lambda: d.remains() == [], "the orphan lives on")
        # its end is known a little after nothing is left: this waits for it, and begins none
        info = await (await client.connect(name)).stop()
        assert info.state == "stopped"
        assert "idle" in info.reason


async def test_a_cancelled_create_leaves_no_orphan() -> None:
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        for i in range(40):
            create = asyncio.ensure_future(client.run_container(ARGS))
            await asyncio.sleep(i % 8 / 1000)
            create.cancel()
            (made,) = await asyncio.gather(create, return_exceptions=True)
            if isinstance(made, Sandbox):  # it was ready before it was cancelled
                await made.stop()
        while await client.list_sandboxes():  # some are still being made, to be undone  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await eventually(lambda: d.remains() == [], "a cancelled create left a sandbox")


async def test_cgroups_and_shims_do_not_leak() -> None:
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        assert d.process is not None
        top = psutil.Process(d.process.pid)

        def held() -> tuple[int, int, int]:
            slots = [
                entry
                for name in ("cpu", "memory", "pids")
                for entry in (Path("/sys/fs/cgroup") / name / d.name).glob("slot-*")
            ]
            return len(slots), len(top.children(recursive=True)), d.open_files()

        async def lives(rounds: int) -> None:
            for _ in range(rounds):
                boxes = await asyncio.gather(*(client.run_container(ARGS) for _ in range(10)))
                await asyncio.gather(*(box.run("true") for box in boxes))
                await asyncio.gather(*(box.stop() for box in boxes))

        await lives(3)
        slots, processes, files = held()
        await lives(12)
        assert d.remains() == []
        await eventually(lambda: held()[1] <= processes, "shims leak")
        await eventually(lambda: held()[0] <= slots + 12, "cgroups leak")
        await eventually(lambda: held()[2] <= files + 16, "descriptors leak")


async def test_deletes_do_not_stall_behind_a_busy_scheduler() -> None:
    """Busy sandboxes, and a queue of creates: a stop is served before the queue is.

    While a client stands still before its stops, all creates may be served: then once more.
    """
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        waiting: list[int] = []
        while not any(waiting) and len(waiting) < 10:
            boxes = await asyncio.gather(*(client.run_container(ARGS) for _ in range(8)))
            for box in boxes:
                await box.commands.run("while :; do :; done", background=True)
            queue = [asyncio.ensure_future(client.run_container(ARGS)) for _ in range(400)]
            await until(lambda: len(d.cgroups()) > 12)
            stopped = await asyncio.gather(*(box.stop() for box in boxes))
            waiting.append(sum(not create.done() for create in queue))
            assert {info.state for info in stopped} == {"stopped"}
            made = await asyncio.gather(*queue)
            await asyncio.gather(*(box.stop() for box in made))
            assert d.remains() == []
        assert any(waiting), "the creates were served first"


async def test_spools_runtime_files_and_records_of_ended_sandboxes_are_reclaimed() -> None:
    sections: dict[str, dict[str, object]] = {"limits": {"ended_kept": 5}}
    async with daemon(**sections) as d, DSecClient(f"unix:{d.socket}") as client:
        ended = []
        for _ in range(15):
            box = await client.run_container(ARGS)
            await box.run_shell("yes | head -c 3000000")
            await box.stop()
            ended.append(box)
        assert d.remains() == []
        assert [p for p in (d.state / "spool").rglob("*") if p.is_file()] == []
        remembered = await client.list_sandboxes(all=True)
        assert len(remembered) <= 6
        with pytest.raises(NotFound):
            await ended[0].get_info()


async def test_dangling_layers_are_reclaimed() -> None:
    """What lost its name a year ago goes; what the layer of that name now shares with it stays."""
    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        (old,) = await client.layers.list()
        layer = d.state / "store/layers" / old.digest
        (image,) = (d.state / "store/images").iterdir()
        (blob,) = (d.state / "store/blobs").iterdir()
        (d.root / "rootfs/new").write_text("x" * 100_000)
        await client.layers.import_(IMAGE, str(d.root / "rootfs"), replace=True)
        past = time.time() - 365 * 86400
        for file in (layer, image, blob):
            os.utime(file, (past, past))
        assert (await client.layers.collect(wait_s=0)).marked == 2
        done = await client.layers.collect(wait_s=0)
        assert done.deleted == 2
        assert done.freed_bytes > 4096
        assert not layer.exists()
        assert not image.exists()
        assert blob.exists()
        async with await client.run_container(ARGS) as box:
            assert (await box.run("busybox", "wc", "-c", "/new")).stdout.split()[0] == "100000"


async def test_a_failed_image_is_visible_to_the_client(tmp_path: Path) -> None:
    broken = tmp_path / "broken.tar"
    broken.write_bytes(b"\x1f\x8bnot an archive" * 100)

    async def batch(client: DSecClient) -> AsyncIterator[Sandbox | DSecError]:
        args = DSecContainerRunArgs(container_image="base/absent:1")
        async for made in client.run_containers(args, 3):
            yield made

    async with daemon() as d, DSecClient(f"unix:{d.socket}") as client:
        with pytest.raises(NotFound, match="base/absent:1"):
            await client.run_container(DSecContainerRunArgs(container_image="base/absent:1"))
        answers = [made async for made in batch(client)]
        assert [type(made) for made in answers] == [NotFound] * 3
        with pytest.raises(DSecError, match=r"broken\.tar"):
            await client.layers.import_("base/broken:1", str(broken))
        assert [layer.name for layer in await client.layers.list()] == [IMAGE]
        for place in ("builds", "store/tmp"):
            assert list((d.state / place).iterdir()) == []
