"""How a container competes for CPUs: its group, and on SMT a core of its own while it runs."""

from __future__ import annotations

import errno

from dsecd import fastpath
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_host import ContainerHost
from libdsec.errors import Internal, Unsupported
from libdsec.model import CpuClass

_ROUNDS = 8  # a process that was being forked during one is found by the next


def set_class(host: ContainerHost, holding: Holding, cpu_class: CpuClass) -> tuple[str, ...]:
    """Put a container in a class; returns what this host lacks of it. Raises `Internal`."""
    assert holding.cgroup is not None
    try:
        missing = host.driver.set_cpu_class(holding.cgroup, holding.slot, cpu_class)
    except OSError as error:
        raise Internal(f"cannot set the CPU class of {holding.sandbox}: {error}") from error
    try:
        _set_cookie(host, holding, own=cpu_class == "latency_sensitive")
    except Unsupported as error:
        if cpu_class == "latency_sensitive":
            missing = (*missing, f"latency_sensitive: no core of its own, {error.detail['reason']}")
    return missing


def _set_cookie(host: ContainerHost, holding: Holding, own: bool) -> None:
    """Let no one else run on the SMT siblings of a container's CPUs meanwhile, or end that.

    A child has its parent's cookie, so all that dsec-init starts later has its own. To take the
    cookie of a process without one is to have none. Raises `Unsupported`.
    """
    assert holding.cgroup is not None
    wanted = _cookie(holding.pid)
    if own and not wanted:
        fastpath.make_sched_cookie(holding.pid)
        wanted = _cookie(holding.pid)
    elif not own:
        if not wanted:
            return
        wanted = 0
        _share(0, holding.pid)
    for _ in range(_ROUNDS):
        others = [pid for pid in host.driver.pids(holding.cgroup) if _cookie(pid) != wanted]
        if not others:
            return
        for pid in others:
            _share(holding.pid, pid)


def _share(source: int, target: int) -> None:
    """`source` 0: ours, which is none. One that ended has no use for it."""
    try:
        fastpath.share_sched_cookie(source, target)
    except fastpath.StepError as error:
        if error.errno != errno.ESRCH:
            raise Internal(f"core scheduling: {error}") from error


def _cookie(pid: int) -> int:
    try:
        return fastpath.get_sched_cookie(pid)
    except fastpath.StepError as error:
        if error.errno != errno.ESRCH:
            raise Internal(f"core scheduling: {error}") from error
        return 0
