"""Ends the daemon of a bench that was killed: a process beside both, which outlives the bench.

    python -m dsec_bench.guard NAME BENCH_PIDFD DAEMON_PIDFD

A parent-death signal does not last (the kernel clears it when dsecd changes its effective ids), so
this waits on pidfds: for the daemon to end, or for the bench, after which it stops the daemon in
order and removes what is left of it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys

from dsec_bench import leftovers

STOP_S = 120.0


def start(name: str, pid: int) -> subprocess.Popen[bytes]:
    """Guard the daemon `pid`, a child of ours called `name`, until it ends."""
    bench, daemon = os.pidfd_open(os.getpid()), os.pidfd_open(pid)
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "dsec_bench.guard", name, str(bench), str(daemon)],
            stdin=subprocess.DEVNULL,
            pass_fds=(bench, daemon),
            start_new_session=True,  # Ctrl-C is for the bench
        )
    finally:
        os.close(bench)
        os.close(daemon)


def watch(name: str, bench: int, daemon: int) -> None:
    """Return when `daemon` has ended by itself, or was ended after `bench`."""
    ended, _, _ = select.select([bench, daemon], [], [])
    if bench not in ended:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(daemon, number)
        if select.select([daemon], [], [], STOP_S)[0]:
            break
    leftovers.remove(name)


if __name__ == "__main__":
    watch(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
