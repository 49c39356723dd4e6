"""What backends of virtual machines have in common: the monitor of each machine is in a jail.

The jail is a sandbox of another backend, under the same id. What concerns a machine as a whole, as
memory, CPU class and network, is asked of its jail.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar

import msgspec

from dsecd.backends import abc
from dsecd.backends.abc import Backend, Capabilities, Handle, Layers, Listener, Save, Usage
from dsecd.backends.agent import call
from dsecd.backends.microvm_machine import GuestMachine, OnDeath, OnKills
from dsecd.backends.microvm_plan import VMM_DISK_BYTES, check_policy
from dsecd.host import addresses, network_veth
from dsecd.model import Death
from dsecd.policy.rules import NetPolicy
from libdsec.errors import Timeout, Unavailable, Unsupported
from libdsec.model import CpuClass, Feature, WriteArgs
from libdsec.wire import pack

logger = logging.getLogger("dsecd.vm")
MECHANISMS = ("netns", "bpf_cgroup", "resolver")  # of a jail, those that hold for its guest


class HeldJail(msgspec.Struct, kw_only=True):
    """The journalled part of any machine."""

    jail: Handle
    paused: bool = False
    ruled: bool = False  # its network has a policy, and the guest's resolv.conf names our resolver


class Jailed(Protocol):
    """What a backend knows of one machine."""

    @property
    def held(self) -> HeldJail: ...
    @property
    def machine(self) -> GuestMachine | None: ...
    def keep(self, **changes: object) -> None:
        """Have other fields of `held`, which are not journalled yet."""

    def handle(self) -> Handle: ...


H = TypeVar("H", bound=Jailed)


class JailedBackend(Generic[H]):
    """Part of an `abc.Backend`; `kind` names its sandboxes in messages."""

    kind = "virtual machines"

    def __init__(self, jail: Backend) -> None:
        self._jail = jail
        self.capabilities = Capabilities()
        self._holdings: dict[str, H] = {}
        self._listener: Listener | None = None

    def _ears(self, sandbox: str, holding: H) -> tuple[OnDeath, OnKills]:
        """Return where a machine of `holding` tells what happens by itself."""

        def died(death: Death) -> None:
            if self._listener is not None and self._holdings.get(sandbox) is holding:
                self._listener.died(sandbox, death)

        def killed(kills: int) -> None:
            if self._listener is not None:
                self._listener.oom(sandbox, kills)

        return died, killed

    def _lacking(self, what: str) -> Unsupported:
        return Unsupported(f"{self.kind} have no {what}; use a container", reason="backend")

    async def usage(self, handle: Handle) -> Usage:
        usage = await self._jail.usage(self._holdings[handle.sandbox].held.jail)
        return msgspec.structs.replace(
            usage,
            oom_kills=self.oom_kills(handle),
            disk_limit_bytes=max(0, usage.disk_limit_bytes - VMM_DISK_BYTES),
        )

    def warmth(self, handle: Handle) -> abc.Warmth:
        return self._jail.warmth(self._holdings[handle.sandbox].held.jail)

    async def trim(self, handle: Handle, want_bytes: int) -> int:
        """First of the guest, which knows best what it can spare, then of the whole jail."""
        holding = self._holdings[handle.sandbox]
        jail, machine = holding.held.jail, holding.machine
        before = self._jail.warmth(jail).memory_bytes
        if machine is not None:
            try:
                await machine.shrink(want_bytes)
            except (Unavailable, Timeout) as error:
                logger.warning("%s gives no memory: %s", handle.sandbox, error.message)
        freed = before - self._jail.warmth(jail).memory_bytes
        if freed < want_bytes:
            freed += await self._jail.trim(jail, want_bytes - max(0, freed))
        return max(0, freed)

    async def set_cpu_class(self, handle: Handle, cpu_class: CpuClass) -> tuple[str, ...]:
        """Of the whole jail: the guest's CPUs are threads in it."""
        jail = self._holdings[handle.sandbox].held.jail
        return await self._jail.set_cpu_class(jail, cpu_class)

    def oom_kills(self, handle: Handle) -> int:
        """Count those of the guest's kernel; a monitor that is killed takes the sandbox along."""
        holding = self._holdings.get(handle.sandbox)
        return holding.machine.oom_kills if holding and holding.machine else 0

    def disk_full(self, handle: Handle) -> bool:
        return False  # the agent sees its whole disk

    async def update_network(self, handle: Handle, policy: NetPolicy, save: Save) -> None:
        """What is not allowed any more is dropped at once; the guest's connections hang, for its
        sockets are not this kernel's to close."""
        holding = self._holdings[handle.sandbox]
        check_policy(policy)

        async def save_jail(jail: Handle) -> None:
            if not holding.held.ruled:
                await name_resolver(holding.machine)
            holding.keep(jail=jail, ruled=True)
            await save(holding.handle())

        await self._jail.update_network(holding.held.jail, policy, save_jail)

    async def open_stream(self, handle: Handle, op: str, args: msgspec.Raw) -> socket.socket:
        raise self._lacking("streams of their own")

    async def keep(self, handle: Handle, args: abc.KeepArgs) -> abc.Kept:
        raise self._lacking("grading")

    def pools(self) -> Mapping[str, float]:
        return {}

    def features(self) -> list[Feature]:
        return self._jail.features()

    def layers(self) -> Layers:
        return self._jail.layers()


async def name_resolver(machine: GuestMachine | None) -> None:
    """Have the guest ask the resolver that knows its rules."""
    if machine is None or machine.channel is None:
        raise Unavailable("the sandbox's agent cannot be reached")
    text = addresses.resolv_conf((str(network_veth.RESOLVER),)).encode()
    arguments = WriteArgs(path=b"/etc/resolv.conf", user="root", data=text)
    await call(machine.channel, "files.write", pack(arguments))
