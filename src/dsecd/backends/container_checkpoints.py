"""Checkpoints of running containers: uppers that became immutable, and roots made of them.

A checkpoint swaps the root under a sandbox in which no process but dsec-init lives: the present
upper becomes the topmost lower of a new overlay with a fresh upper. No data is copied.
Where something lives or is open, the upper is copied while the sandbox is frozen instead, and the
root stays.

Overlayfs copies up one name of a file and forgets the others. So in each root that is made on a
saved upper, the spawner makes its files of several names anew, in the fresh upper.

A checkpoint that is deleted is gone at once; what it saved goes when neither the present root nor
another checkpoint stands on it: then, or after the rollback that leaves it.

What was saved is found again by its path, so that it outlives dsecd: the mount of a memory upper
below `directory`, or a directory in the sandbox's own part of the volume. It is kept for as long as
a sandbox may need it: its own, or one that branched off.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import os
import re
import shutil
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path

from dsecd import fastpath
from dsecd.backends.agent import swap_root
from dsecd.backends.container_holding import (
    FD_MOUNT_NS,
    FD_UPPER,
    Checkpoint,
    Holding,
    Pending,
    Roots,
    Saved,
)
from dsecd.backends.container_host import ContainerHost
from dsecd.backends.container_plan import runtime_dir
from dsecd.backends.container_roots import describe, find, note, unneeded, without_links
from dsecd.backends.container_saved import copy_tree, discard, place
from dsecd.host import mountinfo, processes, syscalls
from dsecd.host.layers import privatise
from dsecd.host.plan import LIST_MAX, RerootPlan
from dsecd.host.upper import Upper
from dsecd.policy.guards import in_kernel_tree
from libdsec import model
from libdsec.errors import Exhausted, Internal, Unavailable, WrongState

logger = logging.getLogger("dsecd.checkpoints")
UPPER = "u"  # the upper's directory in its file system
MAX_STACK = 20  # saved uppers below one another: look-ups slow down with each
KILL_S = 5.0
QUIET_S = 2.0
_NUMBERED = re.compile("c?[0-9]+")  # directories in a volume that are ours: uppers and copies
Save = Callable[[], Awaitable[None]]  # journals the holding as it is now


class Checkpoints:
    """All saved uppers of the host. `directory` is ours."""

    def __init__(self, host: ContainerHost, directory: Path) -> None:
        self._host, self._directory = host, directory
        self._users: collections.Counter[str] = collections.Counter()  # of saved uppers, by path
        self._volumes: collections.Counter[str] = collections.Counter()  # of disk uppers, by path
        self._shifts: dict[tuple[int, int], int] = {}

    def start(self) -> None:
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        privatise(self._directory)

    def close(self, leave_nothing: bool) -> None:
        for fd in self._shifts.values():
            os.close(fd)
        self._shifts.clear()
        if leave_nothing:
            for path in list(self._mounted()):
                fastpath.umount(path)
            while mountinfo.at(self._directory) is not None:
                fastpath.umount(self._directory)
            shutil.rmtree(self._directory, ignore_errors=True)

    # --- who needs what ---------------------------------------------------------------------------

    def hold(self, holding: Holding) -> None:
        """Count a holding's saved uppers, and its own volume directory, as used."""
        for saved in holding.roots.saved:
            self._use(saved)
        if holding.upper is not None:
            self._volumes[holding.upper.dir] += 1

    def forget(self, holding: Holding) -> None:
        """Undo `hold` for a container that was never made."""
        for saved in holding.roots.saved:
            self._unuse(saved)
        if holding.upper is not None:
            self._volumes -= collections.Counter([holding.upper.dir])
        holding.roots = Roots()

    async def let_go(self, holding: Holding) -> None:
        """Remove what only this holding needed; called once its container is gone.

        After a failure it may be called again: nothing is counted before it is removed.
        """
        roots = holding.roots
        while roots.saved:
            await self._free(holding, roots.saved[-1], leaving=True)
        if holding.upper is not None:
            await self._release_last(holding.upper)
            self._volumes -= collections.Counter([holding.upper.dir])
            holding.upper = None
        holding.roots = Roots()

    async def tidy(self, holding: Holding) -> bool:
        """Free what nothing of this holding stands on; return whether there was anything.

        To be journalled afterwards. A daemon that is killed before that finds it to do again.
        """
        found = unneeded(holding.roots)
        for saved in found:
            await self._free(holding, saved)
        return bool(found)

    async def recovered(self, holding: Holding) -> None:
        """Free what a daemon that died had not come to, or had half made. Others are counted."""
        await self.tidy(holding)
        volume = holding.upper
        if volume is None:
            return
        kept = {path for used in self._users for path in (used, str(Path(used).parent))}
        kept.add(holding.roots.upper_dir)
        for entry in list(Path(volume.dir).iterdir()):
            if _NUMBERED.fullmatch(entry.name) and str(entry) not in kept:
                await asyncio.to_thread(discard, entry)

    async def _free(self, holding: Holding, saved: Saved, leaving: bool = False) -> None:
        """Take a saved upper from a holding, and remove it with its last user.

        `leaving`: the container is gone, and its own part of the volume will go as a whole.
        """
        volume, last = saved.volume, self._users[saved.path] == 1
        if volume is None:
            if last:
                await asyncio.to_thread(self._unmount, Path(saved.path))
        elif self._volumes[volume.dir] == 1:
            await self._host.uppers.release(volume)
        elif last and not (leaving and volume == holding.upper):
            await asyncio.to_thread(discard, place(saved, volume))
        holding.roots.saved.remove(saved)
        self._unuse(saved)

    async def _release_last(self, volume: Upper) -> None:
        """Remove the volume directory if nobody else uses it."""
        if self._volumes[volume.dir] == 1:
            await self._host.uppers.release(volume)

    def _use(self, saved: Saved) -> None:
        self._users[saved.path] += 1
        if saved.volume is not None:
            self._volumes[saved.volume.dir] += 1

    def _unuse(self, saved: Saved) -> None:
        # this operator drops what reaches zero
        self._users -= collections.Counter([saved.path])
        if saved.volume is not None:
            self._volumes -= collections.Counter([saved.volume.dir])

    def kept_volumes(self) -> set[str]:
        """Return the directories of disk uppers that somebody needs."""
        return set(self._volumes)

    def sweep(self) -> list[str]:
        """Unmount what no sandbox needs: left by a crash. Returns the paths."""
        kept = {part for path in self._users for part in (path, str(Path(path).parent))}
        stale = [path for path in self._mounted() if str(path) not in kept]
        for path in stale:
            self._unmount(path)
        return [str(path) for path in stale]

    def _unmount(self, path: Path) -> None:
        """Unmount what was saved at `path`, or in the file system mounted above it, if it is."""
        point = self._directory / path.relative_to(self._directory).parts[0]
        with contextlib.suppress(fastpath.StepError):
            fastpath.umount(point)
        with contextlib.suppress(OSError):
            point.rmdir()

    def _mounted(self) -> Iterator[Path]:
        prefix = os.path.realpath(self._directory) + "/"
        for mount in mountinfo.mounts():
            if mount.point.startswith(prefix):
                yield self._directory / mount.point.removeprefix(prefix)

    # --- lowers -----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def lowers(self, saved: Sequence[Saved], uid_base: int) -> Iterator[list[int]]:
        """Lend mounts of saved uppers, oldest first, for a root of the range at `uid_base`."""
        with contextlib.ExitStack() as stack:
            found = []
            for one in saved:
                fd = fastpath.open_tree(one.path, clone=True)
                stack.callback(os.close, fd)
                if one.uid_base != uid_base:
                    fastpath.idmap_mount(fd, self._shift(one.uid_base, uid_base))
                found.append(fd)
            yield found

    def _shift(self, from_base: int, to_base: int) -> int:
        """Return a user namespace that shows the one range's files as the other's."""
        key = (from_base, to_base)
        if key not in self._shifts:
            if len(self._shifts) >= 256:
                os.close(self._shifts.pop(next(iter(self._shifts))))
            self._shifts[key] = fastpath.make_shift_userns(*key)
        return self._shifts[key]

    # --- checkpoint -------------------------------------------------------------------------------

    async def checkpoint(self, holding: Holding, save: Save) -> model.Checkpoint:
        """Make the present state of the files one to come back to. Raises `Exhausted`."""
        deep = len(holding.roots.stack)
        if deep >= min(MAX_STACK, LIST_MAX - len(holding.layers)):
            raise Exhausted(
                f"the sandbox's files lie on {deep} checkpoints, more cannot be stacked; roll back "
                "to an earlier one, or save it with pack_diff and create a sandbox of that layer"
            )
        begun = time.perf_counter()
        # the mount of a memory upper cannot be attached a second time where roots are made by path
        swappable = holding.upper is not None or not self._host.spawners.by_path
        if swappable and self._is_quiet(holding):
            try:
                made = await self._swap_in(holding, save)
            except WrongState:  # something began meanwhile, or is open
                made = await self._copy(holding, save)
        else:
            made = await self._copy(holding, save)
        return describe(made, (time.perf_counter() - begun) * 1e3)

    async def delete(self, holding: Holding, name: str, save: Save) -> None:
        """Forget a checkpoint for good, then free what only it needed. Raises `NotFound`."""
        roots = holding.roots
        before = list(roots.checkpoints)
        roots.checkpoints.remove(find(roots, name))
        try:
            await save()  # before anything is freed: what the journal knows must be there
        except BaseException:
            roots.checkpoints = before
            raise
        if await self.tidy(holding):
            await save()

    def described(self, holding: Holding) -> Sequence[model.Checkpoint]:
        """Return the checkpoints, the oldest first."""
        return [describe(checkpoint) for checkpoint in holding.roots.checkpoints]

    def _is_quiet(self, holding: Holding) -> bool:
        assert holding.cgroup is not None
        return not self._host.driver.command_pids(holding.cgroup)

    async def _swap_in(self, holding: Holding, save: Save) -> Checkpoint:
        """The present upper becomes a lower. Raises `WrongState` when something is open.

        Nothing begins meanwhile: what the new root takes over from it is what it is in the end.
        """
        roots = holding.roots
        saved = self._present(holding)
        if saved.volume is None:
            self._attach(holding, saved)
        stack = (*roots.stack, saved.path)
        roots.saved.append(saved)
        self._use(saved)
        try:
            with self._still(holding):
                await self._enter(holding, stack, save)
        except BaseException:
            if roots.stack != stack:
                await self._drop(roots, saved)
            raise
        return await self._remember(holding, stack, "swap", save)

    @contextlib.contextmanager
    def _still(self, holding: Holding) -> Iterator[None]:
        """Keep calls back while nothing changes a file. Raises `WrongState` when something may."""
        if holding.channel is None:
            raise Unavailable("the sandbox's agent cannot be reached")
        with holding.channel.held() as idle:
            if not idle or not self._is_quiet(holding):  # in this order: a call starts a process
                raise WrongState("the sandbox is at work")
            yield

    def _present(self, holding: Holding) -> Saved:
        """Return what the present upper will be called as a saved one."""
        assert holding.range is not None
        roots, base = holding.roots, holding.range.uid_base
        if holding.upper is not None:
            directory = roots.upper_dir or holding.upper.dir
            return Saved(f"{directory}/{UPPER}", base, holding.upper)
        roots.serial += 1
        return Saved(str(self._directory / f"{holding.sandbox}-{roots.serial}"), base)

    def _attach(self, holding: Holding, saved: Saved) -> None:
        """Give the present memory upper a place on the host."""
        source = processes.descriptor(holding.pid, FD_UPPER) / UPPER
        fd = fastpath.open_tree(source, clone=True)
        try:
            Path(saved.path).mkdir(mode=0o700, exist_ok=True)
            fastpath.move_mount(fd, saved.path)
        finally:
            os.close(fd)

    async def _drop(self, roots: Roots, saved: Saved) -> None:
        """Undo a checkpoint that was not reached; a directory on disk is still the upper."""
        roots.saved.remove(saved)
        self._unuse(saved)
        if saved.volume is None:
            await asyncio.to_thread(self._unmount, Path(saved.path))

    async def _copy(self, holding: Holding, save: Save) -> Checkpoint:
        """Copy the upper while the sandbox stands still."""
        assert holding.cgroup is not None
        assert holding.range is not None
        roots, driver = holding.roots, self._host.driver
        roots.serial += 1
        if holding.upper is not None:
            place = Path(holding.upper.dir) / f"c{roots.serial}"
            place.mkdir(mode=0o700)
        else:
            place = self._directory / f"{holding.sandbox}-{roots.serial}"
            place.mkdir(mode=0o700, exist_ok=True)
            options = f"mode=700,size={holding.upper_bytes}"
            syscalls.mount("dsec-saved", str(place), "tmpfs", syscalls.MS_NODEV, options)
        saved = Saved(str(place / UPPER), holding.range.uid_base, holding.upper)
        source = processes.descriptor(holding.pid, FD_UPPER) / UPPER
        try:
            await driver.freeze(holding.cgroup.path)
            try:
                await copy_tree(source, place)
            finally:
                await driver.thaw(holding.cgroup.path)
        except BaseException:
            remove = self._unmount if holding.upper is None else discard
            await asyncio.to_thread(remove, place)
            raise
        roots.saved.append(saved)
        self._use(saved)
        return await self._remember(holding, (*roots.stack, saved.path), "copy", save)

    async def _remember(
        self, holding: Holding, stack: tuple[str, ...], method: str, save: Save
    ) -> Checkpoint:
        made = note(holding.roots, stack, method)
        await save()
        return made

    # --- rollback ---------------------------------------------------------------------------------

    async def rollback(self, holding: Holding, name: str, save: Save) -> model.Checkpoint:
        """End every process and go back to a checkpoint. Raises `NotFound`, `WrongState`."""
        target = find(holding.roots, name)
        begun = time.perf_counter()
        deadline = begun + QUIET_S
        left = self._present(holding) if holding.upper is not None else None
        while True:
            await self._end_processes(holding)
            try:
                await self._enter(holding, target.stack, save)
                break
            except WrongState:  # dsec-init has not noticed all ends yet
                if time.perf_counter() > deadline:
                    raise
                await asyncio.sleep(0.001)
        await save()
        used = {saved.path for saved in holding.roots.saved}
        if left is not None and left.volume is not None and left.path not in used:
            await asyncio.to_thread(discard, place(left, left.volume))
        if await self.tidy(holding):
            await save()
        return describe(target, (time.perf_counter() - begun) * 1e3)

    async def _end_processes(self, holding: Holding) -> None:
        """Kill commands and sessions at once: frozen, so that nobody forks meanwhile."""
        assert holding.cgroup is not None
        if self._is_quiet(holding):
            return
        driver, path = self._host.driver, holding.cgroup.path
        await driver.freeze(path)
        try:
            for pid in driver.command_pids(holding.cgroup):
                # frozen: nobody can end and leave its number to another
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        finally:
            await driver.thaw(path)
        deadline = time.perf_counter() + KILL_S
        while not self._is_quiet(holding):
            if time.perf_counter() > deadline:
                raise Internal(
                    f"processes of {holding.sandbox} do not end", sandbox=holding.sandbox
                )
            await asyncio.sleep(0.001)

    # --- another root -----------------------------------------------------------------------------

    async def _enter(self, holding: Holding, stack: tuple[str, ...], save: Save) -> None:
        """Put the sandbox on a root of its layers, `stack` and a fresh upper.

        Journalled before the swap with what tells whether it happened. Raises `WrongState` when
        something lives or is open inside; then nothing changed.
        """
        host, roots = self._host, holding.roots
        assert holding.range is not None
        base, upper_dir = holding.range.uid_base, ""
        if holding.upper is not None:
            roots.serial += 1
            upper_dir = f"{holding.upper.dir}/{roots.serial}"
        by_path = {saved.path: saved for saved in roots.saved}
        with (
            host.mounts.lowers([layer.digest for layer in holding.layers]) as layers,
            self.lowers([by_path[path] for path in stack], base) as uppers,
        ):
            plan = RerootPlan(
                sandbox=holding.sandbox,
                lowers=len(layers) + len(uppers),
                raw_lowers=len(uppers),
                linked=bool(stack) and by_path[stack[-1]].linked,
                uid_base=base,
                upper_dir=upper_dir,
                upper_bytes=0 if upper_dir else holding.upper_bytes,
                upper_project=holding.upper.project if holding.upper is not None else 0,
                binds=(*host.sys_binds(holding.cpus), *host.secrets.binds(holding.sandbox)),
                # /proc and /dev come along from the present root with what is mounted there
                guards=tuple(g for g in holding.guards if not in_kernel_tree(g.path)),
            )
            fds = [holding.pidfd, holding.range.userns_fd, *layers, *uppers]
            built = await host.spawners.reroot(plan, fds)
        try:
            roots.pending = Pending(os.fstat(built.mount_ns).st_ino, stack, upper_dir)
            await save()
            agent = f"{runtime_dir(host.template, holding.sandbox)}/agent.sock"
            async with host.file_rules.swapping(holding, built.mount_ns):
                await swap_root(agent, built.mount_ns, built.upper)
        except BaseException:
            self.settle(holding)
            if roots.upper_dir != upper_dir and upper_dir:
                await asyncio.to_thread(discard, Path(upper_dir))
            raise
        finally:
            os.close(built.mount_ns)
            os.close(built.upper)
        self.settle(holding)
        if plan.linked and not built.linked:
            roots.saved = [without_links(s) if s.path == stack[-1] else s for s in roots.saved]

    def settle(self, holding: Holding) -> None:
        """Find out whether the swap that was begun has happened."""
        roots = holding.roots
        pending, roots.pending = roots.pending, None
        if pending is None:
            return
        try:
            present = processes.descriptor(holding.pid, FD_MOUNT_NS).stat().st_ino
        except OSError:
            return  # it is dead
        if present == pending.mount_ns:
            roots.stack, roots.upper_dir = pending.stack, pending.upper_dir
