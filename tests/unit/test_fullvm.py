"""The full VM backend on a fake jail and a fake monitor, and what it compiles."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dsecd.backends import fullvm_display
from dsecd.backends.abc import Display, Handle, Instance
from dsecd.backends.fullvm import FullVMBackend, Held
from dsecd.backends.fullvm_keys import key_named, keys_of
from dsecd.backends.fullvm_plan import seed
from dsecd.backends.spec import Spec
from dsecd.config import Config, Paths
from dsecd.engine.request import Kind, compile_spec, settle
from dsecd.host import qcow2
from dsecd.host.fullvm_plan import ButtonEvent, FullVmPlan, InputEvent, KeyEvent, MoveEvent
from dsecd.host.qemu_full import FullQemu
from dsecd.host.vm_plan import OnEvent, VmPlan
from libdsec.errors import (
    Exhausted,
    InvalidArgument,
    NotFound,
    Unavailable,
    Unsupported,
    WrongState,
)
from libdsec.model import DSecFullVMRunArgs, FullVmArgs, VmArgs
from libdsec.request import request_of
from libdsec.wire import pack
from tests.unit.microvm_bed import Ears, Jail
from tests.unit.microvm_fakes import FakeMachine, FakeVmm
from tests.waiting import until

MIB = 1 << 20
ID = "s0-n0-1-1"
JAIL = "base/dsec-qemu:test"


def png(width: int, height: int) -> bytes:
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I4sII", 13, b"IHDR", width, height) + bytes(5)


class FullFakeMachine(FakeMachine):
    """Its screen is a file, as QEMU's is; `failing` names what it refuses."""

    def __init__(self, on_event: OnEvent, root: Path) -> None:
        super().__init__(on_event)
        self._root = root
        self.failing: dict[str, Exception] = {}
        self.screen = png(640, 480)
        self.events: list[InputEvent] = []

    def _do(self, name: str) -> None:
        self.did.append(name)
        if name in self.failing:
            raise self.failing[name]

    async def screendump(self, path: str) -> None:
        (self._root / path.lstrip("/")).write_bytes(self.screen)

    async def send_input(self, events: tuple[InputEvent, ...]) -> None:
        self.events += events

    async def snapshot(self, name: str) -> None:
        self._do("snapshot")

    async def restore(self, name: str) -> None:
        self._do("restore")

    async def forget(self, name: str) -> None:
        self._do("forget")


class FullFakeVmm(FakeVmm):
    async def connect(
        self, root: Path, plan: VmPlan, on_event: OnEvent, timeout_s: float = 10.0
    ) -> FakeMachine:
        self.machines.append(FullFakeMachine(on_event, root))
        return self.machines[-1]


class Bed:
    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.images, self.root = tmp_path / "images", tmp_path / "root"
        self.images.mkdir()
        (self.root / "vm").mkdir(parents=True)
        (self.images / "disk.raw").write_bytes(bytes(MIB))
        self.config = Config(paths=Paths(state=str(tmp_path / "state")))
        self.vmm, self.ears = FullFakeVmm(), Ears()
        self.jail = Jail(self.vmm)
        monkeypatch.setattr(fullvm_display, "KEY_S", 0)
        monkeypatch.setattr("dsecd.host.vm_disks.root_of", lambda pid: self.root)
        self.saved: list[Handle] = []
        self.backend = self.make()

    def make(self) -> FullVMBackend:
        backend = FullVMBackend(self.config, self.jail)
        host: Any = backend._host
        host.vmm, host.images, host.start = self.vmm, self.images, lambda: None
        host.seed = lambda sandbox, spec: b"seed"
        host.jail.name = JAIL
        return backend

    async def start(self) -> None:
        await self.jail.start(self.ears)
        await self.backend.start(self.ears)

    async def create(self, **changes: Any) -> Instance:
        asked = spec(**changes)
        await self.backend.locate(asked)
        return await self.backend.create(self.backend.prepare(ID, asked), asked)

    async def save(self, handle: Handle) -> None:
        self.saved.append(handle)

    @property
    def machine(self) -> FullFakeMachine:
        machine = self.vmm.machine
        assert isinstance(machine, FullFakeMachine)
        return machine


@pytest.fixture
async def bed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Bed]:
    made = Bed(tmp_path, monkeypatch)
    await made.start()
    yield made
    await made.backend.close()
    made.vmm.end()


def spec(**changes: Any) -> Spec:
    given = {"image": "disk", "firmware": "bios", "disk_limit_mb": 64, "memory_limit_mb": 128}
    wanted = request_of(DSecFullVMRunArgs(**{**given, **changes}))
    return compile_spec(ID, wanted.args, None, Kind(backend=wanted.backend, vm=wanted.vm))


def held(handle: Handle) -> Held:
    return msgspec.msgpack.decode(handle.resources, type=Held)


# --- what is compiled -----------------------------------------------------------------------------


async def test_the_machine_has_a_disk_above_the_image_and_is_told_who_it_is(bed: Bed) -> None:
    instance = await bed.create(hostname="desk", disk_bus="sata", width=800, height=600)
    plan = held(instance.handle).plan
    assert (plan.base, plan.base_format, plan.bus) == ("/vm/base.img", "raw", "sata")
    upper = bed.root / "vm/upper.img"
    assert qcow2.virtual_bytes(upper) == 64 * MIB
    assert (bed.root / "vm/seed.img").read_bytes() == b"seed"
    (jail,) = bed.jail.specs
    assert [bind.target for bind in jail.binds if bind.read_only] == ["/vm/base.img"]
    assert jail.disk_bytes >= (64 + 2 * 128) * MIB
    assert not instance.paused
    begun = next(args for op, args in bed.vmm.agent.asked if op == "vm.begin")
    assert {"layers", "upper", "dax"}.isdisjoint(begun)
    assert begun["hostname"] == "desk"
    assert "etc/machine-id" not in [path for path, *_ in begun["files"]]


def test_the_monitor_follows_no_name_in_an_image() -> None:
    plan = FullVmPlan(
        memory_bytes=128 * MIB, upper="/vm/u", base="/vm/b", base_format="qcow2", seed="/vm/s",
        firmware="/vm/f", variables="/vm/v",
    )  # fmt: skip
    words = FullQemu().compile(plan).argv
    images = [msgspec.json.decode(word) for word in words if word.startswith("{")]
    base, upper, seed_ = images
    assert base["backing"] is None
    assert (base["read-only"], seed_["read-only"]) == (True, True)
    assert upper["backing"] == "base"
    assert words[words.index("-sandbox") + 1].startswith("on,")
    assert "pflash0=firmware,pflash1=variables" in words[words.index("-machine") + 1]
    sata = FullQemu().compile(msgspec.structs.replace(plan, bus="sata", firmware="")).argv
    assert "virtio-blk-pci" not in " ".join(sata)
    assert "pflash" not in " ".join(sata)


def test_the_seed_brings_the_agent_and_the_callers_words() -> None:
    files = seed(ID, spec(user_data="#cloud-config\nx: 1\n", hostname="desk"), b"ELF")
    assert files["dsec-init"] == b"ELF"
    assert files["user-data"] == b"#cloud-config\nx: 1\n"
    assert b"local-hostname: desk" in files["meta-data"]
    assert b"dsec-init --service" in files["vendor-data"]


@pytest.mark.parametrize("size", [MIB, 64 * MIB, 3 << 40])
def test_an_empty_image_says_how_large_its_disk_is(tmp_path: Path, size: int) -> None:
    image = tmp_path / "x.qcow2"
    image.write_bytes(qcow2.empty(size))
    assert qcow2.virtual_bytes(image) == size
    image.write_bytes(bytes(4096))
    with pytest.raises(InvalidArgument, match="no qcow2 image"):
        qcow2.virtual_bytes(image)


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"disk_limit_mb": 1, "image": "large"}, "the disk of large has 2 MiB"),
        ({"image": "../disk"}, "is no name of a disk image"),
        ({"width": 10}, "width: 200 to 4096"),
        ({"boot_timeout": 0.0}, "boot_timeout"),
    ],
)
async def test_what_cannot_be_is_refused(bed: Bed, changes: dict[str, Any], told: str) -> None:
    (bed.images / "large.raw").write_bytes(bytes(2 * MIB))
    with pytest.raises(InvalidArgument, match=told):
        await bed.create(**changes)


async def test_an_image_that_is_not_there_is_named_with_its_place(bed: Bed) -> None:
    with pytest.raises(NotFound, match=r"put absent\.qcow2 or absent\.raw into"):
        await bed.create(image="absent")


def test_only_a_full_vm_takes_what_is_its_own(bed: Bed) -> None:
    kind = Kind(backend="container", vm=VmArgs(full=FullVmArgs()))
    with pytest.raises(InvalidArgument, match="no kernel of their own"):
        settle(kind, bed.jail)
    settled = settle(Kind(backend="fullvm"), bed.backend)
    assert settled.vm is not None
    assert settled.vm.full == FullVmArgs()


# --- checkpoints ----------------------------------------------------------------------------------


async def test_checkpoints_are_journalled_before_the_monitor_is_asked(bed: Bed) -> None:
    instance = await bed.create()
    made = await bed.backend.checkpoint(instance.handle, bed.save)
    first, last = (held(handle).checkpoints[0] for handle in bed.saved)
    assert (first.took_ms, first.id) == (0, made.id)
    assert last == made
    assert bed.machine.did[-3:] == ["stop", "snapshot", "cont"]
    await bed.backend.delete_checkpoint(instance.handle, made.id, bed.save)
    assert bed.backend.checkpoints(instance.handle) == []
    with pytest.raises(NotFound):
        await bed.backend.rollback(instance.handle, made.id, bed.save)


async def test_a_checkpoint_without_room_is_none_and_the_machine_goes_on(bed: Bed) -> None:
    instance = await bed.create()
    bed.machine.failing["snapshot"] = Exhausted("no room")
    with pytest.raises(Exhausted):
        await bed.backend.checkpoint(instance.handle, bed.save)
    assert bed.machine.did[-1] == "cont"
    assert held(bed.saved[-1]).checkpoints == ()


async def test_going_back_fails_open_calls_and_takes_a_new_connection(bed: Bed) -> None:
    instance = await bed.create()
    made = await bed.backend.checkpoint(instance.handle, bed.save)
    before = len(bed.vmm.agents)
    await bed.backend.rollback(instance.handle, made.id, bed.save)
    assert bed.machine.did[-3:] == ["stop", "restore", "cont"]
    assert len(bed.vmm.agents) == before + 1
    await until(lambda: "vm.watch" in [op for op, _ in bed.vmm.agent.asked])
    asked = [op for op, _ in bed.vmm.agent.asked]
    assert asked[:2] == ["sys.ping", "vm.clock"]
    assert bed.ears.deaths == []  # the end of the old connection is no death
    bed.machine.happen("shutdown")
    await until(lambda: bed.ears.deaths)
    assert bed.ears.deaths[0][1].reason == "the guest switched itself off"


async def test_a_machine_that_cannot_go_back_is_dead(bed: Bed) -> None:
    instance = await bed.create()
    made = await bed.backend.checkpoint(instance.handle, bed.save)
    bed.machine.failing["restore"] = Unavailable("broken")
    with pytest.raises(Unavailable):
        await bed.backend.rollback(instance.handle, made.id, bed.save)
    assert "could not go back" in bed.ears.deaths[0][1].reason


async def test_an_unfinished_checkpoint_of_a_killed_daemon_can_only_be_deleted(bed: Bed) -> None:
    instance = await bed.create()
    made = await bed.backend.checkpoint(instance.handle, bed.save)
    await bed.backend.close()
    bed.backend = bed.make()
    await bed.backend.start(bed.ears)
    assert await bed.backend.recover(bed.saved[0]) is not None  # as journalled at first
    with pytest.raises(WrongState, match="never finished"):
        await bed.backend.rollback(instance.handle, made.id, bed.save)
    await bed.backend.delete_checkpoint(instance.handle, made.id, bed.save)
    assert bed.backend.checkpoints(instance.handle) == []


# --- the display ----------------------------------------------------------------------------------


async def shown(bed: Bed) -> Display:
    display = (await bed.create()).display
    assert display is not None
    return display


async def test_a_screenshot_is_a_file_that_does_not_stay(bed: Bed) -> None:
    display = await shown(bed)
    found = await display.screenshot()
    assert (found.width, found.height, found.png) == (640, 480, png(640, 480))
    assert not (bed.root / "vm/screen.png").exists()


async def test_a_link_in_the_place_of_the_screenshot_is_not_followed(bed: Bed) -> None:
    display = await shown(bed)
    secret = bed.root / "secret"
    secret.write_bytes(png(1, 1))
    (bed.root / "vm/screen.png").symlink_to("/secret")
    assert (await display.screenshot()).width == 640
    assert secret.read_bytes() == png(1, 1)


async def test_a_click_goes_to_the_middle_of_the_pixel(bed: Bed) -> None:
    display = await shown(bed)
    await display.click(320, 0, "right", 2)
    move, *buttons = bed.machine.events
    assert move == MoveEvent(320.5 / 640, 0.5 / 480)
    assert buttons == [ButtonEvent("right", True), ButtonEvent("right", False)] * 2
    bed.machine.events.clear()
    await display.scroll(1, 1, -1)
    assert bed.machine.events[1:] == [
        ButtonEvent("wheel-up", True), ButtonEvent("wheel-up", False),
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match="not on the screen of 640x480"):
        await display.click(640, 0, "left", 1)


async def test_text_is_checked_before_the_first_key(bed: Bed) -> None:
    display = await shown(bed)
    with pytest.raises(InvalidArgument, match="American keyboard"):
        await display.type_text("aé")
    assert bed.machine.events == []
    await display.type_text("A")
    down, up = (KeyEvent("shift", True), KeyEvent("a", True)), (
        KeyEvent("a", False), KeyEvent("shift", False),
    )  # fmt: skip
    assert tuple(bed.machine.events) == (*down, *up)


def test_every_printable_character_has_keys() -> None:
    for code in range(32, 127):
        *held_, last = keys_of(chr(code))
        assert held_ in ([], ["shift"])
        assert key_named(last) == last
    assert keys_of("_") == ("shift", "minus")
    assert (key_named("Enter"), key_named("ctrl"), key_named("-")) == ("ret", "ctrl", "minus")
    with pytest.raises(InvalidArgument, match="no key"):
        key_named("any")


async def test_what_layers_are_needed_for_is_refused(bed: Bed) -> None:
    instance = await bed.create()
    with pytest.raises(Unsupported, match="no grading"):
        await bed.backend.keep(instance.handle, None)  # type: ignore[arg-type]
    assert not bed.backend.capabilities.pack
    with pytest.raises(Unsupported):
        await bed.backend.open_stream(instance.handle, "fncall.serve", pack({}))
