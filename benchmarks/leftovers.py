"""The last line of cleaning up: whatever still carries a name of a bench goes.

A daemon that ends in order leaves nothing for this. After a crash of the daemon, or of a bench, it
kills what runs in our cgroups, removes them, and unmounts what is below our runtime directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import signal
import time
from pathlib import Path

from dsec_bench import cgroups

MNT_DETACH = 2
PATIENCE_S = 20.0
RUN = Path("/run")
TEMPORARY = Path("/var/tmp")  # on a disk: EROFS mounts backed by files refuse tmpfs
_libc = ctypes.CDLL(None, use_errno=True)


def unmount_below(directory: Path) -> int:
    """Detach every mount at or below `directory`, the newest first; return how many there were."""
    inside = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        where = line.split()[4].replace("\\040", " ")
        if Path(where).is_relative_to(directory):
            inside.append(where)
    for where in reversed(inside):
        _libc.umount2(where.encode(), MNT_DETACH)
    return len(inside)


def processes_of(name: str) -> set[int]:
    """Return the processes, but for ours, with a path of the daemon or bench `name` among their
    arguments: a daemon whose bench was killed, and what serves its blobs and outlives it."""
    marks = [f"{RUN / name}/".encode(), f"{TEMPORARY / name}-".encode()]
    found = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):
                line = (entry / "cmdline").read_bytes()
                if any(argument.startswith(tuple(marks)) for argument in line.split(b"\0")):
                    found.add(int(entry.name))
    return found


def end_processes(name: str, patience_s: float = PATIENCE_S) -> int:
    """End these processes, in order if they do so in time; return how many there were."""
    first = processes_of(name)
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in processes_of(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline = time.monotonic() + patience_s
        while processes_of(name) and time.monotonic() < deadline:
            time.sleep(0.05)
    return len(first)


def remove(name: str) -> dict[str, int]:
    """Remove all of the daemon or bench called `name`; return what there was, by kind.

    Raises `cgroups.CgroupError` when something cannot be killed.
    """
    killed = end_processes(name) + cgroups.kill(name)
    mounts = unmount_below(RUN / name)
    groups = cgroups.remove(name)
    counts = {"processes": killed, "mounts": mounts, "cgroups": groups}
    shutil.rmtree(RUN / name, ignore_errors=True)
    for state in TEMPORARY.glob(f"{name}-*"):
        mounts += unmount_below(state)
        shutil.rmtree(state, ignore_errors=True)
    return {what: count for what, count in counts.items() if count}


def sweep_stale() -> None:
    """Remove what benches left that were killed before they could clean up."""
    places = [*cgroups.hierarchies(), RUN, TEMPORARY]
    names = {path.name for place in places for path in place.glob(f"{cgroups.PREFIX}*")}
    for name in names:
        pid, _, rest = name.removeprefix(cgroups.PREFIX).partition("-")
        if pid.isdigit() and not Path(f"/proc/{pid}").exists():
            serial = rest.partition("-")[0]
            remove(f"{cgroups.PREFIX}{pid}" + (f"-{serial}" if serial.isdigit() else ""))
