"""What the processes of a container are confined by, made of a policy once and then shared.

What the platform protects in every container is in all of them: masks and read-only mounts of
/proc, the command part of the system call filter. A policy adds guards over paths, a narrower
filter, and a Landlock ruleset where its files are closed by default. Mounts belong to the
container's tree: whoever enters it meets them, the files API too. The ruleset binds commands only.
"""

from __future__ import annotations

import functools

import msgspec

from dsecd.host import probe
from dsecd.host.plan import Guard
from dsecd.policy import guards, landlock, masks, seccomp
from dsecd.policy.compile import Compiled
from dsecd.policy.masks import Masks
from dsecd.policy.mechanisms import NEEDS
from dsecd.policy.rules import FilePolicy, SystemPolicy
from libdsec.errors import InvalidArgument


class Confinement(msgspec.Struct, frozen=True, kw_only=True):
    """`masked` and `read_only` are the platform's, over /proc; `guards` the policy's."""

    masked: tuple[str, ...]
    read_only: tuple[str, ...]
    guards: tuple[Guard, ...] = ()
    seccomp: bytes
    landlock: landlock.Ruleset | None = None
    apparmor: str = ""


class Confiner:
    """Makes confinements on one host, which has Landlock or not.

    What the BPF security module decides by itself (`by_module`) needs no guards; they would only
    close more than the policy says. Landlock is for hosts that have no security module at all.
    """

    def __init__(self, platform: Masks, *, has_landlock: bool, by_module: bool = False) -> None:
        self._platform, self._by_module = platform, by_module
        self._landlock = has_landlock
        self._default = self._make(FilePolicy(), SystemPolicy())
        self._made = functools.lru_cache(maxsize=1024)(self._make)

    def confine(self, policy: Compiled | None) -> Confinement:
        """Return what enforces `policy`, of what this host has. Raises `InvalidArgument`."""
        return self._default if policy is None else self._made(policy.files, policy.system)

    def _make(self, files: FilePolicy, system: SystemPolicy) -> Confinement:
        placed = () if self._by_module else guards.for_policy(files, system)
        return Confinement(
            masked=self._platform.masked,
            read_only=self._platform.read_only,
            guards=placed,
            seccomp=_filter(system, guarded=bool(placed)),
            landlock=landlock.for_policy(files) if self._landlock else None,
        )


def for_host() -> Confiner:
    """Return the confiner of this host; what it has is looked up once."""
    has = {name: probe.has(NEEDS[name]) for name in ("landlock", "apparmor", "bpf_lsm")}
    return Confiner(
        masks.for_host(),
        has_landlock=has["landlock"] and not (has["apparmor"] or has["bpf_lsm"]),
        by_module=has["bpf_lsm"],
    )


def _filter(system: SystemPolicy, *, guarded: bool) -> bytes:
    allowed, denied = (
        frozenset(rule.request for rule in system.ioctls if rule.verdict == verdict)
        for verdict in ("allow", "deny")
    )
    options = seccomp.Options(
        ioctls_allowed=allowed if system.ioctl_default == "deny" else None,
        ioctls_denied=denied,
        mounts=not guarded and not seccomp.closes_mounts(system),
    )
    try:
        return seccomp.command_filter(options)
    except ValueError as error:
        raise InvalidArgument(
            f"policy: {len(system.ioctls)} rules for ioctls do not fit into a system call filter "
            f"({error}); use fewer",
            field="policy",
        ) from error
