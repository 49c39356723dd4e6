"""QEMU as a whole PC: firmware, a disk, a screen, a keyboard and a pointer.

Its devices are those that every system has drivers for: VGA, a PS/2 keyboard, a USB tablet, whose
positions are absolute. Snapshots are QEMU's own, inside of the qcow2 image that is written to.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import msgspec

from dsecd.host import inside
from dsecd.host.fullvm_plan import (
    ButtonEvent,
    FullVmPlan,
    InputEvent,
    KeyEvent,
)
from dsecd.host.qemu import Qemu, channels, memory, network, processor, value
from dsecd.host.qemu_machine import QemuMachine
from dsecd.host.vm_plan import Accel, Devices, Launch, OnEvent, VmPlan, check
from libdsec.errors import Exhausted, Internal, Timeout

SNAPSHOT_S = 600.0  # all of memory is written, or read
_SCREEN_BYTES = 96 << 20  # video memory, and what serves the screen
_AXIS_MOST = 0x7FFF  # of an absolute position (INPUT_EVENT_ABS_MAX)
_LOOK_AGAIN_S = 0.02
_DISK = "upper"  # the node that holds snapshots
_LOAD = "snapshot-load"
_VIRTIO_DISK = "virtio-blk-pci,num-queues=1"
# QEMU 7.2 tells any failure to write memory as an error of the device
_FULL = ("No space left", "Error while writing VM state")

# As `qemu._MACHINE`, with the keyboard's controller and disks that need no driver of virtio.
_MACHINE = "q35,memory-backend=ram,usb=off,smbus=off,vmport=off,smm=off,dump-guest-core=off"
_FIXED = (
    "-nodefaults", "-no-user-config", "-display", "none", "-rtc", "base=utc",
    "-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    "-global", "ICH9-LPC.disable_s3=1", "-global", "ICH9-LPC.disable_s4=1",
    "-action", "reboot=shutdown,shutdown=pause,panic=pause",
    "-device", "pvpanic",
)  # fmt: skip


class FullQemu(Qemu):
    """A `Vmm` of `FullVmPlan`s, whose machines are `FullMachine`s."""

    def compile(self, plan: VmPlan) -> Launch:
        """See `Vmm`."""
        assert isinstance(plan, FullVmPlan)
        check(plan)
        argv = (
            self.program, *_FIXED, *_firmware(plan), *processor(plan), *memory(plan),
            *channels(plan), *network(plan), *_screen(plan), *_disk(plan), *_seed(plan),
        )  # fmt: skip
        return Launch(argv=argv, devices=Devices.of(plan))

    def overhead_bytes(self, accel: Accel, vcpus: int) -> int:
        """See `Vmm`."""
        return super().overhead_bytes(accel, vcpus) + _SCREEN_BYTES

    async def connect(
        self, root: Path, plan: VmPlan, on_event: OnEvent, timeout_s: float = 10.0
    ) -> FullQemuMachine:
        """See `Vmm`."""
        connection, pid = await inside.reach(root, plan.control_socket, timeout_s)
        return await FullQemuMachine.take(connection, pid, root, on_event, timeout_s)


class _Job(msgspec.Struct):
    id: str
    type: str
    status: str
    error: str = ""


class FullQemuMachine(QemuMachine):
    """A `FullMachine`."""

    async def boot(self, plan: VmPlan) -> None:
        """See `Machine`: QEMU begins with its process.

        Who was connected before may have been killed while the machine stood still for a snapshot.
        """
        for job in await self._qmp.ask("query-jobs", list[_Job]):
            found = await self._end(job.id)
            if found.error and found.type == _LOAD:
                raise Internal(f"QEMU could not go back to a snapshot: {found.error}")
        if await self.status() == "paused":
            await self.cont()

    async def screendump(self, path: str) -> None:
        """See `FullMachine`."""
        await self._qmp.execute("screendump", {"filename": path, "format": "png"})

    async def send_input(self, events: tuple[InputEvent, ...]) -> None:
        """See `FullMachine`."""
        told = [told for event in events for told in _told(event)]
        await self._qmp.execute("input-send-event", {"events": told})

    async def snapshot(self, name: str) -> None:
        """See `FullMachine`."""
        await self._run("snapshot-save", name, {"vmstate": _DISK})

    async def restore(self, name: str) -> None:
        """See `FullMachine`."""
        await self._run(_LOAD, name, {"vmstate": _DISK})

    async def forget(self, name: str) -> None:
        """See `FullMachine`."""
        await self._run("snapshot-delete", name, {})

    async def _run(self, command: str, name: str, more: dict[str, Any]) -> None:
        """Run a job of QEMU to its end."""
        job = f"{command}-{os.urandom(4).hex()}"
        arguments = {"job-id": job, "tag": name, "devices": [_DISK], **more}
        await self._qmp.execute(command, arguments)
        found = await self._end(job)
        if any(words in found.error for words in _FULL):
            raise Exhausted(
                f"the machine's disk has no room for {command}: delete checkpoints, or give a "
                "larger disk_limit_mb"
            )
        if found.error:
            raise Internal(f"QEMU cannot do {command}: {found.error}")

    async def _end(self, job: str) -> _Job:
        """Return a job when it has ended, and make QEMU forget it."""
        deadline = time.monotonic() + SNAPSHOT_S
        while (found := await self._job(job)).status != "concluded":
            if time.monotonic() > deadline:
                raise Timeout(f"QEMU did not end {found.type} within {SNAPSHOT_S:g} s")
            await asyncio.sleep(_LOOK_AGAIN_S)
        await self._qmp.execute("job-dismiss", {"id": job})
        return found

    async def _job(self, job: str) -> _Job:
        jobs = await self._qmp.ask("query-jobs", list[_Job])
        for found in jobs:
            if found.id == job:
                return found
        raise Internal(f"QEMU knows nothing of its job {job}")


def _told(event: InputEvent) -> list[dict[str, Any]]:
    if isinstance(event, KeyEvent):
        key = {"type": "qcode", "data": event.key}
        return [{"type": "key", "data": {"down": event.down, "key": key}}]
    if isinstance(event, ButtonEvent):
        return [{"type": "btn", "data": {"down": event.down, "button": event.button}}]
    return [
        {"type": "abs", "data": {"axis": axis, "value": round(part * _AXIS_MOST)}}
        for axis, part in (("x", event.x), ("y", event.y))
    ]


def _firmware(plan: FullVmPlan) -> list[str]:
    words = ["-device", "vmgenid,guid=auto"]
    machine = _MACHINE + (",sata=on" if plan.bus == "sata" else ",sata=off")
    if not plan.firmware:
        return ["-machine", machine, *words]
    return [
        "-blockdev", f"driver=file,node-name=firmware,filename={value(plan.firmware)},read-only=on",
        "-blockdev", f"driver=file,node-name=variables,filename={value(plan.variables)}",
        "-machine", f"{machine},pflash0=firmware,pflash1=variables", *words,
    ]  # fmt: skip


def _screen(plan: FullVmPlan) -> list[str]:
    size = f"xres={plan.screen.width},yres={plan.screen.height}"
    return [
        "-device", f"VGA,id=video,edid=on,{size}",
        "-device", "qemu-xhci,id=usb", "-device", "usb-tablet,bus=usb.0",
        "-vnc", f"unix:{value(plan.screen_socket)}",
    ]  # fmt: skip


def _disk(plan: FullVmPlan) -> list[str]:
    # whatever the header of an image says of another file below it is not followed
    base: dict[str, Any] = {
        "driver": plan.base_format, "node-name": "base", "read-only": True,
        "file": {"driver": "file", "filename": plan.base, "locking": "off"},
    }  # fmt: skip
    if plan.base_format == "qcow2":
        base["backing"] = None
    upper = {
        "driver": "qcow2", "node-name": _DISK, "backing": "base",
        "discard": "unmap", "detect-zeroes": "unmap",
        "file": {"driver": "file", "filename": plan.upper, "discard": "unmap"},
    }  # fmt: skip
    words = [word for image in (base, upper) for word in ("-blockdev", _json(image))]
    device = f"drive={_DISK},id={_DISK}-disk,bootindex=0,werror=report,rerror=report"
    kind = "ide-hd,bus=ide.0" if plan.bus == "sata" else _VIRTIO_DISK
    return [*words, "-device", f"{kind},{device}"]


def _seed(plan: FullVmPlan) -> list[str]:
    image = {
        "driver": "raw", "node-name": "seed", "read-only": True,
        "file": {"driver": "file", "filename": plan.seed},
    }  # fmt: skip
    # no SATA disk is read-only, and no CD has the sectors of a FAT file system
    kind = "usb-storage,bus=usb.0" if plan.bus == "sata" else _VIRTIO_DISK
    return ["-blockdev", _json(image), "-device", f"{kind},drive=seed,id=seed-disk"]


def _json(image: dict[str, Any]) -> str:
    return msgspec.json.encode(image).decode()
