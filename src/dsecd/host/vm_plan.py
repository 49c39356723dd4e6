"""What a virtual machine is, as data, and what every monitor (VMM) of one can be asked.

Vocabulary
    *plan*     a machine before it is: memory, kernel, disks, sockets. Pure data. All paths are
               those of the file system in which the VMM runs.
    *VMM*      the program that runs one machine: a `Vmm` is its driver.
    *launch*   what a plan becomes: the command that starts the VMM, and the names under which the
               guest will find its disks.
    *machine*  a connection to a running VMM.

Lifecycle of one machine::

    launch = vmm.compile(plan)                  # pure; refuses what this VMM cannot do
    start(launch.argv)                          # whoever owns the place where it is to run
    machine = await vmm.connect(root, plan, on_event)
    await machine.boot(plan)                    # one that was saved: `load(state)`, then `cont()`
    agent = await vmm.open_agent(root, plan)    # a socket to the port that the agent serves
    ...
    await machine.quit()

The VMM does not depend on who is connected. After a restart of the daemon `connect` alone takes the
machine up again, and `status` says what became of it: one whose guest panicked or switched itself
off stands still until `quit`, so that its console can be read (unless the VMM lacks that).

`root` is where the paths of the plan begin for this process: ``/proc/<pid>/root`` of the VMM. What
runs there is not trusted: links in its paths are not followed, and what it answers is checked.

Errors: `Unsupported` with the reason when the VMM cannot, `Unavailable` when it cannot be reached
or went away, `Timeout` when it does not answer, `WrongState`, and `Internal` with its own words.
"""

from __future__ import annotations

import socket
import string
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from libdsec.errors import InvalidArgument

Accel = Literal["kvm", "tcg"]
LayerDevice = Literal["pmem", "block"]
PMEM_ALIGN = 2 << 20  # of DAX: the guest maps it by huge pages


class VmLayer(msgspec.Struct, frozen=True, array_like=True):
    """A read-only image: as memory that the guest maps (pmem, DAX), or as a disk."""

    path: str
    size_bytes: int  # of pmem a multiple of `PMEM_ALIGN`, as the file is long
    device: LayerDevice = "pmem"


class Ram(msgspec.Struct, frozen=True, kw_only=True):
    """Where the guest's memory lies: anonymous, or a file of just its size.

    A file that is not `shared` is mapped copy-on-write: many machines may stand on one snapshot.
    With `read_only` the VMM cannot write to it either; what the guest gives back is its own copy.
    """

    path: str = ""
    shared: bool = True
    read_only: bool = False


class VmNetwork(msgspec.Struct, frozen=True, kw_only=True):
    """A tap interface of the VMM's network namespace, and the guest's address on it."""

    interface: str
    mac: str


class VmPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One machine. A saved one is restored with the plan it was saved under, but for paths."""

    memory_bytes: int  # a multiple of 2 MiB
    vcpus: int = 1
    kernel: str
    initrd: str = ""
    command_line: str = ""
    layers: tuple[VmLayer, ...] = ()
    upper: str  # a raw image, written to
    data: str = ""  # another one
    network: VmNetwork | None = None
    agent_socket: str = "/vm/agent.sock"  # made by the VMM, as is the other one
    control_socket: str = "/vm/qmp.sock"
    accel: Accel = "tcg"
    cpu: str = ""  # the VMM's name of a CPU model, "": what suits `accel`
    firmware: str = ""  # "": the VMM's own
    ram: Ram = Ram()
    balloon: bool = True  # the guest can be made to give memory back
    free_page_reporting: bool = True  # and gives back by itself what it does not use
    incoming: bool = False  # wait for `Machine.load` instead of booting


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """Names inside the guest; `layers` bottom first, as in the plan."""

    layers: tuple[str, ...]
    upper: str
    data: str = ""
    network: str = ""

    @classmethod
    def of(cls, plan: VmPlan) -> Devices:
        """Return the names that the guest's kernel gives to what `plan` holds.

        Disks are counted in the order upper, data disk, layers: every VMM puts them so.
        """
        disks, memories, layers = 2 if plan.data else 1, 0, []
        for layer in plan.layers:
            if layer.device == "pmem":
                layers.append(f"/dev/pmem{memories}")
                memories += 1
            else:
                layers.append(disk_name(disks))
                disks += 1
        return cls(
            layers=tuple(layers),
            upper=disk_name(0),
            data=disk_name(1) if plan.data else "",
            network="eth0" if plan.network else "",
        )


def disk_name(index: int) -> str:
    """Return the device of the guest's virtio disk `index`: vda ... vdz, vdaa, vdab ..."""
    letters, index = "", index + 1
    while index:
        index, letter = divmod(index - 1, 26)
        letters = string.ascii_lowercase[letter] + letters
    return f"/dev/vd{letters}"


class Launch(msgspec.Struct, frozen=True, kw_only=True):
    """How the VMM is started, and what its guest finds."""

    argv: tuple[str, ...]
    devices: Devices
    env: Mapping[str, str] = {}


Status = Literal[
    "starting",  # configured, or waiting for a saved state
    "running",
    "paused",
    "saved",  # stopped, its state written; `cont` goes on
    "panicked",  # the guest's kernel
    "ended",  # the guest switched itself off, or began to reboot
    "failed",  # the VMM cannot go on
]

EventKind = Literal[
    "panicked",
    "shutdown",  # by the guest
    "reset",  # the guest began to reboot, which ends the machine
    "stopped",
    "resumed",
    "disk_error",  # the guest was told of it; `detail` says which disk
    "agent_opened",  # the guest's agent opened its port
    "agent_closed",
    "lost",  # no connection to the VMM any more: always the last one
]


class VmEvent(msgspec.Struct, frozen=True):
    """Something that happened by itself."""

    kind: EventKind
    detail: str = ""


OnEvent = Callable[[VmEvent], None]  # called from the event loop, must not raise or block


class VmMemory(msgspec.Struct, frozen=True, kw_only=True):
    """Memory as the guest sees it."""

    limit_bytes: int  # what the balloon leaves it
    total_bytes: int  # by the guest's own count, as are the others
    free_bytes: int
    available_bytes: int


# What a VMM may be unable to do. Where it says why, its driver refuses plans that need it.
Lack = Literal[
    "tcg",  # to emulate, where KVM is not usable
    "bzimage",  # to boot a compressed kernel: it wants `vmlinux`
    "firmware", "cpu",  # to be told which
    "ram_file",  # to keep RAM in a file of the plan: it is saved, and taken up, with the state
    "serial_agent",  # a serial port for the agent: it gets one of vsock, `VSOCK_PORT`
    "console",  # to show what the guest wrote to its console
    "standing_end",  # to stand still when the guest has ended: it exits, and only `lost` is told
]  # fmt: skip
VSOCK_PORT = 1024


class Machine(Protocol):
    """A running VMM. Every method raises as the module's docstring says."""

    pid: int  # of the VMM, as this host counts

    async def boot(self, plan: VmPlan) -> None:
        """Start the guest of a VMM just started: nothing to do where its command line said all."""

    async def status(self) -> Status: ...

    async def stop(self) -> None:
        """Let the guest stand still. Returns when no vCPU runs and its disks' requests are done."""

    async def cont(self) -> None:
        """Let it go on."""

    async def balloon(self, limit_bytes: int) -> None:
        """Ask the guest to make do with so much memory. It follows as far as it can, later."""

    async def memory(self) -> VmMemory:
        """Ask the guest how much it has. Raises `Unavailable` when it does not answer."""

    async def console(self) -> str:
        """Return the end of what the guest wrote to its console since `connect`, at most 64 KiB."""

    def vcpu_threads(self) -> tuple[int, ...]:
        """Return the threads that run vCPUs, by their ids on this host."""

    async def save(self, state: str) -> None:
        """Write the state of a stopped machine to the new file `state`.

        Its RAM is not in there: it is the plan's file, which must be shared or `read_only`. A VMM
        that lacks `ram_file` writes it to ``<state>.ram``. Disks, and files after a failure, are
        the caller's.
        """

    async def load(self, state: str) -> None:
        """Take up a saved state in a machine planned as `incoming`; it is paused afterwards."""

    async def quit(self) -> None:
        """End the VMM, whatever its guest does. `lost` follows."""

    def close(self) -> None:
        """Give up the connection and leave the VMM alone; no event follows."""


class Vmm(Protocol):
    """A driver; see the module's docstring."""

    name: str
    lacks: Mapping[Lack, str]  # what this VMM cannot do: why

    def compile(self, plan: VmPlan) -> Launch:
        """Return how to start `plan`. Raises `InvalidArgument`, `Unsupported`."""

    def overhead_bytes(self, accel: Accel, vcpus: int) -> int:
        """Return how much memory the VMM may take beyond the guest's: linear in `vcpus`."""

    async def connect(
        self, root: Path, plan: VmPlan, on_event: OnEvent, timeout_s: float = 10.0
    ) -> Machine:
        """Connect to a VMM that may still be starting. Raises `Unavailable`, `Timeout`."""

    async def open_agent(self, root: Path, plan: VmPlan) -> socket.socket:
        """Return a connection to the agent's port, which does not block. Raises `Unavailable`."""


def check(plan: VmPlan) -> None:
    """Raise `InvalidArgument` for a plan that no VMM can follow."""
    if plan.memory_bytes <= 0 or plan.memory_bytes % PMEM_ALIGN:
        raise InvalidArgument(
            f"memory of {plan.memory_bytes} bytes is not a multiple of 2 MiB", field="memory_bytes"
        )
    if plan.vcpus < 1:
        raise InvalidArgument("a machine has at least one vCPU", field="vcpus")
    for layer in plan.layers:
        if layer.device == "pmem" and (layer.size_bytes <= 0 or layer.size_bytes % PMEM_ALIGN):
            raise InvalidArgument(
                f"{layer.path}: {layer.size_bytes} bytes is not a multiple of 2 MiB: pad the image",
                field="layers",
            )
    if plan.free_page_reporting and not plan.balloon:
        raise InvalidArgument(
            "free page reporting is done by the balloon device", field="free_page_reporting"
        )
    if plan.ram.shared and not plan.ram.read_only:
        return
    if plan.ram.shared or not plan.ram.path:
        raise InvalidArgument(
            "memory that is not shared needs a file to stand on, and one that is only read is "
            "never shared",
            field="ram",
        )
    if plan.balloon and not plan.ram.read_only:
        # to discard is to punch a hole, in QEMU 7.2 into the file itself
        raise InvalidArgument(
            f"memory on {plan.ram.path} is copied on write: a balloon would take pages out of the "
            "file, which other machines stand on",
            field="balloon",
        )
