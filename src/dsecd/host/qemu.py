"""QEMU, the VMM that runs everywhere: its command line, and a machine behind its monitor (QMP).

The guest finds its disks by their order: buses are scanned by slot and function, and the drivers
count what they find. Slot 1 holds what is no disk, slot 2 the upper and the data disk, slots from 3
on the layers, bottom first, eight functions each. So the upper is /dev/vda, the data disk /dev/vdb,
layers that are disks come after these, and /dev/pmem0 is the lowest layer that is memory. (A pmem
region is named when its PCI function is, but its device appears a moment later: wait for it.)

A guest that panics, switches itself off or reboots leaves QEMU standing with its vCPUs stopped.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from dsecd.host import inside
from dsecd.host.qemu_machine import CONSOLE_BYTES, QemuMachine
from dsecd.host.vm_plan import Accel, Devices, Lack, Launch, OnEvent, VmPlan, check
from libdsec.errors import InvalidArgument, Unavailable

PROGRAM = "/usr/bin/qemu-system-x86_64"
# Boots faster than the default, SeaBIOS. It stops at the ACPI table of vmgenid, a device that tells
# the kernel of a restore; the agent is told anyway.
QBOOT = "qboot.rom"
AGENT_PORT = "dsec.agent"  # name of the guest's virtio port
# QEMU's default is a share of the host's memory, up to 1 GiB. A boot with a shell fills a third.
TRANSLATED_BYTES = 128 << 20
_OWN_BYTES, _VCPU_BYTES = 96 << 20, 16 << 20  # beyond guest and translated code

_DISK_SLOT, _LAYER_SLOT, _LAST_SLOT, _FUNCTIONS = 2, 3, 30, 8  # 31 is the chipset's
LAYERS_MOST = (_LAST_SLOT - _LAYER_SLOT + 1) * _FUNCTIONS

# -cx16: without it kernels from 6.12 on oops in some boots
_CPU: dict[Accel, str] = {"kvm": "host", "tcg": "max,-cx16"}
# What no guest of ours drives, taken out: less to attack, less to probe for. No snapshots of guest
# memory in core dumps. No suspend: a guest that sleeps would look as one that hangs.
_MACHINE = (
    "q35,memory-backend=ram,graphics=off,usb=off,sata=off,smbus=off,i8042=off,vmport=off,smm=off,"
    "dump-guest-core=off"
)
# In the jail; for memory that is copied on write from a file which is only read.
RAM_LIBRARY = "/usr/lib/dsec-ram.so"
_FIXED = (
    "-nodefaults", "-no-user-config", "-display", "none",
    "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    "-machine", _MACHINE,
    "-global", "ICH9-LPC.disable_s3=1", "-global", "ICH9-LPC.disable_s4=1",
    "-action", "reboot=shutdown,shutdown=pause,panic=pause",
    "-device", "pvpanic",
)  # fmt: skip


class Qemu:
    """A `Vmm`."""

    name = "qemu"
    lacks: Mapping[Lack, str] = MappingProxyType({})

    def __init__(self, program: str = PROGRAM) -> None:
        self.program = program

    def compile(self, plan: VmPlan) -> Launch:
        """See `Vmm`."""
        check(plan)
        if len(plan.layers) > LAYERS_MOST:
            raise InvalidArgument(
                f"{len(plan.layers)} layers; a machine has place for {LAYERS_MOST}: collapse some",
                field="layers",
            )
        return Launch(
            argv=(self.program, *_arguments(plan)),
            devices=Devices.of(plan),
            env={"LD_PRELOAD": RAM_LIBRARY} if plan.ram.read_only else {},
        )

    def overhead_bytes(self, accel: Accel, vcpus: int) -> int:
        """See `Vmm`."""
        translated = TRANSLATED_BYTES if accel == "tcg" else 0
        return _OWN_BYTES + vcpus * _VCPU_BYTES + translated

    async def connect(
        self, root: Path, plan: VmPlan, on_event: OnEvent, timeout_s: float = 10.0
    ) -> QemuMachine:
        """See `Vmm`."""
        connection, pid = await inside.reach(root, plan.control_socket, timeout_s)
        return await QemuMachine.take(connection, pid, root, on_event, timeout_s)

    async def open_agent(self, root: Path, plan: VmPlan) -> socket.socket:
        """See `Vmm`."""
        try:
            return inside.socket_inside(root, plan.agent_socket)[0]
        except OSError as error:
            raise Unavailable(
                f"the port of the agent cannot be reached: {error.strerror}"
            ) from error


def _arguments(plan: VmPlan) -> list[str]:
    return [
        *_FIXED,
        *processor(plan),
        *memory(plan),
        *_kernel(plan),
        *channels(plan),
        *network(plan),
        *_disk("upper", plan.upper, 0),
        *(_disk("data", plan.data, 1) if plan.data else ()),
        *(word for index in range(len(plan.layers)) for word in _layer(plan, index)),
    ]


def processor(plan: VmPlan) -> list[str]:
    accel = "kvm"
    if plan.accel == "tcg":
        accel = f"tcg,thread=multi,tb-size={TRANSLATED_BYTES >> 20}"
    cpu = plan.cpu or _CPU[plan.accel]
    return ["-accel", accel, "-cpu", cpu, "-smp", f"{plan.vcpus}"]


def memory(plan: VmPlan) -> list[str]:
    """Return RAM, and room beyond it into which layers are mapped.

    RAM is shared even where it lies in no file: so a page is taken back by punching a hole, and
    charged as shared memory to the cgroup of QEMU.
    """
    mapped = sum(layer.size_bytes for layer in plan.layers if layer.device == "pmem")
    size = f"size={plan.memory_bytes}"
    limit = f",maxmem={plan.memory_bytes + mapped}" if mapped else ""
    if plan.ram.path:
        # one that is only read is taken for shared, so that it is not in what `save` writes
        share = "on" if plan.ram.shared or plan.ram.read_only else "off"
        path = value(plan.ram.path)
        ram = f"memory-backend-file,id=ram,{size},mem-path={path},share={share}"
    else:
        ram = f"memory-backend-memfd,id=ram,{size},share=on"
    return ["-m", f"{size}b{limit}b" if limit else f"{size}b", "-object", ram]


def _kernel(plan: VmPlan) -> list[str]:
    words = ["-kernel", plan.kernel, "-append", plan.command_line]
    if plan.initrd:
        words += ["-initrd", plan.initrd]
    if plan.firmware:
        words += ["-bios", plan.firmware]
    if Path(plan.firmware).name != QBOOT:
        words += ["-device", "vmgenid,guid=auto"]
    if plan.incoming:
        words += ["-incoming", "defer"]
    return words


def channels(plan: VmPlan) -> list[str]:
    """Return monitor, console, the agent's port, and the other devices of slot 1."""
    words = [
        "-chardev", f"socket,id=qmp,path={value(plan.control_socket)},server=on,wait=off",
        "-mon", "chardev=qmp,mode=control",
        "-chardev", f"ringbuf,id=console,size={CONSOLE_BYTES}",
        "-serial", "chardev:console",
        "-chardev", f"socket,id=agent,path={value(plan.agent_socket)},server=on,wait=off",
        "-device", _pci("virtio-serial-pci-non-transitional,id=serial,max_ports=2", 1, 0),
        "-device", f"virtserialport,bus=serial.0,chardev=agent,name={AGENT_PORT},id=agent",
        "-device", _pci("virtio-rng-pci-non-transitional", 1, 1),
    ]  # fmt: skip
    if plan.balloon:
        reporting = "on" if plan.free_page_reporting else "off"
        balloon = (
            "virtio-balloon-pci-non-transitional,id=balloon,deflate-on-oom=on,"
            f"free-page-reporting={reporting}"
        )
        words += ["-device", _pci(balloon, 1, 2)]
    return words


def network(plan: VmPlan) -> list[str]:
    if plan.network is None:
        return []
    interface = value(plan.network.interface)
    device = f"virtio-net-pci-non-transitional,netdev=net,mac={plan.network.mac},romfile="
    return [
        "-netdev", f"tap,id=net,ifname={interface},script=no,downscript=no",
        "-device", _pci(device, 1, 3),
    ]  # fmt: skip


def _disk(name: str, path: str, function: int) -> list[str]:
    """Return a disk that is written to, and gives back what the guest discards.

    A write that fails is the guest's to know, also for want of room: by default QEMU would then
    stop all of it.
    """
    backend = (
        f"driver=raw,node-name={name},discard=unmap,detect-zeroes=unmap,file.driver=file,"
        f"file.filename={value(path)},file.aio=threads,file.discard=unmap"
    )
    device = (
        f"virtio-blk-pci-non-transitional,drive={name},id={name},serial={name},num-queues=1,"
        "write-cache=on,werror=report,rerror=report"
    )
    return ["-blockdev", backend, "-device", _pci(device, _DISK_SLOT, function)]


def _layer(plan: VmPlan, index: int) -> list[str]:
    layer = plan.layers[index]
    name, path = f"layer{index}", value(layer.path)
    slot, function = _LAYER_SLOT + index // _FUNCTIONS, index % _FUNCTIONS
    if layer.device == "pmem":
        memory = f"memory-backend-file,id={name}-file,size={layer.size_bytes},mem-path={path}"
        device = f"virtio-pmem-pci,id={name},memdev={name}-file"
        backend = ["-object", f"{memory},share=on,readonly=on"]
    else:
        image = f"driver=raw,node-name={name},read-only=on,file.driver=file,file.filename={path}"
        device = (
            f"virtio-blk-pci-non-transitional,drive={name},id={name},serial={name},num-queues=1,"
            "rerror=report"
        )
        backend = ["-blockdev", f"{image},file.aio=threads"]
    return [*backend, "-device", _pci(device, slot, function)]


def _pci(device: str, slot: int, function: int) -> str:
    """Return `device` at its place; the first function says that there may be others."""
    several = ",multifunction=on" if function == 0 else ""
    return f"{device},addr={slot:#x}.{function}{several}"


def value(text: str) -> str:
    """Return a value of an option: a comma in it is doubled."""
    return text.replace(",", ",,")
