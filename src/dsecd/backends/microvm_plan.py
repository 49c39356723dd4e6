"""A microVM's request compiled: the spec of its jail, and what its agent is told at the start.

Pure. The jail is a sandbox of another backend in which nothing runs but the virtual machine
monitor; its limits are the guest's and what the monitor needs beside.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from dsecd.backends.abc import GuestNetwork, Instance
from dsecd.backends.inside import NO_NETWORK, generated_files, init_config
from dsecd.backends.spec import Spec
from dsecd.host import network_veth
from dsecd.host.plan import Bind
from dsecd.host.vm_plan import PMEM_ALIGN, Accel, Devices, Ram, VmLayer, VmNetwork, VmPlan
from dsecd.host.vmm_tree import VMM_UID
from dsecd.images.flat_cache import FlatLayer
from dsecd.images.manifest import Config
from dsecd.policy.compile import Compiled
from dsecd.policy.rules import FilePolicy, NetPolicy, SystemPolicy
from libdsec.errors import Unsupported

MIB = 1 << 20
VM = "/vm"  # in the jail: what is the machine's
KERNEL, INITRD, UPPER, DATA = f"{VM}/kernel", f"{VM}/initrd", f"{VM}/upper.img", f"{VM}/data.img"
RAM_INSIDE = f"{VM}/ram"  # of a branch; src/_fastpath/vmm/ram.c knows it, too
BRANCH_RAM = Ram(path=RAM_INSIDE, shared=False, read_only=True)
AGENT, CONTROL = f"{VM}/agent.sock", f"{VM}/control.sock"
VMM_USER = "vmm"
VMM = "vmm"  # the command's id in the jail
VMM_PIDS = 256  # threads: one for each CPU, and those of disks, which come and go
VMM_DISK_BYTES = 64 * MIB  # sockets and logs, and the metadata of the volume
VMM_OUTPUT_BYTES = MIB
ALL_CAPABILITIES = (1 << 41) - 1
ENTROPY_BYTES = 64


class Link(msgspec.Struct, kw_only=True):
    """The guest's end of its network: see `abc.GuestNetwork`."""

    interface: str
    addresses: tuple[str, ...]
    gateways: tuple[str, ...]
    neighbours: tuple[tuple[str, str], ...]
    mtu: int


def link(guest: GuestNetwork, interface: str) -> Link:
    return Link(
        interface=interface,
        addresses=guest.addresses,
        gateways=guest.gateways,
        neighbours=guest.neighbours,
        mtu=guest.mtu,
    )


class Reclaim(msgspec.Struct, kw_only=True):
    """What the guest has not used for so long it gives up; `swap_bytes` of anonymous memory have
    room, compressed."""

    min_age_s: int
    swap_bytes: int


class Clock(msgspec.Struct, kw_only=True):
    """Arguments of `vm.clock`: what a guest that stood still cannot know (docs/protocol.md)."""

    time_ns: int
    entropy: bytes


class Renew(Clock, kw_only=True):
    """Arguments of `vm.renew`: who a guest is, of which there are others."""

    files: list[tuple[str, bytes, int]]
    hostname: str
    network: Link | None
    config: bytes


class Begin(Renew, kw_only=True):
    """Arguments of `vm.begin`."""

    # not of a machine that has a root of its own
    layers: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET  # devices, bottom first
    dax: bool | msgspec.UnsetType = msgspec.UNSET
    upper: str | msgspec.UnsetType = msgspec.UNSET
    pids: int
    reclaim: Reclaim | None


def clock() -> Clock:
    return Clock(time_ns=time.time_ns(), entropy=os.urandom(ENTROPY_BYTES))


def memory_bytes(spec: Spec) -> int:
    """Return the guest's memory, in steps that a machine can have."""
    return -(-spec.memory_bytes // PMEM_ALIGN) * PMEM_ALIGN


def interface(spec: Spec) -> VmNetwork | None:
    """Return what connects the machine to the tap in its jail."""
    if spec.network == "none":
        return None
    return VmNetwork(interface=network_veth.TAP, mac=network_veth.GUEST_MAC.hex(":"))


def disk_bytes(spec: Spec) -> int:
    """Return how much the disks of the machine may grow to."""
    assert spec.vm is not None
    return spec.disk_bytes + spec.vm.data_disk_bytes


def jail_spec(
    spec: Spec, image: str, *, accel: Accel = "tcg", overhead_bytes: int = 0,
    binds: tuple[Bind, ...] = (),
) -> Spec:  # fmt: skip
    """Return what the jail is asked to be.

    `image` holds the monitor, which takes `overhead_bytes` of memory beside the guest's.
    """
    assert spec.vm is not None
    devices = ("kvm",) if accel == "kvm" else ()
    return Spec(
        image=image,
        memory_bytes=memory_bytes(spec) + overhead_bytes,
        cpu_cores=spec.cpu_cores,
        pids=VMM_PIDS + spec.vm.vcpus,
        disk_bytes=disk_bytes(spec) + VMM_DISK_BYTES,
        upper="disk",
        network=spec.network,
        policy=_of_network(spec.policy),
        user=VMM_USER,
        workdir=VM,
        env={},
        hostname=spec.hostname,
        no_new_privileges=True,
        output_limit=VMM_OUTPUT_BYTES,
        spool_limit=VMM_OUTPUT_BYTES,
        binds=binds,
        devices=devices if spec.network == "none" else (*devices, "net/tun"),
        tap_user=VMM_UID,
    )


def _of_network(policy: Compiled | None) -> Compiled | None:
    """Return what of a policy the jail enforces: other rules are about files of the guest."""
    if policy is None:
        return None
    return Compiled(net=policy.net, files=FilePolicy(), system=SystemPolicy(), lines=())


def check_policy(policy: NetPolicy | None) -> None:
    """Raise `Unsupported` for what no guest can be given."""
    if policy is not None and policy.check_names:
        raise Unsupported(
            "check_names has no effect on microVMs: the relay that checks names listens on "
            "loopback, which a guest does not reach; use a container, or leave check_names out",
            reason="the relay is not reachable from a guest",
        )


def binds(
    kernel: str, initrd: str, layers: tuple[FlatLayer, ...], ram: Path | None = None
) -> tuple[Bind, ...]:
    """Return what of the host the jail shows the monitor, read-only."""
    shown = [Bind(kernel, KERNEL), Bind(initrd, INITRD)]
    if ram is not None:
        shown.append(Bind(str(ram), RAM_INSIDE))
    shown += [Bind(layer.path, layer_path(number)) for number, layer in enumerate(layers)]
    return tuple(shown)


def layer_path(number: int) -> str:
    return f"{VM}/layer{number}"


def vm_plan(
    spec: Spec, layers: tuple[FlatLayer, ...], *, command_line: str, accel: Accel,
    reporting: bool = True,
) -> VmPlan:  # fmt: skip
    """Return the machine, as the monitor finds things in its jail."""
    assert spec.vm is not None
    return VmPlan(
        memory_bytes=memory_bytes(spec),
        vcpus=spec.vm.vcpus,
        kernel=KERNEL,
        initrd=INITRD,
        command_line=command_line,
        layers=tuple(
            VmLayer(layer_path(number), layer.size_bytes, spec.vm.layers)
            for number, layer in enumerate(layers)
        ),
        upper=UPPER,
        data=DATA if spec.vm.data_disk_bytes else "",
        network=interface(spec),
        agent_socket=AGENT,
        control_socket=CONTROL,
        accel=accel,
        free_page_reporting=reporting,
    )


def begin(
    sandbox: str, spec: Spec, defaults: Config, devices: Devices, jail: Instance,
    min_age_s: int = 0,
) -> Begin:  # fmt: skip
    """Return what the agent makes the sandbox of."""
    assert spec.vm is not None
    identity = renew(sandbox, spec, defaults, devices, jail)
    return Begin(
        layers=devices.layers,
        dax=spec.vm.layers == "pmem",
        upper=devices.upper,
        pids=spec.pids,
        reclaim=Reclaim(min_age_s=min_age_s, swap_bytes=memory_bytes(spec) // 2)
        if min_age_s
        else None,
        **msgspec.structs.asdict(identity),
    )


def renew(sandbox: str, spec: Spec, defaults: Config, devices: Devices, jail: Instance) -> Renew:
    """Return what makes a sandbox of its own of one that was saved."""
    now, guest = clock(), jail.guest
    resolv_conf = guest.resolv_conf if guest else NO_NETWORK
    return Renew(
        files=[
            (file.target, file.content, file.mode)
            for file in generated_files(
                sandbox, spec.hostname, jail.address, jail.address6, resolv_conf
            )
        ],
        hostname=spec.hostname,
        network=link(guest, devices.network) if guest else None,
        time_ns=now.time_ns,
        entropy=now.entropy,
        config=init_config(sandbox, spec, defaults, caps=ALL_CAPABILITIES),
    )
