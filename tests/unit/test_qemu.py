"""QEMU's command line, as data."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dsecd.host.qemu import LAYERS_MOST, PROGRAM, Qemu
from dsecd.host.qemu_machine import _event
from dsecd.host.vm_plan import Ram, VmEvent, VmLayer, VmNetwork, VmPlan
from libdsec.errors import InvalidArgument

MIB = 1 << 20
PLAN = VmPlan(
    memory_bytes=256 * MIB,
    vcpus=2,
    kernel="/vm/kernel",
    initrd="/vm/initrd",
    command_line="quiet rdinit=/init -- --vm",
    upper="/vm/upper.img",
)


def options(plan: VmPlan) -> dict[str, list[str]]:
    """Return option → its values, in order."""
    words = Qemu().compile(plan).argv
    assert words[0] == PROGRAM
    found: dict[str, list[str]] = {}
    for word in words[1:]:
        if word.startswith("-") and word[1:2].isalpha():
            found.setdefault(name := word, [])
        else:
            found[name].append(word)
    return found


def changed(**changes: Any) -> VmPlan:
    return msgspec.structs.replace(PLAN, **changes)


def test_nothing_is_there_that_was_not_asked_for() -> None:
    found = options(PLAN)
    assert found["-nodefaults"] == found["-no-user-config"] == []
    assert found["-sandbox"] == [
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"
    ]
    assert not {"-netdev", "-bios", "-incoming"} & set(found)
    assert not [device for device in found["-device"] if "net" in device or "pmem" in device]


def test_the_kernel_is_handed_over_as_it_is() -> None:
    found = options(PLAN)
    assert found["-kernel"] == ["/vm/kernel"]
    assert found["-initrd"] == ["/vm/initrd"]
    assert found["-append"] == ["quiet rdinit=/init -- --vm"]
    assert "-initrd" not in options(changed(initrd=""))
    assert options(changed(firmware="qboot.rom"))["-bios"] == ["qboot.rom"]


def test_qboot_has_no_generation_id() -> None:
    """It does not know the command of the ACPI loader that this device needs, and stops."""
    assert "vmgenid,guid=auto" in options(PLAN)["-device"]
    assert "vmgenid,guid=auto" not in options(changed(firmware="/vm/qboot.rom"))["-device"]


def test_accelerators_have_their_cpu() -> None:
    assert options(PLAN)["-accel"] == ["tcg,thread=multi,tb-size=128"]
    assert options(PLAN)["-cpu"] == ["max,-cx16"]
    native = options(changed(accel="kvm"))
    assert (native["-accel"], native["-cpu"]) == (["kvm"], ["host"])
    assert options(changed(cpu="Skylake-Client-v1,-cx16"))["-cpu"] == ["Skylake-Client-v1,-cx16"]
    assert options(PLAN)["-smp"] == ["2"]


@pytest.mark.parametrize(
    ("ram", "expected"),
    [
        (Ram(), "memory-backend-memfd,id=ram,size=268435456,share=on"),
        (
            Ram(path="/vm/a,b"),
            "memory-backend-file,id=ram,size=268435456,mem-path=/vm/a,,b,share=on",
        ),
    ],
)
def test_where_memory_lies(ram: Ram, expected: str) -> None:
    found = options(changed(ram=ram))
    assert found["-object"] == [expected]
    assert found["-m"] == ["size=268435456b"]


def test_copied_memory() -> None:
    plan = changed(ram=Ram(path="/vm/ram", shared=False), balloon=False, free_page_reporting=False)
    assert options(plan)["-object"][0].endswith("mem-path=/vm/ram,share=off")


def test_mapped_layers_have_room_beyond_ram() -> None:
    layers = (VmLayer("/vm/layer0", 2 * MIB), VmLayer("/vm/layer1", 6 * MIB))
    found = options(changed(layers=layers))
    assert found["-m"] == [f"size={256 * MIB}b,maxmem={264 * MIB}b"]
    assert found["-object"][1:] == [
        f"memory-backend-file,id=layer{n}-file,size={size},mem-path=/vm/layer{n},"
        "share=on,readonly=on"
        for n, size in enumerate((2 * MIB, 6 * MIB))
    ]
    assert found["-device"][-2:] == [
        "virtio-pmem-pci,id=layer0,memdev=layer0-file,addr=0x3.0,multifunction=on",
        "virtio-pmem-pci,id=layer1,memdev=layer1-file,addr=0x3.1",
    ]


def test_disks_stand_in_the_order_of_their_names() -> None:
    plan = changed(data="/vm/data.img", layers=(VmLayer("/vm/layer0", 4096, "block"),))
    found = options(plan)
    disks = [device for device in found["-device"] if "virtio-blk" in device]
    places = [device.partition("addr=")[2].partition(",")[0] for device in disks]
    names = [device.partition("serial=")[2].partition(",")[0] for device in disks]
    assert dict(zip(places, names, strict=True)) == {
        "0x2.0": "upper", "0x2.1": "data", "0x3.0": "layer0"
    }  # fmt: skip
    assert places == sorted(places)
    devices = Qemu().compile(plan).devices
    assert (devices.upper, devices.data, devices.layers) == ("/dev/vda", "/dev/vdb", ("/dev/vdc",))
    for image in found["-blockdev"]:
        assert ("read-only=on" in image) == ("layer0" in image)
        assert ("discard=unmap" in image) == ("layer0" not in image)


def test_every_place_is_taken_once_and_layers_have_a_limit() -> None:
    layers = tuple(VmLayer(f"/vm/layer{n}", 2 * MIB) for n in range(LAYERS_MOST))
    network = VmNetwork(interface="tap0", mac="02:00:00:00:00:01")
    plan = changed(layers=layers, data="/vm/data", network=network)
    places = [
        device.partition("addr=")[2].partition(",")[0]
        for device in options(plan)["-device"]
        if "addr=" in device
    ]
    assert len(places) == len(set(places)) == LAYERS_MOST + 6
    assert all(0 < int(place.partition(".")[0], 16) < 31 for place in places)
    with pytest.raises(InvalidArgument, match="collapse"):
        Qemu().compile(changed(layers=(*layers, layers[0])))


def test_a_network_is_a_tap_without_scripts() -> None:
    found = options(changed(network=VmNetwork(interface="tap0", mac="02:00:00:00:00:01")))
    assert found["-netdev"] == ["tap,id=net,ifname=tap0,script=no,downscript=no"]
    assert any("mac=02:00:00:00:00:01,romfile=," in device for device in found["-device"])


def test_the_balloon_reports_free_pages_if_asked() -> None:
    def balloon(plan: VmPlan) -> str:
        return next((one for one in options(plan)["-device"] if "balloon" in one), "")

    assert "free-page-reporting=on" in balloon(PLAN)
    assert "free-page-reporting=off" in balloon(changed(free_page_reporting=False))
    assert balloon(changed(free_page_reporting=False, balloon=False)) == ""


def test_a_restored_machine_waits() -> None:
    assert options(changed(incoming=True))["-incoming"] == ["defer"]


def test_emulation_takes_memory_of_its_own() -> None:
    qemu = Qemu()
    assert qemu.overhead_bytes("tcg", 1) - qemu.overhead_bytes("kvm", 1) == 128 * MIB
    assert qemu.overhead_bytes("tcg", 3) > qemu.overhead_bytes("tcg", 1)


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("GUEST_PANICKED", {"action": "pause"}, VmEvent("panicked")),
        ("SHUTDOWN", {"guest": True, "reason": "guest-shutdown"}, VmEvent("shutdown")),
        ("SHUTDOWN", {"guest": True, "reason": "guest-reset"}, VmEvent("reset")),
        ("SHUTDOWN", {"guest": False, "reason": "host-qmp-quit"}, None),
        ("STOP", {}, VmEvent("stopped")),
        ("RESUME", {}, VmEvent("resumed")),
        ("VSERPORT_CHANGE", {"id": "agent", "open": True}, VmEvent("agent_opened")),
        ("VSERPORT_CHANGE", {"id": "agent", "open": False}, VmEvent("agent_closed")),
        ("VSERPORT_CHANGE", {"id": "other", "open": True}, None),
        (
            "BLOCK_IO_ERROR",
            {
                "device": "", "node-name": "upper", "operation": "write", "action": "report",
                "nospace": True, "reason": "No space left on device",
            },
            VmEvent("disk_error", "upper write No space left on device"),
        ),
        ("RTC_CHANGE", {"offset": 1}, None),
    ],
)  # fmt: skip
def test_events(name: str, data: dict[str, Any], expected: VmEvent | None) -> None:
    assert _event(name, data) == expected
