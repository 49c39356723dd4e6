"""Machines that were saved: memory, devices and disks at one moment, in a directory each.

One is made under another name and renamed when it is complete; whoever needs it has it in its
journalled handle. A directory has users (checkpoints, machines that stand on its memory, paused
ones), is removed with the last of them, and at the start of the daemon when there is none.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import functools
import logging
import secrets
import shutil
from collections.abc import Awaitable
from pathlib import Path
from typing import TypeVar

from dsecd.host import vm_disks, vm_pages, vm_ram
from dsecd.host.vm_plan import Machine, VmPlan
from dsecd.images import disk
from libdsec.errors import Exhausted

logger = logging.getLogger("dsecd.microvm")
RAM, STATE = "ram", "state"
T = TypeVar("T")
STATE_INSIDE = "/vm/state"  # in the jail, while it is written or read


class SavedMachine:
    """What is in the directory `place`. Its methods raise `DSecError`, `OSError`."""

    def __init__(self, place: Path) -> None:
        self.place = place

    @property
    def ram(self) -> Path:
        return self.place / RAM

    async def take(
        self, root: Path, plan: VmPlan, machine: Machine, base: Path | None = None,
        disks: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Save `machine`, which stands still, with `disks` of its plan.

        `base` has the memory that it stands on, if it is another file than its own.
        """
        # a daemon that was killed may have left one
        await asyncio.to_thread(vm_disks.remove, root, STATE_INSIDE)
        await machine.save(STATE_INSIDE)
        await asyncio.to_thread(self._take, root, plan, machine.pid, base, disks)

    def _take(
        self, root: Path, plan: VmPlan, pid: int, base: Path | None, disks: tuple[str, ...]
    ) -> None:
        try:
            vm_disks.take(root, STATE_INSIDE, self.place / STATE)
        finally:
            vm_disks.remove(root, STATE_INSIDE)
        if base is None:
            vm_ram.take_ram(pid, plan.memory_bytes, self.ram)
        else:
            vm_pages.take_pages(pid, base, self.ram)
        self.ram.chmod(0o444)  # monitors read it, each with a uid of its own
        for path in disks:
            vm_disks.take(root, path, self.disk(path))

    def disk(self, path: str) -> Path:
        """Return the copy of the disk that lies at `path` in the jail."""
        return self.place / Path(path).name

    async def put_disks(self, root: Path, *disks: str) -> None:
        """Copy disks into the jail, in the place of what is there."""
        for path in disks:
            await asyncio.to_thread(vm_disks.remove, root, path)
            await asyncio.to_thread(vm_disks.place, root, path, self.disk(path))

    async def load(self, root: Path, plan: VmPlan, machine: Machine) -> None:
        """Take it up in `machine`, planned as `incoming`, which stands still afterwards."""
        if plan.ram.shared:
            fill = functools.partial(vm_ram.fill_ram, machine.pid, plan.memory_bytes, self.ram)
            await asyncio.to_thread(fill)
        await asyncio.to_thread(vm_disks.remove, root, STATE_INSIDE)
        await asyncio.to_thread(vm_disks.place, root, STATE_INSIDE, self.place / STATE)
        try:
            await machine.load(STATE_INSIDE)
        finally:
            await asyncio.to_thread(vm_disks.remove, root, STATE_INSIDE)


class SavedMachines:
    """Those below `directory`, by the name of theirs. Used from one event loop."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._users: collections.Counter[str] = collections.Counter()

    def start(self) -> None:
        self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)

    def get(self, name: str) -> SavedMachine:
        return SavedMachine(self._directory / name)

    def ram(self, name: str) -> Path | None:
        """Return the memory of one, None for the name ""."""
        return self.get(name).ram if name else None

    async def make(
        self, root: Path, plan: VmPlan, machine: Machine, base: str, disks: tuple[str, ...]
    ) -> str:
        """Save `machine`, which stands still, and return the name; it has one user.

        Raises `Exhausted` when the disk has no room for it, and as `SavedMachine.take`.
        """
        needed = await asyncio.to_thread(self._needed, root, plan, machine, base, disks)
        if (room := disk.room(self._directory)) < needed:
            raise Exhausted(
                f"to save the machine takes {needed >> 20} MiB of the disk of {self._directory}, "
                f"which has {room >> 20} to spare: delete checkpoints, or free space"
            )
        name = secrets.token_hex(8)
        made = self.get(f".{name}")
        try:
            made.place.mkdir(mode=0o700)
            with disk.full_named("a machine was saved"):
                await whole(made.take(root, plan, machine, self.ram(base), disks))
            made.place.rename(self._directory / name)
        except BaseException:
            await asyncio.to_thread(shutil.rmtree, made.place, ignore_errors=True)
            raise
        self.acquire(name)
        return name

    def _needed(
        self, root: Path, plan: VmPlan, machine: Machine, base: str, disks: tuple[str, ...]
    ) -> int:
        ram = self.ram(base)
        if ram is None:
            memory = vm_ram.used_bytes(machine.pid, plan.memory_bytes)
        else:
            memory = ram.stat().st_blocks * 512 + vm_pages.own_bytes(machine.pid, ram)
        return memory + sum(vm_disks.used_bytes(root, path) for path in disks)

    def acquire(self, name: str) -> None:
        """Count one more user; "" is none."""
        if name:
            self._users[name] += 1

    async def release(self, name: str) -> None:
        """Count one user less, and remove what has none; "" is none."""
        if not name:
            return
        self._users -= collections.Counter([name])  # drops what reaches zero
        if name not in self._users:
            place = self.get(name).place
            gone = place.with_name(f".{name}")
            with contextlib.suppress(FileNotFoundError):
                place.rename(gone)
            await asyncio.to_thread(shutil.rmtree, gone, ignore_errors=True)

    def forget(self, name: str) -> None:
        """Count one user less of something that has others; "" is none."""
        if name:
            self._users -= collections.Counter([name])

    async def sweep(self) -> list[str]:
        """Remove what nobody uses: left by a daemon that was killed. Returns the paths."""
        stale = [entry for entry in self._directory.iterdir() if entry.name not in self._users]
        for entry in stale:
            await asyncio.to_thread(shutil.rmtree, entry, ignore_errors=True)
        return [str(entry) for entry in stale]


async def whole(work: Awaitable[T]) -> T:
    """Wait until `work` has ended, also when cancelled: it must not be left half done."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        with contextlib.suppress(Exception):
            await task
        raise
