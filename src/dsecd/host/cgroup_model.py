"""What cgroup drivers deal in: a sandbox's v2 directory, a slot of v1 sets, usage, a watch."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property

from dsecd.host.plan import FileWrite
from libdsec.model import CpuClass

INIT_PIDS = 1  # dsec-init lives in the same set as the commands; the user gets the whole limit
CPU_PERIOD_US = 100_000
CPU_QUOTA_MIN_US = 1_000  # the kernel's floor


@dataclass
class SandboxCgroup:
    """The v2 directory of one sandbox. `fd` serves CLONE_INTO_CGROUP and is closed after that.

    `fd` is -1 once closed, and for a directory found again after a restart of the daemon.
    """

    sandbox: str
    path: str
    fd: int = -1

    def close(self) -> None:
        """Close the descriptor; the directory stays."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


@dataclass
class Slot:
    """A pre-made set of v1 groups (cpu, memory, pids) that one sandbox inherits at its clone.

    Page cache that an earlier life read in stays charged to the memory group, and so does some
    kernel memory. `residue_bytes` and `oom_kills` hold what was there when this life began, so that
    `usage` reports this life only.
    """

    name: str
    directories: dict[str, str]  # controller → path
    residue_bytes: int = 0
    oom_kills: int = 0
    classed: bool = field(default=False, compare=False)  # a life of it may have had a CPU class
    waits: int = field(default=0, compare=False)  # looks that found it still in use

    @cached_property
    def procs_paths(self) -> tuple[str, ...]:
        """The files that a spawner writes its pid to, each hierarchy once."""
        seen = dict.fromkeys(os.path.realpath(path) for path in self.directories.values())
        return tuple(f"{path}/cgroup.procs" for path in seen)


@dataclass(frozen=True)
class Usage:
    """What one sandbox uses now. `cache_bytes` is the reclaimable part of `memory_bytes`."""

    memory_bytes: int = 0
    swapped_bytes: int = 0
    cache_bytes: int = 0
    cpu_usage_s: float = 0.0
    pids: int = 0
    oom_kills: int = 0


class OomWatch(ABC):
    """A running notification; the callback gets the number of kills of this life so far."""

    @abstractmethod
    def close(self) -> None:
        """Stop. Harmless when called twice."""


OomCallback = Callable[[int], None]


class Driver(ABC):
    """How this host limits, counts, freezes and kills the processes of a sandbox.

    Lifecycle: `detect` makes one; `start()` in the event loop; per sandbox `slots.acquire()` where
    `slots` is not None, `make()`, `limits()` into the container's plan, later `usage()`,
    `watch_oom()`, `freeze()`; at the end `kill()`, `remove()`, `slots.release()`. `close()` removes
    what is empty and leaves live sandboxes alone.

    The v2 directory exists on both kinds of host: freezing, killing, pressure and BPF need no
    controllers. Where a slot exists it carries the limits, otherwise the directory does.
    """

    kind: str
    name: str
    controllers: frozenset[str]

    @abstractmethod
    def make(self, sandbox_id: str, owner_uid: int) -> SandboxCgroup:
        """Make the sandbox's v2 directory, delegated to `owner_uid`. Raises `DSecError`."""

    @abstractmethod
    def limits(
        self, target: Slot | SandboxCgroup, memory_bytes: int, cpu_cores: float, pids: int
    ) -> tuple[FileWrite, ...]:
        """Return the writes that limit `target`, in the order they must be made. Pure."""

    @abstractmethod
    def usage(self, cgroup: SandboxCgroup, slot: Slot | None = None) -> Usage:
        """Return current use; zeros once the directories are gone."""

    @abstractmethod
    def trim(self, cgroup: SandboxCgroup, want_bytes: int) -> None:
        """Page out about `want_bytes` of a sandbox, running or frozen. Blocks; raises `OSError`."""

    @abstractmethod
    def set_cpu_class(
        self, cgroup: SandboxCgroup, slot: Slot | None, cpu_class: CpuClass
    ) -> tuple[str, ...]:
        """Say how a sandbox competes for CPUs; returns what the kernel lacks. Raises `OSError`."""

    @abstractmethod
    def oom_kills(self, cgroup: SandboxCgroup, slot: Slot | None = None) -> int:
        """Return how many processes the kernel killed for the memory limit in this life."""

    @abstractmethod
    def watch_oom(
        self, cgroup: SandboxCgroup, slot: Slot | None, callback: OomCallback
    ) -> OomWatch:
        """Call `callback` from the running event loop after each such kill."""


def cpu_quota_us(cpu_cores: float) -> int:
    """Return the CFS quota in µs per period of 100 ms."""
    return max(CPU_QUOTA_MIN_US, round(cpu_cores * CPU_PERIOD_US))
