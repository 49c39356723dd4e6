"""Sandboxes as microVMs: a guest kernel each, its monitor jailed in a container.

The jail is a sandbox of the host's own backend, under the same id. From it come uid range,
namespaces, cgroup, limits, a disk with a quota, pausing, and life beyond that of the daemon; its
one command is the monitor. What the guest needs beside it has as disks: the layers as flat files
(`images.flat_cache`), which all guests of a host share, and an upper of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec

from dsecd.backends import microvm_pack, packing
from dsecd.backends.abc import (
    Backend,
    Capabilities,
    Environments,
    Handle,
    Instance,
    Listener,
    Save,
)
from dsecd.backends.microvm_checkpoints import Checkpoints, check_branch, describe, find
from dsecd.backends.microvm_holding import BACKEND, Held, Holding, decode
from dsecd.backends.microvm_host import MicroVMHost
from dsecd.backends.microvm_machine import GuestMachine
from dsecd.backends.microvm_plan import (
    BRANCH_RAM,
    DATA,
    UPPER,
    begin,
    binds,
    check_policy,
    jail_spec,
    renew,
    vm_plan,
)
from dsecd.backends.microvm_saved import SavedMachine, whole
from dsecd.backends.spec import Spec
from dsecd.backends.vm_jailed import MECHANISMS, JailedBackend, name_resolver
from dsecd.config import Config
from dsecd.host import vm_disks
from dsecd.host.vm_plan import Machine, VmPlan
from dsecd.images.flat_cache import FlatLayer
from dsecd.images.manifest import Config as Defaults
from dsecd.images.tool import Report, unreported
from libdsec import model
from libdsec.errors import DSecError, NotFound, Unavailable
from libdsec.model import PackArgs, Packed

logger = logging.getLogger("dsecd.microvm")


class _Start(NamedTuple):
    """What a machine begins with."""

    plan: VmPlan
    layers: tuple[str, ...]  # digests, bottom first
    files: tuple[FlatLayer, ...]
    defaults: Defaults
    base: str = ""  # the saved machine that it is a branch of


class MicroVMBackend(JailedBackend[Holding]):
    """See the module's docstring, and `abc.Backend` for the contract."""

    name, kind = BACKEND, "microVMs"

    def __init__(self, config: Config, jail: Backend, environments: Environments) -> None:
        super().__init__(jail)
        self._host, self._environments = MicroVMHost(config), environments
        self._checkpoints = Checkpoints(self._host)

    async def start(self, listener: Listener) -> None:
        self._listener = listener
        await self._host.start()
        able = self._jail.capabilities
        alone, with_cpu = (self._host.vmm.overhead_bytes(self._host.accel, n) for n in (0, 1))
        self.capabilities = Capabilities(
            vm=True, survives_daemon=able.survives_daemon, oom=True, layers=True, pack=True,
            checkpoints=True, pause=True, pause_frees=True, shell=True, trim=able.trim,
            network=able.network,
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
        await self._host.close()

    # --- create ---------------------------------------------------------------------------------

    def located(self, spec: Spec) -> bool:
        if not self._host.jail_image:
            return False
        if not self._jail.located(jail_spec(spec, self._host.jail_image)):
            return False
        return bool(spec.checkpoint) or self._recall(spec) is not None

    def _recall(self, spec: Spec, aged: bool = False) -> _Start | None:
        """Return what an environment brings of which every part is at hand."""
        found = self._environments.recall(spec, aged)
        if found is None:
            return None
        digests = tuple(layer.digest for layer in found.layers)
        files = self._files(digests)
        if len(files) != len(digests):
            return None
        host = self._host
        plan = vm_plan(
            spec, files, command_line=host.command_line, accel=host.accel, reporting=host.reporting
        )
        return _Start(plan, digests, files, found.config)

    def _branch(self, spec: Spec) -> _Start:
        """Return what a checkpoint of another machine brings. Raises `NotFound`."""
        name, _, checkpoint = spec.checkpoint.rpartition("/")
        origin = self._holdings.get(name)
        if origin is None:
            raise NotFound(f"no sandbox {name!r} on this host to branch from", id=name)
        held = origin.held
        target = find(held, checkpoint)
        check_branch(spec, held)
        plan = msgspec.structs.replace(held.plan, ram=BRANCH_RAM)
        return _Start(plan, held.layers, self._files(held.layers), held.defaults, target.place)

    def _files(self, digests: tuple[str, ...]) -> tuple[FlatLayer, ...]:
        return tuple(filter(None, map(self._host.flats.find, digests)))

    async def pull(self, spec: Spec, report: Report = unreported) -> None:
        await self._environments.pull(spec, report)

    async def locate(self, spec: Spec) -> None:
        with contextlib.ExitStack() as undo:
            await self._locate(spec, undo)

    async def _locate(self, spec: Spec, undo: contextlib.ExitStack) -> None:
        flats, loop = self._host.flats, asyncio.get_running_loop()
        image = await self._host.provide_jail_image(self._jail.layers())
        if spec.checkpoint:  # its origin has the layers
            await self._jail.locate(jail_spec(spec, image))
            return
        found = await self._environments.locate(spec)
        for layer in found.layers:
            await flats.provide(layer)
            # not before `prepare`, which follows in the same turn, has counted its sandbox
            undo.callback(loop.call_soon, flats.release, layer.digest)
        # again, for files may have taken longer to make than this is remembered
        await self._environments.locate(spec)
        await self._jail.locate(jail_spec(spec, image))

    def prepare(self, sandbox: str, spec: Spec) -> Handle:
        start = self._branch(spec) if spec.checkpoint else self._recall(spec, aged=True)
        if start is None:
            raise Unavailable("the layers were not located; try again")
        check_policy(spec.policy.net if spec.policy is not None else None)
        self._host.checked(start.plan)
        for digest in start.layers:
            self._host.flats.acquire(digest)
        self._host.saved.acquire(start.base)
        try:
            jail = self._jail.prepare(sandbox, self._jail_spec(spec, start))
        except BaseException:
            self._host.saved.forget(start.base)
            for digest in start.layers:
                self._host.flats.release(digest)
            raise
        held = Held(
            jail=jail,
            layers=start.layers,
            plan=start.plan,
            upper_bytes=spec.disk_bytes,
            defaults=start.defaults,
            ruled=spec.policy is not None,
            base=start.base,
        )
        holding = self._holdings[sandbox] = Holding(held, start.defaults)
        return holding.handle()

    def _jail_spec(self, spec: Spec, start: _Start) -> Spec:
        host = self._host
        return jail_spec(
            spec,
            host.jail_image,
            accel=start.plan.accel,
            overhead_bytes=host.vmm.overhead_bytes(start.plan.accel, start.plan.vcpus),
            binds=binds(
                str(host.kernel), str(host.initrd), start.files, host.saved.ram(start.base)
            ),
        )

    def release(self, handle: Handle) -> None:
        holding = self._holdings.pop(handle.sandbox, None)
        if holding is not None:
            self._jail.release(holding.held.jail)
            self._host.saved.forget(holding.held.base)
            self._uncount(holding)

    async def create(self, handle: Handle, spec: Spec) -> Instance:
        holding, host = self._holdings[handle.sandbox], self._host
        assert spec.vm is not None
        held = holding.held
        start = _Start(held.plan, held.layers, self._files(held.layers), held.defaults, held.base)
        jail = await self._jail.create(held.jail, self._jail_spec(spec, start))
        plan = held.plan
        if jail.guest is None:  # none was asked for, or this host enforces no rules
            plan = msgspec.structs.replace(plan, network=None)
        holding.keep(jail=jail.handle, plan=plan)
        holding.pid = jail.pid
        root = self._root(holding)
        if held.base:
            devices = host.vmm.compile(plan).devices
            told = renew(handle.sandbox, spec, holding.defaults, devices, jail)
            holding.machine = self._machine(holding, jail, root)
            await self._checkpoints.branch(holding, root, told)
            return self._instance(holding, jail)
        blank = await asyncio.to_thread(host.blank, spec.disk_bytes)
        await asyncio.to_thread(vm_disks.place, root, UPPER, blank)
        if spec.vm.data_disk_bytes:
            await asyncio.to_thread(vm_disks.place_empty, root, DATA, spec.vm.data_disk_bytes)
        holding.machine = self._machine(holding, jail, root)
        await self._start(holding, holding.machine, spec, root, jail)
        return self._instance(holding, jail)

    async def _start(
        self, holding: Holding, machine: GuestMachine, spec: Spec, root: Path, jail: Instance
    ) -> None:
        """Start the guest from a template where there is one, else boot it and make one."""
        host, plan, templates = self._host, holding.held.plan, self._host.templates
        key = host.template_key(plan, spec, holding.held.layers)
        devices = host.vmm.compile(plan).devices
        told = begin(machine.sandbox, spec, holding.defaults, devices, jail, host.min_age_s)
        template = templates.find(key)
        if template is not None:
            waiting = host.vmm.compile(msgspec.structs.replace(plan, incoming=True))
            try:
                await machine.take_up(
                    waiting, functools.partial(_load, template, root, plan), "vm.begin", told
                )
            except (DSecError, OSError) as error:
                logger.warning("%s boots, its template failed: %s", machine.sandbox, error)
                await templates.forget(template)
            else:
                logger.debug("%s started from the template %s", machine.sandbox, key)
                return
        booted = functools.partial(templates.make, key, root, plan)
        wanted = booted if templates.wanted(key) else None
        await machine.start(host.vmm.compile(plan), told, wanted)

    def _machine(self, holding: Holding, jail: Instance, root: Path) -> GuestMachine:
        sandbox, plan = jail.handle.sandbox, holding.held.plan
        ears = self._ears(sandbox, holding)
        machine = GuestMachine(sandbox, self._host.vmm, plan, jail.channel, root, *ears)
        machine.ping_s = self._host.ping_s
        return machine

    def _root(self, holding: Holding) -> Path:
        """Return where the files of the jail begin."""
        return vm_disks.root_of(holding.pid)

    def _instance(self, holding: Holding, jail: Instance) -> Instance:
        assert holding.machine is not None
        assert holding.machine.channel is not None
        return Instance(
            handle=holding.handle(),
            channel=holding.machine.channel,
            pid=jail.pid,
            address=jail.address,
            address6=jail.address6,
            notes=self._host.notes,
            steps_us=jail.steps_us,
            paused=holding.held.paused,
        )

    # --- destroy --------------------------------------------------------------------------------

    async def destroy(self, handle: Handle) -> None:
        holding = self._holdings.get(handle.sandbox)
        if holding is None:  # this daemon did not make it, and it counts as no layer's user
            holding = Holding(decode(handle), Defaults())
            holding.counted = ()
        self._holdings.pop(handle.sandbox, None)  # what ends now is not reported as a death
        try:
            await _let_go(holding)
            await self._jail.destroy(holding.held.jail)
            if holding.counted:
                await self._checkpoints.let_go(holding)
        except BaseException:
            self._holdings[handle.sandbox] = holding  # tried again with what is left
            raise
        self._uncount(holding)

    def _uncount(self, holding: Holding) -> None:
        for digest in holding.counted:
            self._host.flats.release(digest)
        holding.counted = ()

    # --- after a restart ------------------------------------------------------------------------

    async def recover(self, handle: Handle) -> Instance | None:
        held = decode(handle)
        holding = Holding(held, held.defaults)
        jail = await self._jail.recover(holding.held.jail)
        if jail is None:
            return None
        for digest in holding.counted:
            self._host.flats.acquire(digest)
        self._checkpoints.hold(holding)
        self._holdings[handle.sandbox] = holding
        holding.keep(jail=jail.handle)
        holding.pid = jail.pid
        root = self._root(holding)
        machine = self._machine(holding, jail, root)
        holding.machine = machine
        try:
            await machine.adopt(saved=bool(held.saved or held.returning))
            if held.returning:
                await self._checkpoints.go_back(holding, root, _unsaved)
        except (DSecError, OSError) as error:
            logger.error("%s is given up: %s", handle.sandbox, error)
            return None
        return self._instance(holding, jail)

    async def sweep(self, known: Collection[str]) -> Iterable[str]:
        """Jails are swept by the backend that makes them; layers' files count their users."""
        await self._host.flats.trim()
        return await self._host.saved.sweep()

    # --- asked from outside ---------------------------------------------------------------------

    async def pause(self, handle: Handle, save: Save) -> None:
        """Save the machine and end its monitor: its memory is free, and it goes on in a new one."""
        holding = self._holdings[handle.sandbox]
        await self._checkpoints.pause(holding, self._root(holding), save)

    async def resume(self, handle: Handle, save: Save) -> None:
        holding = self._holdings[handle.sandbox]
        await self._checkpoints.resume(holding, self._root(holding), save)

    async def pack_diff(self, handle: Handle, args: PackArgs) -> Packed:
        holding = self._holdings[handle.sandbox]
        assert holding.machine is not None
        assert holding.machine.channel is not None
        held = holding.held
        base = packing.Base(handle.sandbox, held.layers, holding.defaults)
        return await microvm_pack.pack_diff(
            self._environments.library, holding.machine.channel, base, held.upper_bytes, args
        )

    async def checkpoint(self, handle: Handle, save: Save) -> model.Checkpoint:
        holding = self._holdings[handle.sandbox]
        return await self._checkpoints.make(holding, self._root(holding), save)

    async def rollback(self, handle: Handle, checkpoint: str, save: Save) -> model.Checkpoint:
        """Its memory, too: every process is what it was, and so are clocks but the real one."""
        holding = self._holdings[handle.sandbox]
        return await whole(self._roll_back(holding, checkpoint, save))

    async def _roll_back(self, holding: Holding, checkpoint: str, save: Save) -> model.Checkpoint:
        try:
            made = await self._checkpoints.rollback(holding, self._root(holding), checkpoint, save)
        except (DSecError, OSError) as error:
            if holding.held.returning and holding.machine is not None:
                holding.machine.fail(f"it did not go back to a checkpoint: {error}")
            raise
        if holding.held.ruled:  # the checkpoint may be older than its rules
            await name_resolver(holding.machine)
        return made

    async def delete_checkpoint(self, handle: Handle, checkpoint: str, save: Save) -> None:
        await self._checkpoints.delete(self._holdings[handle.sandbox], checkpoint, save)

    def checkpoints(self, handle: Handle) -> list[model.Checkpoint]:
        return [describe(one) for one in self._holdings[handle.sandbox].held.checkpoints]


async def _let_go(holding: Holding) -> None:
    machine, holding.machine = holding.machine, None
    if machine is not None:
        await machine.close()


async def _unsaved(handle: Handle) -> None:
    """Of `recover`: whoever called it journals what it returns."""


async def _load(template: SavedMachine, root: Path, plan: VmPlan, machine: Machine) -> None:
    await template.load(root, plan, machine)
    await machine.cont()
