"""Another root under a live sandbox: checkpoint, rollback and branch; refusals and failures."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from dsecd import fastpath
from dsecd.backends.agent import swap_root
from dsecd.host.plan import REROOT_STEPS, Bind, NewFile
from dsecd.host.upper import Uppers
from libdsec import wire
from libdsec.errors import Exhausted, Internal, InvalidArgument, WrongState
from tests.system.reroot_lab import CONFIG, INIT, Box, box, image, lab, open_box
from tests.system.spawner_lab import BINARY, UID_BASE, Lab, open_lab, traces

__all__ = ["box", "image", "lab"]

pytestmark = pytest.mark.root
FIND = "cd /; find . -xdev ! -path './proc*' ! -path './dev*' "
# what a directory is said to be long depends on the layer that it is in
TREE = (
    f"({FIND} -type d -exec stat -c '%n %f %u %g' {{}} +;"
    f"{FIND} ! -type d -exec stat -c '%n %f %u %g %s %Y' {{}} +)"
)


# --- what a checkpoint is -------------------------------------------------------------------------


async def test_a_checkpoint_changes_nothing_that_is_seen(box: Box) -> None:
    box.sh(
        "mkdir -p /d/e; echo one > /one; ln /one /d/hard; ln -s one /soft; mkfifo /d/pipe;"
        "rm /lib/a/b/file; mv /lib/a /lib/c; rm -r /tmp; mkdir /tmp; chown 1000:7 /one;"
        "chmod 4711 /one; chmod 1703 /; chown 5:6 /; touch -d 2001-02-03 /"
    )
    before, root = box.sh(TREE + "| sort"), box.sh("stat -c '%a %u %g %Y' /")
    await box.checkpoint()
    assert box.sh(TREE + "| sort") == before
    assert box.sh("stat -c '%a %u %g %Y' /") == root
    assert root.startswith("1703 5 6 98")
    box.sh("echo more >> /one; mv /lib/c /lib/a; rmdir /d/e; touch /d/e")
    assert box.sh("cat /one; ls /lib/a/b /d; stat -c %F /d/e").split("\n")[:2] == ["one", "more"]
    assert box.sh("ls /lib; ls /d; stat -c %F /d/e; ls /lib/a/b | wc -l") == (
        "a\ne\nhard\npipe\nregular empty file\n0\n"
    )


async def test_attributes_of_the_root_directory_are_kept(box: Box) -> None:
    upper = Path(f"/proc/{box.spawned.pid}/fd/12/u")
    for name in ("user.note", "trusted.overlay.impure", "security.other"):
        os.setxattr(upper, name, b"y")
    await box.checkpoint()
    assert set(os.listxattr(upper)) == {"user.note", "security.other"}


async def test_shared_memory_terminals_ipc_and_names_survive(box: Box) -> None:
    box.sh("echo mine > /dev/shm/s; hostname other")
    before = box.init_fds()
    await box.checkpoint()
    after = box.init_fds()
    assert box.sh("cat /dev/shm/s; hostname") == "mine\nother\n"
    assert {fd for fd in before if before[fd] != after.get(fd)} == {8}
    assert box.client.run("tty", pty={"rows": 7, "cols": 9})["stdout"].split() == [b"/dev/pts/0"]


async def test_no_root_outlives_the_last_use_of_it(box: Box) -> None:
    """That of the creation would: PID 1 stands in it, and in its mount namespace it is mounted."""
    mounts = Path(f"/proc/{box.spawned.pid}/mounts")
    before = {line for line in mounts.read_text().splitlines() if " / " not in line}
    for _ in range(3):
        await box.checkpoint()
        after = set(mounts.read_text().splitlines())
        assert not [line for line in after if " overlay " in line]
        assert {line for line in after if " / " not in line} == before
    assert not Path(f"/proc/{box.spawned.pid}/root/etc").exists()
    assert Path(f"/proc/{box.spawned.pid}/root/proc/1").exists()


async def test_an_old_root_with_many_cached_files_holds_nobody_up(box: Box) -> None:
    """Taking it down costs milliseconds, which the next command would wait for."""
    box.sh(
        "mkdir /m; cd /m; for d in $(seq 100); do mkdir $d; (cd $d; seq 100 | xargs touch); done"
    )
    root = await box.checkpoint()
    for _ in range(5):
        box.sh("find /m -exec stat -c %i {} + > /dev/null")
        await box.rollback(root)
        await box.rollback(root)  # waits for the end of the one before
    assert box.sh("find /m | wc -l") == "10101\n"


async def test_masks_locks_and_mounts_are_those_of_the_creation(box: Box) -> None:
    mounts = "cut -d' ' -f2- /proc/mounts | grep -v ^/.overlay"
    before = box.sh(mounts)
    await box.checkpoint()
    assert box.sh(mounts) == before
    attacks = dict(line.split() for line in box.sh("attack").splitlines())
    assert attacks.pop("own_tmpfs") == "DONE"
    assert [name for name, outcome in attacks.items() if outcome == "DONE"] == []


async def test_rollback_brings_back_exactly_what_was(box: Box) -> None:
    box.sh("echo kept > /kept; echo old > /changed; mkdir /full; echo x > /full/x")
    first = await box.checkpoint()
    before = box.sh(TREE + "| sort")
    box.sh("echo new > /changed; rm -r /full; echo more > /more; rm /lib/a/b/file; mv /lib /l")
    second = await box.checkpoint()
    after = box.sh(TREE + "| sort")
    box.sh("echo third > /third")
    await box.rollback(first)
    assert box.sh(TREE + "| sort") == before
    assert box.sh("cat /kept /changed /full/x") == "kept\nold\nx\n"
    await box.rollback(second)
    assert box.sh(TREE + "| sort") == after
    await box.rollback([], files=(NewFile("etc/hostname", b"box\n"),))
    assert box.sh("cat /etc/hostname /lib/a/b/file") == "box\ncontent\n"
    assert "No such file" in box.sh("ls /kept")


async def test_many_checkpoints_stack_and_each_can_be_entered(box: Box) -> None:
    saved = []
    for number in range(20):
        box.sh(f"echo {number} > /n; echo {number} > /f{number}; rm -f /f{number - 2}")
        saved.append(await box.checkpoint())
    assert box.sh("cat /n; ls / | grep ^f").split() == ["19", "f18", "f19"]
    for number in (3, 19, 0):
        await box.rollback(saved[number])
        names = [f"f{n}" for n in (number - 1, number) if n >= 0]
        assert box.sh("cat /n; ls / | grep ^f").split() == [str(number), *names]


async def test_files_watches_sessions_and_uploads_work_in_the_new_root(box: Box) -> None:
    box.sh("mkdir /w")
    await box.checkpoint()
    client = box.client
    client.upload(client.open("files.write", path=b"/w/f"), b"content")
    assert client.call("files.stat", path=b"/w/f")["size"] == 7
    watch = client.open("files.watch", path=b"/w")
    box.sh("echo x > /w/g")
    frame = client.frame(watch)
    assert isinstance(frame, wire.Item)
    client.send(wire.Cancel(watch))
    client.finish(watch)
    client.call("session.open", name="s")
    assert client.run("cat /w/g", session="s")["stdout"] == b"x\n"
    client.call("session.close", name="s")
    await box.checkpoint()
    assert box.sh("cat /w/f /w/g") == "contentx\n"


async def test_binds_outside_proc_and_dev_are_made_again(lab: Lab) -> None:
    shown = lab.folder / "shown"
    shown.mkdir()
    (shown / "cpus").write_text("0-1\n")
    (lab.folder / "info").write_text("one cpu\n")
    binds = (Bind(str(lab.folder / "info"), "/proc/cpuinfo"), Bind(str(shown), "/sys"))
    async with open_box(lab, binds=binds) as box:
        await box.checkpoint(binds=binds[1:])
        assert box.sh("cat /proc/cpuinfo /sys/cpus") == "one cpu\n0-1\n"
        assert box.sh("grep -c cpuinfo /proc/mounts") == "1\n"
        assert "Read-only" in box.sh("echo x > /sys/cpus")


async def test_the_limit_of_the_fresh_upper_holds_and_is_reported(box: Box) -> None:
    box.sh("dd if=/dev/zero of=/old bs=1k count=4000")
    await box.checkpoint(upper_bytes=1 << 20)
    result = box.client.run("dd if=/dev/zero of=/new bs=1k count=2000")
    assert b"No space left" in result["stderr"]
    assert result["disk_full"] is True
    assert box.sh("stat -c %s /old") == "4096000\n"


# --- the uppers of others -------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def branch(lab: Lab, uppers: list[int], origin: int = UID_BASE) -> AsyncIterator[Box]:
    """Another sandbox, in a range of its own, on top of the checkpoints of the one at `origin`."""
    base = UID_BASE + (1 << 20)
    userns = fastpath.make_userns(base, base + 65535)
    shift = fastpath.make_shift_userns(origin, base)
    mapped = []
    for fd in uppers:
        mapped.append(fastpath.open_tree(f"/proc/self/fd/{fd}", clone=True))
        fastpath.idmap_mount(mapped[-1], shift)
    plan = lab.plan(
        "branch", uid_base=base, owner_uid=base + 65535, init_config=CONFIG,
        lowers=len(lab.lowers) + len(mapped), raw_lowers=len(mapped),
    )  # fmt: skip
    spawned = await lab.pool.create(plan, [userns, lab.netns, *lab.lowers, *mapped])
    box = Box(lab, "branch", spawned, base, userns)
    try:
        box.uppers = list(mapped)
        yield box
    finally:
        box.close()
        await lab.destroy("branch", spawned)
        for fd in (userns, shift, *mapped):
            os.close(fd)


async def test_a_branch_sees_the_checkpoint_as_its_own(lab: Lab, box: Box) -> None:
    box.sh(
        "echo one > /one; chown 1000:7 /one; chmod 640 /one; rm /lib/a/b/file; mv /lib/a /lib/c;"
        "mkdir /d; echo 2 > /d/f; chmod 711 /; chown 3 /"
    )
    tree = TREE + "| grep -v '^./etc' | sort"
    before = box.sh(tree)
    saved = await box.checkpoint()
    async with branch(lab, saved) as other:
        assert other.sh(tree) == before
        assert other.sh("stat -c '%a %u' /") == "711 3\n"
        other.sh("echo theirs >> /one; chown 0 /d/f; rm -r /lib/c; echo new > /new")
        assert other.sh("stat -c '%u %g %a' /one /d/f").split() == [
            *("1000", "7", "640"), *("0", "0", "644")]  # fmt: skip
        assert box.sh(tree) == before
        await other.checkpoint()
        assert other.sh("cat /one /new; ls /lib") == "one\ntheirs\nnew\n"
        box.sh("echo mine > /one")
        assert other.sh("cat /one") == "one\ntheirs\n"


async def test_a_checkpoint_outlives_its_sandbox_as_a_mount_of_the_host(lab: Lab) -> None:
    point = lab.folder / "kept"
    point.mkdir()
    async with open_box(lab) as box:
        box.sh("echo one > /one; rm /lib/a/b/file")
        saved = await box.checkpoint()
        fastpath.move_mount(saved[0], point)
        box.uppers = [fastpath.open_tree(point, clone=False)]  # as after a restart of the daemon
        box.kept += box.uppers
        await box.checkpoint()
        assert box.sh("cat /one; ls /lib/a/b") == "one\n"
    fd = fastpath.open_tree(point, clone=False)
    try:
        async with branch(lab, [fd]) as other:
            assert other.sh("cat /one; ls /lib/a/b") == "one\n"
    finally:
        os.close(fd)
        fastpath.umount(point)


async def test_uppers_on_disk_are_lowers_too(tmp_path: Path, image: Path) -> None:
    uppers = Uppers(tmp_path / "disk", tmp_path / "point", 1 << 30, ("btrfs",))
    uppers.start()
    if not uppers.feature().available:
        pytest.skip(uppers.feature().reason)
    try:
        await _stack_on_disk(tmp_path, image, uppers)
    finally:
        uppers.teardown()


async def _stack_on_disk(folder: Path, image: Path, uppers: Uppers) -> None:
    volume = await uppers.acquire("a", 64 << 20)
    async with open_lab(folder, image, INIT) as lab, open_box(lab, upper_dir=volume.dir) as box:
        box.sh("echo one > /one; chown 1000 /one; rm /lib/a/b/file; mv /lib/a /lib/c; mkdir /d")
        first = await box.checkpoint(upper_dir=f"{volume.dir}/1")
        assert box.sh("cat /one; stat -c %u /one; ls /lib; ls /lib/c/b") == "one\n1000\nc\n"
        box.sh("rmdir /d; echo two > /one")
        assert "exceeded" in box.sh("dd if=/dev/zero of=/big bs=1M count=70")
        box.sh("rm /big")
        await box.checkpoint(upper_dir=f"{volume.dir}/2")
        assert box.sh("cat /one; ls -d /d") == "two\nls: /d: No such file or directory\n"
        async with branch(lab, box.uppers) as other:
            assert other.sh("cat /one; stat -c %u /one; ls /lib") == "two\n1000\nc\n"
        await box.rollback(first, upper_dir=f"{volume.dir}/3")
        assert box.sh("cat /one; ls -d /d") == "one\n/d\n"
    await uppers.release(volume)


# --- refusals and failures ------------------------------------------------------------------------


async def test_the_root_is_not_replaced_under_anybody(box: Box) -> None:
    client, built = box.client, await box.build([box.open_upper()])

    async def refused(by: str) -> None:
        with pytest.raises(WrongState, match=by):
            await swap_root(box.path, built.mount_ns, built.upper)

    before = box.init_fds()
    call = client.open("exec.run", cid="runs", shell=b"sleep 1000")
    client.call("sys.ping")
    await refused("command runs is running")
    client.call("exec.kill", cid="runs")
    client.finish(call)
    client.call("session.open", name="s")
    await refused("1 sessions are open")
    client.call("session.close", name="s")
    watch = client.open("files.watch", path=b"/")
    client.call("sys.ping")
    await refused("file operations or watches")
    client.send(wire.Cancel(watch))
    client.finish(watch)
    upload = client.open("files.write", path=b"/up")
    client.call("sys.ping")
    await refused("file operations or watches")
    client.upload(upload, b"x")
    box.sh("sleep 1000 >/dev/null 2>&1 &")
    await refused("in the background")
    box.sh("killall sleep")
    await _until(lambda: box.init_fds().get(8) == before[8] and _alone(box))
    await swap_root(box.path, built.mount_ns, built.upper)
    assert box.init_fds()[8] != before[8]
    assert box.sh("echo fine") == "fine\n"
    os.close(built.mount_ns)
    os.close(built.upper)


async def test_a_swap_without_its_descriptors_is_refused(box: Box) -> None:
    before = box.init_fds()
    with pytest.raises(InvalidArgument, match="2 descriptors must come"):
        box.client.call("root.swap")
    for fds in ([box.userns, box.userns], [box.spawned.pidfd, box.userns]):
        with pytest.raises(InvalidArgument, match="not a mount namespace and a directory"):
            await swap_root(box.path, *fds)
    fd = os.open("/proc/self/ns/mnt", os.O_RDONLY)
    with pytest.raises(InvalidArgument, match="not a mount namespace and a directory"):
        await swap_root(box.path, fd, fd)
    os.close(fd)
    await _until(lambda: box.init_fds() == before)
    assert box.sh("echo fine") == "fine\n"


@pytest.mark.parametrize("upper", ["memory", "disk"])
async def test_a_failure_at_any_step_leaves_the_sandbox_as_it_was(lab: Lab, upper: str) -> None:
    changes: dict[str, Any] = {"upper_dir": str(lab.folder / "upper/b")} if upper == "disk" else {}
    shown = Bind(str(lab.folder / "spool"), "/host")
    async with open_box(lab) as box:
        box.sh("echo one > /one")
        top = box.open_upper()
        before, fds = traces(lab), box.init_fds()
        for step in REROOT_STEPS:
            with pytest.raises(Internal) as caught:
                await box.build([top], binds=(shown,), fail_step=step, **changes)
            assert caught.value.detail == {"step": step, "errno": "ECANCELED"}
            assert traces(lab) == before, step
        assert box.init_fds() == fds
        assert box.sh("cat /one; echo two > /two") == "one\n"
        await box.enter([top], **changes)
        assert box.sh("cat /one /two") == "one\ntwo\n"


async def test_a_step_that_fails_by_itself_is_named(lab: Lab, box: Box) -> None:
    with pytest.raises(Internal, match="'plan' failed"):
        await box.build([], raw_lowers=5)
    with pytest.raises(Exhausted, match="'files' failed: No space"):
        await box.build([], upper_bytes=4096, files=(NewFile("f", b"x" * 9000),))
    with pytest.raises(Internal, match="'lowers' failed: Not a directory"):
        await box.build([box.spawned.pidfd])
    os.kill(box.spawned.pid, signal.SIGKILL)
    await _until(lambda: not Path(f"/proc/{box.spawned.pid}").exists())
    with pytest.raises(Internal, match="'carry_over' failed: No such process"):
        await box.build([])


async def test_a_cancelled_reroot_leaves_nothing(lab: Lab, box: Box) -> None:
    top, directory = box.open_upper(), lab.folder / "upper/c"
    before = traces(lab)
    for turns in range(6):
        task = asyncio.create_task(box.build([top], upper_dir=str(directory)))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            made = await task
            os.close(made.mount_ns)
            os.close(made.upper)
        fastpath.remove_tree(directory)
    await _until(lambda: traces(lab) == before)


async def test_every_step_is_timed_when_asked(box: Box) -> None:
    built = await box.build([box.open_upper()], trace=True)
    assert set(built.micros) == set(REROOT_STEPS)
    os.close(built.mount_ns)
    os.close(built.upper)


async def test_the_sanitized_builds_do_the_same(tmp_path: Path, image: Path) -> None:
    spawner = BINARY.parent / "asan/dsec-spawner"
    if not spawner.exists():
        pytest.skip("built only with DSEC_SANITIZE=1")
    async with open_lab(tmp_path, image, INIT, binary=spawner) as lab, open_box(lab) as box:
        box.sh("echo one > /one")
        for step in ("overlay", "dev", "namespace"):
            with pytest.raises(Internal):
                await box.build([box.open_upper()], fail_step=step)
        await box.checkpoint()
        assert box.sh("cat /one") == "one\n"


def _alone(box: Box) -> bool:
    task = Path(f"/proc/{box.spawned.pid}/task/{box.spawned.pid}/children")
    return not task.read_text().split()


async def _until(condition: Any) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come about within 5 s")
