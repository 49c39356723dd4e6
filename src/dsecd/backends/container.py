"""Sandboxes as containers: user, mount, PID, IPC, UTS, network and cgroup namespaces of this
kernel.

What one container holds is a `Holding`; `create` fills it from top to bottom and `destroy` empties
it from bottom to top, field by field, so that there is one way to undo whatever stage was reached.
Of all that, only what outlives a killed daemon is in the handle (`Held`): descriptors of namespaces
and of the slot's spawner go with the process, interfaces and directories are found by name.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping

import msgspec

from dsecd.backends import abc, container_cpu, container_pack, container_pause, container_usage
from dsecd.backends.abc import Capabilities, Handle, Instance, Layers, Listener, Save, Usage
from dsecd.backends.agent import AgentChannel, open_stream
from dsecd.backends.container_checkpoints import Checkpoints
from dsecd.backends.container_holding import Held, Holding
from dsecd.backends.container_host import ContainerHost, resources
from dsecd.backends.container_keep import keep
from dsecd.backends.container_network import OPEN, guest_network
from dsecd.backends.container_oom import OomEars
from dsecd.backends.container_plan import (
    MEMORY_UPPER_SHARE,
    compile_plan,
    memory_upper_bytes,
    on_disk,
    runtime_dir,
)
from dsecd.backends.container_roots import branch
from dsecd.backends.spec import Spec
from dsecd.config import Config
from dsecd.host import processes
from dsecd.host.cgroup import Slot
from dsecd.host.plan import DestroyPlan
from dsecd.host.spawner import Spawned
from dsecd.images.local import Local
from dsecd.images.tool import Report, unreported
from dsecd.model import Death
from dsecd.policy.packed import unpack
from dsecd.policy.rules import NetPolicy
from libdsec import model
from libdsec.errors import DSecError, Internal, NotFound, Unavailable
from libdsec.model import Feature, PackArgs, Packed

logger = logging.getLogger("dsecd.container")
DESTROY_TIMEOUT_MS = 10_000
DISK_FULL_BYTES = 1 << 20  # a file system with a quota refuses before the last byte


class ContainerBackend:
    """See the module's docstring, and `abc.Backend` for the contract."""

    name = "container"

    def __init__(self, config: Config) -> None:
        self.capabilities = Capabilities(
            network=("none", "nat"), survives_daemon=True, oom=True, layers=True, secrets=True,
            files_each=5, files_ruled=5, trim=True, pause=True, checkpoints=True, pack=True,
            streams=True,
            # where the probe finds what they need
            mechanisms=(
                "netns", "seccomp", "mounts", "landlock", "apparmor", "bpf_lsm", "bpf_cgroup",
                "resolver", "relay",
            ),
        )  # fmt: skip
        self._host = ContainerHost(config)
        self._checkpoints = Checkpoints(self._host, config.runtime / "checkpoints")
        self._holdings: dict[str, Holding] = {}
        self._listener: Listener | None = None
        self._ears = OomEars(self._host)

    async def start(self, listener: Listener) -> None:
        self._listener = self._ears.listener = listener
        self._checkpoints.start()
        await self._host.start()
        self._host.secrets.listener = listener
        shell = not self._host.shell_missing
        self.capabilities = msgspec.structs.replace(self.capabilities, shell=shell)

    async def close(self) -> None:
        for holding in self._holdings.values():
            self._deafen(holding)
            await self._host.secrets.close(holding, leave=True)
            if holding.pidfd >= 0:
                os.close(holding.pidfd)
                holding.pidfd = -1
        idle = not self._holdings
        self._checkpoints.close(leave_nothing=idle)
        await self._host.close(leave_nothing=idle)
        self._holdings.clear()

    # --- create ---------------------------------------------------------------------------------

    def located(self, spec: Spec) -> bool:
        return bool(spec.checkpoint) or self._host.layers.recall(spec) is not None

    async def pull(self, spec: Spec, report: Report = unreported) -> None:
        await self._host.layers.pull(spec, report)

    async def locate(self, spec: Spec) -> None:
        await self._host.layers.locate(spec)

    def _stack(self, holding: Holding, spec: Spec) -> tuple[Local, ...]:
        """Note what a checkpoint or an environment brings; return the layers, bottom first."""
        if spec.checkpoint:
            name, _, checkpoint = spec.checkpoint.rpartition("/")
            origin = self._holdings.get(name)
            if origin is None:
                raise NotFound(f"no sandbox {name!r} on this host to branch from", id=name)
            holding.defaults = origin.defaults
            holding.roots = branch(origin.roots, checkpoint)
            return tuple(origin.layers)
        located = self._host.layers.recall(spec, aged=True)
        if located is None:
            raise Unavailable("the layers were not located; try again")
        holding.defaults = located.config
        return located.layers

    def prepare(self, sandbox: str, spec: Spec) -> Handle:
        host = self._host
        holding = Holding(sandbox)
        try:
            for layer in self._stack(holding, spec):
                self._mount(layer)
                holding.layers.append(layer)
            holding.guards = host.confiner.confine(spec.policy).guards
            holding.range = host.ranges.acquire()
            if on_disk(spec, host.disk_uppers):
                holding.upper = host.uppers.plan(sandbox, spec.disk_bytes)
                holding.upper_bytes = holding.upper.limit_bytes
            else:
                holding.upper_bytes = memory_upper_bytes(spec)
            holding.cpus = host.cpu_load.choose(host.tree.cpu_count(spec.cpu_cores))
        except BaseException:
            self._give_back_pooled(holding)
            raise
        self._checkpoints.hold(holding)
        self._holdings[sandbox] = holding
        return holding.handle()

    def _mount(self, layer: Local) -> None:
        try:
            self._host.mounts.acquire(layer.digest, layer.image, layer.devices, layer.served)
        except DSecError:
            self._host.layers.forget(layer.digest)
            raise

    def release(self, handle: Handle) -> None:
        holding = self._holdings.pop(handle.sandbox, None)
        if holding is not None:
            self._checkpoints.forget(holding)
            self._give_back_pooled(holding)

    async def create(self, handle: Handle, spec: Spec) -> Instance:
        host, holding = self._host, self._holdings[handle.sandbox]
        if holding.upper is not None:
            await host.uppers.make(holding.upper)
        await host.networks.connect(holding, spec)
        await host.secrets.open(holding, spec)
        await host.apparmor.confine(holding, spec)
        assert holding.range is not None
        holding.cgroup = host.driver.group(holding.sandbox)
        spawned = await self._spawn(holding, spec)
        holding.pid, holding.pidfd = spawned.pid, spawned.pidfd
        host.networks.judge(holding)
        await host.file_rules.confine(holding, spec)
        await self._connect(holding)
        self._ears.listen_later(holding)
        return self._instance(holding, spec, spawned.micros)

    async def _spawn(self, holding: Holding, spec: Spec) -> Spawned:
        """Have a spawner make the container; a cancelled call leaves none."""
        host = self._host
        assert holding.range is not None
        assert holding.netns is not None
        assert holding.cgroup is not None
        slot = await host.spawners.reserve()
        try:
            given = resources(host, holding, spec, slot if isinstance(slot, Slot) else None)
            plan = compile_plan(host.template, spec, given)
            saved, base = holding.roots.saved, holding.range.uid_base
            with (
                host.mounts.lowers([layer.digest for layer in holding.layers]) as lowers,
                self._checkpoints.lowers(saved, base) as uppers,
            ):
                fds = [holding.range.userns_fd, holding.netns.fd, *lowers, *uppers]
                spawned = await host.spawners.create(plan, fds, slot)
        except BaseException:
            host.spawners.cancel(slot)
            raise
        holding.slot = slot if isinstance(slot, Slot) else None
        return spawned

    async def _connect(self, holding: Holding) -> None:
        """Connect to dsec-init; its socket listens since before it was started.

        No timeout: connect(2) of a unix socket succeeds or fails at once, unlike an answer.
        """
        path = self._agent(holding)
        try:
            holding.channel = await AgentChannel.connect(path, lambda: self._lost(holding))
        except OSError as error:
            raise Internal(f"dsec-init does not answer on {path}: {error}") from error

    def _agent(self, holding: Holding) -> str:
        return f"{runtime_dir(self._host.template, holding.sandbox)}/agent.sock"

    def _instance(self, holding: Holding, spec: Spec | None, micros: Mapping[str, int]) -> Instance:
        attachment, notes = holding.attachment, []
        if spec is not None and holding.upper is None and holding.upper_bytes < spec.disk_bytes:
            notes.append(
                f"the upper layer is in memory and holds {holding.upper_bytes >> 20} MiB "
                f"({MEMORY_UPPER_SHARE:.0%} of memory_limit_mb)"
            )
        if spec is not None and self._host.shell_missing:
            notes.append(f"sessions and run_shell use its own shell: {self._host.shell_missing}")
        assert holding.channel is not None
        return Instance(
            handle=holding.handle(),
            channel=holding.channel,
            pid=holding.pid,
            address=attachment.address if attachment else "",
            address6=attachment.address6 if attachment else "",
            notes=tuple(notes),
            steps_us=micros,
            paused=holding.paused,
            guest=guest_network(attachment),
        )

    # --- what happens by itself -----------------------------------------------------------------

    def _lost(self, holding: Holding) -> None:
        """The channel is closed: whatever the reason, nobody can reach the sandbox any more."""
        holding.channel = None
        if self._listener is None or self._holdings.get(holding.sandbox) is not holding:
            return
        ended = holding.pidfd >= 0 and processes.exited(holding.pidfd)
        reason = "its init ended" if ended else "its init closed the channel"
        if self._ears.count(holding):
            reason += " after running out of memory"
        self._listener.died(holding.sandbox, Death(reason))

    def _deafen(self, holding: Holding) -> None:
        """Stop listening to a container, without touching it."""
        self._ears.stop(holding)
        channel, holding.channel = holding.channel, None
        if channel is not None:
            channel.close()

    async def update_network(self, handle: Handle, policy: NetPolicy, save: Save) -> None:
        holding = self._holdings[handle.sandbox]
        before = holding.policy or OPEN
        await self._host.networks.update(holding, policy)
        self._host.secrets.judge(holding)
        try:
            await save(holding.handle())
        except BaseException:
            await self._host.networks.update(holding, before)
            self._host.secrets.judge(holding)
            raise

    # --- destroy --------------------------------------------------------------------------------

    async def destroy(self, handle: Handle) -> None:
        holding = self._holdings.get(handle.sandbox)
        if holding is None:
            holding = self._find(handle)
        self._holdings.pop(handle.sandbox, None)  # what ends now is not reported as a death
        try:
            self._deafen(holding)
            await self._unmake(holding)
        except BaseException:
            self._holdings[handle.sandbox] = holding  # tried again with what is left
            raise

    async def _unmake(self, holding: Holding) -> None:
        """Give back what is held; a field is cleared when its resource is free."""
        host, template = self._host, self._host.template
        plan = DestroyPlan(
            sandbox=holding.sandbox,
            cgroup=host.driver.group(holding.sandbox).path,
            runtime_dir=runtime_dir(template, holding.sandbox),
            timeout_ms=DESTROY_TIMEOUT_MS,
            netns=holding.netns is not None,
        )
        fds = [holding.pidfd] if holding.pidfd >= 0 else []
        if holding.netns is not None:
            fds.append(holding.netns.fd)
        clean = await host.spawners.destroy(plan, *fds)
        if holding.pidfd >= 0:
            os.close(holding.pidfd)
            holding.pidfd = -1
        holding.cgroup = None
        if holding.slot is not None:
            if host.driver.slots is not None:
                host.driver.slots.release(holding.slot)
            holding.slot = None
        await host.secrets.close(holding)
        host.file_rules.forget(holding)
        await host.networks.disconnect(holding, clean=clean)
        await self._checkpoints.let_go(holding)
        self._give_back_pooled(holding)

    def _give_back_pooled(self, holding: Holding) -> None:
        """Return what `prepare` took."""
        host = self._host
        host.apparmor.release(holding)
        host.cpu_load.free(holding.cpus)
        holding.cpus = ()
        if holding.range is not None:
            host.ranges.release(holding.range)
            holding.range = None
        for layer in holding.layers:
            host.mounts.release(layer.digest)
        holding.layers = []

    def _find(self, handle: Handle) -> Holding:
        """Return what is left of a container that this daemon did not make."""
        held, holding = _decode(handle), Holding(handle.sandbox)
        holding.upper, holding.roots = held.upper, held.roots
        self._checkpoints.hold(holding)
        holding.pidfd = self._open_init(handle.sandbox, held.pid)
        with contextlib.suppress(DSecError):
            holding.range = self._host.ranges.reserve(held.range_index)
        return holding

    def _open_init(self, sandbox: str, pid: int) -> int:
        """Return a pidfd of a sandbox's init, -1 when it is dead.

        Its pid in its sandbox's cgroup is proof: when an init dies, the kernel kills its PID
        namespace, and nobody is left there who could come to have the same pid.
        """
        driver = self._host.driver
        cgroup = driver.find(sandbox)
        if not pid or cgroup is None:
            return -1
        return processes.open_pidfd(pid, lambda: pid in driver.pids(cgroup))

    # --- after a restart ------------------------------------------------------------------------

    async def recover(self, handle: Handle) -> Instance | None:
        held, host = _decode(handle), self._host
        cgroup = host.driver.find(handle.sandbox)
        pidfd = self._open_init(handle.sandbox, held.pid)
        if cgroup is None or pidfd < 0:
            if pidfd >= 0:
                os.close(pidfd)
            return None
        holding = Holding(handle.sandbox)
        holding.cgroup, holding.pid, holding.pidfd = cgroup, held.pid, pidfd
        self._holdings[handle.sandbox] = holding
        holding.paused = held.paused and host.driver.frozen(cgroup.path)
        if not holding.paused:
            # a daemon that died while it read the changes left everything standing still
            await host.driver.thaw(cgroup.path)
        holding.range = host.ranges.adopt(held.range_index, held.pid)
        for layer in held.layers:
            host.mounts.acquire(layer.digest, layer.image, layer.devices, layer.served)
            holding.layers.append(layer)
        holding.upper, holding.upper_bytes = held.upper, held.upper_bytes
        holding.attachment, holding.cpus = held.attachment, held.cpus
        holding.policy = unpack(held.policy) if held.policy else None
        holding.defaults, holding.roots = held.defaults, held.roots
        holding.guards = held.guards
        self._checkpoints.hold(holding)
        self._checkpoints.settle(holding)
        host.cpu_load.bind(held.cpus)
        holding.netns = host.netns.adopt(held.pid)
        if held.slot and host.driver.slots is not None:
            holding.slot = host.driver.slots.adopt(held.slot)
        await host.secrets.recover(holding)
        holding.restrictions = held.restrictions
        holding.apparmor = held.apparmor
        host.apparmor.recover(holding)
        await host.networks.recover(holding)
        await host.file_rules.recover(holding)
        await self._connect(holding)
        self._ears.listen_later(holding)
        return self._instance(holding, None, {})

    async def sweep(self, known: Collection[str]) -> Iterable[str]:
        attached = [
            (name, holding.attachment)
            for name, holding in self._holdings.items()
            if holding.attachment is not None
        ]
        for name in await self._host.nat.recover(attached):
            holding = self._holdings[name]
            if self._listener is not None:
                self._listener.died(holding.sandbox, Death("its network interface is gone"))
        swept = await self._host.sweep(known, self._checkpoints.kept_volumes())
        swept += [*self._checkpoints.sweep(), *self._host.secrets.sweep(set(self._holdings))]
        swept += self._host.apparmor.sweep()
        for name in sorted(self._host.apparmor.lost):
            if self._listener is not None:
                self._listener.died(name, Death("its AppArmor profile is gone"))
        await self._host.networks.begin(self._listener)
        self._host.file_rules.begin()
        for holding in list(self._holdings.values()):
            await self._checkpoints.recovered(holding)
        self._host.start_pools()
        return swept

    # --- asked from outside ---------------------------------------------------------------------

    async def usage(self, handle: Handle) -> Usage:
        return await container_usage.measure(self._host, self._holdings[handle.sandbox])

    def warmth(self, handle: Handle) -> abc.Warmth:
        return container_usage.warmth(self._host, self._holdings[handle.sandbox])

    async def trim(self, handle: Handle, want_bytes: int) -> int:
        return await container_usage.trim(self._host, self._holdings[handle.sandbox], want_bytes)

    async def pause(self, handle: Handle, save: Save) -> None:
        holding = self._holdings[handle.sandbox]
        await container_pause.pause(self._host, holding, self._saver(holding, save))

    async def resume(self, handle: Handle, save: Save) -> None:
        holding = self._holdings[handle.sandbox]
        await container_pause.resume(self._host, holding, self._saver(holding, save))

    async def set_cpu_class(self, handle: Handle, cpu_class: model.CpuClass) -> tuple[str, ...]:
        return container_cpu.set_class(self._host, self._holdings[handle.sandbox], cpu_class)

    async def open_stream(self, handle: Handle, op: str, args: msgspec.Raw) -> socket.socket:
        try:
            return await open_stream(self._agent(self._holdings[handle.sandbox]), op, args)
        except OSError as error:
            raise Unavailable(f"dsec-init does not answer: {error}") from error

    async def pack_diff(self, handle: Handle, args: PackArgs) -> Packed:
        subject, host = container_pack.subject(self._holdings[handle.sandbox]), self._host
        return await container_pack.pack_diff(host.layers, host.driver, subject, args)

    async def keep(self, handle: Handle, args: abc.KeepArgs) -> abc.Kept:
        subject, host = container_pack.subject(self._holdings[handle.sandbox]), self._host
        return await keep(host.layers, host.driver, subject, args)

    async def checkpoint(self, handle: Handle, save: Save) -> model.Checkpoint:
        holding = self._holdings[handle.sandbox]
        return await self._checkpoints.checkpoint(holding, self._saver(holding, save))

    async def rollback(self, handle: Handle, checkpoint: str, save: Save) -> model.Checkpoint:
        holding = self._holdings[handle.sandbox]
        return await self._checkpoints.rollback(holding, checkpoint, self._saver(holding, save))

    async def delete_checkpoint(self, handle: Handle, checkpoint: str, save: Save) -> None:
        holding = self._holdings[handle.sandbox]
        await self._checkpoints.delete(holding, checkpoint, self._saver(holding, save))

    def checkpoints(self, handle: Handle) -> list[model.Checkpoint]:
        return list(self._checkpoints.described(self._holdings[handle.sandbox]))

    def _saver(self, holding: Holding, save: Save) -> Callable[[], Awaitable[None]]:
        return lambda: save(holding.handle())

    def oom_kills(self, handle: Handle) -> int:
        holding = self._holdings.get(handle.sandbox)
        return self._ears.count(holding) if holding is not None else 0

    def disk_full(self, handle: Handle) -> bool:
        holding = self._holdings.get(handle.sandbox)
        if holding is None or holding.upper is None:
            return False  # statfs(2) inside tells
        return holding.upper_bytes - self._host.uppers.usage(holding.upper) < DISK_FULL_BYTES

    def pools(self) -> Mapping[str, float]:
        return self._host.depths()

    def features(self) -> list[Feature]:
        return self._host.features()

    def layers(self) -> Layers:
        return self._host.layers

    def environments(self) -> abc.Environments:
        """Return what finds the layers of environments, for a backend that stands on this one."""
        return self._host.layers


def _decode(handle: Handle) -> Held:
    return msgspec.msgpack.decode(handle.resources, type=Held)
