"""A real QEMU behind its monitor, with guests of a few instructions (`qemu_guest`)."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd.host import inside, vmm_tree
from dsecd.host.qemu import PROGRAM, Qemu
from dsecd.host.qemu_machine import QemuMachine
from dsecd.host.qmp import Qmp
from dsecd.host.vm_plan import EventKind, Ram, VmEvent, VmLayer, VmNetwork, VmPlan
from libdsec.errors import Internal, Timeout, Unavailable, Unsupported, WrongState
from tests.unit import qemu_guest

pytestmark = pytest.mark.skipif(
    not Path(PROGRAM).exists(), reason=f"{PROGRAM} is missing: install {vmm_tree.PACKAGE}"
)
MIB = 1 << 20
ROOT = Path("/")
WAIT_S = 30.0  # of a busy machine


class Host:
    """Machines of one test, in one directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.events: list[VmEvent] = []
        self._running: list[subprocess.Popen[bytes]] = []
        self._changed = asyncio.Event()

    def plan(self, program: bytes = b"", **changes: Any) -> VmPlan:
        """Return a plan whose guest runs `program`."""
        bios, kernel, upper = self.path("bios"), self.path("kernel"), self.image("upper.img")
        qemu_guest.write_bios(bios, program)
        kernel.write_bytes(bytes(4096))  # is read, never entered
        plan = VmPlan(
            memory_bytes=16 * MIB,
            kernel=str(kernel),
            upper=str(upper),
            firmware=str(bios),
            agent_socket=str(self.path("agent.sock")),
            control_socket=str(self.path("qmp.sock")),
        )
        return msgspec.structs.replace(plan, **changes)

    def path(self, name: str) -> Path:
        return self.directory / name

    def image(self, name: str, size_bytes: int = MIB) -> Path:
        """Return a file of zeros."""
        path = self.path(name)
        path.touch()
        os.truncate(path, size_bytes)
        return path

    def run(self, plan: VmPlan, *more: str) -> subprocess.Popen[bytes]:
        argv = (*Qemu().compile(plan).argv, *more)
        return self.run_command(argv)

    def run_command(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with self.path("stderr").open("wb") as stderr:
            process = subprocess.Popen(argv, stderr=stderr)
        self._running.append(process)
        return process

    async def start(self, plan: VmPlan, *more: str) -> QemuMachine:
        self.run(plan, *more)
        try:
            return await Qemu().connect(ROOT, plan, self.heard, timeout_s=WAIT_S)
        except Unavailable as error:
            pytest.fail(f"{error}: {self.path('stderr').read_text()}")

    def heard(self, event: VmEvent) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, kind: EventKind) -> None:
        async with asyncio.timeout(WAIT_S):
            while kind not in [event.kind for event in self.events]:
                self._changed.clear()
                await self._changed.wait()

    def end(self) -> None:
        while self._running:
            process = self._running.pop()
            process.kill()
            process.wait()


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    made = Host(tmp_path)
    yield made
    made.end()


async def eventually(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not true():  # noqa: ASYNC110 — no event tells
            await asyncio.sleep(0.01)


async def test_a_hundred_layers_and_all_devices_are_there(host: Host) -> None:
    layer = host.image("layer", 2 * MIB)
    layers = tuple(
        VmLayer(str(layer), 2 * MIB, "block" if index % 10 == 9 else "pmem") for index in range(100)
    )
    plan = host.plan(layers=layers, data=str(host.image("data.img")))
    machine = await host.start(plan, "-S")
    assert await machine.status() == "starting"
    pci = await machine._qmp.ask("query-pci", list[dict[str, Any]])
    names = {
        device["qdev_id"]: (device["slot"], device["function"]) for device in pci[0]["devices"]
    }
    assert {"serial", "balloon", "upper", "data"} <= set(names)
    order = [names["upper"], names["data"], *(names[f"layer{index}"] for index in range(100))]
    assert order == sorted(order)
    memories = await machine._qmp.ask("query-memory-devices", list[dict[str, Any]])
    assert len(memories) == 90
    assert {memory["data"]["size"] for memory in memories} == {2 * MIB}
    blocks = await machine._qmp.ask("query-block", list[dict[str, Any]])
    read_only = {block["inserted"]["node-name"]: block["inserted"]["ro"] for block in blocks}
    assert read_only == {
        "upper": False, "data": False, **{f"layer{index}": True for index in range(9, 100, 10)}
    }  # fmt: skip
    machine.close()


async def test_a_guest_runs_and_is_stopped_and_goes_on(host: Host) -> None:
    machine = await host.start(host.plan(qemu_guest.say("hello\r\n"), vcpus=2))
    assert await machine.status() == "running"
    text = ""
    async with asyncio.timeout(WAIT_S):
        while "\n" not in text:
            text = await machine.console()
            await asyncio.sleep(0.01)
    assert text == await machine.console() == "hello\r\n"
    await machine.stop()
    assert await machine.status() == "paused"
    await machine.cont()
    assert await machine.status() == "running"
    assert [event.kind for event in host.events] == ["stopped", "resumed"]
    machine.close()


async def test_threads_of_vcpus_are_found(host: Host) -> None:
    machine = await host.start(host.plan(vcpus=2), "-S")
    found = machine.vcpu_threads()
    assert len(set(found)) == 2
    assert machine.pid not in found
    assert set(found) < {thread for thread, _, _ in inside.threads(machine.pid)}
    machine.close()


async def test_quitting_ends_the_process_and_is_told_as_loss(host: Host) -> None:
    plan = host.plan()
    process = host.run(plan)
    machine = await Qemu().connect(ROOT, plan, host.heard, timeout_s=WAIT_S)
    assert machine.pid == process.pid
    await machine.quit()
    await host.until("lost")
    assert process.wait(WAIT_S) == 0
    assert [event.kind for event in host.events] == ["lost"]
    with pytest.raises(Unavailable):
        await machine.status()


async def test_a_killed_qemu_is_a_loss(host: Host) -> None:
    plan = host.plan()
    process = host.run(plan)
    await Qemu().connect(ROOT, plan, host.heard, timeout_s=WAIT_S)
    process.kill()
    await host.until("lost")
    assert [event.kind for event in host.events] == ["lost"]


@pytest.mark.parametrize(
    ("last", "kind", "status"),
    [
        (qemu_guest.panic(), "panicked", "panicked"),
        (qemu_guest.reset(), "reset", "ended"),
        (qemu_guest.power_off(), "shutdown", "ended"),
    ],
    ids=["panic", "reset", "power-off"],
)
async def test_a_guest_that_ends_leaves_its_last_words(
    host: Host, last: bytes, kind: EventKind, status: str
) -> None:
    plan = host.plan(qemu_guest.say("the end") + last)
    machine = await host.start(plan, "-S")
    await machine.cont()
    await host.until(kind)
    assert await machine.status() == status
    assert await machine.console() == "the end"
    with pytest.raises(WrongState):
        await machine.cont()
    # who comes later finds it as it is
    machine.close()
    again = await Qemu().connect(ROOT, plan, host.heard, timeout_s=WAIT_S)
    assert await again.status() == status
    await again.quit()


async def test_the_end_of_a_long_console_is_kept(host: Host) -> None:
    machine = await host.start(host.plan(qemu_guest.for_ever(qemu_guest.say("0123456789"))))
    text = ""
    async with asyncio.timeout(WAIT_S):
        while len(text) < 64 << 10:
            text = await machine.console()
            await asyncio.sleep(0.05)
    assert len(text) == 64 << 10
    machine.close()


async def test_a_second_client_waits_for_the_first(host: Host) -> None:
    plan = host.plan()
    machine = await host.start(plan)
    with pytest.raises(Timeout, match="another process"):
        await Qemu().connect(ROOT, plan, host.heard, timeout_s=0.3)
    machine.close()
    again = await Qemu().connect(ROOT, plan, host.heard, timeout_s=WAIT_S)
    assert await again.status() == "running"
    again.close()


async def test_the_balloon_is_asked(host: Host) -> None:
    machine = await host.start(host.plan())
    await machine.balloon(8 * MIB)
    with pytest.raises(Unavailable, match="balloon driver"):
        await machine.memory()
    machine.close()


async def test_without_a_balloon_it_is_a_wrong_state(host: Host) -> None:
    machine = await host.start(host.plan(balloon=False, free_page_reporting=False))
    with pytest.raises(WrongState):
        await machine.balloon(8 * MIB)
    machine.close()


async def test_a_machine_is_saved_without_its_memory_and_goes_on_elsewhere(host: Host) -> None:
    ram = host.image("ram", 16 * MIB)
    program = qemu_guest.store(0x500, 0xBEEF) + qemu_guest.say("stored")
    plan = host.plan(program, ram=Ram(path=str(ram)))
    machine = await host.start(plan)
    state = host.path("state")
    await eventually(lambda: ram.read_bytes()[0x500:0x502] == b"\xef\xbe")
    with pytest.raises(WrongState, match="running"):
        await machine.save(str(state))
    assert not state.exists()
    await machine.stop()
    await machine.save(str(state))
    assert await machine.status() == "saved"
    assert 0 < state.stat().st_size < 4 * MIB
    with pytest.raises(Internal, match="exists"):
        await machine.save(str(state))
    await machine.cont()
    assert await machine.status() == "running"
    await machine.quit()
    await host.until("lost")
    host.end()  # it may still listen at the place of the next

    restored = await host.start(msgspec.structs.replace(plan, incoming=True))
    assert await restored.status() == "starting"
    await restored.load(str(state))
    assert await restored.status() == "paused"
    await restored.cont()
    assert await restored.status() == "running"
    assert ram.read_bytes()[0x500:0x502] == b"\xef\xbe"
    await restored.quit()


async def test_clones_stand_on_one_file_and_leave_it_as_it_is(host: Host) -> None:
    ram, state = host.image("ram", 16 * MIB), host.path("state")
    program = qemu_guest.for_ever(qemu_guest.count(0x500))
    plan = host.plan(program, ram=Ram(path=str(ram)), balloon=False, free_page_reporting=False)
    machine = await host.start(plan)
    await eventually(lambda: ram.read_bytes()[0x500:0x502] != bytes(2))
    await machine.stop()
    await machine.save(str(state))
    await machine.quit()
    await host.until("lost")
    host.end()

    before = ram.read_bytes()
    saved = int.from_bytes(before[0x500:0x502], "little")
    for name in ("one", "two"):
        clone = await host.start(
            msgspec.structs.replace(
                plan,
                ram=Ram(path=str(ram), shared=False),
                incoming=True,
                control_socket=str(host.path(f"{name}.sock")),
                agent_socket=str(host.path(f"{name}-agent.sock")),
                upper=str(host.image(f"{name}.img")),
            )
        )
        await clone.load(str(state))
        assert await counted(clone) == saved
        await clone.cont()
        async with asyncio.timeout(WAIT_S):
            while await counted(clone) == saved:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        clone.close()
    assert ram.read_bytes() == before


async def counted(machine: QemuMachine) -> int:
    """Return the 16 bits at 0x500 of the guest's memory."""
    command = {"command-line": "xp /1hx 0x500"}
    text = await machine._qmp.ask("human-monitor-command", str, command)
    return int(text.split(":")[1], 16)


async def test_a_state_that_is_none_is_not_taken_up(host: Host) -> None:
    host.path("state").write_bytes(b"nothing of the kind" * 100)
    machine = await host.start(host.plan(incoming=True))
    with pytest.raises(Unavailable):
        await machine.load(str(host.path("state")))
    await host.until("lost")


async def test_a_link_in_the_place_of_a_state_is_not_followed(host: Host) -> None:
    machine = await host.start(host.plan())
    await machine.stop()
    host.path("state").symlink_to(host.path("elsewhere"))
    with pytest.raises(Internal):
        await machine.save(str(host.path("state")))
    assert not host.path("elsewhere").exists()
    machine.close()


async def test_the_agents_port_is_connected_to(host: Host) -> None:
    plan = host.plan()
    machine = await host.start(plan)

    async def connected() -> bool:
        chardevs = await machine._qmp.ask("query-chardev", list[dict[str, Any]])
        agent = next(one for one in chardevs if one["label"] == "agent")
        return not agent["filename"].startswith("disconnected")

    assert not await connected()
    with await Qemu().open_agent(ROOT, plan):
        async with asyncio.timeout(WAIT_S):
            while not await connected():  # noqa: ASYNC110 — it accepts in its own time
                await asyncio.sleep(0.01)
    machine.close()


@pytest.mark.skipif(
    shutil.which("ip") is None or not os.access("/dev/net/tun", os.R_OK | os.W_OK),
    reason="ip or /dev/net/tun cannot be used",
)
async def test_a_tap_interface_is_the_guests_network(host: Host) -> None:
    network = VmNetwork(interface="tap0", mac="02:00:00:00:00:01")
    plan = host.plan(network=network)
    command = 'ip tuntap add tap0 mode tap && exec "$@"'
    enter = ("unshare", "--user", "--map-root-user", "--net", "sh", "-ec", command, "sh")
    host.run_command((*enter, *Qemu().compile(plan).argv, "-S"))
    machine = await Qemu().connect(ROOT, plan, host.heard, timeout_s=WAIT_S)
    cards = await machine._qmp.ask("query-rx-filter", list[dict[str, Any]])
    assert [card["main-mac"] for card in cards] == [network.mac]
    machine.close()


async def test_qmp_of_a_qemu_without_a_machine(host: Host) -> None:
    sock = host.path("qmp.sock")
    argv = (PROGRAM, "-machine", "none", "-nodefaults", "-display", "none")
    host.run_command((*argv, "-qmp", f"unix:{sock},server=on,wait=off"))
    lost = asyncio.Event()
    connection, _ = await inside.reach(ROOT, str(sock), WAIT_S)
    qmp = await Qmp.connect(connection, lambda name, data: None, lost.set, WAIT_S)
    version = await qmp.ask("query-version", dict[str, Any])
    assert vmm_tree.version().startswith(f"{version['qemu']['major']}.")
    with pytest.raises(Unsupported, match="not found"):
        await qmp.execute("qom-get", {"path": "/sense", "property": "x"})
    await qmp.execute("quit")
    await asyncio.wait_for(lost.wait(), WAIT_S)


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare is missing")
@pytest.mark.parametrize("firmware", ["qboot.rom", ""])
async def test_the_assembled_tree_runs_it(host: Host, firmware: str) -> None:
    place = host.path("tree")
    place.mkdir()
    vmm_tree.assemble(vmm_tree.survey(), place)
    os.chown(place / "vm", os.geteuid(), os.getegid())  # the one user of the namespace below
    for name in ("vm/kernel", "vm/upper.img", "dev/null"):
        (place / name).write_bytes(bytes(4096))
    plan = VmPlan(
        memory_bytes=16 * MIB, kernel="/vm/kernel", upper="/vm/upper.img", firmware=firmware
    )
    enter = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")
    argv = (*enter, "chroot", str(place), *Qemu().compile(plan).argv, "-S")
    process = host.run_command(argv)
    machine = await Qemu().connect(place, plan, host.heard, timeout_s=WAIT_S)
    assert await machine.status() == "starting"
    assert machine.vcpu_threads()
    # in there it counts them otherwise
    assert set(machine.vcpu_threads()).isdisjoint(machine._vcpus)
    await machine.quit()
    assert process.wait(WAIT_S) == 0
    assert host.path("stderr").read_text() == ""
