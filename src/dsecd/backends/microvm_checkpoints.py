"""MicroVMs that are saved and taken up again: checkpoint, rollback, branch, pause.

What is saved is one moment of memory, devices and disks, while the guest stands still. A machine
that goes back to one, or goes on after a pause, has a new monitor in the same jail, and its memory
is a copy. A branch is a new sandbox: its memory is the checkpoint's own file, copied on write.

A daemon may die at any point. Before a rollback ends the monitor it is journalled, and done again
by the next daemon: everything it needs is in the checkpoint. A paused machine is journalled before
its monitor is ended, and as running before its guest goes on, for then what is saved does not fit
its disks any more.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from dsecd.backends.abc import Save
from dsecd.backends.microvm_holding import Checkpoint, Held, Holding, alone
from dsecd.backends.microvm_host import MicroVMHost
from dsecd.backends.microvm_machine import GuestMachine
from dsecd.backends.microvm_plan import Clock, clock, memory_bytes
from dsecd.backends.microvm_saved import SavedMachine
from dsecd.backends.spec import Spec
from dsecd.host.vm_plan import Launch, Machine, VmPlan
from libdsec import model
from libdsec.errors import Internal, InvalidArgument, NotFound, Unavailable

METHOD = "memory"
LEFT = "the sandbox went back to a checkpoint"


def find(held: Held, name: str) -> Checkpoint:
    """Return a checkpoint by its id. Raises `NotFound`."""
    for checkpoint in held.checkpoints:
        if checkpoint.id == name:
            return checkpoint
    known = ", ".join(checkpoint.id for checkpoint in held.checkpoints) or "none"
    raise NotFound(f"no checkpoint {name!r}; there are: {known}", name=name)


def describe(checkpoint: Checkpoint, took_ms: float = 0, frozen_ms: float = 0) -> model.Checkpoint:
    """Return what a user hears of it."""
    return model.Checkpoint(
        id=checkpoint.id,
        method=METHOD,
        created_at=checkpoint.created_at,
        took_ms=round(took_ms, 3),
        frozen_ms=round(frozen_ms, 3),
    )


def check_branch(spec: Spec, origin: Held) -> None:
    """Raise `InvalidArgument` where `spec` is another machine than the one that was saved."""
    assert spec.vm is not None
    plan = origin.plan
    device = plan.layers[0].device if plan.layers else spec.vm.layers
    for field, wanted, has in (
        ("memory_limit_mb", memory_bytes(spec), plan.memory_bytes),
        ("disk_limit_mb", spec.disk_bytes, origin.upper_bytes),
        ("vcpus", spec.vm.vcpus, plan.vcpus),
        ("data_disk_mb", spec.vm.data_disk_bytes > 0, bool(plan.data)),
        ("layers", spec.vm.layers, device),
        ("network", spec.network != "none", plan.network is not None),
    ):
        if wanted != has:
            raise InvalidArgument(
                f"{field}: a branch of a microVM goes on with its machine, and has the same",
                field=field,
            )


class Checkpoints:
    """Of all microVMs of the host."""

    def __init__(self, host: MicroVMHost) -> None:
        self._host = host

    # --- users of what is saved -----------------------------------------------------------------

    def hold(self, holding: Holding) -> None:
        for name in holding.places():
            self._host.saved.acquire(name)

    async def let_go(self, holding: Holding) -> None:
        """Remove what only this machine needed; it is gone."""
        places = holding.places()
        holding.keep(base="", saved="", checkpoints=())
        for name in places:
            await self._host.saved.release(name)

    # --- checkpoints ----------------------------------------------------------------------------

    async def make(self, holding: Holding, root: Path, save: Save) -> model.Checkpoint:
        """Remember the machine as it is. Raises `Exhausted`, `Timeout`, `Unavailable`."""
        begun = time.perf_counter()
        held, machine, place = holding.held, _machine(holding), ""
        number = held.made + 1
        try:
            async with machine.standing() as monitor:
                still = time.perf_counter()
                place = await self._host.saved.make(
                    root, held.plan, monitor, held.base, _disks(held.plan)
                )
            frozen_ms = (time.perf_counter() - still) * 1e3
            made = Checkpoint(id=f"c{number}", place=place, created_at=time.time())
            await holding.change(save, checkpoints=(*held.checkpoints, made), made=number)
        except BaseException:
            await self._host.saved.release(place)
            raise
        return describe(made, (time.perf_counter() - begun) * 1e3, frozen_ms)

    async def delete(self, holding: Holding, name: str, save: Save) -> None:
        """Forget one; its files go with the last branch that stands on it. Raises `NotFound`."""
        target = find(holding.held, name)
        left = tuple(one for one in holding.held.checkpoints if one is not target)
        await holding.change(save, checkpoints=left)
        await self._host.saved.release(target.place)

    async def rollback(
        self, holding: Holding, root: Path, name: str, save: Save
    ) -> model.Checkpoint:
        """Put the machine back. Raises `NotFound`; after another error it is no more."""
        begun, target = time.perf_counter(), find(holding.held, name)
        await holding.change(save, returning=target.place)
        await self.go_back(holding, root, save)
        return describe(target, (time.perf_counter() - begun) * 1e3)

    async def go_back(self, holding: Holding, root: Path, save: Save) -> None:
        """Do, or finish, the rollback that is journalled."""
        machine, held = _machine(holding), holding.held
        target, plan = self._host.saved.get(held.returning), alone(held.plan)
        await machine.leave(LEFT)
        machine.plan = plan
        await target.put_disks(root, *_disks(plan))
        await self.take_up(machine, target, root, "vm.clock", clock())
        await holding.change(save, returning="", plan=plan, base="")
        await self._host.saved.release(held.base)

    async def take_up(
        self, machine: GuestMachine, saved: SavedMachine, root: Path, op: str, told: Clock
    ) -> None:
        """Start `machine` at what was saved, and tell it by `op` what it cannot know."""

        async def load(monitor: Machine) -> None:
            await saved.load(root, machine.plan, monitor)
            await monitor.cont()

        await machine.take_up(self._waiting(machine.plan), load, op, told)

    async def branch(self, holding: Holding, root: Path, told: Clock) -> None:
        """Start a new sandbox's machine at the checkpoint on whose memory it is to stand."""
        held, machine = holding.held, _machine(holding)
        saved = self._host.saved.get(held.base)
        await saved.put_disks(root, *_disks(held.plan))
        try:
            await self.take_up(machine, saved, root, "vm.renew", told)
        except OSError as error:
            raise Internal(f"the checkpoint cannot be taken up: {error}") from error

    # --- pause ----------------------------------------------------------------------------------

    async def pause(self, holding: Holding, root: Path, save: Save) -> None:
        """Save the machine and end its monitor; after a failure it runs."""
        machine, held = _machine(holding), holding.held
        async with machine.standing() as monitor:
            place = await self._host.saved.make(root, held.plan, monitor, held.base, ())
            plan = alone(held.plan)
            try:
                await holding.change(save, paused=True, saved=place, plan=plan, base="")
            except BaseException:
                await self._host.saved.release(place)
                raise
            await machine.end_monitor()
            machine.plan = plan
        await self._host.saved.release(held.base)

    async def resume(self, holding: Holding, root: Path, save: Save) -> None:
        """Go on in a new monitor. After a failure it is paused still, or has failed for good."""
        machine, held = _machine(holding), holding.held
        if not held.saved:
            return
        saved, went_on = self._host.saved.get(held.saved), False

        async def load(monitor: Machine) -> None:
            nonlocal went_on
            await saved.load(root, machine.plan, monitor)
            await holding.change(save, paused=False, saved="")
            went_on = True
            await monitor.cont()

        try:
            await machine.resume(self._waiting(machine.plan), load)
        except BaseException as error:
            if went_on:  # its disks are ahead of what is saved
                machine.fail(f"it did not go on after a pause: {error}")
                await self._host.saved.release(held.saved)
            if isinstance(error, OSError):
                raise Unavailable(f"what was saved cannot be taken up: {error}") from error
            raise
        await self._host.saved.release(held.saved)

    def _waiting(self, plan: VmPlan) -> Launch:
        return self._host.vmm.compile(msgspec.structs.replace(plan, incoming=True))


def _machine(holding: Holding) -> GuestMachine:
    if holding.machine is None:
        raise Unavailable("the machine is gone")
    return holding.machine


def _disks(plan: VmPlan) -> tuple[str, ...]:
    return (plan.upper, plan.data) if plan.data else (plan.upper,)
