"""Whether the host can take one more sandbox; a refusal is retryable and names the limit."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Protocol

from dsecd.backends.abc import Capabilities
from dsecd.backends.spec import Spec
from dsecd.config import Limits
from dsecd.model import Reading
from libdsec.errors import Exhausted, InvalidArgument

REFRESH_S = 0.2  # how old a reading of the host may be
FILES_RESERVE = 768  # descriptors for pools, connections, layers


class Host(Protocol):
    """Where readings come from; one call costs some file reads."""

    cpus: int
    files_max: int  # descriptors this process may hold

    def read(self) -> Reading: ...


class Admission:
    """Counts what live sandboxes asked for and compares it with limits and the host's state."""

    def __init__(
        self,
        limits: Limits,
        host: Host,
        backends: Mapping[str, Capabilities],
        reserve_bytes: int = 0,
    ) -> None:
        """`backends` say, by name, which descriptors of this process and which memory beyond its
        limit a sandbox of theirs costs.
        `reserve_bytes` is the memory that a new one is sure to take soon."""
        self.limits, self.host = limits, host
        self._backends, self._files = backends, 0
        self.sandboxes_max = limits.sandboxes
        if files_each := min(able.files_each for able in backends.values()):
            affordable = max(1, (host.files_max - FILES_RESERVE) // files_each)
            self.sandboxes_max = min(limits.sandboxes, affordable)
        self.sandboxes = 0
        self.memory_requested = 0
        self.cpu_requested = 0.0
        self._reading: Reading | None = None
        self._read_at = 0.0
        self._reserve_bytes = reserve_bytes
        self._target = 1.0  # of the host's memory in use
        self._relief: Callable[[], int] | None = None

    def bound_by(self, target: float, relief: Callable[[], int]) -> None:
        """Refuse what would pass `target`, a share of the host's memory in use, unless `relief`
        says that idle sandboxes can give as much."""
        self._target, self._relief = target, relief

    @property
    def memory_overcommit(self) -> float:
        """What sandboxes asked for, as a multiple of the host's memory."""
        return self.memory_requested / max(1, self.reading().memory_total_bytes)

    @property
    def cpu_overcommit(self) -> float:
        """What sandboxes asked for, as a multiple of the host's CPUs; without CPU limits 0."""
        return self.cpu_requested / max(1, self.host.cpus)

    def above_target_bytes(self, more: int = 0) -> int:
        """Return how far the host's memory in use, and `more`, is above the target."""
        reading = self.reading()
        used = reading.memory_total_bytes - reading.memory_available_bytes
        return max(0, used + more - int(reading.memory_total_bytes * self._target))

    def reading(self) -> Reading:
        """Return the state of the host, at most `REFRESH_S` old."""
        now = time.monotonic()
        if self._reading is None or now - self._read_at > REFRESH_S:
            self._reading, self._read_at = self.host.read(), now
        return self._reading

    def take(self, spec: Spec, creating: int) -> None:
        """Count `spec` in. Raises `Exhausted` when the host is full."""
        limits = self.limits
        if self.sandboxes >= self.sandboxes_max:
            which = "limits.sandboxes"
            if self.sandboxes_max < limits.sandboxes:
                which = f"the open file limit ({self.host.files_max})"
            raise _full("sandboxes", f"{self.sandboxes} sandboxes live, {which} reached")
        if self._files + self._cost(spec) > self.host.files_max - FILES_RESERVE:
            why = f"{self.sandboxes} sandboxes live, the open file limit"
            raise _full("sandboxes", f"{why} ({self.host.files_max}) reached")
        if creating >= limits.queued_creates:
            raise _full("queued_creates", f"{creating} creates are waiting")
        reading = self.reading()
        if reading.critical:
            raise _full("pressure", f"the host is under pressure: {reading.critical}")
        self._check_memory(spec, reading, creating)
        if limits.cpu_overcommit:
            most = self.host.cpus * limits.cpu_overcommit
            if self.cpu_requested + spec.cpu_cores > most:
                raise _full("cpu", f"{self.cpu_requested:g} of {most:g} CPUs are promised")
        if reading.tasks + limits.pids_reserve > reading.tasks_max:
            raise _full("pids", f"{reading.tasks} of the host's {reading.tasks_max} pids are used")
        if reading.disk_free_bytes < limits.disk_headroom_mb << 20:
            raise _full("disk", f"{reading.disk_free_bytes >> 20} MiB free below paths.state")
        self.count(spec)

    def count(self, spec: Spec) -> None:
        """Count a sandbox that is there already (re-adopted)."""
        self.sandboxes += 1
        self._files += self._cost(spec)
        self.memory_requested += self._memory(spec)
        self.cpu_requested += spec.cpu_cores

    def give_back(self, spec: Spec) -> None:
        self.sandboxes -= 1
        self._files -= self._cost(spec)
        self.memory_requested -= self._memory(spec)
        self.cpu_requested -= spec.cpu_cores

    def _cost(self, spec: Spec) -> int:
        able = self._backends[spec.backend]
        ruled = spec.network != "none" and spec.policy is not None
        return able.files_each + able.files_ruled * ruled

    def _memory(self, spec: Spec) -> int:
        """Return what `spec` asks for, and what is needed beside, as by a monitor of machines."""
        able = self._backends[spec.backend]
        cpus = spec.vm.vcpus if spec.vm is not None else 0
        return spec.memory_bytes + able.memory_each + able.memory_each_cpu * cpus

    def _check_memory(self, spec: Spec, reading: Reading, creating: int) -> None:
        limits = self.limits
        wanted = self._memory(spec)
        if wanted > reading.memory_total_bytes:
            raise InvalidArgument(
                f"memory_limit_mb {spec.memory_bytes >> 20} takes {wanted >> 20} MiB, "
                f"more than the host has ({reading.memory_total_bytes >> 20} MiB)",
                field="memory_limit_mb",
            )
        most = int(reading.memory_total_bytes * limits.memory_overcommit)
        if self.memory_requested + wanted > most:
            raise _full("memory", f"{self.memory_requested >> 20} MiB of {most >> 20} are promised")
        if reading.memory_available_bytes < limits.memory_reserve_mb << 20:
            raise _full("memory", f"{reading.memory_available_bytes >> 20} MiB are available")
        self._check_target(spec, creating)

    def _check_target(self, spec: Spec, creating: int) -> None:
        """By what is used, not what was asked for: those being made have not used theirs yet."""
        if self._relief is None:
            return
        beginning = min(creating, self.limits.concurrent_creates) + 1
        above = self.above_target_bytes(beginning * min(self._reserve_bytes, spec.memory_bytes))
        if above and above > (relief := self._relief()):
            raise _full(
                "memory",
                f"a new sandbox would put memory {above >> 20} MiB above reclaim.target_percent, "
                f"and idle ones can give {relief >> 20} MiB at once",
            )


def _full(limit: str, why: str) -> Exhausted:
    return Exhausted(
        f"this host takes no more sandboxes now: {why}; retry later or on another host", limit=limit
    )
