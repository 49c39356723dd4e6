"""The part of `libdsec.model` that is about classes of CPU use, pause and resume; import it from
there."""

from __future__ import annotations

from typing import Literal

import msgspec

CpuClass = Literal["latency_sensitive", "standard", "best_effort"]


class _Args(msgspec.Struct, omit_defaults=True, forbid_unknown_fields=True, kw_only=True):
    """Base of arguments."""


class _Info(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Base of results; a newer peer may add fields."""


class SetCpuClass(_Args):
    """op `sandbox.set_cpu_class` → `SandboxInfo`, whose notes say what this host does not give."""

    id: str
    cpu_class: CpuClass


class PauseArgs(_Args):
    """op `sandbox.pause` → `Paused`. `target_bytes` of memory may stay; None: as few as it can."""

    id: str
    target_bytes: int | None = None


class PauseManyArgs(_Args):
    """op `sandbox.pause_many` → list of `Paused`: every sandbox with all of `labels`."""

    labels: dict[str, str]
    target_bytes: int | None = None


class ResumeManyArgs(_Args):
    """op `sandbox.resume_many` → list of `Resumed`: every sandbox with all of `labels`."""

    labels: dict[str, str]


class Paused(_Info):
    """What pausing freed: memory charged to the sandbox before and after it, and paged out now.

    `notes` say what was not possible. With `error` (of one among many) it was not paused.
    """

    id: str
    memory_before_bytes: int = 0
    memory_bytes: int = 0
    memory_swapped_bytes: int = 0
    notes: list[str] = []
    error: dict[str, object] | None = None


class Resumed(_Info):
    """One of `sandbox.resume_many`; with `error` it was not resumed."""

    id: str
    error: dict[str, object] | None = None
