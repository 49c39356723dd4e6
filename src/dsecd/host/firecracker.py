"""Firecracker, a VMM that starts faster and is smaller than QEMU, where KVM is usable.

It is configured over its API socket (`firecracker_api`), in the order of `requests`. The guest
counts its disks in the order in which they were added: the upper is /dev/vda, the data disk
/dev/vdb, then the layers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import msgspec

from dsecd.host import inside
from dsecd.host.firecracker_api import FirecrackerApi, Method
from dsecd.host.vm_plan import (
    VSOCK_PORT,
    Accel,
    Devices,
    Lack,
    Launch,
    OnEvent,
    Status,
    VmEvent,
    VmMemory,
    VmPlan,
    check,
)
from libdsec.errors import Internal, InvalidArgument, Unavailable, Unsupported, WrongState

PROGRAM = "/usr/bin/firecracker"
STATE_S = 120.0  # to write or to read a machine with its RAM
STATS_S = 10  # between the guest's reports about its memory
_MIB = 1 << 20
_OWN_BYTES, _VCPU_BYTES = 32 << 20, 1 << 20
_VCPUS_MOST = 32
_GUEST_CID = 3  # the first that is no one's
_STATUS: dict[str, Status] = {"Not started": "starting", "Running": "running", "Paused": "paused"}

Request = tuple[Method, str, dict[str, Any]]


class _Instance(msgspec.Struct):
    state: str


class _MachineConfig(msgspec.Struct):
    mem_size_mib: int


class _BalloonStats(msgspec.Struct):
    target_mib: int
    total_memory: int | None = None
    free_memory: int | None = None
    available_memory: int | None = None


class Firecracker:
    """A `Vmm`."""

    name = "firecracker"
    lacks: Mapping[Lack, str] = MappingProxyType(
        {
            "tcg": "Firecracker runs guests on KVM only",
            "bzimage": "Firecracker loads uncompressed kernels (vmlinux) only",
            "firmware": "Firecracker enters the kernel itself",
            "cpu": "Firecracker passes the host's CPU on",
            "ram_file": "Firecracker's memory is anonymous, and saved with the machine",
            "serial_agent": "Firecracker has no virtio-serial; it has vsock",
            "console": "Firecracker writes the guest's console to its own standard output",
            "standing_end": "Firecracker exits when its guest ends",
        }
    )

    def __init__(self, program: str = PROGRAM) -> None:
        self._program = program

    def compile(self, plan: VmPlan) -> Launch:
        """See `Vmm`."""
        check(plan)
        wanted: dict[Lack, bool] = {
            "tcg": plan.accel == "tcg",
            "firmware": bool(plan.firmware),
            "cpu": bool(plan.cpu),
            "ram_file": bool(plan.ram.path),
        }
        for lack, needed in wanted.items():
            if needed:
                raise Unsupported(self.lacks[lack], reason=self.lacks[lack])
        if plan.vcpus > _VCPUS_MOST:
            raise InvalidArgument(f"Firecracker gives at most {_VCPUS_MOST} vCPUs", field="vcpus")
        return Launch(
            argv=(self._program, "--api-sock", plan.control_socket),
            devices=Devices.of(plan),
        )

    def overhead_bytes(self, accel: Accel, vcpus: int) -> int:
        """See `Vmm`."""
        return _OWN_BYTES + vcpus * _VCPU_BYTES

    async def connect(
        self, root: Path, plan: VmPlan, on_event: OnEvent, timeout_s: float = 10.0
    ) -> FirecrackerMachine:
        """See `Vmm`."""
        connection, pid = await inside.reach(root, plan.control_socket, timeout_s)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            connection.close()
            raise Unavailable(f"Firecracker is gone: {error.strerror}") from error
        try:
            api = await FirecrackerApi.connect(connection, lambda: on_event(VmEvent("lost")))
        except BaseException:
            os.close(pidfd)
            raise
        return FirecrackerMachine(api, pid, pidfd)

    async def open_agent(self, root: Path, plan: VmPlan) -> socket.socket:
        """See `Vmm`. A line to Firecracker asks it for the port, a line says that it is open."""
        try:
            connection, _ = inside.socket_inside(root, plan.agent_socket)
        except OSError as error:
            raise Unavailable(f"the guest's vsock cannot be reached: {error.strerror}") from error
        try:
            await _ask_for_port(connection)
        except BaseException:
            connection.close()
            raise
        return connection


async def _ask_for_port(connection: socket.socket, timeout_s: float = 5.0) -> None:
    loop = asyncio.get_running_loop()
    line = b""
    try:
        async with asyncio.timeout(timeout_s):
            await loop.sock_sendall(connection, b"CONNECT %d\n" % VSOCK_PORT)
            while not line.endswith(b"\n") and len(line) < 32:
                # byte by byte: what follows the line is the agent's
                data = await loop.sock_recv(connection, 1)
                if not data:
                    break
                line += data
    except (TimeoutError, OSError) as error:
        raise Unavailable("the guest's vsock does not answer") from error
    if not (line.startswith(b"OK ") and line.endswith(b"\n")):
        raise Unavailable(f"nobody listens at vsock port {VSOCK_PORT} of the guest yet")


class FirecrackerMachine:
    """A `Machine`."""

    def __init__(self, api: FirecrackerApi, pid: int, pidfd: int) -> None:
        self.pid = pid
        self._api, self._pidfd = api, pidfd

    async def boot(self, plan: VmPlan) -> None:
        """See `Machine`."""
        for method, path, body in requests(plan):
            await self._api.call(method, path, body)

    async def status(self) -> Status:
        """See `Machine`."""
        state = (await self._api.ask("/", _Instance)).state
        try:
            return _STATUS[state]
        except KeyError:
            raise Internal(f"Firecracker is in a state without a name: {state[:40]!r}") from None

    async def stop(self) -> None:
        """See `Machine`."""
        await self._api.call("PATCH", "/vm", {"state": "Paused"})

    async def cont(self) -> None:
        """See `Machine`."""
        await self._api.call("PATCH", "/vm", {"state": "Resumed"})

    async def balloon(self, limit_bytes: int) -> None:
        """See `Machine`."""
        have = (await self._api.ask("/machine-config", _MachineConfig)).mem_size_mib
        amount = max(0, have - limit_bytes // _MIB)
        await self._api.call("PATCH", "/balloon", {"amount_mib": amount})

    async def memory(self) -> VmMemory:
        """See `Machine`. What the guest last reported: up to `STATS_S` ago."""
        have = (await self._api.ask("/machine-config", _MachineConfig)).mem_size_mib
        stats = await self._api.ask("/balloon/statistics", _BalloonStats)
        if stats.total_memory is None:
            raise Unavailable("the guest's balloon driver has reported nothing yet")
        return VmMemory(
            limit_bytes=(have - stats.target_mib) * _MIB,
            total_bytes=stats.total_memory,
            free_bytes=stats.free_memory or 0,
            available_bytes=stats.available_memory or 0,
        )

    async def console(self) -> str:
        """See `Machine`."""
        reason = Firecracker.lacks["console"]
        raise Unsupported(reason, reason=reason)

    def vcpu_threads(self) -> tuple[int, ...]:
        """See `Machine`. Firecracker names them."""
        return tuple(
            thread for thread, _, name in inside.threads(self.pid) if name.startswith("fc_vcpu")
        )

    async def save(self, state: str) -> None:
        """See `Machine`."""
        status = await self.status()
        if status != "paused":
            raise WrongState(f"a machine is saved while it is paused, not {status}", state=status)
        body = {
            "snapshot_type": "Full",
            "snapshot_path": state,
            "mem_file_path": f"{state}.ram",
        }
        await self._api.call("PUT", "/snapshot/create", body, timeout_s=STATE_S)

    async def load(self, state: str) -> None:
        """See `Machine`."""
        body = {
            "snapshot_path": state,
            "mem_backend": {"backend_type": "File", "backend_path": f"{state}.ram"},
            "resume_vm": False,
        }
        await self._api.call("PUT", "/snapshot/load", body, timeout_s=STATE_S)

    async def quit(self) -> None:
        """See `Machine`. The API has no call for it."""
        if self._pidfd >= 0:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """See `Machine`."""
        self._api.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def requests(plan: VmPlan) -> tuple[Request, ...]:
    """Return what configures and starts `plan`, in order; () for one that waits for a state."""
    if plan.incoming:
        return ()
    boot = {"kernel_image_path": plan.kernel, "boot_args": plan.command_line}
    if plan.initrd:
        boot["initrd_path"] = plan.initrd
    machine = {"vcpu_count": plan.vcpus, "mem_size_mib": plan.memory_bytes // _MIB, "smt": False}
    made: list[Request] = [
        ("PUT", "/machine-config", machine),
        ("PUT", "/boot-source", boot),
        _drive("upper", plan.upper, read_only=False),
    ]
    if plan.data:
        made.append(_drive("data", plan.data, read_only=False))
    for index, layer in enumerate(plan.layers):
        name = f"layer{index}"
        if layer.device == "pmem":
            pmem = {"id": name, "path_on_host": layer.path, "read_only": True}
            made.append(("PUT", f"/pmem/{name}", pmem))
        else:
            made.append(_drive(name, layer.path, read_only=True))
    if plan.network is not None:
        interface = {
            "iface_id": "eth0",
            "guest_mac": plan.network.mac,
            "host_dev_name": plan.network.interface,
        }
        made.append(("PUT", "/network-interfaces/eth0", interface))
    vsock = {"guest_cid": _GUEST_CID, "uds_path": plan.agent_socket}
    made += [("PUT", "/vsock", vsock), ("PUT", "/entropy", {})]
    if plan.balloon:
        balloon: dict[str, Any] = {
            "amount_mib": 0,
            "deflate_on_oom": True,
            "stats_polling_interval_s": STATS_S,  # cannot be turned on later
        }
        if plan.free_page_reporting:
            balloon["free_page_reporting"] = True
        made.append(("PUT", "/balloon", balloon))
    made.append(("PUT", "/actions", {"action_type": "InstanceStart"}))
    return tuple(made)


def _drive(name: str, path: str, *, read_only: bool) -> Request:
    drive = {
        "drive_id": name,
        "path_on_host": path,
        "is_root_device": False,
        "is_read_only": read_only,
        "cache_type": "Unsafe" if read_only else "Writeback",
    }
    return ("PUT", f"/drives/{name}", drive)
