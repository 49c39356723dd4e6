"""The part of `libdsec.model` that is about what is used; import it from there."""

from __future__ import annotations

import msgspec


class _Info(msgspec.Struct, omit_defaults=True, kw_only=True):
    """Base of results; a newer peer may add fields."""


class Metrics(_Info):
    """Resource use of one sandbox. Limits repeat what was granted.

    `memory_bytes` is charged to the sandbox, `memory_shared_bytes` its share of pages that several
    processes map (layers, mostly), `memory_swapped_bytes` paged out. `stalled` has cpu, memory and
    io: percent of the last 10 s in which one of its tasks waited (PSI); {} without PSI.
    """

    memory_bytes: int = 0
    memory_shared_bytes: int = 0
    memory_swapped_bytes: int = 0
    memory_limit_bytes: int = 0
    cpu_usage_s: float = 0.0
    cpu_limit: float = 0.0
    pids: int = 0
    pids_limit: int = 0
    disk_bytes: int = 0
    disk_limit_bytes: int = 0
    oom_kills: int = 0
    rx_bytes: int = 0
    tx_bytes: int = 0
    denied: int = 0  # calls, packets and sockets that the network policy refused
    uptime_s: float = 0.0
    stalled: dict[str, float] = {}


class HostStats(_Info):
    """op `host.stats`: what the daemon holds and how much it may still take.

    Overcommit is what sandboxes asked for, as a multiple of what the host has. `reclaim_need_bytes`
    is how much the host is above `reclaim.target_percent`.
    """

    node: str = ""
    version: str = ""
    uptime_s: float = 0.0
    sandboxes: int = 0
    sandboxes_max: int = 0
    memory_total_bytes: int = 0
    memory_available_bytes: int = 0
    memory_requested_bytes: int = 0
    cpus: int = 0
    cpu_requested: float = 0.0
    swap_total_bytes: int = 0
    swap_free_bytes: int = 0
    memory_overcommit: float = 0.0
    cpu_overcommit: float = 0.0
    reclaim_need_bytes: int = 0
