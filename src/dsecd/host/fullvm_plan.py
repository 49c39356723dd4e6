"""A machine that boots what is on a disk of its own, as data: see `vm_plan` for the vocabulary."""

from __future__ import annotations

from typing import Literal, Protocol

import msgspec

from dsecd.host.vm_plan import Machine, VmPlan

DiskFormat = Literal["raw", "qcow2"]
DiskBus = Literal["virtio", "sata"]
Button = Literal["left", "middle", "right", "wheel-up", "wheel-down"]


class Screen(msgspec.Struct, frozen=True, kw_only=True):
    """What the firmware and the guest are offered; a guest may choose another size."""

    width: int = 1024
    height: int = 768


class FullVmPlan(VmPlan, frozen=True, kw_only=True):
    """`upper` is a qcow2 image above `base`, which is only read. `firmware` "" is a BIOS."""

    kernel: str = ""  # never: the firmware finds one
    base: str
    base_format: DiskFormat
    bus: DiskBus = "virtio"
    seed: str  # a disk with what the guest is told, read-only
    variables: str = ""  # of UEFI: its memory, written to
    screen: Screen = Screen()
    screen_socket: str = "/vm/vnc.sock"  # where the screen is served as VNC


class KeyEvent(msgspec.Struct, frozen=True):
    """A key (QKeyCode of QEMU's qapi/ui.json) that goes down or up."""

    key: str
    down: bool


class ButtonEvent(msgspec.Struct, frozen=True):
    """A button of the pointer, or a step of its wheel, that goes down or up."""

    button: Button
    down: bool


class MoveEvent(msgspec.Struct, frozen=True):
    """The pointer moves to a place of the screen, in parts of its size from 0 to 1."""

    x: float
    y: float


InputEvent = KeyEvent | ButtonEvent | MoveEvent


class FullMachine(Machine, Protocol):
    """A running one. Errors: see `vm_plan`."""

    async def screendump(self, path: str) -> None:
        """Write what the screen shows to the file `path` of the VMM, as PNG."""

    async def send_input(self, events: tuple[InputEvent, ...]) -> None:
        """Have all `events` happen at once."""

    async def snapshot(self, name: str) -> None:
        """Remember disk, memory and devices of a stopped machine in its disk.

        Raises `Exhausted` when that has no room.
        """

    async def restore(self, name: str) -> None:
        """Have a stopped machine be what it was. Raises `Internal`: it cannot go on then."""

    async def forget(self, name: str) -> None:
        """Give up a snapshot and its room."""
