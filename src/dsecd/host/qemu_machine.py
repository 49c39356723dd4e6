"""A running QEMU, behind its monitor."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import msgspec

from dsecd.host import inside
from dsecd.host.qmp import Qmp
from dsecd.host.vm_plan import EventKind, OnEvent, Status, VmEvent, VmMemory, VmPlan
from libdsec.errors import Internal, Timeout, Unavailable, WrongState

CONSOLE_BYTES = 64 << 10  # a power of two
STATE_S = 60.0  # to write or to read the state of devices; takes some 10 ms
BALLOON_S = 2.0  # for the guest's balloon driver to answer
_LOOK_AGAIN_S = 0.003
_BALLOON = "/machine/peripheral/balloon"
_INTERVAL = "guest-stats-polling-interval"

# RunState of qapi/run-state.json
_STATUS: dict[str, Status] = {
    "prelaunch": "starting", "inmigrate": "starting", "restore-vm": "starting",
    "running": "running",
    "paused": "paused", "debug": "paused", "suspended": "paused", "finish-migrate": "paused",
    "save-vm": "paused",
    "postmigrate": "saved",
    "guest-panicked": "panicked",
    "shutdown": "ended",
    "internal-error": "failed", "io-error": "failed", "watchdog": "failed", "colo": "failed",
}  # fmt: skip
_OVER: tuple[Status, ...] = ("panicked", "ended", "failed")


class _RunState(msgspec.Struct):
    status: str


class _Cpu(msgspec.Struct, rename="kebab"):
    thread_id: int


class _Migration(msgspec.Struct, rename="kebab"):
    status: str = ""
    error_desc: str = ""


class _Balloon(msgspec.Struct):
    actual: int


class _GuestStats(msgspec.Struct, rename="kebab"):
    last_update: int
    stats: dict[str, int]


class QemuMachine:
    """A `Machine`."""

    def __init__(self, pid: int, root: Path, on_event: OnEvent) -> None:
        self.pid = pid
        self._root, self._on_event = root, on_event
        self._qmp: Qmp
        self._vcpus: frozenset[int] = frozenset()  # thread ids as QEMU's PID namespace counts
        self._console = b""

    @classmethod
    async def take(
        cls,
        connection: socket.socket,
        pid: int,
        root: Path,
        on_event: OnEvent,
        timeout_s: float,
    ) -> Self:
        """Return the machine behind a connection to its monitor. Raises as `Vmm.connect`."""
        machine = cls(pid, root, on_event)
        machine._qmp = await Qmp.connect(connection, machine._happened, machine._lost, timeout_s)
        try:
            cpus = await machine._qmp.ask("query-cpus-fast", list[_Cpu])
        except BaseException:
            machine.close()
            raise
        machine._vcpus = frozenset(cpu.thread_id for cpu in cpus)
        return machine

    async def boot(self, plan: VmPlan) -> None:
        """See `Machine`: QEMU begins with its process."""

    async def status(self) -> Status:
        """See `Machine`."""
        state = (await self._qmp.ask("query-status", _RunState)).status
        try:
            return _STATUS[state]
        except KeyError:
            raise Internal(f"QEMU is in a state without a name here: {state[:40]!r}") from None

    async def stop(self) -> None:
        """See `Machine`."""
        await self._qmp.execute("stop")

    async def cont(self) -> None:
        """See `Machine`."""
        status = await self.status()
        if status in _OVER:
            raise WrongState(f"the guest is over ({status}): start another", state=status)
        await self._qmp.execute("cont")

    async def balloon(self, limit_bytes: int) -> None:
        """See `Machine`."""
        await self._qmp.execute("balloon", {"value": limit_bytes})

    async def memory(self) -> VmMemory:
        """See `Machine`."""
        limit = (await self._qmp.ask("query-balloon", _Balloon)).actual
        since = int(time.time())  # QEMU notes whole seconds
        await self._set_polling(3600)  # the first poll is at once
        try:
            stats = await self._guest_stats(since)
        finally:
            with contextlib.suppress(Unavailable):
                await self._set_polling(0)
        return VmMemory(
            limit_bytes=limit,
            total_bytes=stats.get("stat-total-memory", 0),
            free_bytes=stats.get("stat-free-memory", 0),
            available_bytes=stats.get("stat-available-memory", 0),
        )

    async def _set_polling(self, seconds: int) -> None:
        setting = {"path": _BALLOON, "property": _INTERVAL, "value": seconds}
        await self._qmp.execute("qom-set", setting)

    async def _guest_stats(self, since: int) -> dict[str, int]:
        deadline = time.monotonic() + BALLOON_S
        asked = {"path": _BALLOON, "property": "guest-stats"}
        while time.monotonic() < deadline:
            found = await self._qmp.ask("qom-get", _GuestStats, asked)
            if found.last_update >= since:
                return found.stats
            await asyncio.sleep(_LOOK_AGAIN_S)
        raise Unavailable("the guest's balloon driver does not answer")

    async def console(self) -> str:
        """See `Machine`. QEMU hands each byte out once; the end of them is kept here."""
        text = await self._qmp.ask(
            "ringbuf-read", str, {"device": "console", "size": CONSOLE_BYTES, "format": "base64"}
        )
        try:
            self._console = (self._console + base64.b64decode(text))[-CONSOLE_BYTES:]
        except binascii.Error as error:
            raise Internal(f"QEMU answers ringbuf-read with no base64: {error}") from error
        return self._console.decode("utf-8", "replace")

    def vcpu_threads(self) -> tuple[int, ...]:
        """See `Machine`."""
        return tuple(
            thread for thread, inner, _ in inside.threads(self.pid) if inner in self._vcpus
        )

    async def save(self, state: str) -> None:
        """See `Machine`."""
        status = await self.status()
        if status not in ("paused", "saved"):
            raise WrongState(f"a machine is saved while it is paused, not {status}", state=status)
        await self._migrate("migrate", state, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        await self._until_written()

    async def load(self, state: str) -> None:
        """See `Machine`. QEMU exits when it cannot take the state up: its own output says why."""
        await self._migrate("migrate-incoming", state, os.O_RDONLY)
        deadline = time.monotonic() + STATE_S
        while await self.status() == "starting":
            if time.monotonic() > deadline:
                raise Timeout(f"QEMU did not take up {state} within {STATE_S:g} s")
            await asyncio.sleep(_LOOK_AGAIN_S)

    async def _migrate(self, command: str, state: str, flags: int) -> None:
        """Begin to write or to read the state of all devices; RAM that is shared stays out."""
        try:
            file = inside.open_inside(self._root, state, flags, 0o600 if flags & os.O_CREAT else 0)
        except OSError as error:
            raise Internal(f"{state}: {error.strerror}") from error
        try:
            shared = {"capability": "x-ignore-shared", "state": True}
            await self._qmp.execute("migrate-set-capabilities", {"capabilities": [shared]})
            await self._qmp.execute("getfd", {"fdname": "state"}, descriptor=file)
        finally:
            os.close(file)
        await self._qmp.execute(command, {"uri": "fd:state"})

    async def _until_written(self) -> None:
        deadline = time.monotonic() + STATE_S
        while time.monotonic() < deadline:
            found = await self._qmp.ask("query-migrate", _Migration)
            if found.status == "completed":
                return
            if found.status in ("failed", "cancelled"):
                raise Internal(f"QEMU cannot save the machine: {found.error_desc or found.status}")
            await asyncio.sleep(_LOOK_AGAIN_S)
        await self._qmp.execute("migrate_cancel")
        raise Timeout(f"QEMU did not save the machine within {STATE_S:g} s")

    async def quit(self) -> None:
        """See `Machine`."""
        with contextlib.suppress(Unavailable):  # gone before it answered
            await self._qmp.execute("quit")

    def close(self) -> None:
        """See `Machine`."""
        self._qmp.close()

    def _lost(self) -> None:
        if self._vcpus:  # else `take` raises
            self._on_event(VmEvent("lost"))

    def _happened(self, name: str, data: Mapping[str, Any]) -> None:
        event = _event(name, data)
        if event is not None:
            self._on_event(event)


_PLAIN: dict[str, EventKind] = {
    "GUEST_PANICKED": "panicked", "STOP": "stopped", "RESUME": "resumed",
}  # fmt: skip


def _event(name: str, data: Mapping[str, Any]) -> VmEvent | None:
    """Return what a QMP event means here, None for one that nobody waits for."""
    if name in _PLAIN:
        return VmEvent(_PLAIN[name])
    if name == "SHUTDOWN" and data.get("guest") is True:
        return VmEvent("reset" if data.get("reason") == "guest-reset" else "shutdown")
    if name == "BLOCK_IO_ERROR":
        words = (data.get("node-name") or data.get("device"), data.get("operation"))
        return VmEvent(
            "disk_error", " ".join(str(word)[:80] for word in (*words, data.get("reason")))
        )
    if name == "VSERPORT_CHANGE" and data.get("id") == "agent":
        return VmEvent("agent_opened" if data.get("open") is True else "agent_closed")
    return None
