"""Disks for full VMs: the seed, and what scripts/build-vm makes of a tree."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from dsecd.host import seed
from libdsec.errors import Unsupported

SCRIPTS = Path(__file__).parents[2] / "scripts"
needs_fat = pytest.mark.skipif(bool(seed.missing()), reason="dosfstools or mtools are missing")
needs_tables = pytest.mark.skipif(shutil.which("sfdisk") is None, reason="fdisk is missing")


def out(*command: str | Path) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@needs_fat
def test_a_seed_has_its_files_under_their_long_names(tmp_path: Path) -> None:
    image, agent = tmp_path / "seed", bytes(range(256)) * 4096
    seed.make(image, {"user-data": b"#cloud-config\n", "network-config": b"", "dsec-init": agent})
    assert seed.LABEL in out("mlabel", "-s", "-i", image, "::")
    assert out("mtype", "-i", image, "::user-data") == "#cloud-config\n"
    subprocess.run(["mcopy", "-i", image, "::dsec-init", tmp_path / "agent"], check=True)
    assert (tmp_path / "agent").read_bytes() == agent
    assert sorted(path.name for path in tmp_path.iterdir()) == ["agent", "seed"]


def test_a_host_without_the_tools_is_told_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="apt-get install dosfstools mtools"):
        seed.make(tmp_path / "seed", {})
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def build_vm(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(SCRIPTS)
    return importlib.import_module("build_vm")


@needs_fat
@needs_tables
def test_a_tree_becomes_a_disk_that_uefi_boots(tmp_path: Path, build_vm: ModuleType) -> None:
    root, image = tmp_path / "root", tmp_path / "disk"
    for name, text in {
        "usr/lib/systemd/boot/efi/systemd-bootx64.efi": "loader",
        "boot/vmlinuz-6": "kernel",
        "boot/initrd.img-6": "initrd",
        "etc/hostname": "desk\n",
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    build_vm.assemble(root, tmp_path, image)
    table = out("sfdisk", "--dump", image)
    assert "C12A7328-F81F-11D2-BA4B-00A0C93EC93B" in table  # EFI system partition
    assert build_vm.ROOT_TYPE in table
    esp = f"{image}@@{1 << 20}"
    assert out("mtype", "-i", esp, "::EFI/BOOT/BOOTX64.EFI") == "loader"
    assert out("mtype", "-i", esp, "::vmlinuz") == "kernel"
    entry = out("mtype", "-i", esp, "::loader/entries/dsec.conf")
    assert "initrd /initrd" in entry
    assert "root=LABEL=dsec-root" in entry
    with image.open("rb") as disk:
        disk.seek((1 << 20) + build_vm.ESP_BYTES)
        (tmp_path / "ext4").write_bytes(disk.read())
    assert out("debugfs", "-R", "cat /etc/hostname", tmp_path / "ext4") == "desk\n"
    assert "dsec-root" in out("dumpe2fs", "-h", tmp_path / "ext4")
