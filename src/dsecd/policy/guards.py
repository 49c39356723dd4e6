"""Which mounts keep a sandbox from files that a policy closes to it. Pure.

A mask hides a path, a read-only mount keeps what is beneath it from changing, a noexec one from
running; the user namespace locks all of them (mount_namespaces(7)). What is mounted goes along when
a directory above it is renamed, and something else could then be put where it was: so each of those
is held in place by a mount of its own. That must not be covered by another mount either, nor left
behind in another mount namespace, where the kernel would let its mount point be renamed
(fs/namei.c: is_local_mountpoint): a sandbox with guards makes no mounts at all (`seccomp`).

Only literal paths are guarded. A wildcard would have to be looked up when the sandbox starts, and
would say nothing about what appears later.
"""

from __future__ import annotations

import posixpath
import re

from dsecd.host.plan import GUARD_MASK, GUARD_NO_EXEC, GUARD_READ_ONLY, GUARDS_MAX, Guard
from dsecd.policy import globs
from dsecd.policy.rules import EVERY_ACCESS, Access, FilePolicy, SystemPolicy
from libdsec.errors import InvalidArgument

MAX_BYTES = 64 << 10  # of all paths: they travel in one message
_PLATFORM = ("/", "/proc", "/dev")  # what no command could start without
_PROCESS = re.compile(r"/proc/([0-9]+|self|thread-self)(/|$)")  # comes and goes
DEVICES = "devices, and the files of processes in /proc, stay writable"


def mask(pattern: str) -> int | None:
    """Return how the path `pattern` is hidden; None: no mount can do it."""
    return None if _out_of_reach(pattern) or pattern in _PLATFORM else GUARD_MASK


def denial(pattern: str, access: frozenset[Access]) -> int | None:
    """Return how `access` to the path `pattern` is taken away; None: no mount can do it."""
    if access == EVERY_ACCESS:
        return mask(pattern)
    # only a mask takes reading away, and it takes all
    if "read" in access or _out_of_reach(pattern) or pattern == "/proc":
        return None
    return (GUARD_READ_ONLY if "write" in access else 0) | (
        GUARD_NO_EXEC if "execute" in access else 0
    )


def short(pattern: str, access: frozenset[Access]) -> str:
    """Return what a denial by a mount does not do; "" when it does all."""
    devices = globs.covers("/dev", pattern) or pattern == "/"
    return DEVICES if devices and "write" in access and access != EVERY_ACCESS else ""


def _out_of_reach(pattern: str) -> bool:
    return not globs.is_literal(pattern) or _PROCESS.match(pattern) is not None


def in_kernel_tree(path: str) -> bool:
    """Say whether `path` lies in /proc or /dev: nobody inside renames anything there."""
    return globs.covers("/proc", path) or globs.covers("/dev", path)


def for_policy(files: FilePolicy, system: SystemPolicy) -> tuple[Guard, ...]:
    """Return the guards of a policy, those above others first. Raises `InvalidArgument`."""
    wanted: dict[str, int] = {}
    for path, how in _asked(files, system):
        if how is not None:
            wanted[path] = wanted.get(path, 0) | how
    if wanted.get("/"):  # these two have mounts of their own; all that changes in /dev is /dev/shm
        wanted["/dev"] = wanted.get("/dev", 0) | wanted["/"]
    guards: dict[str, int] = {}
    for path in sorted(wanted, key=_depth):
        _add(guards, path, wanted[path])
    found = tuple(Guard(path, how) for path, how in guards.items())
    size = sum(len(guard.path.encode()) for guard in found)
    if len(found) > GUARDS_MAX or size > MAX_BYTES:
        raise InvalidArgument(
            f"policy: denied and hidden paths need {len(found)} mounts with {size} bytes of paths, "
            f"at most {GUARDS_MAX} with {MAX_BYTES} are made; use fewer paths, or the directories "
            "above them",
            field="policy",
        )
    return found


def _asked(files: FilePolicy, system: SystemPolicy) -> list[tuple[str, int | None]]:
    asked = [(pattern, mask(pattern)) for pattern in files.hidden]
    asked += [
        (rule.pattern, denial(rule.pattern, rule.access))
        for rule in files.rules
        if rule.verdict == "deny"
    ]
    asked += [
        (rule.pattern, mask(rule.pattern))
        for rule in system.unix
        if rule.verdict == "deny" and not rule.pattern.startswith("@")
    ]
    return asked


def _depth(path: str) -> tuple[int, str]:
    return (0 if path == "/" else path.count("/"), path)


def _add(guards: dict[str, int], path: str, how: int) -> None:
    """Add a guard and what holds it in place, unless those above it do all of that.

    Beneath a read-only mount nothing is renamed, and beneath a mask there is nothing.
    """
    above = _above(path)
    inherited = 0
    for parent in above[1:] if in_kernel_tree(path) else above:  # mounts that the root's is not
        inherited |= guards.get(parent, 0)
    if inherited & GUARD_MASK or (inherited & GUARD_READ_ONLY and not how & ~inherited):
        return
    if not in_kernel_tree(path):
        fixed = False
        for parent in above[1:]:
            fixed = fixed or bool(guards.get(parent, 0) & GUARD_READ_ONLY)
            if not fixed:
                guards.setdefault(parent, 0)
    guards[path] = GUARD_MASK if how & GUARD_MASK else how


def _above(path: str) -> list[str]:
    """Return the directories above `path`, the root first."""
    found: list[str] = []
    while path != "/":
        path = posixpath.dirname(path)
        found.append(path)
    return found[::-1]
