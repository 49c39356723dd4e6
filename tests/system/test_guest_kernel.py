"""The kernel of scripts/build-guest in a guest of QEMU: what a sandbox is made of works in it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dsecd.images import guest
from dsecd.images.initramfs import initramfs

pytestmark = [pytest.mark.root, pytest.mark.slow]

MEMORY_MB = 256
PROBE = Path(__file__).parent / "guest_probe.c"
SYSTEM_HEADERS = ("-idirafter", "/usr/include", "-idirafter", "/usr/include/x86_64-linux-gnu")
FREE_PAGE_REPORTING = 5  # VIRTIO_BALLOON_F_REPORTING


def compiled(source: Path, binary: Path) -> bytes:
    command = ["musl-gcc", "-static", "-O2", "-Wall", "-Wextra", "-Werror", *SYSTEM_HEADERS]
    subprocess.run([*command, "-o", str(binary), str(source)], check=True)
    return binary.read_bytes()


def make_layer(folder: Path) -> Path:
    """Return an uncompressed EROFS image, as large as a virtio-pmem device must be."""
    tree, image = folder / "tree", folder / "layer"
    tree.mkdir()
    (tree / "hello").write_text("from the layer")
    # whole blocks: a tail within the inode's block has no DAX
    (tree / "large").write_bytes(os.urandom(2 * 4096))
    subprocess.run(["mkfs.erofs", str(image), str(tree)], check=True, stdout=subprocess.DEVNULL)
    os.truncate(image, 2 << 20)
    return image


def make_upper(folder: Path) -> Path:
    disk = folder / "upper"
    disk.touch()
    os.truncate(disk, 64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-O", "^has_journal", str(disk)], check=True)
    return disk


def command(kernel: Path, folder: Path) -> list[str]:
    layer, upper = make_layer(folder), make_upper(folder)
    initrd = folder / "initrd"
    initrd.write_bytes(initramfs(compiled(PROBE, folder / "probe"), b""))
    backend = f"memory-backend-file,id=layer,mem-path={layer},size=2M,share=on,readonly=on"
    drive = f"file={upper},if=none,id=upper,format=raw,cache=unsafe"
    return [
        "qemu-system-x86_64", "-accel", "tcg", "-cpu", "max,-cx16", "-machine", "q35,hpet=off",
        "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
        "-m", f"{MEMORY_MB},maxmem=4G", "-smp", "2",
        "-kernel", str(kernel), "-initrd", str(initrd), "-append", guest.COMMAND_LINE,
        "-serial", "stdio",
        "-object", backend, "-device", "virtio-pmem-pci,memdev=layer",
        "-drive", drive, "-device", "virtio-blk-pci,drive=upper",
        "-device", "virtio-serial-pci", "-chardev", "null,id=agent",
        "-device", "virtserialport,chardev=agent,name=dsec.agent",
        "-netdev", "user,id=net,restrict=on",
        "-device", "virtio-net-pci,netdev=net,mac=02:00:00:00:00:01,romfile=",
        "-device", "virtio-balloon-pci,free-page-reporting=on",
        "-device", "pvpanic-pci", "-device", "pvpanic", "-device", "virtio-rng-pci",
        "-device", "vmgenid,guid=auto",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def facts(guest_kernel: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the probe found, by name."""
    for program in ("qemu-system-x86_64", "mkfs.erofs", "mkfs.ext4", "musl-gcc"):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    folder = tmp_path_factory.mktemp("guest")
    done = subprocess.run(
        command(guest_kernel, folder), stdin=subprocess.DEVNULL, capture_output=True, text=True,
        errors="replace", timeout=100, check=False,
    )  # fmt: skip
    lines = [line.partition(": ") for line in done.stdout.splitlines()]
    found = {name: value for name, separator, value in lines if separator}
    assert found.get("end") == "ok", f"{done.stdout[-4000:]}{done.stderr[-2000:]}"
    return found


def names(facts: dict[str, str], prefix: str) -> list[str]:
    """Return what the probe listed as `prefix`, with a value or without."""
    return [name.removeprefix(prefix + " ") for name in facts if name.startswith(prefix + " ")]


def test_it_boots_quickly_and_powers_off(facts: dict[str, str]) -> None:
    assert float(facts["booted"]) < 30  # of the guest's clock; about 1 on an idle host


def test_the_root_of_a_sandbox_can_be_assembled(facts: dict[str, str]) -> None:
    steps = ("devtmpfs", "proc", "sysfs", "cgroup2", "erofs", "ext4", "overlay", "copy up", "tmpfs")
    assert {step: facts[step] for step in steps} == dict.fromkeys(steps, "ok")
    assert facts["layer"] == "from the layer"
    assert facts["changed"] == "from the layer!"


def test_a_layer_is_read_without_a_copy(facts: dict[str, str]) -> None:
    assert facts["dax"] == "ok"


def test_devices_of_the_vmm_have_drivers(facts: dict[str, str]) -> None:
    assert "dsec.agent" in [facts[f"port {name}"] for name in names(facts, "port")]
    assert facts["network eth0"] == "02:00:00:00:00:01"
    balloon = [facts[f"balloon {name}"] for name in names(facts, "balloon")]
    assert [features[FREE_PAGE_REPORTING] for features in balloon] == ["1"]
    assert names(facts, "pvpanic pci")
    assert names(facts, "pvpanic isa")
    assert names(facts, "vmgenid")
    assert facts["random source"].startswith("virtio_rng")
    assert facts["rtc rtc0"].startswith("rtc_cmos")
    assert facts["fw_cfg"].isdigit()


def test_system_calls_of_programs_exist(facts: dict[str, str]) -> None:
    calls = ("io_uring", "bpf", "userfaultfd", "fanotify", "landlock", "keys", "vsock", "ipv6",
             "random")  # fmt: skip
    assert {call: facts[call] for call in calls} == dict.fromkeys(calls, "ok")
    # one thread per core: there is the call, and nothing to schedule
    assert facts["core scheduling"] in ("ok", "No such device")


def test_limits_and_isolation_exist(facts: dict[str, str]) -> None:
    controllers = set(facts["controllers"].split())
    assert controllers >= {"memory", "pids", "cpu", "cpuset", "io"}
    assert set(names(facts, "namespace")) >= {
        "cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts",
    }  # fmt: skip
    assert facts["lsm"] == "capability,landlock,yama"
    assert facts["pressure"].startswith("some avg10=")


def test_memory_can_be_watched_and_given_back(facts: dict[str, str]) -> None:
    assert facts["damon"] == "0"
    assert {"lz4", "zstd"} <= set(facts["zram"].replace("[", " ").replace("]", " ").split())
    total_kb = int(facts["memory"].split()[1])
    assert total_kb > (MEMORY_MB - 40) * 1024  # what the kernel keeps for itself is small
