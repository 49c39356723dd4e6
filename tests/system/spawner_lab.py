"""A bench for the spawner: a tiny EROFS base of busybox, pooled namespaces, and cgroups of its own.

PID 1 is `spawner_init.c`, so that these tests fail only for faults of the spawner.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsecd import fastpath
from dsecd.host import probe
from dsecd.host.plan import ContainerPlan, DestroyPlan, NewFile
from dsecd.host.spawner import Spawned, SpawnerPool
from dsecd.policy import seccomp

BINARY = Path(__file__).parents[2] / "src/dsecd/bin/dsec-spawner"
CGROUPS = Path("/sys/fs/cgroup")
UID_BASE = 0x6F000000
MASKED = ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/kpagecgroup", "/proc/fs")


def cgroup_v2() -> Path:
    """Return the root of the v2 tree, pure or hybrid."""
    return CGROUPS / "unified" if (CGROUPS / "unified").is_dir() else CGROUPS


def build_base(folder: Path) -> Path:
    """Make an EROFS image of busybox with a set-user-id program and a small tree."""
    root = folder / "base"
    for name in ("bin", "sbin", "proc", "dev", "tmp", "etc", "root", "lib/a/b"):
        (root / name).mkdir(parents=True)
    busybox = shutil.which("busybox")
    assert busybox is not None, "busybox-static is missing"
    shutil.copy(busybox, root / "bin/busybox")
    applets = subprocess.run([busybox, "--list"], capture_output=True, text=True, check=True)
    for name in applets.stdout.split():
        if name != "busybox":
            (root / "bin" / name).symlink_to("busybox")
    (root / "lib/a/b/file").write_text("content\n")
    (root / "etc/passwd").write_text("root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/:/bin/sh\n")
    compile_c(Path(__file__).with_name("spawner_attack.c"), root / "bin/attack")
    shutil.copy(root / "bin/attack", root / "bin/setuid-attack")
    (root / "bin/setuid-attack").chmod(0o4755)
    (root / "tmp").chmod(0o1777)
    image = folder / "base.erofs"
    subprocess.run(["mkfs.erofs", image, root], check=True, capture_output=True)
    return image


def compile_c(source: Path, target: Path) -> Path:
    subprocess.run(["cc", "-O1", "-Wall", "-static", source, "-o", target], check=True)
    return target


@dataclass
class Lab:
    """Everything a plan refers to. `say` talks to a container's PID 1."""

    folder: Path
    pool: SpawnerPool
    cgroup: Path
    userns: int
    netns: int
    lowers: list[int]
    by_path: bool
    live: list[str] = field(default_factory=list)

    def plan(self, name: str, **changes: Any) -> ContainerPlan:
        fields: dict[str, Any] = {
            "sandbox": name,
            "lowers": len(self.lowers),
            "uid_base": UID_BASE,
            "owner_uid": UID_BASE + 65535,
            "cgroup": str(self.cgroup / name),
            "runtime_dir": str(self.folder / "sb" / name),
            "spool_dir": str(self.folder / "spool"),
            "upper_bytes": 16 << 20,
            "files": (NewFile("etc/hostname", b"box\n"), NewFile("etc/x/y", b"deep", 0o600)),
            "masked": MASKED,
            "hostname": "box",
            "init_config": b"c" * 3000,
        }
        return ContainerPlan(**(fields | changes))

    async def create(self, name: str, slot: Any = None, **changes: Any) -> Spawned:
        with self.lend() as lowers:
            fds = [self.userns, self.netns, *lowers]
            return await self.pool.create(self.plan(name, **changes), fds, slot)

    @contextlib.contextmanager
    def lend(self) -> Iterator[list[int]]:
        """The lowers for one root; a spawner that goes by path uses them up."""
        if not self.by_path:
            yield self.lowers
            return
        clones = [fastpath.open_tree(self.layer, clone=True) for _ in self.lowers]
        try:
            yield clones
        finally:
            for fd in clones:
                os.close(fd)

    @property
    def layer(self) -> Path:
        """Where the layer is attached when roots are made by path."""
        return self.folder / "layer"

    async def destroy(self, name: str, spawned: Spawned | None, **changes: Any) -> None:
        fields: dict[str, Any] = {
            "sandbox": name,
            "cgroup": str(self.cgroup / name),
            "runtime_dir": str(self.folder / "sb" / name),
        }
        fds = [spawned.pidfd] if spawned else []
        await self.pool.destroy(DestroyPlan(**(fields | changes)), *fds)
        for fd in fds:
            os.close(fd)

    @contextlib.asynccontextmanager
    async def container(self, name: str, **changes: Any) -> AsyncIterator[Spawned]:
        spawned = await self.create(name, **changes)
        try:
            yield spawned
        finally:
            await self.destroy(name, spawned, upper_dir=changes.get("upper_dir", ""))

    async def say(self, name: str, command: str) -> tuple[int, str]:
        """Run `command` as root inside; return its exit status and its output."""
        return await asyncio.to_thread(self._say, name, command)

    def _say(self, name: str, command: str) -> tuple[int, str]:
        folder = os.open(self.folder / "sb" / name, os.O_PATH)
        try:
            with socket.socket(socket.AF_UNIX) as peer:
                peer.settimeout(20)
                peer.connect(f"/proc/self/fd/{folder}/agent.sock")
                peer.sendall(command.encode())
                peer.shutdown(socket.SHUT_WR)
                data = b"".join(iter(lambda: peer.recv(65536), b"")).decode()
        finally:
            os.close(folder)
        output, _, status = data.rpartition("\nstatus ")
        return int(status), output


@contextlib.asynccontextmanager
async def open_lab(
    folder: Path, image: Path, init: Path, binary: Path = BINARY, **pool: Any
) -> AsyncIterator[Lab]:
    """Start a pool of two creators with its own cgroup directory; leave nothing."""
    for name in ("sb", "spool", "upper", "layer"):
        (folder / name).mkdir(exist_ok=True)
    cgroup = cgroup_v2() / f"dsec-fp-{os.getpid()}"
    cgroup.mkdir()
    fds = [
        fastpath.make_userns(UID_BASE, UID_BASE + 65535),
        fastpath.make_netns(),
        fastpath.mount_erofs(image),
    ]
    by_path = not probe.feature("overlay_lower_fd").available
    defaults = {"base_filter": seccomp.base_filter(), "by_path": by_path}
    spawners = SpawnerPool(str(binary), 2, init=str(init), **(defaults | pool))
    lab = Lab(folder, spawners, cgroup, fds[0], fds[1], fds[2:], pool.get("by_path", by_path))
    if lab.by_path:
        fastpath.move_mount(fds[2], lab.layer)
    try:
        await spawners.start()
        yield lab
    finally:
        await spawners.close()
        if lab.by_path:
            fastpath.umount(lab.layer)
        for fd in fds:
            os.close(fd)
        fastpath.remove_cgroup(cgroup)


def traces(lab: Lab) -> dict[str, object]:
    """Everything a container could leave: names, groups, processes, descriptors, mounts."""
    workers = [*lab.pool._creators, *lab.pool._destroyers, *lab.pool._rerooters]
    pids = [worker._process.pid for worker in workers]
    children = {
        int(path.name)
        for path in Path("/proc").iterdir()
        if path.name.isdigit() and _parent(path) in pids
    }
    return {
        "files": sorted(str(path) for path in lab.folder.rglob("*")),
        "populated": sorted(
            str(path.parent)
            for path in lab.cgroup.rglob("cgroup.procs")
            if path.read_text().strip()
        ),
        "children": children,
        "fds": [_fds(pid) for pid in pids],
        "mounts": [Path(f"/proc/{pid}/mountinfo").read_text() for pid in pids],
        "host_mounts": [
            line
            for line in Path("/proc/self/mountinfo").read_text().splitlines()
            if str(lab.folder) in line
        ],
        "own_fds": len(_fds(os.getpid())),
    }


def _fds(pid: int) -> list[str]:
    return sorted(path.name for path in Path(f"/proc/{pid}/fd").iterdir())


def _parent(path: Path) -> int:
    try:
        return int((path / "stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0
