"""What a sandbox's mount namespace holds: its mounts, and the paths that patterns name in it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec

from dsecd.host import mountinfo, syscalls
from dsecd.host.lsmtable import Place
from libdsec.errors import Exhausted

MAX_LOOKED_AT = 500_000  # entries of directories, for one pattern
_CLONE_FS, _CLONE_NEWNS = 0x200, 0x20000
_NOT_FILES = ("proc", "sysfs", "devpts", "fuse")  # types of file systems, and how others begin


class Search(msgspec.Struct, frozen=True):
    """Where the paths of a pattern may be: below `start`, down to so many levels (None: all)."""

    start: str
    levels: int | None
    matches: Callable[[str], bool]


class Survey(msgspec.Struct, frozen=True):
    """The mounts in their order, and by pattern the paths that it names beside its own."""

    places: list[Place]
    found: dict[str, list[str]]


def survey(mount_ns: int, literals: Sequence[str], searches: Mapping[str, Search]) -> Survey:
    """Look into the mount namespace `mount_ns`. Raises `OSError`; `Exhausted` for too much.

    What a literal path names is what lies behind its symbolic links. This waits for a thread that
    enters the namespace and has the sandbox's root as its own, so that no link leads to the host;
    there is no way back, so it ends then.
    """
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(_survey, mount_ns, literals, searches).result()


def _survey(mount_ns: int, literals: Sequence[str], searches: Mapping[str, Search]) -> Survey:
    mounts = _enter(mount_ns)
    found: dict[str, list[str]] = {}
    for path in literals:
        behind = os.path.realpath(path)
        if behind != path:
            found[path] = [behind]
    avoid = frozenset(mount.point for mount in mounts if mount.type.startswith(_NOT_FILES))
    for pattern, search in searches.items():
        paths = [path for path in _walk(pattern, search, avoid) if search.matches(path)]
        found[pattern] = sorted({*paths, *map(os.path.realpath, paths)})
    places = [Place(mount.device, mount.root, mount.point) for mount in mounts]
    return Survey(places, found)


def _enter(mount_ns: int) -> list[mountinfo.Mount]:
    """Enter the namespace, which may have no /proc of ours; return its mounts."""
    proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        syscalls.call("unshare", _CLONE_FS)
        syscalls.call("setns", mount_ns, _CLONE_NEWNS)
        table = os.open("thread-self/mountinfo", os.O_RDONLY | os.O_CLOEXEC, dir_fd=proc)
    finally:
        os.close(proc)
    with os.fdopen(table, errors="surrogateescape") as file:
        return list(mountinfo.parse(file.read()))


def _walk(pattern: str, search: Search, avoid: frozenset[str]) -> Iterator[str]:
    """Yield the paths below the start."""
    looked_at, waiting = 0, [(search.start, 0)]
    while waiting:
        directory, level = waiting.pop()
        try:
            entries = list(os.scandir(directory))
        except OSError:
            continue  # no directory, or gone
        looked_at += len(entries)
        if looked_at > MAX_LOOKED_AT:
            raise Exhausted(
                f"{pattern}: more than {MAX_LOOKED_AT} paths would have to be looked at; begin the"
                " pattern with the directory that is meant"
            )
        for entry in entries:
            yield entry.path
            deeper = search.levels is None or level + 1 < search.levels
            if deeper and entry.path not in avoid and entry.is_dir(follow_symlinks=False):
                waiting.append((entry.path, level + 1))
