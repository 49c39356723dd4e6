"""Plans of machines: what none can follow, and what the guest finds."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from dsecd.host.vm_plan import Devices, Ram, VmLayer, VmNetwork, VmPlan, check, disk_name
from libdsec.errors import InvalidArgument

PLAN = VmPlan(memory_bytes=256 << 20, kernel="/vm/kernel", upper="/vm/upper.img")
MIB = 1 << 20


def test_disks_are_named_as_the_kernel_does() -> None:
    names = {0: "vda", 1: "vdb", 25: "vdz", 26: "vdaa", 51: "vdaz", 52: "vdba", 701: "vdzz"}
    assert {index: disk_name(index) for index in names} == {
        index: f"/dev/{name}" for index, name in names.items()
    }
    assert disk_name(702) == "/dev/vdaaa"


def test_the_guest_finds_disks_in_order() -> None:
    layers = (
        VmLayer("/vm/layer0", 2 * MIB),
        VmLayer("/vm/layer1", 5000, "block"),
        VmLayer("/vm/layer2", 4 * MIB),
    )
    plan = msgspec.structs.replace(PLAN, layers=layers)
    assert Devices.of(plan) == Devices(
        layers=("/dev/pmem0", "/dev/vdb", "/dev/pmem1"), upper="/dev/vda"
    )
    plan = msgspec.structs.replace(
        plan, data="/vm/data.img", network=VmNetwork(interface="tap0", mac="02:00:00:00:00:01")
    )
    assert Devices.of(plan) == Devices(
        layers=("/dev/pmem0", "/dev/vdc", "/dev/pmem1"),
        upper="/dev/vda",
        data="/dev/vdb",
        network="eth0",
    )


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"memory_bytes": 0}, "memory_bytes"),
        ({"memory_bytes": 3 * MIB}, "memory_bytes"),
        ({"vcpus": 0}, "vcpus"),
        ({"layers": (VmLayer("/l", 3 * MIB),)}, "layers"),
        ({"layers": (VmLayer("/l", 0),)}, "layers"),
        ({"balloon": False}, "free_page_reporting"),
        ({"ram": Ram(shared=False)}, "ram"),
        ({"ram": Ram(read_only=True, shared=False)}, "ram"),
        ({"ram": Ram(path="/r", read_only=True)}, "ram"),
        # the hole would be in the file that the others stand on
        ({"ram": Ram(path="/r", shared=False)}, "balloon"),
        ({"ram": Ram(path="/r", shared=False), "free_page_reporting": False}, "balloon"),
    ],
)
def test_what_no_vmm_can_do_is_refused(changes: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(msgspec.structs.replace(PLAN, **changes))
    assert caught.value.detail["field"] == field


def test_copied_memory_without_a_balloon_is_allowed() -> None:
    check(PLAN)
    check(
        msgspec.structs.replace(
            PLAN,
            ram=Ram(path="/r", shared=False),
            balloon=False,
            free_page_reporting=False,
        )
    )
    check(msgspec.structs.replace(PLAN, ram=Ram(path="/r")))
    # what cannot be written to cannot get a hole
    check(msgspec.structs.replace(PLAN, ram=Ram(path="/r", shared=False, read_only=True)))
