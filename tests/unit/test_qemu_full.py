"""A real QEMU as a whole PC, which boots a disk of one sector."""

from __future__ import annotations

import asyncio
import os
import struct
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd.host import qcow2, vmm_tree
from dsecd.host.fullvm_plan import ButtonEvent, FullVmPlan, KeyEvent, MoveEvent
from dsecd.host.qemu import PROGRAM
from dsecd.host.qemu_full import FullQemu, FullQemuMachine
from dsecd.host.vm_plan import VmEvent
from libdsec.errors import Exhausted, Internal
from tests.unit import qemu_guest

pytestmark = pytest.mark.skipif(
    not Path(PROGRAM).exists(), reason=f"{PROGRAM} is missing: install {vmm_tree.PACKAGE}"
)
MIB = 1 << 20
WAIT_S = 60.0  # of a busy machine
COUNTER = 0x7000


class Pc:
    """One machine in one directory."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        base, upper, seed = folder / "base", folder / "upper", folder / "seed"
        sector = qemu_guest.say("up") + qemu_guest.for_ever(qemu_guest.count(COUNTER))
        base.write_bytes(sector.ljust(510, b"\0") + b"\x55\xaa" + bytes(MIB - 512))
        upper.write_bytes(qcow2.empty(8 * MIB))
        seed.write_bytes(bytes(MIB))
        self.upper = upper
        self.plan = msgspec.structs.replace(
            FullVmPlan(
                memory_bytes=32 * MIB, base=str(base), base_format="raw", upper=str(upper),
                seed=str(seed), screen_socket=str(folder / "vnc.sock"),
                agent_socket=str(folder / "agent.sock"), control_socket=str(folder / "qmp.sock"),
            ),
            **changes,
        )  # fmt: skip
        self.events: list[VmEvent] = []
        self._stderr = folder / "stderr"
        with self._stderr.open("wb") as stderr:
            self.process = subprocess.Popen(FullQemu().compile(self.plan).argv, stderr=stderr)

    async def connect(self) -> FullQemuMachine:
        return await FullQemu().connect(Path("/"), self.plan, self.events.append, WAIT_S)

    async def up(self) -> FullQemuMachine:
        """Return the machine when its sector runs."""
        machine = await self.connect()
        async with asyncio.timeout(WAIT_S):
            while "up" not in await machine.console():
                assert self.process.poll() is None, self._stderr.read_text()
                await asyncio.sleep(0.05)
        return machine

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
async def pc(tmp_path: Path) -> AsyncIterator[Pc]:
    made = Pc(tmp_path)
    yield made
    made.end()


async def counted(machine: FullQemuMachine) -> int:
    words = {"command-line": f"xp /1hx {COUNTER:#x}"}
    text = await machine._qmp.ask("human-monitor-command", str, words)
    return int(text.split(":")[1], 16)


@pytest.mark.parametrize("bus", ["virtio", "sata"])
async def test_firmware_boots_what_is_on_the_disk(tmp_path: Path, bus: str) -> None:
    made = Pc(tmp_path, bus=bus)
    try:
        machine = await made.up()
        assert await machine.status() == "running"
        machine.close()
    finally:
        made.end()


async def test_the_screen_is_seen_and_input_goes_in(pc: Pc, tmp_path: Path) -> None:
    machine = await pc.up()
    await machine.screendump(str(tmp_path / "shot"))
    head = (tmp_path / "shot").read_bytes()[:24]
    assert head[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack_from(">II", head, 16)) >= 350  # text mode, as a picture
    await machine.send_input((KeyEvent("shift", True), KeyEvent("a", True)))
    await machine.send_input((MoveEvent(0.5, 1.0), ButtonEvent("wheel-down", True)))
    with pytest.raises(Internal, match="nokey"):
        await machine.send_input((KeyEvent("nokey", True),))
    assert (tmp_path / "vnc.sock").is_socket()
    machine.close()


async def test_a_snapshot_has_memory_and_is_gone_back_to(pc: Pc) -> None:
    machine = await pc.up()
    await machine.stop()
    before = await counted(machine)
    await machine.snapshot("one")
    await machine.cont()
    while await counted(machine) == before:  # noqa: ASYNC110 — no event tells
        await asyncio.sleep(0.01)
    await machine.stop()
    await machine.restore("one")
    assert await counted(machine) == before
    await machine.cont()
    assert await machine.status() == "running"
    await machine.forget("one")
    await machine.stop()
    with pytest.raises(Internal, match="does not exist"):
        await machine.restore("one")
    machine.close()


async def test_who_connects_after_a_kill_ends_what_was_begun(pc: Pc) -> None:
    """Regression: the machine stood still for ever after a kill of the daemon in a snapshot."""
    machine = await pc.up()
    await machine.stop()
    arguments = {"job-id": "left", "tag": "t", "vmstate": "upper", "devices": ["upper"]}
    await machine._qmp.execute("snapshot-save", arguments)
    machine.close()
    again = await pc.connect()
    await again.boot(pc.plan)
    assert await again.status() == "running"
    await again.stop()
    await again.restore("t")  # it was finished
    again.close()


@pytest.fixture
def full_device(tmp_path: Path) -> Iterator[Path]:
    """A directory on which there is room for an empty image, and little more."""
    if os.geteuid() != 0:
        pytest.skip("mounts a file system")
    place = tmp_path / "full"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=512k", "none", str(place)], check=True)
    yield place
    subprocess.run(["umount", str(place)], check=True)


async def test_a_disk_without_room_is_told(tmp_path: Path, full_device: Path) -> None:
    upper = full_device / "upper"
    upper.write_bytes(qcow2.empty(8 * MIB))
    made = Pc(tmp_path, upper=str(upper))
    try:
        machine = await made.up()
        await machine.stop()
        with pytest.raises(Exhausted, match="no room"):
            await machine.snapshot("large")
        await machine.cont()
        assert await machine.status() == "running"
        machine.close()
    finally:
        made.end()
