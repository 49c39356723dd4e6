"""Templates of microVMs: when one is made and used, and that a broken one costs nothing else."""

from __future__ import annotations

import os
from pathlib import Path

import msgspec
import pytest

from dsecd.backends import microvm_template
from dsecd.backends.microvm_saved import STATE_INSIDE
from dsecd.backends.microvm_template import Templates, key_of
from dsecd.host import vm_disks, vm_ram
from dsecd.host.qemu import Qemu
from dsecd.host.vm_plan import VmPlan
from libdsec.errors import Unavailable, WrongState
from tests.unit.microvm_fakes import FakeMachine

PLAN = VmPlan(memory_bytes=64 << 20, kernel="/vm/kernel", upper="/vm/upper.img")
KEY = "k" * 32


class Machine(FakeMachine):
    """Saves itself into the directory `root`, and reads that again."""

    def __init__(self, root: Path) -> None:
        super().__init__(lambda event: None)
        self.root, self.loaded, self.failing = root, b"", ""

    async def save(self, state: str) -> None:
        await super().save(state)
        if self.failing == "save":
            raise Unavailable("cannot save")
        (self.root / state.lstrip("/")).write_bytes(b"devices")

    async def load(self, state: str) -> None:
        await super().load(state)
        self.loaded = (self.root / state.lstrip("/")).read_bytes()

    async def cont(self) -> None:
        await super().cont()
        if self.failing == "cont":
            self.state = "failed"
            raise WrongState("the guest is over", state="failed")


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "root"
    (place / "vm").mkdir(parents=True)
    monkeypatch.setattr(vm_ram, "take_ram", lambda pid, size, to: to.write_bytes(b"memory"))
    return place


def made(tmp_path: Path, limit: int = 2) -> Templates:
    templates = Templates(tmp_path / "templates", limit)
    templates.start()
    return templates


async def test_a_machine_is_saved_once_and_goes_on(tmp_path: Path, root: Path) -> None:
    templates, machine = made(tmp_path), Machine(root)
    assert templates.wanted(KEY)
    assert templates.find(KEY) is None
    await templates.make(KEY, root, PLAN, machine)
    assert machine.did == ["stop", "save", "cont"]
    assert not templates.wanted(KEY)
    found = templates.find(KEY)
    assert found is not None
    assert {path.name: path.read_bytes() for path in found.place.iterdir()} == {
        "ram": b"memory",
        "state": b"devices",
    }
    assert list((root / "vm").iterdir()) == [], "the jail keeps nothing of it"


async def test_a_template_is_taken_up_with_its_memory_before_its_devices(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates, machine = made(tmp_path), Machine(root)
    await templates.make(KEY, root, PLAN, Machine(root))
    monkeypatch.setattr(
        vm_ram, "fill_ram", lambda pid, size, source: machine.did.append(f"fill {source.name}")
    )
    found = templates.find(KEY)
    assert found is not None
    await found.load(root, PLAN, machine)
    assert machine.did == ["fill ram", "load"]
    assert machine.loaded == b"devices"
    assert not (root / STATE_INSIDE.lstrip("/")).exists()


async def test_a_machine_that_cannot_be_saved_goes_on(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    templates, machine = made(tmp_path), Machine(root)
    machine.failing = "save"
    await templates.make(KEY, root, PLAN, machine)
    assert machine.did == ["stop", "save", "cont"]
    assert templates.find(KEY) is None
    assert templates.wanted(KEY), "the next one may succeed"
    assert "cannot save" in caplog.text
    machine.failing = "cont"
    with pytest.raises(WrongState):
        await templates.make(KEY, root, PLAN, machine)


async def test_the_oldest_unused_one_goes(tmp_path: Path, root: Path) -> None:
    templates = made(tmp_path)
    for number, key in enumerate(("a" * 32, "b" * 32)):
        await templates.make(key, root, PLAN, Machine(root))
        os.utime(tmp_path / "templates" / key, (number, number))
    assert templates.find("a" * 32) is not None, "used now"
    await templates.make("c" * 32, root, PLAN, Machine(root))
    assert [key for key in "abc" if templates.find(key * 32)] == ["a", "c"]


async def test_another_start_of_the_host_begins_without_templates(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    templates = made(tmp_path)
    await templates.make(KEY, root, PLAN, Machine(root))
    (tmp_path / "templates" / ".left").mkdir()
    assert made(tmp_path).find(KEY) is not None, "a daemon that restarts keeps them"
    assert not (tmp_path / "templates" / ".left").exists()
    monkeypatch.setattr(microvm_template.sparse, "boot_id", lambda: "another")
    assert made(tmp_path).find(KEY) is None


def test_none_are_made_where_none_are_kept(tmp_path: Path) -> None:
    assert not made(tmp_path, 0).wanted(KEY)


def test_its_name_says_all_that_it_depends_on() -> None:
    def key(plan: VmPlan = PLAN, layer: str = "sha256:1", disk: int = 1, made: str = "7.2") -> str:
        return key_of(plan, Qemu(), (layer,), (disk, 0), made)

    bigger = msgspec.structs.replace(PLAN, memory_bytes=128 << 20)
    other = {key(), key(bigger), key(layer="sha256:2"), key(disk=2), key(made="7.3")}
    assert len(other) == 5
    assert key() == key()


def test_a_file_is_taken_from_a_jail_without_following_links(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("of the host")
    (root / "state").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="symbolic"):
        vm_disks.take(root, "/state", tmp_path / "taken")
    assert not (tmp_path / "taken").exists()
    vm_disks.remove(root, "/state")
    vm_disks.remove(root, "/state")
    assert (tmp_path / "secret").exists()


def test_memory_is_copied_as_what_it_is(tmp_path: Path) -> None:
    """Of this process: a memfd with a page in the middle, as a monitor has one."""
    size = 8 << 20
    source = os.memfd_create("memory-backend-memfd")
    try:
        os.ftruncate(source, size)
        os.pwrite(source, b"page" * 1024, 4 << 20)
        vm_ram.take_ram(os.getpid(), size, tmp_path / "ram")
        os.pwrite(source, bytes(4096), 4 << 20)
        with (tmp_path / "ram").open("rb") as copy:
            assert os.lseek(copy.fileno(), 0, os.SEEK_DATA) == 4 << 20
        with pytest.raises(Unavailable, match="has 0 memfds of 1 bytes"):
            vm_ram.take_ram(os.getpid(), 1, tmp_path / "other")
    finally:
        os.close(source)
