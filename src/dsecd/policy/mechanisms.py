"""Which mechanism can enforce a typed rule, and how far. Pure.

Each function returns `Way`s in order of preference. A way whose `short` is not empty falls short of
the rule by what it says. Sources: cgroup-bpf and seccomp(2) manual pages, Landlock and AppArmor in
the kernel's admin guide, mount_namespaces(7) for locked mounts.
"""

from __future__ import annotations

import msgspec

from dsecd.policy import globs, guards, seccomp
from dsecd.policy.rules import (
    CHECKED_PORTS,
    EVERY_ACCESS,
    Access,
    FilePolicy,
    FileRule,
    MountRule,
    NameRule,
    NetPolicy,
    SystemPolicy,
    UnixRule,
)

# mechanism: the rows of the probe table that it needs
NEEDS: dict[str, tuple[str, ...]] = {
    "netns": ("network_namespaces",),  # a namespace with loopback only
    # without pins the rules would end with the daemon
    "bpf_cgroup": ("bpf_cgroup", "bpf_fs"),
    "resolver": ("bpf_cgroup", "bpf_fs"),  # it enters addresses there
    "relay": ("bpf_cgroup", "bpf_fs"),  # they close every way around it
    "seccomp": ("seccomp",),
    "mounts": ("user_namespaces",),  # masks, read-only and noexec mounts: see `guards`
    "landlock": ("landlock",),
    "apparmor": ("apparmor",),
    "bpf_lsm": ("bpf_lsm", "bpf_fs"),
}

# how mounts and Landlock go beyond a rule
NO_MOUNTS = "no mounts can be made in such a sandbox"
HELD = (
    "the path and the directories above it are held in place: they cannot be removed or renamed, "
    "and renames and links across them are refused as between file systems (EXDEV); what is "
    "missing of them is made when the sandbox starts"
)
ENTRY = "the path itself cannot be made, removed or renamed, only what is in it be changed"
GAIN = "files cannot be renamed or linked to where more is allowed (EXDEV)"
RENAMED = (
    "a file can be renamed or linked, within its directory, to a name that a rule opens further, "
    "and later commands then have that"
)
APART = "processes of one command neither trace those of another nor see them in /proc"
READ_TOO = "to execute, a rule must allow reading, too"
NOT_LISTENED = "nothing can listen there either"
_MOUNTED = f"{NO_MOUNTS}; {HELD}"
AT_START = "holds for paths that exist when the sandbox starts, not for later ones"
BY_NUMBER = "the resolver alone refuses it: addresses known otherwise are reached"
SOME_BY_NUMBER = "addresses of the name that another rule opens can be reached by number"
SHARED = "other sites on the same addresses can be reached too"
CHECKED_ONLY = "with check_names its ports but tcp 443 (TLS) and 80 (HTTP) are closed"
UNSEEN = "within TLS the server itself may answer for other sites"
WHOLE_NAMES = "holds for whole abstract names and for @**, not for other wildcards"
OWN_CLOSED = "file systems that the sandbox mounts itself are closed"
# what AppArmor does not see (security/apparmor/lsm.c; of Linux 6.12: no hooks for these)
XATTRS = "changes of times and extended attributes are not denied"
INTERPRETED = "a script can still name it as its interpreter"
SEEN = "its attributes can be read, and a unix socket there connected to"
ATTRIBUTES = "chmod, chown and changes of extended attributes are not denied"


class Way(msgspec.Struct, frozen=True, cache_hash=True):
    """A mechanism of `NEEDS`, or `default` where nothing has to be done.

    `short` is what it does not do of the rule, `remark` what else is to be known of it.
    """

    mechanism: str
    short: str = ""
    remark: str = ""


NOTHING_TO_DO = (Way("default"),)
_BY_PACKET = (Way("bpf_cgroup"),)
_NO_LINK = (Way("netns"), Way("bpf_cgroup"))


class Reach(msgspec.Struct, frozen=True):
    """What of the network is open: `closed` is nothing, `everywhere` a whole address family by
    number, `by_number` anything that is not opened by a name. `checked`: names are, at the relay.
    """

    closed: bool
    everywhere: bool
    by_number: bool
    checked: bool


def reach(policy: NetPolicy) -> Reach:
    """Return what of the network a policy opens."""
    opening = [rule for rule in policy.rules if rule.verdict == "allow"]
    names = any(rule.verdict == "allow" for rule in policy.names)
    return Reach(
        closed=policy.default == "deny" and not opening and not names,
        everywhere=policy.default == "allow" or any(not r.prefix.prefixlen for r in opening),
        by_number=policy.default == "allow" or bool(opening),
        checked=policy.check_names,
    )


def for_net(reached: Reach) -> tuple[Way, ...]:
    """Return the ways for rules on networks and for the default."""
    return _NO_LINK if reached.closed else _BY_PACKET


def for_name(rule: NameRule, reached: Reach) -> tuple[Way, ...]:
    """Return the ways for a name; a denied one may be reachable by number."""
    if reached.closed:
        return (Way("netns"), Way("resolver"))
    if rule.verdict == "allow":
        checked = (Way("relay", remark=_checked(rule, reached)),)
        return checked if reached.checked else (Way("resolver", remark=SHARED),)
    if reached.everywhere:
        return (Way("resolver", BY_NUMBER),)
    return (Way("resolver", remark=SOME_BY_NUMBER if reached.by_number else ""),)


def _checked(rule: NameRule, reached: Reach) -> str:
    """Return what is to be known of a name that the relay checks."""
    alone = rule.protocol == "tcp" and rule.first_port == rule.last_port
    remarks = [] if alone and rule.first_port in CHECKED_PORTS else [CHECKED_ONLY]
    remarks += [SOME_BY_NUMBER] if reached.by_number else []
    return "; ".join([*remarks, UNSEEN])


def _bpf_lsm(pattern: str) -> Way:
    """Return what the programs do of a rule at `pattern`: they know names, not wildcards."""
    if not pattern.startswith("@"):
        return Way("bpf_lsm", "" if globs.is_subtree(pattern) else AT_START)
    known = globs.is_literal(pattern) or pattern == "@**"
    return Way("bpf_lsm", "" if known else WHOLE_NAMES)


def for_file(rule: FileRule, policy: FilePolicy) -> tuple[Way, ...]:
    """Return the ways for a rule on files."""
    literal = globs.is_literal(rule.pattern)
    short = "" if rule.verdict == "allow" else _unseen(rule.access)
    lsm = (Way("apparmor", short), _bpf_lsm(rule.pattern))
    if rule.verdict == "allow":
        if policy.default == "allow":
            return NOTHING_TO_DO
        return (*lsm, _landlock(rule)) if literal else lsm
    if guards.denial(rule.pattern, rule.access) is None:
        return lsm
    return (*lsm, Way("mounts", guards.short(rule.pattern, rule.access), _MOUNTED))


def _landlock(rule: FileRule) -> Way:
    """Return what Landlock does of a rule that allows."""
    stricter = [ENTRY, GAIN] if "write" in rule.access else []
    if "execute" in rule.access and "read" not in rule.access:
        stricter.append(READ_TOO)
    return Way("landlock", remark="; ".join(stricter))


def _unseen(access: frozenset[Access]) -> str:
    """Return what AppArmor leaves open where all of `access` is denied."""
    return "; ".join(
        short for word, short in (("write", XATTRS), ("execute", INTERPRETED)) if word in access
    )


def for_hidden(pattern: str) -> tuple[Way, ...]:
    """Return the ways to hide what a pattern covers."""
    lsm = (Way("apparmor", f"{SEEN}; {_unseen(EVERY_ACCESS)}"), _bpf_lsm(pattern))
    return lsm if guards.mask(pattern) is None else (*lsm, Way("mounts", remark=_MOUNTED))


def for_file_default(policy: FilePolicy) -> tuple[Way, ...]:
    """Return the ways to close every path that no rule opens."""
    short = f"{ATTRIBUTES}; {RENAMED}" if _opens_further(policy) else ATTRIBUTES
    return (
        Way("apparmor", _unseen(EVERY_ACCESS)),
        Way("bpf_lsm", remark=OWN_CLOSED),
        Way("landlock", short, f"{NO_MOUNTS}; {APART}"),
    )


def _opens_further(policy: FilePolicy) -> bool:
    """Say whether some rule opens a path further than one that opens a directory above to writing.

    Landlock knows the files that are there when a command starts, and within a directory asks no
    more of a new name than writing (landlock(7), LANDLOCK_ACCESS_FS_REFER).
    """
    opening = [rule for rule in policy.rules if rule.verdict == "allow"]
    return any(
        "write" in above.access
        and not below.access <= above.access
        and above.pattern != below.pattern
        and globs.covers(above.pattern, below.pattern)
        for above in opening
        for below in opening
    )


def for_ioctl() -> tuple[Way, ...]:
    """Return the ways for rules on ioctls and their default: the request is an argument."""
    return (Way("seccomp"),)


def for_mount(rule: MountRule, policy: SystemPolicy) -> tuple[Way, ...]:
    """Return the ways for a rule on mounts; a filter of calls sees neither type nor path."""
    if rule.verdict == "allow" and policy.mount_default == "allow":
        return NOTHING_TO_DO
    if rule.verdict == "deny" and seccomp.closes_mounts(policy):
        return (Way("seccomp"),)
    return (Way("apparmor"), _bpf_lsm(rule.pattern))


def for_mount_default(policy: SystemPolicy) -> tuple[Way, ...]:
    """Return the ways to deny every mount that no rule allows."""
    lsm = (Way("apparmor"), Way("bpf_lsm"))
    return (Way("seccomp"), *lsm) if seccomp.closes_mounts(policy) else lsm


def for_unix(rule: UnixRule, policy: SystemPolicy) -> tuple[Way, ...]:
    """Return the ways for a unix socket; where a mask lies nobody can listen."""
    if rule.verdict == "allow" and policy.unix_default == "allow":
        return NOTHING_TO_DO
    lsm = _bpf_lsm(rule.pattern)  # AppArmor has no hook for unix sockets before Linux 6.17
    abstract = rule.pattern.startswith("@")
    if rule.verdict == "allow" or abstract or guards.mask(rule.pattern) is None:
        return (lsm,)
    return (lsm, Way("mounts", remark=f"{NOT_LISTENED}; {_MOUNTED}"))


def for_unix_default() -> tuple[Way, ...]:
    """Return the ways to close every unix socket that no rule opens."""
    return (Way("bpf_lsm"),)


def for_vsock(policy: SystemPolicy) -> tuple[Way, ...]:
    """Return the ways for vsock: the filter of calls closes the family, or knows no peers."""
    allowed = any(rule.verdict == "allow" for rule in policy.vsock)
    if policy.vsock_default == "deny" and not allowed:
        return (Way("seccomp"),)
    return (Way("bpf_lsm"),)
