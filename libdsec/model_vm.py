"""The part of `libdsec.model` that is about virtual machines; import it from there."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from libdsec.model_pause import CpuClass
from libdsec.model_policy import NetworkMode

VmLayers = Literal["pmem", "block"]
Firmware = Literal["uefi", "bios"]
DiskBus = Literal["virtio", "sata"]


class DSecMicroVMRunArgs(
    msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What a microVM sandbox is made of: a sandbox with a kernel of its own, under a VMM.

    `image`, `workspace` and `toolkits` are layers, as those of `DSecContainerRunArgs`, and so is
    all that has the same name there. `memory_limit_mb` is the memory of the guest, `vcpus` are the
    processors that it sees and may use in full.

    `layers` says how the layers get into the guest: "pmem" maps them, so that all guests share the
    host's copy of what they read; "block" are disks, of which each guest caches its own.
    `data_disk_mb` above 0 adds an empty raw disk, the last of the guest's disks, for workloads that
    want a file system of their own (Docker).
    """

    image: str
    workspace: str | None = None
    toolkits: list[str] = []
    memory_limit_mb: int = 512
    vcpus: int = 1
    cpu_class: CpuClass = "standard"
    pids_limit: int = 1024
    disk_limit_mb: int = 1024
    layers: VmLayers = "pmem"
    data_disk_mb: int = 0
    ttl_running_stop: float | None = None
    max_lifetime_s: float | None = None
    network: NetworkMode = "none"
    network_rules: dict[str, bool] | None = None
    policy: str | dict[str, Any] | None = None
    strict: bool = False
    secrets: dict[str, dict[str, str] | str] = {}
    init_user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    hostname: str | None = None
    labels: dict[str, str] = {}
    output_limit_mb: int = 64
    spool_limit_mb: int = 256


class DSecFullVMRunArgs(
    msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True
):
    """What a full VM is made of: a disk image, booted whole by its own firmware.

    `image` names a qcow2 or raw image of the host (docs/fullvms.md). It is only read: what the
    guest writes goes to a disk of its own, of `disk_limit_mb`, which begins as the image. Fields
    that `DSecMicroVMRunArgs` has, too, mean the same.

    `firmware` starts what is on the disk, `disk_bus` is how the guest sees it: "sata" for systems
    without virtio drivers. `width` and `height` are what the screen offers. `user_data` is for
    cloud-init in the image. `boot_timeout` bounds the time to the answer of the agent, in seconds.
    """

    image: str
    memory_limit_mb: int = 1024
    vcpus: int = 1
    cpu_class: CpuClass = "standard"
    pids_limit: int = 1024
    disk_limit_mb: int = 8192
    firmware: Firmware = "uefi"
    disk_bus: DiskBus = "virtio"
    width: int = 1024
    height: int = 768
    user_data: str = ""
    boot_timeout: float = 300.0
    ttl_running_stop: float | None = None
    max_lifetime_s: float | None = None
    network: NetworkMode = "none"
    network_rules: dict[str, bool] | None = None
    policy: str | dict[str, Any] | None = None
    strict: bool = False
    init_user: str | None = None
    workdir: str | None = None
    env: dict[str, str] = {}
    hostname: str | None = None
    labels: dict[str, str] = {}
    output_limit_mb: int = 64
    spool_limit_mb: int = 256


class FullVmArgs(
    msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """Of `VmArgs`: what only a full VM has."""

    firmware: Firmware = "uefi"
    disk_bus: DiskBus = "virtio"
    width: int = 1024
    height: int = 768
    user_data: str = ""
    boot_timeout: float = 300.0


class VmArgs(
    msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True, frozen=True
):
    """Of `CreateArgs`: what a sandbox with a kernel of its own has beside what all have.

    `layers` and `data_disk_mb` are microVMs', `full` full VMs'.
    """

    vcpus: int = 1
    layers: VmLayers = "pmem"
    data_disk_mb: int = 0
    full: FullVmArgs | None = None


MouseButton = Literal["left", "middle", "right"]


class DisplayRef(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """op `display.screenshot` → `Screenshot`: of the sandbox `id`."""

    id: str


class Screenshot(msgspec.Struct, kw_only=True):
    """What a screen shows. `png` is an image file."""

    width: int
    height: int
    png: bytes


class Click(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """op `display.click` → None: the pointer goes to a pixel, `button` is pressed `count` times.

    With `button` None it only goes there.
    """

    id: str
    x: int
    y: int
    button: MouseButton | None = "left"
    count: int = 1


class Scroll(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """op `display.scroll` → None: steps of the wheel at a pixel, upwards below 0."""

    id: str
    x: int
    y: int
    steps: int


class TypeText(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """op `display.type` → None: characters of an American keyboard, one after the other."""

    id: str
    text: str


class PressKeys(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """op `display.key` → None: keys held together, as in ``["ctrl", "alt", "delete"]``.

    Their names are QEMU's (QKeyCode), and characters.
    """

    id: str
    keys: list[str]
