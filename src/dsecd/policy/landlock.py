"""File rules as a Landlock ruleset: what a command may open when everything else is closed. Pure.

Landlock only allows: a policy whose default is `deny` becomes one rule per path that is opened, and
what it denies beneath these is the mounts' work (`guards`). Sources: landlock(7) and
Documentation/userspace-api/landlock.rst of the kernel.
"""

from __future__ import annotations

import msgspec

from dsecd.policy import globs
from dsecd.policy.rules import Access, FilePolicy

# include/uapi/linux/landlock.h, LANDLOCK_ACCESS_FS_*
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
_REMOVE_AND_MAKE = sum(1 << bit for bit in range(4, 13))  # REMOVE_DIR to MAKE_SYM
_REFER, _TRUNCATE = 1 << 13, 1 << 14

ACCESS: dict[Access, int] = {
    "read": _READ_FILE | _READ_DIR,
    "write": _WRITE_FILE | _REMOVE_AND_MAKE | _REFER | _TRUNCATE,
    "execute": _EXECUTE,
}
HANDLED = sum(ACCESS.values())


class Ruleset(msgspec.Struct, frozen=True, array_like=True):
    """The accesses that are closed, and for each path those that are opened beneath it.

    `dsec-init` opens the paths for each command, through no symbolic link; a path that is not there
    opens nothing for that command.
    """

    handled: int
    rules: tuple[tuple[str, int], ...]


def for_policy(files: FilePolicy) -> Ruleset | None:
    """Return the ruleset of a policy; None where files are open by default."""
    if files.default == "allow":
        return None
    opened: dict[str, int] = {}
    for rule in files.rules:
        if rule.verdict == "allow" and globs.is_literal(rule.pattern):
            access = sum(ACCESS[each] for each in rule.access)
            opened[rule.pattern] = opened.get(rule.pattern, 0) | access
    return Ruleset(HANDLED, tuple(sorted(opened.items())))
