"""What both cgroup drivers share: the v2 directory of each sandbox."""

from __future__ import annotations

import os
from abc import abstractmethod
from contextlib import suppress

from dsecd.host.cgroup_model import Driver, SandboxCgroup
from dsecd.host.cgroup_slots import SlotPool
from dsecd.host.cgroup_tree import SandboxTree
from dsecd.host.kernelfs import KernelFiles, fields


class TreeDriver(Driver):
    """A driver over a `SandboxTree`; freezing, killing and pressure need nothing else."""

    slots: SlotPool | None

    def __init__(self, files: KernelFiles, parent: str, name: str) -> None:
        self.files = files
        self.name = name
        self.tree = SandboxTree(files, parent)

    @abstractmethod
    def prepare(self) -> None:
        """Make our parent directories. Raises `OSError`."""

    @abstractmethod
    def start(self) -> None:
        """Begin background work in the running event loop."""

    async def close(self) -> None:
        """Stop background work; remove our directory when no sandbox is left in it."""
        with suppress(OSError):
            self.files.rmdir(self.tree.parent)

    def discard(self) -> None:
        """Remove our empty parent directories at once; for a driver that was never started."""
        with suppress(OSError):
            self.files.rmdir(self.tree.parent)
        if self.slots is not None:
            self.slots.discard()

    def make(self, sandbox_id: str, owner_uid: int) -> SandboxCgroup:
        return self.tree.make(sandbox_id, owner_uid)

    def group(self, sandbox_id: str) -> SandboxCgroup:
        """Return the directory of a sandbox whether it is there or not; a spawner makes it."""
        return self.tree.group(sandbox_id)

    def find(self, sandbox_id: str) -> SandboxCgroup | None:
        """Return the directory of a sandbox that outlived the last daemon, or None."""
        return self.tree.find(sandbox_id)

    def identify(self, cgroup: SandboxCgroup) -> int:
        """Return the id of a v2 group as BPF programs see it: its inode. Raises `OSError`."""
        return self.files.inode(cgroup.path)

    def list_sandboxes(self) -> list[str]:
        """Return the ids of all sandboxes that have a directory under our name."""
        return self.tree.names()

    def list_slots(self) -> dict[str, tuple[int, ...]]:
        """Return by slot the host pids inside; {} where there are no slots."""
        return self.slots.holders() if self.slots is not None else {}

    def pids(self, cgroup: SandboxCgroup) -> tuple[int, ...]:
        """Return the host pids of a sandbox, its init included."""
        return self.tree.pids(cgroup.path)

    def command_pids(self, cgroup: SandboxCgroup) -> tuple[int, ...]:
        """Return the host pids of its commands and sessions, each of which has a group below."""
        return self.tree.pids(cgroup.path, below=True)

    def kill(self, path: str) -> None:
        """SIGKILL everything in `path`, frozen or not. Raises `DSecError`."""
        self.tree.kill(path)

    async def freeze(self, path: str, timeout_s: float = 5.0) -> None:
        """Stop all processes in `path`. Raises `DSecError`."""
        await self.tree.freeze(path, timeout_s)

    async def thaw(self, path: str, timeout_s: float = 5.0) -> None:
        """Let them go on. Raises `DSecError`."""
        await self.tree.thaw(path, timeout_s)

    def frozen(self, path: str) -> bool:
        """Return whether all processes in `path` are stopped. Raises `OSError`."""
        return fields(self.files.read(f"{path}/cgroup.events")).get("frozen") == 1

    async def remove(self, path: str, timeout_s: float = 5.0) -> None:
        """Remove `path` and all below it. Raises `Internal` naming processes that stayed."""
        await self.tree.remove(path, timeout_s)

    def cpu_usage_s(self, path: str) -> float:
        """Return CPU seconds of this life; the v2 hierarchy counts them without a controller."""
        return fields(self.files.read(f"{path}/cpu.stat")).get("usage_usec", 0) / 1e6

    def trial(self) -> None:
        """Make, limit and remove a sandbox directory, to know that this host lets us.

        Raises `DSecError` or `OSError` with the step that failed.
        """
        self.prepare()
        cgroup = self.make(f"trial-{os.getpid()}", os.geteuid())
        try:
            self.attempt(cgroup)
        finally:
            cgroup.close()
            self.files.rmdir(cgroup.path)

    def attempt(self, cgroup: SandboxCgroup) -> None:
        """Write the limits of a trial sandbox."""
        for write in self.limits(cgroup, 64 << 20, 1.0, 16):
            self.files.write(write.path, write.value)
