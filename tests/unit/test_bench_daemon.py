"""The daemon of a bench: when it counts as started, and that it does not outlive its bench."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from dsec_bench.create.daemon import accepts

# A bench with a daemon that, as dsecd, no parent-death signal ends; then it waits to be killed.
BENCH = """
import os, subprocess, sys, time
from dsec_bench import guard
daemon = subprocess.Popen([sys.executable, "-c", sys.argv[1]], start_new_session=True)
watcher = guard.start(f"dsec-bench-{os.getpid()}-0", daemon.pid)
print(daemon.pid, watcher.pid, flush=True)
time.sleep(60)
"""
DAEMON = """
import pathlib, signal, sys, time
def end(*_):
    pathlib.Path({mark!r}).write_text("in order")
    sys.exit()
signal.signal(signal.SIGTERM, end)
pathlib.Path({ready!r}).touch()
time.sleep(60)
"""


def test_a_socket_file_without_a_listener_is_not_a_started_daemon(tmp_path: Path) -> None:
    path = tmp_path / "dsecd.sock"
    assert not accepts(path)
    with socket.socket(socket.AF_UNIX) as end:
        end.bind(str(path))
        assert not accepts(path)
        end.listen()
        assert accepts(path)
    assert not accepts(path)


@pytest.mark.parametrize("victim", ["bench", "daemon"])
def test_the_guard_ends_the_daemon_of_a_killed_bench_and_itself(
    tmp_path: Path, victim: str
) -> None:
    mark, ready = tmp_path / "mark", tmp_path / "ready"
    code = DAEMON.format(mark=str(mark), ready=str(ready))
    command = [sys.executable, "-c", BENCH, code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as bench:
        assert bench.stdout is not None
        daemon, guard = (os.pidfd_open(int(pid)) for pid in bench.stdout.readline().split())
        try:
            while not ready.exists():
                assert not ended(daemon, 0.01)
            if victim == "bench":
                bench.kill()
            else:
                signal.pidfd_send_signal(daemon, signal.SIGKILL)
            assert ended(daemon, 30)
            assert ended(guard, 30)
            assert mark.exists() == (victim == "bench")
        finally:
            for fd in (daemon, guard):
                if not ended(fd, 0):
                    signal.pidfd_send_signal(fd, signal.SIGKILL)
                os.close(fd)
            bench.kill()


def ended(pidfd: int, patience_s: float) -> bool:
    return bool(select.select([pidfd], [], [], patience_s)[0])
