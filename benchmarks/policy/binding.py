"""What the daemon's part costs: loading the programs, binding, changing and unbinding."""

from __future__ import annotations

import contextlib
import statistics
import time

from dsec_bench.bench import Context
from dsec_bench.policy import rules
from dsec_bench.policy.costs import timed
from dsec_bench.policy.places import COUNTS, filled
from dsec_bench.policy.world import Cgroups
from dsec_bench.report import Row
from dsec_bench.stats import Round, Summary

from dsecd.host.netpolicy import NetworkPolicies, sandbox_level

SERIES = "in the daemon"
LOADS = 9
BINDS = 1000
_FIRST_NEW = 100_000  # number of a policy that is not in force
_FIRST_ID = 10**13


def measure(context: Context) -> None:
    """Record loading, and the calls of `NetworkPolicies` beside 1 and beside 10,000 policies."""
    count = BINDS // 4 if context.options.quick else BINDS
    with contextlib.closing(Cgroups()) as groups:
        context.steps.now("loading")
        _row(context, "load and attach the programs", "", _loads(groups))
        worst = 0.0
        for live in (COUNTS[0], COUNTS[-1]):
            context.steps.now(f"binding beside {live:,} policies")
            with contextlib.closing(filled(groups, live)) as policies:
                for name, summary in _calls(policies, count).items():
                    _row(context, name, f"{live:,} policies", summary)
                    if name.startswith("bind"):
                        worst = max(worst, summary.p50_ms * 1e3)
    context.report.figure("bind_us", worst)


def _row(context: Context, name: str, note: str, summary: Summary) -> None:
    context.report.row(Row(SERIES, name, summary, note=note, unit="µs"))


def _loads(groups: Cgroups) -> Summary:
    level = sandbox_level(groups.path)
    found = []
    for _ in range(LOADS):
        start = time.perf_counter_ns()
        policies = NetworkPolicies(groups.fd, level=level, pins=None)
        policies.start()
        found.append((time.perf_counter_ns() - start) / 1e6)
        policies.close()
    return Summary.of([Round(1e3 / statistics.median(found), found)])


def _calls(policies: NetworkPolicies, count: int) -> dict[str, Summary]:
    """Return how long the calls take; sandboxes come and go, the policies of before stay."""
    known = rules.access(_FIRST_NEW)
    new = [rules.access(_FIRST_NEW + 1 + number) for number in range(2 * count)]
    ids = range(_FIRST_ID, _FIRST_ID + 2 * count)
    policies.bind(_FIRST_ID - 1, known)
    found = {
        "bind, policy known": timed(lambda n: policies.bind(ids[n], known), range(count)),
        "bind, policy of 8 rules new": timed(
            lambda n: policies.bind(ids[count + n], new[n]), range(count)
        ),
        "change a binding, policy new": timed(
            lambda n: policies.bind(ids[n], new[count + n]), range(count)
        ),
        "unbind": timed(lambda n: policies.unbind(ids[n]), range(2 * count)),
    }
    policies.unbind(_FIRST_ID - 1)
    return found
