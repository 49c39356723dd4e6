"""What a test may leave behind: a census of the host's state, taken before and after.

`Census.take` reads it, `left_over` names what is new. Only what DSec makes is looked at, so a busy
host does not disturb a test; a host on which two test runs go on at once does, and says so with
``DSEC_LEAKS=own``: then only things that carry this run's process id in their name, this process's
descriptors and its descendants count.
"""

# ruff: noqa: PTH110, PTH115, PTH123, PTH208 - a census reads thousands of entries; plain strings halve its time

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

_OURS = re.compile(r"dsec")
_PROGRAMS = re.compile(rb"Name:\t(dsec-|dsecd|dsec_bench)")  # in /proc/PID/status
_UID = re.compile(rb"^Uid:\t(\d+)", re.MULTILINE)
FIRST_UID = 0x10000000  # sandboxes run under host ids from here on
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_DIRECTORIES = ("/run", "/var/lib", "/var/tmp", "/tmp", "/dev/shm")
# Descriptors that pytest and asyncio open and close by themselves
_QUIET_FDS = re.compile(r"/\.pytest_cache/|/\.hypothesis/|^/dev/null$|^/proc/|/__pycache__/")

Census = dict[str, Counter[str]]


@dataclass(frozen=True)
class Scope:
    """`host`: look at cgroups, mounts, namespaces and so on, not only at this process."""

    host: bool
    own: str = ""  # "" → everything of DSec's, else only names that hold this text

    def counts(self, name: str) -> bool:
        return bool(_OURS.search(name)) and self.own in name


def take(scope: Scope) -> Census:
    """Return what is there now, by kind."""
    census = {"descriptor": Counter(_descriptors()), "process": Counter(_processes(scope))}
    if scope.host:
        for kind, look in _HOST.items():
            census[kind] = Counter(look(scope))
    return census


def left_over(before: Census, after: Census) -> list[str]:
    """Return "kind: name" for everything that `after` has and `before` has not."""
    found = []
    for kind, names in after.items():
        for name, count in (names - before.get(kind, Counter())).items():
            found.append(f"{kind}: {name}" + (f" (×{count})" if count > 1 else ""))
    return sorted(found)


def _descriptors() -> Iterator[str]:
    for entry in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{entry}")
        except OSError:
            continue  # the descriptor of this very listing
        if not _QUIET_FDS.search(target):
            # inode numbers of sockets and pipes are new each time; their number is what counts
            yield re.sub(r"^(socket|pipe):\[\d+\]$", r"\1", target)


def _processes(scope: Scope) -> Iterator[str]:
    """Our descendants, and on the host every program of ours and all that runs in a sandbox."""
    seen: set[int] = set()
    if _has_children():
        for child in psutil.Process().children(recursive=True):
            seen.add(child.pid)
            yield from _described(child)
    if not scope.host or scope.own:
        return
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if pid in seen or pid == os.getpid():
            continue
        with contextlib.suppress(OSError, psutil.Error):  # it ended
            with open(f"/proc/{pid}/status", "rb") as file:
                status = file.read()
            uid = _UID.search(status)
            if _PROGRAMS.match(status) or (uid and int(uid[1]) >= FIRST_UID):
                yield from _described(psutil.Process(pid))


def _has_children() -> bool:
    """False spares a look at every process of the host, twice a test. A kernel without these lists
    (CONFIG_PROC_CHILDREN) answers True."""
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/children") as children:
                if children.read(1):
                    return True
        except FileNotFoundError:
            if os.path.exists(f"/proc/self/task/{task}"):
                return True
    return False


def _described(process: psutil.Process) -> Iterator[str]:
    try:
        if process.status() != psutil.STATUS_ZOMBIE or process.ppid() == os.getpid():
            yield f"{process.pid} {' '.join(process.cmdline())[:120] or process.name()}"
    except psutil.Error:
        return


def _mounts(scope: Scope) -> Iterator[str]:
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if scope.counts(f"{fields[4]} {tail[1]}"):
            yield f"{fields[4]} ({tail[0]}, {tail[1]})"


def _cgroups(scope: Scope) -> Iterator[str]:
    roots = [_CGROUP_ROOT] if (_CGROUP_ROOT / "cgroup.controllers").exists() else []
    roots += [_CGROUP_ROOT / name for name in ("unified", "cpu", "memory", "pids")]
    for root in roots:
        if not root.is_dir():
            continue
        for entry in root.iterdir():
            if entry.is_dir() and scope.counts(entry.name):
                for path, _, _ in os.walk(entry):
                    if not _pooled(path):
                        yield path


def _pooled(path: str) -> bool:
    """An empty slot belongs to the pool of a daemon that outlives the test; when the daemon should
    be gone too, the directory above the slot is there to be named."""
    return Path(path).name.startswith("slot-") and not Path(path, "cgroup.procs").read_text()


def _network_namespaces(scope: Scope) -> Iterator[str]:
    """Namespaces that a process lives in, and those kept by a bind mount."""
    if scope.own:
        return
    seen = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            seen.add(os.readlink(f"/proc/{pid}/ns/net"))
        except OSError:
            continue
    yield from seen
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        if " - nsfs " in line:
            yield line.split()[4]


def _interfaces(scope: Scope) -> Iterator[str]:
    if not scope.own:
        yield from os.listdir("/sys/class/net")


def _directories(scope: Scope) -> Iterator[str]:
    for base in _DIRECTORIES:
        try:
            names = os.listdir(base)
        except OSError:
            continue
        for name in names:
            if scope.counts(name):
                yield f"{base}/{name}"


def _pins(scope: Scope) -> Iterator[str]:
    for path, directories, files in os.walk("/sys/fs/bpf"):
        for name in directories + files:
            if scope.counts(f"{path}/{name}"):
                yield f"{path}/{name}"


def _tables(scope: Scope) -> Iterator[str]:
    if shutil.which("nft") is None:
        return
    command = ["nft", "-j", "list", "tables"]
    done = subprocess.run(command, capture_output=True, timeout=20, check=False)
    if done.returncode:
        return
    for entry in json.loads(done.stdout)["nftables"]:
        table = entry.get("table")
        if table and scope.counts(table["name"]):
            yield f"{table['family']} {table['name']}"


_HOST: dict[str, Callable[[Scope], Iterator[str]]] = {
    "mount": _mounts,
    "cgroup": _cgroups,
    "network namespace": _network_namespaces,
    "interface": _interfaces,
    "directory": _directories,
    "BPF pin": _pins,
    "nft table": _tables,
}
