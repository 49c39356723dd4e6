"""Which task of a pool gets which GPU, and when. Pure.

A task is compiled on a CPU and then runs on a GPU; it holds no device while it is compiled, nor
while it waits. An *exclusive* task has whole devices to itself; *shared* ones lie together on a
device as long as its memory and its places reach, and fill one before they begin another, so that
whole devices stay free.

Tasks run in the order in which they were asked for. One that does not fit yet holds the devices it
waits for: a later task may pass it only on others, so that a stream of small shared tasks does not
keep an exclusive one out for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

Mode = Literal["shared", "exclusive"]
State = Literal["compiling", "waiting", "running"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """A GPU. `nodes` are the device nodes that a task on it needs besides the driver's own."""

    index: int
    memory_bytes: int
    nodes: tuple[str, ...]
    places: int = 8  # shared tasks at once


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a task wants: `devices` whole ones, or a place with `memory_bytes` on one."""

    mode: Mode = "shared"
    memory_bytes: int = 0
    devices: int = 1


@dataclass(frozen=True)
class Grant:
    """What a task runs on."""

    task: str
    devices: tuple[Device, ...]

    @property
    def nodes(self) -> tuple[str, ...]:
        """The device nodes to open for it, each once."""
        return tuple(dict.fromkeys(node for device in self.devices for node in device.nodes))


@dataclass
class _Task:
    name: str
    demand: Demand
    state: State
    grant: Grant | None = None


@dataclass
class _Load:
    """Who is on a device."""

    device: Device
    exclusive: bool = False
    used_bytes: int = 0
    tasks: set[str] = field(default_factory=set)

    @property
    def free(self) -> bool:
        return not self.tasks

    def takes(self, demand: Demand) -> bool:
        """Whether a shared task still fits."""
        room = self.device.memory_bytes - self.used_bytes
        return (
            not self.exclusive
            and len(self.tasks) < self.device.places
            and demand.memory_bytes <= room
        )


class Unplaceable(Exception):
    """No device of the host could ever hold the task; the message says why."""


class Scheduler:
    """The devices of a host and the tasks that want them."""

    def __init__(self, devices: Sequence[Device], compilers: int) -> None:
        self._loads = [_Load(device) for device in devices]
        self._compilers = compilers
        self._tasks: dict[str, _Task] = {}  # in the order in which they were asked for
        self._uncompiled: list[str] = []

    def add(self, name: str, demand: Demand, *, compiled: bool = False) -> None:
        """Enter a task. Raises `Unplaceable` at once, not after it has waited."""
        self._check(demand)
        if name in self._tasks:
            raise ValueError(f"task {name!r} is there already")
        self._tasks[name] = _Task(name, demand, "waiting" if compiled else "compiling")
        if not compiled:
            self._uncompiled.append(name)

    def compilations(self) -> list[str]:
        """Return the tasks that may be compiled now, the first first."""
        return self._uncompiled[: self._compilers]

    def compiled(self, name: str) -> None:
        """The task only needs its device now."""
        self._uncompiled.remove(name)
        self._tasks[name].state = "waiting"

    def end(self, name: str) -> None:
        """The task is over, or was given up: in whatever state it is."""
        task = self._tasks.pop(name)
        if task.state == "compiling":
            self._uncompiled.remove(name)
        for load in self._loads:
            if name in load.tasks:
                load.tasks.discard(name)
                load.used_bytes -= task.demand.memory_bytes if not load.exclusive else 0
                load.exclusive = False

    def grants(self) -> list[Grant]:
        """Place every waiting task that may run now, and return what each got."""
        made: list[Grant] = []
        held: set[int] = set()  # devices that earlier tasks wait for
        for task in self._tasks.values():
            if task.state != "waiting":
                continue
            chosen = self._choose(task.demand, held)
            if chosen is None:
                held |= self._wanted(task.demand, held)
                continue
            made.append(self._put(task, chosen))
        return made

    def _check(self, demand: Demand) -> None:
        if demand.devices < 1 or (demand.mode == "shared" and demand.devices != 1):
            raise Unplaceable("a task wants one device, or is exclusive and wants several")
        able = sum(_whole(load.device, demand) for load in self._loads)
        if able < demand.devices:
            raise Unplaceable(
                f"{demand.devices} devices of {demand.memory_bytes} bytes are wanted, "
                f"the host has {able}"
            )

    def _choose(self, demand: Demand, held: Iterable[int]) -> list[_Load] | None:
        """Return the devices for a task, or None when it has to wait."""
        usable = [load for load in self._loads if load.device.index not in held]
        if demand.mode == "exclusive":
            fit = [load for load in usable if load.free and _whole(load.device, demand)]
            fit.sort(key=lambda load: load.device.memory_bytes)  # the smallest that do
            return fit[: demand.devices] if len(fit) >= demand.devices else None
        fit = [load for load in usable if load.takes(demand)]
        fit.sort(key=lambda load: (load.free, load.device.memory_bytes - load.used_bytes))
        return fit[:1] or None

    def _wanted(self, demand: Demand, held: set[int]) -> set[int]:
        """Return the devices that a task will get first: those with the fewest others on them."""
        able = [
            load for load in self._loads
            if load.device.index not in held and _whole(load.device, demand)
        ]  # fmt: skip
        able.sort(key=lambda load: (load.exclusive, len(load.tasks)))
        return {load.device.index for load in able[: demand.devices]}

    def _put(self, task: _Task, chosen: list[_Load]) -> Grant:
        for load in chosen:
            load.tasks.add(task.name)
            load.exclusive = task.demand.mode == "exclusive"
            load.used_bytes += 0 if load.exclusive else task.demand.memory_bytes
        task.state = "running"
        task.grant = Grant(task.name, tuple(load.device for load in chosen))
        return task.grant


def _whole(device: Device, demand: Demand) -> bool:
    return device.memory_bytes >= demand.memory_bytes
