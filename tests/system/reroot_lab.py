"""A live container with a real dsec-init, whose root is replaced again and again."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd import fastpath
from dsecd.backends.agent import swap_root
from dsecd.host.plan import RerootPlan
from dsecd.host.spawner import Rerooted, Spawned
from tests.system.init_harness import InitClient
from tests.system.spawner_lab import BINARY, UID_BASE, Lab, build_base, open_lab

INIT = BINARY.with_name("dsec-init")
CONFIG = msgspec.msgpack.encode(
    {"workdir": "/", "env": {"PATH": "/bin:/sbin", "HOME": "/root"}, "sandbox": "box"}
)
FD_UPPER = 12


class Box:
    """`uppers` are descriptors of its checkpoints, the oldest first; `kept` all that it opened."""

    def __init__(self, lab: Lab, name: str, spawned: Spawned, uid_base: int, userns: int) -> None:
        self.lab, self.name, self.spawned = lab, name, spawned
        self.uid_base, self.userns = uid_base, userns
        self.path = str(lab.folder / "sb" / name / "agent.sock")
        self.client = InitClient(self.path)
        self.client.call("sys.ping")  # it is accepted, and a descriptor of dsec-init
        self.uppers: list[int] = []
        self.kept: list[int] = []

    def close(self) -> None:
        self.client.close()
        for fd in self.kept:
            os.close(fd)

    def sh(self, command: str) -> str:
        """Run `command` as root inside; return all it wrote."""
        result = self.client.run(command)
        return (result["stdout"] + result["stderr"]).decode()

    def init_fds(self) -> dict[int, str]:
        """What dsec-init has open; its /dev/null goes by a shorter name in its bare root."""
        names = {}
        for path in Path(f"/proc/{self.spawned.pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):  # closed while we looked
                names[int(path.name)] = str(path.readlink())
        return {fd: "/dev/null" if name == "/null" else name for fd, name in names.items()}

    def open_upper(self) -> int:
        """A mount of its own of the present upper: what a checkpoint keeps."""
        fd = fastpath.open_tree(f"/proc/{self.spawned.pid}/fd/{FD_UPPER}/u", clone=True)
        self.kept.append(fd)
        return fd

    async def build(self, uppers: list[int], **changes: Any) -> Rerooted:
        """Build a root of the layers and `uppers`, as the next one."""
        lowers = [*self.lab.lowers, *uppers]
        fields: dict[str, Any] = {
            "sandbox": self.name, "lowers": len(lowers), "raw_lowers": len(uppers),
            "uid_base": self.uid_base, "upper_bytes": 64 << 20,
        }  # fmt: skip
        fds = [self.spawned.pidfd, self.userns, *lowers]
        return await self.lab.pool.reroot(RerootPlan(**(fields | changes)), fds)

    async def enter(self, uppers: list[int], **changes: Any) -> None:
        """Build such a root and move in."""
        built = await self.build(uppers, **changes)
        try:
            await swap_root(self.path, built.mount_ns, built.upper)
        finally:
            os.close(built.mount_ns)
            os.close(built.upper)

    async def checkpoint(self, **changes: Any) -> list[int]:
        """Make the present upper immutable; return what to `enter` to come back here."""
        uppers = [*self.uppers, self.open_upper()]
        await self.enter(uppers, **changes)
        self.uppers = uppers
        return uppers

    async def rollback(self, uppers: list[int], **changes: Any) -> None:
        await self.enter(uppers, **changes)
        self.uppers = uppers


@contextlib.asynccontextmanager
async def open_box(lab: Lab, name: str = "a", **changes: Any) -> AsyncIterator[Box]:
    async with lab.container(name, **({"init_config": CONFIG} | changes)) as spawned:
        box = Box(lab, name, spawned, UID_BASE, lab.userns)
        try:
            yield box
        finally:
            box.close()


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_base(tmp_path_factory.mktemp("reroot"))


@pytest.fixture
async def lab(tmp_path: Path, image: Path) -> AsyncIterator[Lab]:
    async with open_lab(tmp_path, image, INIT) as lab:
        yield lab


@pytest.fixture
async def box(lab: Lab) -> AsyncIterator[Box]:
    async with open_box(lab) as box:
        yield box
