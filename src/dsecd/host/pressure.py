"""How loaded the host or one sandbox is: pressure stall information and available memory.

Source: Documentation/accounting/psi.rst. `some` is the share of time in which at least one task
waited for the resource, `full` in which all did; averages over 10, 60 and 300 s, in percent.
"""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import Unsupported

Resource = Literal["cpu", "memory", "io"]


@dataclass(frozen=True)
class Stall:
    """One line of a pressure file; averages in percent, total in seconds."""

    avg10: float = 0.0
    avg60: float = 0.0
    avg300: float = 0.0
    total_s: float = 0.0


@dataclass(frozen=True)
class Pressure:
    """`full` is zero where the kernel does not give it (cpu on old kernels)."""

    some: Stall = Stall()
    full: Stall = Stall()


@dataclass(frozen=True)
class Memory:
    """Of the host, from /proc/meminfo."""

    total_bytes: int
    available_bytes: int
    swap_total_bytes: int
    swap_free_bytes: int


def read(
    resource: Resource, cgroup: str = "", root: str = "/", files: KernelFiles | None = None
) -> Pressure | None:
    """Return the pressure of the host, or of the v2 directory `cgroup`; None without PSI."""
    path = f"{cgroup}/{resource}.pressure" if cgroup else f"{root}proc/pressure/{resource}"
    try:
        return parse((files or KernelFiles()).read(path))
    except OSError:
        return None  # CONFIG_PSI off, psi=0, or the sandbox is gone


def parse(text: str) -> Pressure:
    """Return what a pressure file says."""
    lines: dict[str, Stall] = {}
    for line in text.splitlines():
        kind, _, rest = line.partition(" ")
        values = dict(pair.split("=", 1) for pair in rest.split())
        lines[kind] = Stall(
            float(values.get("avg10", 0)),
            float(values.get("avg60", 0)),
            float(values.get("avg300", 0)),
            int(values.get("total", 0)) / 1e6,
        )
    return Pressure(lines.get("some", Stall()), lines.get("full", Stall()))


def memory(root: str = "/") -> Memory:
    """Return the host's memory. Raises `OSError` without /proc."""
    values: dict[str, int] = {}
    for line in Path(root, "proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        number = rest.split()
        values[name] = int(number[0]) * 1024 if number else 0
    return Memory(
        total_bytes=values.get("MemTotal", 0),
        available_bytes=values.get("MemAvailable", values.get("MemFree", 0)),
        swap_total_bytes=values.get("SwapTotal", 0),
        swap_free_bytes=values.get("SwapFree", 0),
    )


class Trigger:
    """Calls back when a stall passes a threshold, without polling.

    The window is 2 s: shorter or odd windows need CAP_SYS_RESOURCE (kernel commit d82caa273565).
    """

    WINDOW_S = 2.0

    def __init__(
        self,
        resource: Resource,
        stall_s: float,
        callback: Callable[[], None],
        kind: Literal["some", "full"] = "some",
        cgroup: str = "",
    ) -> None:
        """Fire when tasks were stalled for `stall_s` of any 2 s. Raises `Unsupported`."""
        path = f"{cgroup}/{resource}.pressure" if cgroup else f"/proc/pressure/{resource}"
        text = f"{kind} {round(stall_s * 1e6)} {round(self.WINDOW_S * 1e6)}"
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise Unsupported(f"no {path}: {error.strerror}", reason=str(error)) from error
        try:
            os.write(self._fd, text.encode() + b"\0")
        except OSError as error:
            os.close(self._fd)
            raise Unsupported(f"{path} takes no trigger: {error}", reason=str(error)) from error
        self._callback = callback
        # The event is EPOLLPRI, which asyncio does not wait for; an epoll inside its epoll does.
        self._epoll = select.epoll(flags=select.EPOLL_CLOEXEC)
        self._epoll.register(self._fd, select.EPOLLPRI)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._epoll.fileno(), self._fired)

    def _fired(self) -> None:
        """The loop's own look took the event (psi_trigger_poll clears it): only an error stays."""
        if any(mask & select.EPOLLERR for _, mask in self._epoll.poll(0)):
            self.close()  # the cgroup is gone
        else:
            self._callback()

    def close(self) -> None:
        """Stop. Harmless when called twice."""
        if self._fd >= 0:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            os.close(self._fd)
            self._fd = -1
