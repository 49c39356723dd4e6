"""DAMON through sysfs: the kernel finds cold memory and pages it out
(Documentation/admin-guide/mm/damon/usage.rst).

There is one list of kdamonds for the whole host, and changing its length stops all of them. So one
is made only where there is none, and afterwards touched only while the list looks as we left it:
what somebody else has set up since is theirs.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from pathlib import Path

from dsecd.host.kernelfs import KernelFiles
from libdsec.errors import Unsupported, WrongState

ADMIN = "/sys/kernel/mm/damon/admin/kdamonds"
_MAX = 2**63 - 1  # of what sysfs takes for "no bound"


@dataclass(frozen=True, kw_only=True)
class Scheme:
    """Page out what nobody has touched for `cold_s`, at most `quota_bytes` each second.

    `pids` () means the whole host's physical memory. Works only while less than `low` of the host's
    memory is free (per mille), so that nothing is done without need; 1000: always.
    """

    pids: tuple[int, ...] = ()
    cold_s: float = 30.0
    quota_bytes: int = 64 << 20
    low: int = 200
    sample_us: int = 100_000
    aggregate_us: int = 2_000_000


class Damon:
    """The one kdamond, if it is ours. Methods raise `OSError` as sysfs answers.

    `record` keeps the pid of its thread, by which a later daemon knows it again; a reboot empties
    its directory.
    """

    def __init__(self, record: Path, files: KernelFiles | None = None) -> None:
        self._files, self._record = files or KernelFiles(), record
        self._pid = 0  # of our kdamond's thread; 0: none is ours
        with contextlib.suppress(OSError, ValueError):
            self._pid = int(record.read_text())

    def missing(self) -> str:
        """Return why none can be made now, "" when one can."""
        try:
            running = self._files.number(f"{ADMIN}/nr_kdamonds")
        except OSError:
            return "the kernel has no DAMON sysfs interface (CONFIG_DAMON_SYSFS)"
        if running:
            return f"{running} kdamonds are there that are not ours"
        return ""

    def start(self, scheme: Scheme) -> None:
        """Make a kdamond with this scheme. Raises `Unsupported` where one is there, or the kernel
        cannot watch what is asked for; nothing is left then."""
        if reason := self.missing():
            raise Unsupported(f"no DAMON: {reason}", reason=reason)
        write = self._files.write
        write(f"{ADMIN}/nr_kdamonds", "1")
        try:
            for path, value in writes(scheme):
                write(f"{ADMIN}/0/{path}", value)
            write(f"{ADMIN}/0/state", "on")
            self._pid = self._files.number(f"{ADMIN}/0/pid")
            self._record.write_text(str(self._pid))
        except OSError as error:
            write(f"{ADMIN}/nr_kdamonds", "0")
            what = "processes" if scheme.pids else "physical memory"
            reason = f"the kernel watches no {what} by DAMON: {error.strerror}"
            raise Unsupported(reason, reason=reason) from error

    @property
    def ours(self) -> bool:
        """Whether the only kdamond there is still the one that we started."""
        if not self._pid:
            return False
        try:
            return (
                self._files.number(f"{ADMIN}/nr_kdamonds") == 1
                and self._files.number(f"{ADMIN}/0/pid") == self._pid
            )
        except OSError:
            return False

    def reclaimed_bytes(self) -> int:
        """Return what our scheme has paged out so far. Raises `WrongState` if it is not ours."""
        self._check()
        self._files.write(f"{ADMIN}/0/state", "update_schemes_stats")
        return self._files.number(f"{ADMIN}/0/contexts/0/schemes/0/stats/sz_applied")

    def stop(self) -> None:
        """End ours, and leave the list as it was found. Raises `WrongState` if it is not ours."""
        self._check()
        self._files.write(f"{ADMIN}/0/state", "off")
        self._files.write(f"{ADMIN}/nr_kdamonds", "0")
        self._pid = 0
        self._record.unlink(missing_ok=True)

    def _check(self) -> None:
        if not self.ours:
            raise WrongState("the kdamond is not ours (any more): it is left alone")


def writes(scheme: Scheme) -> list[tuple[str, str]]:
    """Return the files below kdamonds/0 and what goes into each, in order. Pure."""
    context, region = "contexts/0", "contexts/0/schemes/0"
    target = f"{context}/targets"
    out = [
        ("contexts/nr_contexts", "1"),
        (f"{context}/operations", "vaddr" if scheme.pids else "paddr"),
        (f"{context}/monitoring_attrs/intervals/sample_us", str(scheme.sample_us)),
        (f"{context}/monitoring_attrs/intervals/aggr_us", str(scheme.aggregate_us)),
        (f"{context}/monitoring_attrs/intervals/update_us", str(scheme.aggregate_us * 10)),
        (f"{target}/nr_targets", str(max(1, len(scheme.pids)))),
        *((f"{target}/{n}/pid_target", str(pid)) for n, pid in enumerate(scheme.pids)),
        (f"{context}/schemes/nr_schemes", "1"),
        (f"{region}/action", "pageout"),
    ]
    age = max(1, round(scheme.cold_s * 1e6 / scheme.aggregate_us))  # in aggregations
    for what, low, high in (("sz", 4096, _MAX), ("nr_accesses", 0, 0), ("age", age, 2**31)):
        out += [
            (f"{region}/access_pattern/{what}/min", str(low)),
            (f"{region}/access_pattern/{what}/max", str(high)),
        ]
    out += [
        (f"{region}/quotas/bytes", str(scheme.quota_bytes)),
        (f"{region}/quotas/reset_interval_ms", "1000"),
        (f"{region}/watermarks/metric", "free_mem_rate" if scheme.low < 1000 else "none"),
        (f"{region}/watermarks/interval_us", "5000000"),
        (f"{region}/watermarks/high", str(scheme.low)),
        (f"{region}/watermarks/mid", str(scheme.low)),
        (f"{region}/watermarks/low", "0"),
    ]
    return out
