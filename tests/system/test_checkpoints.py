"""Checkpoint, rollback and branch of sandboxes in a real daemon."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from libdsec import DSecClient, DSecContainerRunArgs
from libdsec.errors import Exhausted, NotFound, WrongState
from tests.system.daemon import IMAGE, Daemon
from tests.system.user_view import shell

pytestmark = pytest.mark.root
KINDS = ["memory", "disk"]
# everything of a tree that a user can see
TREE = (
    "cd /; find . -xdev \\( -path ./proc -o -path ./dev -o -path ./sys \\) -prune -o "
    "-type f -exec sh -c 'stat -c \"%n %f %u %g %s\" $0; md5sum < $0' {} \\; -o "
    "-exec stat -c '%n %f %u %g' {} \\; | sort"
)


def arguments(upper: str = "memory", **more: object) -> DSecContainerRunArgs:
    options: dict[str, object] = {"upper": upper, "disk_limit_mb": 128, **more}
    return DSecContainerRunArgs(container_image=IMAGE, **options)  # type: ignore[arg-type]


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="one CPU: there is nothing to hide")
async def test_the_count_of_cpus_is_the_same_after_a_checkpoint(client: DSecClient) -> None:
    async with await client.run_container(arguments(cpu_cores_limit=1)) as box:
        look = "cat /sys/devices/system/cpu/online; grep -c ^processor /proc/cpuinfo; nproc"
        before = await shell(box, look)
        first = await box.checkpoint()
        assert first.method == "swap"
        assert await shell(box, look) == before
        await box.rollback(first)
        assert await shell(box, look) == before


@pytest.mark.parametrize("upper", KINDS)
async def test_rollback_brings_back_the_files(client: DSecClient, upper: str) -> None:
    async with await client.run_container(arguments(upper)) as box:
        await shell(box, "echo one > /root/a; mkdir /srv/d; rm /etc/group; chown 1000 /root/a")
        first = await box.checkpoint()
        assert first.method == "swap"
        before = await shell(box, TREE)
        await shell(box, "echo two > /root/a; rmdir /srv/d; echo new > /etc/group; mv /root /r")
        second = await box.checkpoint()
        after = await shell(box, TREE)
        await shell(box, "rm -r /r /home; echo three > /etc/group")
        await box.rollback(first)
        assert await shell(box, TREE) == before
        await box.rollback(second.id)
        assert await shell(box, TREE) == after
        await box.rollback(first)
        assert await shell(box, TREE) == before
        assert [c.id for c in await box.checkpoints()] == [first.id, second.id]


@pytest.mark.vm
@pytest.mark.parametrize("upper", KINDS)
async def test_with_processes_alive_the_changes_are_copied(client: DSecClient, upper: str) -> None:
    async with await client.run_container(arguments(upper)) as box:
        async with await box.create_session() as session:
            await session.run("cd /root; echo one > a; ln a b; mkfifo p; rm /etc/group")
            loop = "i=0; while :; do i=$((i+1)); echo $i > /root/x; echo $i > /root/y; done"
            running = await box.commands.run(["sh", "-c", loop], background=True)
            while not await box.files.exists("/root/y"):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            saved = await box.checkpoint()
            assert saved.method == "copy"
            assert (await session.run("pwd")).stdout == "/root\n"  # it lives on
            await session.run("echo two > a")
        await box.rollback(saved)
        assert (await running.wait()).signal == 9
        assert await shell(box, "cat /root/a; stat -c %h /root/b; ls /etc/group 2>&1 | wc -l") == (
            "one\n2\n1\n"
        )
        x, y = (await shell(box, "cat /root/x; echo -; cat /root/y")).split("-")
        numbers = [int(text) for text in (x, y) if text.strip()]
        assert max(numbers) - min(numbers) <= 1


@pytest.mark.vm
@pytest.mark.parametrize("upper", KINDS)
async def test_branches_go_their_own_ways_and_outlive_their_origin(
    client: DSecClient, host: Daemon, upper: str
) -> None:
    async with await client.run_container(arguments(upper)) as box:
        await shell(box, "echo base > /root/a; chown 1000:7 /root/a; rm /etc/group")
        point = await box.checkpoint()
        await shell(box, "echo later > /root/a")
        boxes = await box.branch(4, point)
        for n, each in enumerate(boxes):
            assert await shell(each, "cat /root/a; stat -c '%u %g' /root/a") == "base\n1000 7\n"
            await shell(each, f"echo {n} > /root/n; echo {n} >> /root/a")
        assert await shell(box, "cat /root/a; ls /root") == "later\na\n"
    # the origin is gone; a branch can still make and use checkpoints, and be branched from
    one = boxes[1]
    mine = await one.checkpoint()
    await shell(one, "rm /root/a")
    (grandchild,) = await one.branch(1)
    assert await shell(grandchild, "ls /root") == "n\n"
    await one.rollback(mine)
    assert await shell(one, "cat /root/a") == "base\n1\n"
    for each in (*boxes, grandchild):
        await each.stop()
    assert not list((host.runtime / "checkpoints").iterdir())


async def test_a_hundred_branches(client: DSecClient) -> None:
    async with await client.run_container(arguments(memory_limit_mb=64)) as box:
        await shell(box, "echo base > /root/a")
        boxes = await box.branch(100)
        assert len({each.id for each in boxes}) == 100
        found = await asyncio.gather(*(shell(each, "cat /root/a") for each in boxes))
        assert set(found) == {"base\n"}
        await asyncio.gather(*(each.stop() for each in boxes))


@pytest.mark.parametrize("upper", KINDS)
async def test_checkpoints_survive_a_kill_of_dsecd(host: Daemon, upper: str) -> None:
    async with DSecClient(f"unix:{host.socket}") as client:
        box = await client.run_container(arguments(upper))
        await shell(box, "echo one > /root/a")
        first = await box.checkpoint()
        await shell(box, "echo two > /root/a")
        await box.checkpoint()
        await shell(box, "echo three > /root/a")
        (branch,) = await box.branch(1, first)
        await shell(branch, "echo branch >> /root/a")
    host.kill()
    await host.start()
    async with DSecClient(f"unix:{host.socket}") as client:
        box, branch = await client.connect(box.id), await client.connect(branch.id)
        assert await shell(box, "cat /root/a") == "three\n"
        await box.rollback("c2")
        assert await shell(box, "cat /root/a") == "two\n"
        await box.rollback("c1")
        assert await shell(box, "cat /root/a") == "one\n"
        await box.stop()
        assert await shell(branch, "cat /root/a") == "one\nbranch\n"
        await branch.checkpoint()
        await branch.stop()
    assert not list((host.runtime / "checkpoints").iterdir())


@pytest.mark.parametrize("upper", KINDS)
async def test_a_packed_sandbox_contains_what_its_checkpoints_hold(
    client: DSecClient, upper: str
) -> None:
    """And what came after them: an upper on disk is in another directory since."""
    async with await client.run_container(arguments(upper)) as box:
        await shell(box, "echo one > /root/a; echo one > /root/b; rm /etc/group")
        await box.checkpoint()
        await shell(box, "rm /root/a; echo two > /root/b")
        await box.checkpoint()
        await shell(box, "echo three > /root/c")
        await box.pack_diff("snapshot/stacked")
    saved = DSecContainerRunArgs(container_image="snapshot/stacked")
    async with await client.run_container(saved) as box:
        assert await shell(box, "cd /root; cat *; ls; ls /etc/group 2>&1 | wc -l") == (
            "two\nthree\nb\nc\n1\n"
        )


async def test_what_cannot_be_done_is_said(client: DSecClient) -> None:
    async with await client.run_container(arguments()) as box:
        with pytest.raises(NotFound, match=r"no checkpoint 'c9'; there are: none"):
            await box.rollback("c9")
        methods = [(await box.checkpoint()).method for _ in range(20)]
        assert methods == ["swap"] * 20
        with pytest.raises(Exhausted, match="save it with pack_diff"):
            await box.checkpoint()
        with pytest.raises(NotFound, match="no checkpoint 'c99'"):
            await box.branch(1, "c99")
        async with await box.files.watch_dir("/root"):
            with pytest.raises(WrongState, match="watches"):
                await box.rollback("c1")
        await box.rollback("c1")
    gone = DSecContainerRunArgs(container_image=IMAGE, from_checkpoint=f"{box.id}/c1")
    with pytest.raises(NotFound, match="to branch from"):
        await client.run_container(gone)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("upper", KINDS)
async def test_any_history_comes_back_exactly(client: DSecClient, upper: str, seed: int) -> None:
    """Random operations, with and without processes alive; each checkpoint against a full copy."""
    dice = random.Random(seed)
    names = [f"/root/{name}" for name in ("a", "b", "c", "d/e", "d/f", "g")]

    def operation() -> str:
        one, two = dice.sample(names, 2)
        return dice.choice(
            (
                f"echo {dice.random()} > {one}",
                f"echo {dice.random()} >> {one}",
                f"rm -rf {one}",
                f"mv {one} {two}",
                f"ln -f {one} {two}",
                f"ln -sf {one} {two}",
                "mkdir -p /root/d",
                "rm -rf /root/d; mkdir /root/d",
                "mv /root/d /root/h",
                f"chmod {dice.choice(('600', '4755', '000'))} {one}",
                f"chown {dice.randrange(65535)} {one}",
                "rm -rf /etc; mkdir /etc; cp /proc/version /etc/passwd; echo root:x:0:0::/: "
                "> /etc/passwd",
                f"truncate -s {dice.randrange(1 << 20)} {one}",
            )
        )

    async with await client.run_container(arguments(upper)) as box:
        history: dict[str, str] = {}
        for _ in range(12):
            await box.run_shell("; ".join(operation() for _ in range(8)) + "; true")
            sleeper = None
            if dice.random() < 0.3:
                sleeper = await box.commands.run(["sleep", "1000"], background=True)
            tree = await shell(box, TREE)
            history[(await box.checkpoint()).id] = tree
            if sleeper is not None:
                await sleeper.kill()
            if history and dice.random() < 0.5:
                target = dice.choice(list(history))
                await box.rollback(target)
                assert await shell(box, TREE) == history[target]
        for target, tree in history.items():
            await box.rollback(target)
            assert await shell(box, TREE) == tree


async def test_nothing_is_left(host: Daemon, client: DSecClient, tmp_path: Path) -> None:
    for upper in KINDS:
        box = await client.run_container(arguments(upper))
        await box.checkpoint()
        async with await box.create_session() as session:
            await session.run("echo 1 > /root/x")
            await box.checkpoint()
        await box.rollback("c1")
        await box.stop()
    assert host.remains() == []
    assert not list((host.runtime / "checkpoints").iterdir())
