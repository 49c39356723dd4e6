"""What root inside, its images and its links try while a root is built and afterwards."""

from __future__ import annotations

import array
import asyncio
import contextlib
import os
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dsecd import fastpath
from dsecd.host.plan import Bind
from libdsec import wire
from libdsec.errors import Internal
from tests.system.init_harness import InitClient, wait_until
from tests.system.reroot_lab import Box, box, image, lab, open_box
from tests.system.spawner_lab import UID_BASE, Lab

__all__ = ["box", "image", "lab"]

pytestmark = pytest.mark.root


async def test_nobody_inside_sees_or_reaches_who_builds_the_root(box: Box) -> None:
    """Every pid is asked for with signal 0: EPERM would betray a process that is not theirs."""
    scan = (
        "while :; do for p in $(seq 2 60); do kill -0 $p 2>&1; done;"
        "ls -d /proc/[0-9]*; done > /seen 2>&1"
    )
    call = box.client.open("exec.run", cid="scan", shell=scan.encode())
    await asyncio.sleep(0.2)
    top = box.open_upper()
    for _ in range(1000):
        built = await box.build([top])
        os.close(built.mount_ns)
        os.close(built.upper)
    box.client.call("exec.kill", cid="scan")
    box.client.finish(call)
    seen = box.sh("sort /seen | uniq -c | sort -n | tail -n 500")
    assert "No such process" in seen
    assert "not permitted" not in seen


async def test_the_upper_is_out_of_reach(box: Box) -> None:
    """A command inherits nothing of it, and the owner's uid alone opens nothing in it."""
    assert box.sh("ls /proc/self/fd").split() == ["0", "1", "2", "3"]
    assert "12" not in box.sh("ls /proc/1/fd").split()
    link, owner = f"/proc/{box.spawned.pid}/fd/12", UID_BASE + 65535
    fd = os.open(link, os.O_PATH)
    assert {each.name for each in Path(f"/proc/self/fd/{fd}").iterdir()} == {"s", "u", "w"}
    attempts = (
        lambda: os.open("u", os.O_PATH, dir_fd=fd),
        lambda: os.fchdir(fd),
        lambda: os.open(".", os.O_RDONLY, dir_fd=fd),
        lambda: os.stat("u/etc", dir_fd=fd),
        lambda: os.open(link, os.O_PATH),
    )
    assert await asyncio.to_thread(_count_as, owner, attempts) == 0
    assert await asyncio.to_thread(_count_as, 0, attempts) == len(attempts)
    os.close(fd)


def _count_as(uid: int, attempts: tuple[Callable[[], object], ...]) -> int:
    """Return how many of `attempts` a process of `uid` without any capability succeeds with."""
    child = os.fork()
    if child == 0:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        done = 0
        for attempt in attempts:
            with contextlib.suppress(PermissionError):
                attempt()
                done += 1
        os._exit(done)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("fd", [4, 5, 6, 12])
async def test_a_link_in_the_root_leads_no_mount_out_of_it(lab: Lab, fd: int) -> None:
    """/sys made a link to a descriptor of dsec-init: a directory would be made on the host."""
    shown = lab.folder / "shown"
    shown.mkdir()
    binds = (Bind(str(shown), "/new/deep"), Bind(str(shown), "/way/made"))
    async with open_box(lab) as box:
        box.sh(f"mkdir /new; ln -s /proc/1/fd/{fd} /way")
        before = sorted(lab.folder.rglob("*"))
        with pytest.raises(Internal, match="'binds' failed: Too many levels"):
            await box.checkpoint(binds=binds)
        assert sorted(lab.folder.rglob("*")) == before
        assert not (lab.cgroup / "a/made").exists()
        await box.checkpoint(binds=binds[:1])
        assert box.sh("ls -d /new/deep") == "/new/deep\n"


async def test_a_link_in_an_image_leads_no_mount_out_of_it(lab: Lab, tmp_path: Path) -> None:
    """At a creation: the new process is real root, with the spawner's descriptors of the host."""
    shared, spool = lab.lowers, str(lab.folder / "spool")
    roots = {
        path.name
        for worker in lab.pool._creators
        for path in Path(f"/proc/{worker._process.pid}/fd").iterdir()
        if str(path.readlink()) == "/"
    }
    assert roots
    for fd in roots:
        root, image = tmp_path / f"root{fd}", tmp_path / f"root{fd}.erofs"
        (root / "proc").mkdir(parents=True)
        (root / "sys").symlink_to(f"/proc/self/fd/{fd}{lab.folder}")
        command = ["mkfs.erofs", image, root]
        await asyncio.to_thread(subprocess.run, command, check=True, capture_output=True)
        lab.lowers = [fastpath.mount_erofs(image)]
        with pytest.raises(Internal, match="'binds' failed: Too many levels"):
            await lab.create("hostile", binds=(Bind(spool, "/sys/escaped"),))
        os.close(lab.lowers[0])
    lab.lowers = shared
    assert not list(lab.folder.rglob("escaped"))


async def test_descriptors_that_nobody_asked_for_are_closed(box: Box) -> None:
    """Else a peer could fill the table of dsec-init, which then starts no command."""
    before = box.init_fds()
    peer = InitClient(box.path)
    flood = array.array("i", [0] * 200)
    ping = wire.encode(wire.Request(1, "sys.ping", wire.pack({})))
    for _ in range(50):
        socket.send_fds(peer.socket, [ping], flood)
        peer.frame(1)
    for part in (ping[:3], ping[3:7]):  # a frame in parts, with descriptors on each
        socket.send_fds(peer.socket, [part], flood)
        box.client.call("sys.ping")
    wait_until(lambda: len(box.init_fds()) <= len(before) + 3)  # while the frame waits for its end
    peer.socket.sendall(ping[7:])
    peer.frame(1)
    peer.close()
    wait_until(lambda: box.init_fds() == before)
