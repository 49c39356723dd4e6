"""The control groups that a bench makes: all under its own name, in every hierarchy of the host."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

PREFIX = "dsec-bench-"
PATIENCE_S = 10.0


class CgroupError(Exception):
    """A group of ours cannot be removed; the message names it."""


def own_group(suffix: str = "") -> str:
    """Return the name of this process's group; its pid tells later runs whether we still live."""
    return f"{PREFIX}{os.getpid()}{suffix}"


def hierarchies() -> list[Path]:
    """Return the mount points of the host's cgroup hierarchies, v1 and v2."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        left, _, right = line.partition(" - ")
        if right.split()[0] in ("cgroup", "cgroup2") and left.split()[3] == "/":
            found.append(Path(left.split()[4]))
    return found


def is_v2(root: Path) -> bool:
    """Return whether the hierarchy mounted at `root` is the v2 one (cgroups(7))."""
    return (root / "cgroup.controllers").exists()


def make(name: str) -> list[Path]:
    """Make the group `name` (may be nested) in every hierarchy and return the directories."""
    made = []
    for root in hierarchies():
        directory = root
        for part in Path(name).parts:
            parent, directory = directory, directory / part
            directory.mkdir(exist_ok=True)
            if (directory / "tasks").exists():  # v1: a new cpuset is empty and takes no process
                for setting in ("cpuset.cpus", "cpuset.mems"):
                    if (directory / setting).exists():
                        (directory / setting).write_text((parent / setting).read_text())
        made.append(directory)
    return made


def processes_in(name: str) -> set[int]:
    """Return the pids in the group `name` and below, over all hierarchies."""
    found: set[int] = set()
    for root in hierarchies():
        for file in (root / name).rglob("cgroup.procs"):
            with contextlib.suppress(OSError):
                found |= {int(word) for word in file.read_text().split()}
    return found - {0, os.getpid()}


def kill(name: str, patience_s: float = PATIENCE_S) -> int:
    """Kill every process in the group `name` and below; return how many there were."""
    killed: set[int] = set()
    deadline = time.monotonic() + patience_s
    while (pids := processes_in(name)) and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= pids
        time.sleep(0.01)
    return len(killed)


def remove(name: str, patience_s: float = PATIENCE_S) -> int:
    """Remove the group `name` with all below it; return in how many hierarchies it was.

    Its processes may still be dying. Raises CgroupError when they do not.
    """
    count = 0
    deadline = time.monotonic() + patience_s
    for root in hierarchies():
        top = root / name
        count += top.exists()
        while top.exists():
            for directory, _, _ in os.walk(top, topdown=False):
                with contextlib.suppress(OSError):
                    Path(directory).rmdir()
            if top.exists():
                if time.monotonic() > deadline:
                    raise CgroupError(f"cgroup {top} cannot be removed: something runs in it")
                time.sleep(0.02)
    return count
