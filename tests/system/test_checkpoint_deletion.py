"""Checkpoints that are deleted: gone at once, and what they saved as soon as nobody needs it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from dsecd.host import mountinfo, syscalls
from libdsec import DSecClient, DSecContainerRunArgs, Sandbox
from libdsec.errors import DSecError, NotFound
from tests.system.daemon import IMAGE, Daemon, daemon
from tests.system.user_view import shell

pytestmark = pytest.mark.root
KINDS = ["memory", "disk"]
MIB = 1 << 20


def arguments(upper: str) -> DSecContainerRunArgs:
    return DSecContainerRunArgs(
        container_image=IMAGE,
        upper=upper,  # type: ignore[arg-type]
        disk_limit_mb=128,
        memory_limit_mb=512,
    )


async def fill(sandbox: Sandbox, name: str) -> None:
    """Write 8 MiB that nothing else has."""
    await shell(sandbox, f"dd if=/dev/urandom of=/root/{name} bs=1M count=8 2>/dev/null")


def saved(host: Daemon) -> list[str]:
    """Every saved upper of the host: mounts of memory, directories of disk."""
    root = str(host.runtime / "checkpoints")
    found = [mount.point for mount in mountinfo.mounts() if mount.point.startswith(f"{root}/")]
    volume = host.runtime / "upper"
    uppers = [entry for entry in volume.iterdir() if entry.is_dir()] if volume.is_dir() else []
    for upper in uppers:
        found += [str(place) for place in (upper / "u", *upper.glob("*/u")) if place.is_dir()]
    return sorted(found)


async def ids(sandbox: Sandbox) -> list[str]:
    return [checkpoint.id for checkpoint in await sandbox.checkpoints()]


@pytest.mark.parametrize("upper", KINDS)
async def test_what_lies_under_the_present_files_goes_when_they_are_left(
    client: DSecClient, host: Daemon, upper: str
) -> None:
    async with await client.run_container(arguments(upper)) as box:
        start = await box.checkpoint()
        await fill(box, "one")
        one = await box.checkpoint()
        await fill(box, "two")
        kept = saved(host)
        await box.delete_checkpoint(one)
        with pytest.raises(NotFound, match="no checkpoint 'c2'; there are: c1"):
            await box.rollback(one)
        with pytest.raises(NotFound, match="no checkpoint 'c2'"):
            await box.branch(1, one)
        assert saved(host) == kept  # the present files stand on it
        assert await shell(box, "ls /root") == "one\ntwo\n"
        await box.rollback(start)
        assert len(saved(host)) < len(kept)
        assert await shell(box, "ls -A /root") == ""
        assert await ids(box) == ["c1"]
        third = await box.checkpoint()
        assert third.id == "c3"  # an id is not used again
    assert saved(host) == []


@pytest.mark.parametrize("upper", KINDS)
async def test_space_is_given_back_at_once(client: DSecClient, host: Daemon, upper: str) -> None:
    async with await client.run_container(arguments(upper)) as box:
        start = await box.checkpoint()
        before = saved(host)
        for round_ in range(30):  # 8 MiB each, in 128
            await fill(box, f"f{round_}")
            point = await box.checkpoint()
            await box.rollback(start)
            await box.delete_checkpoint(point)
        assert len(saved(host)) == len(before)
        if upper == "disk":
            assert (await box.get_metrics()).disk_bytes < 40 * MIB
        assert await ids(box) == ["c1"]


@pytest.mark.parametrize("upper", KINDS)
async def test_copied_checkpoints_go_too(client: DSecClient, host: Daemon, upper: str) -> None:
    async with await client.run_container(arguments(upper)) as box:
        before = saved(host)
        async with await box.create_session() as session:
            await session.run("echo 1 > /root/x")
            point = await box.checkpoint()
            assert point.method == "copy"
            assert len(saved(host)) == len(before) + 1
            await box.delete_checkpoint(point.id)
        assert saved(host) == before
        assert await shell(box, "cat /root/x") == "1\n"


async def test_a_rollback_gives_back_the_first_upper(client: DSecClient, host: Daemon) -> None:
    """It used to stay on disk until the sandbox ended."""
    async with await client.run_container(arguments("disk")) as box:
        async with await box.create_session() as session:
            await session.run("echo 1 > /root/x")
            point = await box.checkpoint()
            assert point.method == "copy"
        first = [path for path in saved(host) if "/c1/" not in path]
        assert len(first) == 1
        await fill(box, "one")
        await box.rollback(point)
        assert await shell(box, "ls /root") == "x\n"
        assert len(saved(host)) == 2
        assert first[0] not in saved(host)


@pytest.mark.parametrize("upper", KINDS)
async def test_branches_keep_what_their_origin_deletes(
    client: DSecClient, host: Daemon, upper: str
) -> None:
    async with await client.run_container(arguments(upper)) as box:
        start = await box.checkpoint()
        await shell(box, "echo one > /root/a")
        point = await box.checkpoint()
        (branch,) = await box.branch(1, point)
        await box.rollback(start)
        held = saved(host)
        await box.delete_checkpoint(point)
        assert saved(host) == held
        mine = await branch.checkpoint()
        await shell(branch, "echo two > /root/a")
        await branch.rollback(mine)
        assert await shell(branch, "cat /root/a") == "one\n"
        await branch.stop()
        after = saved(host)
        assert len(after) < len(held)  # also on disk, where the origin's directory stays
        assert await shell(box, "ls -A /root") == ""
        await box.checkpoint()
    assert saved(host) == []


@pytest.mark.parametrize("upper", KINDS)
@pytest.mark.parametrize("when", ["before-tidy", "after-tidy"])
async def test_a_deletion_survives_a_kill_between_its_steps(upper: str, when: str) -> None:
    async with daemon() as host:
        await host.end()
        await host.start(crash_at=when)
        async with DSecClient(f"unix:{host.socket}", reconnect_timeout=0.1) as client:
            box = await client.run_container(arguments(upper))
            start = await box.checkpoint()
            before = saved(host)
            await fill(box, "one")
            point = await box.checkpoint()
            await box.rollback(start)
            with pytest.raises(DSecError):
                await box.delete_checkpoint(point)
        host.kill()  # it is dead already
        for _ in range(2):  # the second time, of a journal that still tells of what is gone
            await host.start()
            async with DSecClient(f"unix:{host.socket}") as client:
                box = await client.connect(box.id)
                assert await ids(box) == ["c1"]
                assert len(saved(host)) == len(before)
            host.kill()
        await host.start()
        async with DSecClient(f"unix:{host.socket}") as client:
            box = await client.connect(box.id)
            await shell(box, "echo x > /root/x")
            await box.rollback("c1")
            assert await shell(box, "ls -A /root") == ""
            assert (await box.checkpoint()).id == "c3"
            await box.stop()
        assert saved(host) == []
        assert host.remains() == []


@pytest.mark.parametrize("upper", KINDS)
async def test_a_kill_while_a_checkpoint_is_copied_leaves_no_copy(upper: str) -> None:
    """The copy used to stay on disk, in the way of the next one."""
    async with daemon() as host:
        await host.end()
        await host.start(crash_at="in-a-copy")
        async with DSecClient(f"unix:{host.socket}", reconnect_timeout=0.1) as client:
            box = await client.run_container(arguments(upper))
            start = await box.checkpoint()
            await shell(box, "echo 1 > /root/x")
            before = saved(host)
            await box.commands.run(["sleep", "1000"], background=True)
            with pytest.raises(DSecError):
                await box.checkpoint()
        host.kill()  # it is dead already
        await host.start()
        async with DSecClient(f"unix:{host.socket}") as client:
            box = await client.connect(box.id)
            assert saved(host) == before
            assert await ids(box) == [start.id]
            point = await box.checkpoint()
            assert point.method == "copy"
            await box.rollback(start)
            await box.rollback(point)
            assert await shell(box, "cat /root/x") == "1\n"
            await box.stop()
        assert saved(host) == []


async def test_a_saved_upper_that_is_gone_takes_no_others_along(
    client: DSecClient, host: Daemon
) -> None:
    """A second removal of a memory upper used to unmount the directory of all of them."""
    async with await client.run_container(arguments("memory")) as box:
        await shell(box, "echo one > /root/a")
        await box.checkpoint()
        other = await client.run_container(arguments("memory"))
        await other.checkpoint()
        (place,) = [path for path in saved(host) if other.id in Path(path).name]
        host.kill()
        await host.start()
        async with DSecClient(f"unix:{host.socket}") as again:
            mine = await again.connect(box.id)
            syscalls.umount(place)
            await (await again.connect(other.id)).stop()
            await shell(mine, "echo two > /root/a")
            await mine.rollback("c1")
            assert await shell(mine, "cat /root/a") == "one\n"


async def test_events_tell_of_checkpoints(client: DSecClient) -> None:
    async with await client.run_container(arguments("memory")) as box:
        events = client.events(box.id)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0.1)  # until it is subscribed
        point = await box.checkpoint()
        await box.rollback(point)
        await box.delete_checkpoint(point)
        kinds = [(await first).kind, (await anext(events)).kind, (await anext(events)).kind]
        assert kinds == ["checkpoint", "rollback", "checkpoint_deleted"]
        await events.aclose()  # type: ignore[attr-defined]
