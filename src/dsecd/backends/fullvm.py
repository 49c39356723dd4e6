"""Sandboxes as full VMs: a disk image booted whole, its monitor jailed in a container.

The jail is the one that microVMs have (docs/decisions/0008-vms.md), of the host's own backend and
under the same id. The machine differs: firmware, a disk above an image that is only read, a screen.
Its agent comes with the seed, a disk that is made for each machine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import time
from collections.abc import Collection, Iterable
from pathlib import Path

import msgspec

from dsecd.backends.abc import (
    Backend,
    Capabilities,
    Handle,
    Instance,
    Listener,
    Save,
)
from dsecd.backends.fullvm_display import FullVMDisplay
from dsecd.backends.fullvm_host import FullVMHost
from dsecd.backends.fullvm_machine import FullGuestMachine, GuestChannel
from dsecd.backends.fullvm_plan import (
    SEED,
    VARIABLES,
    Firmware,
    Image,
    begin,
    binds,
    full_of,
    machine_jail_spec,
    machine_plan,
)
from dsecd.backends.microvm_plan import UPPER, check_policy
from dsecd.backends.spec import Spec
from dsecd.backends.vm_jailed import MECHANISMS, HeldJail, JailedBackend
from dsecd.config import Config
from dsecd.host import qcow2, vm_disks
from dsecd.host.fullvm_plan import FullVmPlan
from dsecd.images.tool import Report, unreported
from libdsec.errors import (
    DSecError,
    Exhausted,
    NotFound,
    Unavailable,
    WrongState,
)
from libdsec.model import Checkpoint, PackArgs, Packed

logger = logging.getLogger("dsecd.fullvm")
BACKEND = "fullvm"
CHECKPOINTS_MOST = 16
METHOD = "snapshot"


class Held(HeldJail, kw_only=True):
    """The journalled part of a full VM."""

    plan: FullVmPlan
    checkpoints: tuple[Checkpoint, ...] = ()


class Holding:
    """All that one full VM holds."""

    def __init__(self, held: Held) -> None:
        self.held = held
        self.machine: FullGuestMachine | None = None

    def handle(self) -> Handle:
        return Handle(
            sandbox=self.held.jail.sandbox,
            backend=BACKEND,
            resources=msgspec.msgpack.encode(self.held),
        )

    def keep(self, **changes: object) -> None:
        self.held = msgspec.structs.replace(self.held, **changes)

    def running(self) -> FullGuestMachine:
        if self.machine is None:
            raise Unavailable("its machine is being made or removed")
        return self.machine


class FullVMBackend(JailedBackend[Holding]):
    """See the module's docstring, and `abc.Backend` for the contract."""

    name, kind = BACKEND, "full VMs"

    def __init__(self, config: Config, jail: Backend) -> None:
        super().__init__(jail)
        self._host = FullVMHost(config)

    async def start(self, listener: Listener) -> None:
        self._listener = listener
        await asyncio.to_thread(self._host.start)
        able = self._jail.capabilities
        alone, with_cpu = (self._host.vmm.overhead_bytes(self._host.accel, n) for n in (0, 1))
        self.capabilities = Capabilities(
            vm=True, whole=True, survives_daemon=able.survives_daemon, oom=True, layers=True,
            checkpoints=True, trim=able.trim, pause=able.pause, network=able.network,
            # to the guest's agent, and to the monitor
            files_each=able.files_each + 2, files_ruled=able.files_ruled,
            memory_each=alone, memory_each_cpu=with_cpu - alone,  # the monitor's
            # on what the guest sends; the others know processes and files of this kernel
            mechanisms=tuple(name for name in able.mechanisms if name in MECHANISMS),
        )  # fmt: skip

    async def close(self) -> None:
        for holding in self._holdings.values():
            await _let_go(holding)
        self._holdings.clear()

    # --- create ---------------------------------------------------------------------------------

    def located(self, spec: Spec) -> bool:
        image = self._host.jail.name
        return bool(image) and self._jail.located(machine_jail_spec(spec, image))

    async def pull(self, spec: Spec, report: Report = unreported) -> None:
        """Disk images are put on the host by its operator."""

    async def locate(self, spec: Spec) -> None:
        image = await self._host.jail.provide(self._jail.layers())
        await self._jail.locate(machine_jail_spec(spec, image))

    def prepare(self, sandbox: str, spec: Spec) -> Handle:
        image, firmware = self._host.image(spec), self._host.firmware(spec)
        check_policy(spec.policy.net if spec.policy is not None else None)
        plan = machine_plan(spec, image, firmware, accel=self._host.accel)
        self._host.vmm.compile(plan)
        jail = self._jail.prepare(sandbox, self._jail_spec(spec, plan, image, firmware))
        held = Held(jail=jail, plan=plan, ruled=spec.policy is not None)
        holding = self._holdings[sandbox] = Holding(held)
        return holding.handle()

    def _jail_spec(
        self, spec: Spec, plan: FullVmPlan, image: Image, firmware: Firmware | None
    ) -> Spec:
        return machine_jail_spec(
            spec,
            self._host.jail.name,
            accel=plan.accel,
            overhead_bytes=self._host.vmm.overhead_bytes(plan.accel, plan.vcpus),
            binds=binds(image, firmware),
        )

    def release(self, handle: Handle) -> None:
        holding = self._holdings.pop(handle.sandbox, None)
        if holding is not None:
            self._jail.release(holding.held.jail)

    async def create(self, handle: Handle, spec: Spec) -> Instance:
        holding, host = self._holdings[handle.sandbox], self._host
        plan, image, firmware = holding.held.plan, host.image(spec), host.firmware(spec)
        jail = await self._jail.create(
            holding.held.jail, self._jail_spec(spec, plan, image, firmware)
        )
        if jail.guest is None:  # none was asked for, or this host enforces no rules
            plan = msgspec.structs.replace(plan, network=None)
        holding.keep(jail=jail.handle, plan=plan)
        root = vm_disks.root_of(jail.pid)
        await asyncio.to_thread(self._place_disks, root, handle.sandbox, spec, firmware)
        machine = holding.machine = self._machine(holding, jail, root)
        machine.boot_s = full_of(spec).boot_timeout
        await machine.start(host.vmm.compile(plan), begin(handle.sandbox, spec, jail))
        return self._instance(holding, jail, root)

    def _place_disks(self, root: Path, sandbox: str, spec: Spec, firmware: Firmware | None) -> None:
        vm_disks.write(root, UPPER, qcow2.empty(spec.disk_bytes))
        vm_disks.write(root, SEED, self._host.seed(sandbox, spec))
        if firmware is not None:
            vm_disks.write(root, VARIABLES, Path(firmware.variables).read_bytes())

    def _machine(self, holding: Holding, jail: Instance, root: Path) -> FullGuestMachine:
        sandbox, plan = jail.handle.sandbox, holding.held.plan
        ears = self._ears(sandbox, holding)
        machine = FullGuestMachine(sandbox, self._host.vmm, plan, jail.channel, root, *ears)
        machine.ping_s = self._host.ping_s
        return machine

    def _instance(self, holding: Holding, jail: Instance, root: Path) -> Instance:
        machine = holding.running()
        return Instance(
            handle=holding.handle(),
            channel=GuestChannel(machine),
            display=FullVMDisplay(machine.full, root),
            pid=jail.pid,
            address=jail.address,
            address6=jail.address6,
            notes=self._host.notes,
            steps_us=jail.steps_us,
            paused=holding.held.paused,
        )

    # --- destroy, and after a restart -----------------------------------------------------------

    async def destroy(self, handle: Handle) -> None:
        holding = self._holdings.pop(handle.sandbox, None)  # what ends now is no death
        if holding is None:  # this daemon did not make it
            holding = Holding(_decode(handle))
        try:
            await _let_go(holding)
            await self._jail.destroy(holding.held.jail)
        except BaseException:
            self._holdings[handle.sandbox] = holding  # tried again with what is left
            raise

    async def recover(self, handle: Handle) -> Instance | None:
        holding = Holding(_decode(handle))
        jail = await self._jail.recover(holding.held.jail)
        if jail is None:
            return None
        self._holdings[handle.sandbox] = holding
        holding.keep(jail=jail.handle, paused=holding.held.paused and jail.paused)
        root = vm_disks.root_of(jail.pid)
        machine = holding.machine = self._machine(holding, jail, root)
        try:
            if holding.held.paused:
                await machine.adopt_frozen()
            else:
                await machine.adopt(saved=False)
        except DSecError as error:
            logger.error("%s is given up: %s", handle.sandbox, error.message)
            return None
        return self._instance(holding, jail, root)

    async def sweep(self, known: Collection[str]) -> Iterable[str]:
        """Jails are swept by the backend that makes them, and all else is in them."""
        return ()

    # --- asked from outside ---------------------------------------------------------------------

    async def pause(self, handle: Handle, save: Save) -> None:
        holding = self._holdings[handle.sandbox]
        machine = holding.running()
        await machine.stop()
        try:
            await self._jail.pause(holding.held.jail, functools.partial(_save, holding, save, True))
        except BaseException:
            holding.keep(paused=False)
            await machine.go_on()
            raise

    async def resume(self, handle: Handle, save: Save) -> None:
        holding = self._holdings[handle.sandbox]
        await self._jail.resume(holding.held.jail, functools.partial(_save, holding, save, False))
        await holding.running().go_on()

    # --- checkpoints ----------------------------------------------------------------------------

    async def checkpoint(self, handle: Handle, save: Save) -> Checkpoint:
        """Of disk, memory and devices. Journalled first: a daemon that dies forgets none."""
        holding = self._holdings[handle.sandbox]
        known = holding.held.checkpoints
        if len(known) >= CHECKPOINTS_MOST:
            raise Exhausted(f"a full VM has at most {CHECKPOINTS_MOST} checkpoints: delete some")
        begun = time.monotonic()
        made = Checkpoint(id=f"c{os.urandom(4).hex()}", method=METHOD, created_at=time.time())
        holding.keep(checkpoints=(*known, made))
        await save(holding.handle())
        try:
            await holding.running().snapshot(made.id)
        except BaseException:
            holding.keep(checkpoints=known)
            await save(holding.handle())
            raise
        made = msgspec.structs.replace(made, took_ms=(time.monotonic() - begun) * 1e3)
        holding.keep(checkpoints=(*known, made))
        await save(holding.handle())
        return made

    async def rollback(self, handle: Handle, checkpoint: str, save: Save) -> Checkpoint:
        """The machine becomes what it was, processes included; calls since then fail."""
        holding = self._holdings[handle.sandbox]
        found = _find(holding, checkpoint)
        if not found.took_ms:
            raise WrongState(f"checkpoint {found.id} was never finished: delete it")
        begun = time.monotonic()
        await holding.running().restore(found.id)
        return msgspec.structs.replace(found, took_ms=(time.monotonic() - begun) * 1e3)

    async def delete_checkpoint(self, handle: Handle, checkpoint: str, save: Save) -> None:
        holding = self._holdings[handle.sandbox]
        found = _find(holding, checkpoint)
        await holding.running().forget(found.id)
        left = tuple(one for one in holding.held.checkpoints if one.id != found.id)
        holding.keep(checkpoints=left)
        await save(holding.handle())

    def checkpoints(self, handle: Handle) -> list[Checkpoint]:
        return list(self._holdings[handle.sandbox].held.checkpoints)

    async def pack_diff(self, handle: Handle, args: PackArgs) -> Packed:
        raise self._lacking("layers")


def _find(holding: Holding, name: str) -> Checkpoint:
    for checkpoint in holding.held.checkpoints:
        if checkpoint.id == name:
            return checkpoint
    raise NotFound(f"there is no checkpoint {name} of {holding.held.jail.sandbox}")


async def _let_go(holding: Holding) -> None:
    machine, holding.machine = holding.machine, None
    if machine is not None:
        await machine.close()


async def _save(holding: Holding, save: Save, paused: bool, jail: Handle) -> None:
    holding.keep(jail=jail, paused=paused)
    await save(holding.handle())


def _decode(handle: Handle) -> Held:
    return msgspec.msgpack.decode(handle.resources, type=Held)
