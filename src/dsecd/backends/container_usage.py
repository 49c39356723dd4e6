"""What a container uses of the host, and taking memory back from it."""

from __future__ import annotations

import asyncio

from dsecd.backends.abc import Usage, Warmth
from dsecd.backends.container_holding import FD_UPPER, Holding
from dsecd.backends.container_host import ContainerHost
from dsecd.host import pageout, pressure, processes
from libdsec.errors import Internal

_PROCESSES = 256  # whose mappings are looked at; 50-100 µs each
_RESOURCES: tuple[pressure.Resource, ...] = ("cpu", "memory", "io")


async def measure(host: ContainerHost, holding: Holding) -> Usage:
    """Return it as it is now. Raises `DSecError`, `OSError`."""
    assert holding.cgroup is not None
    found = host.driver.usage(holding.cgroup, holding.slot)
    received = sent = 0
    if holding.attachment is not None:
        traffic = (await host.nat.traffic([holding.attachment])).get(holding.sandbox)
        if traffic is not None:
            received, sent = traffic.rx_bytes, traffic.tx_bytes
    if holding.upper is not None:
        disk = host.uppers.usage(holding.upper)
    else:
        disk = processes.used_bytes(holding.pid, FD_UPPER)
    pids = host.driver.pids(holding.cgroup)[:_PROCESSES]
    return Usage(
        memory_bytes=found.memory_bytes,
        memory_shared_bytes=await asyncio.to_thread(pageout.shared_bytes, pids),
        memory_swapped_bytes=found.swapped_bytes,
        stalled={name: _stalled(name, holding.cgroup.path) for name in _RESOURCES},
        cpu_usage_s=found.cpu_usage_s,
        pids=found.pids,
        oom_kills=found.oom_kills,
        disk_bytes=disk,
        disk_limit_bytes=holding.upper_bytes,
        rx_bytes=received,
        tx_bytes=sent,
        denied=host.networks.denied(holding),
    )


def _stalled(resource: pressure.Resource, path: str) -> float:
    found = pressure.read(resource, path)
    return found.some.avg10 if found is not None else 0.0


def warmth(host: ContainerHost, holding: Holding) -> Warmth:
    """Return what tells how cold a container is."""
    assert holding.cgroup is not None
    found = host.driver.usage(holding.cgroup, holding.slot)
    return Warmth(
        memory_bytes=found.memory_bytes,
        cpu_usage_s=found.cpu_usage_s,
        memory_stalled=_stalled("memory", holding.cgroup.path),
    )


async def trim(host: ContainerHost, holding: Holding, want_bytes: int) -> int:
    """Page out memory; return how much less it holds. Raises `Internal`."""
    assert holding.cgroup is not None
    before = host.driver.usage(holding.cgroup, holding.slot).memory_bytes
    try:
        await asyncio.to_thread(host.driver.trim, holding.cgroup, want_bytes)
    except OSError as error:
        raise Internal(f"cannot reclaim from {holding.sandbox}: {error.strerror}") from error
    if holding.cgroup is None:
        return 0  # it ended meanwhile
    return max(0, before - host.driver.usage(holding.cgroup, holding.slot).memory_bytes)
