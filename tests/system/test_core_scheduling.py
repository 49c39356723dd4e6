"""Core scheduling: the threads of one core run only tasks that have the same cookie.

Needs SMT and a kernel with CONFIG_SCHED_CORE, which Debian's are built without. That of microVMs
has it: scripts/vm-test --smt runs these in a guest with two cores of two threads. What the product
calls is checked with prctl(2) itself (core-scheduling.rst of the kernel's documentation).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import psutil
import pytest

from dsecd import fastpath
from dsecd.backends import container_cpu
from dsecd.backends.container_holding import Holding
from dsecd.backends.container_host import ContainerHost
from dsecd.host.cgroup import SandboxCgroup

pytestmark = [pytest.mark.root, pytest.mark.smt, pytest.mark.needs("core_scheduling")]
PR_SCHED_CORE, GET, ONE_THREAD = 62, 0, 0
SIBLINGS = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list")
WATCHED_S = 3.0
Process = subprocess.Popen[bytes]
_libc = ctypes.CDLL(None, use_errno=True)


def cookie(pid: int) -> int:
    """Return a thread's cookie; 0 is none."""
    found = ctypes.c_uint64()
    if _libc.prctl(PR_SCHED_CORE, GET, pid, ONE_THREAD, ctypes.byref(found)):
        raise OSError(ctypes.get_errno(), "PR_SCHED_CORE_GET")
    return found.value


@contextlib.contextmanager
def process(script: str = "read line; sleep 600 & echo $!; wait") -> Iterator[Process]:
    """A shell in a group of its own; this one starts a child when it is told to, and says which."""
    command, pipe = ["sh", "-c", f"echo; {script}"], subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, start_new_session=True) as made:
        assert made.stdout is not None
        made.stdout.readline()
        try:
            yield made
        finally:
            os.killpg(made.pid, signal.SIGKILL)


def child_of(parent: Process) -> int:
    assert parent.stdin is not None
    assert parent.stdout is not None
    parent.stdin.write(b"\n")
    parent.stdin.flush()
    return int(parent.stdout.readline())


def test_each_process_gets_a_cookie_of_its_own() -> None:
    with process() as first, process() as second:
        assert cookie(first.pid) == cookie(second.pid) == 0
        fastpath.make_sched_cookie(first.pid)
        assert cookie(first.pid) == fastpath.get_sched_cookie(first.pid) != 0
        assert cookie(second.pid) == 0
        fastpath.make_sched_cookie(second.pid)
        assert 0 != cookie(second.pid) != cookie(first.pid)
    assert cookie(os.getpid()) == 0


def test_what_a_process_starts_has_its_cookie() -> None:
    with process() as parent:
        fastpath.make_sched_cookie(parent.pid)
        assert cookie(child_of(parent)) == cookie(parent.pid) != 0


def test_a_cookie_is_shared_and_taken_away_by_one_who_stays_without() -> None:
    with process() as first, process() as second:
        fastpath.make_sched_cookie(first.pid)
        fastpath.share_sched_cookie(first.pid, second.pid)
        assert cookie(second.pid) == cookie(first.pid) != 0
        assert cookie(os.getpid()) == 0
        fastpath.share_sched_cookie(0, second.pid)
        assert cookie(second.pid) == 0 != cookie(first.pid)


def test_a_new_cookie_takes_the_place_of_the_old_one() -> None:
    with process() as one:
        fastpath.make_sched_cookie(one.pid)
        before = cookie(one.pid)
        fastpath.make_sched_cookie(one.pid)
        assert 0 != cookie(one.pid) != before


def cookies(pid: int) -> list[int]:
    """Return those of all threads of a process."""
    return [cookie(int(thread.name)) for thread in Path(f"/proc/{pid}/task").iterdir()]


def test_a_class_is_of_every_thread_of_a_sandbox() -> None:
    """The CPUs of a microVM are threads of its monitor, a command that dsec-init has started."""
    threads = (
        "import threading, time\n"
        "for _ in range(3): threading.Thread(target=time.sleep, args=(600,)).start()\n"
        'print("started", flush=True)'
    )
    with process() as init, process(f"exec {sys.executable} -ISc '{threads}'") as monitor:
        assert monitor.stdout is not None
        assert monitor.stdout.readline() == b"started\n"
        pids = (init.pid, monitor.pid)
        driver = SimpleNamespace(pids=lambda group: pids, set_cpu_class=lambda *wanted: ())
        host = cast("ContainerHost", SimpleNamespace(driver=driver))
        holding = Holding("s0-n0-1-1")
        holding.pid, holding.cgroup = init.pid, SandboxCgroup(holding.sandbox, "")
        assert container_cpu.set_class(host, holding, "latency_sensitive") == ()
        own = cookie(init.pid)
        assert own != 0
        assert cookies(monitor.pid) == [own] * 4
        assert cookie(child_of(init)) == own
        assert container_cpu.set_class(host, holding, "best_effort") == ()
        assert {*cookies(init.pid), *cookies(monitor.pid)} == {0}


def cpus_used(processes: Sequence[Process]) -> float:
    """Return how many CPUs they use together, by the kernel's own account."""

    def used_s() -> float:
        times = [psutil.Process(one.pid).cpu_times() for one in processes]
        return sum(one.user + one.system for one in times)

    begin, before = time.monotonic(), used_s()
    time.sleep(WATCHED_S)
    return (used_s() - before) / (time.monotonic() - begin)


def test_threads_of_a_core_never_run_two_cookies_at_once() -> None:
    """Each of two busy processes has one thread of a core: with two cookies they take turns."""
    cpus = [int(cpu) for cpu in re.split("[-,]", SIBLINGS.read_text().strip())]
    with contextlib.ExitStack() as stack:
        busy = [stack.enter_context(process("while :; do :; done")) for _ in cpus]
        for one, cpu in zip(busy, cpus, strict=True):
            os.sched_setaffinity(one.pid, {cpu})
        without = cpus_used(busy)
        for one in busy:
            fastpath.make_sched_cookie(one.pid)
        apart = cpus_used(busy)
        for one in busy[1:]:
            fastpath.share_sched_cookie(busy[0].pid, one.pid)
        together = cpus_used(busy)
    print(f"CPUs: {without:.2f} without, {apart:.2f} with two cookies, {together:.2f} with one")
    assert apart < 1.3, (without, apart, together)
    assert min(without, together) > 1.6, (without, apart, together)
