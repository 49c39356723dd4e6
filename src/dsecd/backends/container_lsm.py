"""What containers are denied in their files, by the programs of the security module.

A container is bound when its root is there and its init runs, before any command can: the survey
needs its mounts, and nobody is inside yet who could change them. A checkpoint gives it another
root, which is entered before the swap, beside the present one, and replaces it afterwards.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
from collections.abc import AsyncIterator
from pathlib import Path

from dsecd.backends.container_holding import FD_MOUNT_NS, Holding, Restrictions
from dsecd.backends.spec import Spec
from dsecd.host import bpf, lsmplaces, netpolicy, probe, processes
from dsecd.host.cgroup import TreeDriver
from dsecd.host.lsmplaces import Search
from dsecd.host.lsmpolicy import FilePolicies
from dsecd.host.lsmtable import Table
from dsecd.policy import globs, lsm
from dsecd.policy.mechanisms import NEEDS
from libdsec.errors import Unsupported


class FileRules:
    """The restrictions of all containers of one daemon. Methods belong to one event loop."""

    def __init__(self, pins: Path) -> None:
        self._pins = pins
        self._policies: FilePolicies | None = None
        self._driver: TreeDriver | None = None
        self._cgroups: dict[str, int] = {}  # of bound containers

    def start(self, driver: TreeDriver) -> None:
        """Load the programs, or take over those of the daemon before."""
        if not probe.has(NEEDS["bpf_lsm"]):
            return
        bpf.ensure_bpf_fs(self._pins)
        level = netpolicy.sandbox_level(Path(driver.tree.parent))
        self._driver, self._policies = driver, FilePolicies(level, self._pins)

    def begin(self) -> None:
        """All living containers are recovered: enforce."""
        if self._policies is not None:
            self._policies.start()

    def close(self, *, leave_nothing: bool) -> None:
        if self._policies is not None:
            self._policies.close(remove=leave_nothing)
        if leave_nothing:
            bpf.remove_bpf_fs(self._pins)

    async def confine(self, holding: Holding, spec: Spec) -> None:
        """Put the rules of `spec` in force. Raises `Unsupported` for more than can be held."""
        if self._policies is None or spec.policy is None:
            return
        files, system = spec.policy.files, spec.policy.system
        if lsm.concerns(files, system):
            holding.restrictions = Restrictions(files, system)
            await self.settle(holding)

    @contextlib.asynccontextmanager
    async def swapping(self, holding: Holding, mount_ns: int) -> AsyncIterator[None]:
        """Swap the root for that of `mount_ns` in the block, or fail to: both are denied the same
        until it ends."""
        if holding.restrictions is None:
            yield
            return
        await self._enter(holding, holding.restrictions, mount_ns, beside=True)
        try:
            yield
        finally:
            await self.settle(holding)

    async def settle(self, holding: Holding) -> None:
        """Enter the present root, and no other."""
        if holding.restrictions is None:
            return
        path = processes.descriptor(holding.pid, FD_MOUNT_NS)
        mount_ns = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            await self._enter(holding, holding.restrictions, mount_ns)
        finally:
            os.close(mount_ns)

    async def recover(self, holding: Holding) -> None:
        """Take over a living container. Raises `Unsupported` when its rules cannot be enforced."""
        if holding.restrictions is None:
            return
        policies, cgroup = self._bind(holding)
        # what an earlier daemon entered holds for this root, or for two of them
        if not policies.keep(cgroup):
            await self.settle(holding)

    def forget(self, holding: Holding) -> None:
        """Remove what holds for a container whose processes are gone."""
        cgroup = self._cgroups.pop(holding.sandbox, None)
        if cgroup is not None and self._policies is not None:
            self._policies.remove(cgroup)

    def _bind(self, holding: Holding) -> tuple[FilePolicies, int]:
        if self._policies is None or self._driver is None:
            raise Unsupported("this host no longer enforces rules on files; see dsec check")
        if holding.sandbox not in self._cgroups:
            assert holding.cgroup is not None
            self._cgroups[holding.sandbox] = self._driver.identify(holding.cgroup)
        return self._policies, self._cgroups[holding.sandbox]

    async def _enter(
        self, holding: Holding, rules: Restrictions, mount_ns: int, *, beside: bool = False
    ) -> None:
        policies, cgroup = self._bind(holding)
        table = await asyncio.to_thread(_survey, rules, mount_ns)
        policies.enter(cgroup, table, beside=beside)


def _survey(rules: Restrictions, mount_ns: int) -> Table:
    """Look at what the rules name in a root; return the table for it."""
    patterns = lsm.patterns(rules.files, rules.system)
    # of /a/**, what is meant is below whatever /a leads to
    heads = {
        pattern: pattern.removesuffix("/**") for pattern in patterns if globs.is_subtree(pattern)
    }
    searches = {
        pattern: Search(
            globs.head(pattern),
            None if "**" in pattern else pattern.count("/") - globs.head(pattern).count("/"),
            functools.partial(globs.matches, pattern),
        )
        for pattern in patterns
        if pattern not in heads
    }
    seen = lsmplaces.survey(mount_ns, tuple(heads.values()), searches)
    found = {pattern: seen.found.get(heads.get(pattern, pattern), []) for pattern in patterns}
    return lsm.compile_table(rules.files, rules.system, seen.places, found)
