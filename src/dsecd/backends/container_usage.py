"""What a container uses of the host."""

from __future__ import annotations

from dsecd.backends.abc import Usage
from dsecd.backends.container_holding import FD_UPPER, Holding
from dsecd.backends.container_host import ContainerHost
from dsecd.host import processes


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
    return Usage(
        memory_bytes=found.memory_bytes,
        cpu_usage_s=found.cpu_usage_s,
        pids=found.pids,
        oom_kills=found.oom_kills,
        disk_bytes=disk,
        disk_limit_bytes=holding.upper_bytes,
        rx_bytes=received,
        tx_bytes=sent,
        denied=host.networks.denied(holding),
    )
