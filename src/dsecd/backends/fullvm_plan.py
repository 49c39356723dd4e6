"""A full VM's request compiled: machine, files of the seed, what its agent is told. Pure."""

from __future__ import annotations

import msgspec

from dsecd.backends.abc import Instance
from dsecd.backends.inside import NO_NETWORK, generated_files, init_config, machine_id
from dsecd.backends.microvm_plan import (
    AGENT,
    ALL_CAPABILITIES,
    CONTROL,
    UPPER,
    VM,
    VMM_DISK_BYTES,
    Begin,
    clock,
    interface,
    jail_spec,
    link,
    memory_bytes,
)
from dsecd.backends.spec import Spec
from dsecd.host import network_veth
from dsecd.host.fullvm_plan import DiskFormat, FullVmPlan, Screen
from dsecd.host.plan import Bind
from dsecd.host.vm_plan import Accel
from dsecd.images.manifest import Config
from libdsec.model import FullVmArgs

BASE, SEED = f"{VM}/base.img", f"{VM}/seed.img"
FIRMWARE, VARIABLES = f"{VM}/firmware.fd", f"{VM}/variables.fd"
SCREEN, SHOT = f"{VM}/vnc.sock", f"{VM}/screen.png"
# Snapshots lie in the disk's file, beside what the guest wrote: each has all of the memory.
SNAPSHOTS_ROOM = 2
OWN = ("etc/machine-id",)  # the system makes its own when it starts

# Where cloud-init is, an image needs no agent of its own: it is started from the seed.
_VENDOR_DATA = """\
#cloud-config
bootcmd:
  - - sh
    - -c
    - >-
      test -e /etc/systemd/system/dsec-init.service || {
      mkdir -p /run/dsec-seed;
      mount -t vfat -o ro LABEL=cidata /run/dsec-seed;
      systemd-run --no-block --unit=dsec-init -p Delegate=yes -p OOMScoreAdjust=-1000
      -p DefaultDependencies=no /run/dsec-seed/dsec-init --service; }
"""


class Image(msgspec.Struct, frozen=True, kw_only=True):
    """A disk image of this host."""

    name: str
    path: str
    format: DiskFormat
    disk_bytes: int  # of the disk that it holds


class Firmware(msgspec.Struct, frozen=True, kw_only=True):
    """UEFI: its code, and what its memory begins as."""

    code: str
    variables: str


def full_of(spec: Spec) -> FullVmArgs:
    assert spec.vm is not None
    assert spec.vm.full is not None
    return spec.vm.full


def machine_jail_spec(
    spec: Spec, image: str, *, accel: Accel = "tcg", overhead_bytes: int = 0,
    binds: tuple[Bind, ...] = (),
) -> Spec:  # fmt: skip
    """Return what the jail is asked to be, with room for snapshots: see `jail_spec`."""
    jail = jail_spec(spec, image, accel=accel, overhead_bytes=overhead_bytes, binds=binds)
    room = SNAPSHOTS_ROOM * spec.memory_bytes
    return msgspec.structs.replace(jail, disk_bytes=spec.disk_bytes + room + VMM_DISK_BYTES)


def binds(image: Image, firmware: Firmware | None) -> tuple[Bind, ...]:
    """Return what of the host the jail shows the monitor, read-only."""
    shown = [Bind(image.path, BASE)]
    if firmware is not None:
        shown.append(Bind(firmware.code, FIRMWARE))
    return tuple(shown)


def machine_plan(
    spec: Spec, image: Image, firmware: Firmware | None, *, accel: Accel
) -> FullVmPlan:
    """Return the machine, as the monitor finds things in its jail."""
    full = full_of(spec)
    assert spec.vm is not None
    return FullVmPlan(
        memory_bytes=memory_bytes(spec),
        vcpus=spec.vm.vcpus,
        upper=UPPER,
        base=BASE,
        base_format=image.format,
        bus=full.disk_bus,
        seed=SEED,
        firmware=FIRMWARE if firmware is not None else "",
        variables=VARIABLES if firmware is not None else "",
        screen=Screen(width=full.width, height=full.height),
        screen_socket=SCREEN,
        network=interface(spec),
        agent_socket=AGENT,
        control_socket=CONTROL,
        accel=accel,
    )


def begin(sandbox: str, spec: Spec, jail: Instance) -> Begin:
    """Return what the agent is told: its machine has a root."""
    now, guest = clock(), jail.guest
    files = generated_files(
        sandbox, spec.hostname, jail.address, jail.address6,
        guest.resolv_conf if guest else NO_NETWORK,
    )  # fmt: skip
    return Begin(
        files=[(file.target, file.content, file.mode) for file in files if file.target not in OWN],
        hostname=spec.hostname,
        pids=spec.pids,
        network=link(guest, network_veth.GUEST_MAC.hex(":")) if guest else None,
        reclaim=None,
        time_ns=now.time_ns,
        entropy=now.entropy,
        config=init_config(sandbox, spec, Config(), caps=ALL_CAPABILITIES),
    )


def seed(sandbox: str, spec: Spec, agent: bytes) -> dict[str, bytes]:
    """Return the files of the seed: see `host.seed`."""
    meta = f"instance-id: {machine_id(sandbox)}\nlocal-hostname: {spec.hostname}\n"
    return {
        "meta-data": meta.encode(),
        "user-data": (full_of(spec).user_data or "#cloud-config\n{}\n").encode(),
        "vendor-data": _VENDOR_DATA.encode(),
        # the agent gives the interface its address: on this link nobody answers questions
        "network-config": b"version: 2\nethernets: {}\n",
        "dsec-init": agent,
    }
