"""An honest account of a policy on a host: per rule, what enforces it, or that nothing does. Pure.

The probe's table says what the kernel can do, and the backend which mechanisms it applies; a rule
is enforced by the first mechanism that has both and does all of it. `require_all` is ``strict``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Literal, Protocol

import msgspec

from dsecd.policy import mechanisms
from dsecd.policy.compile import Compiled
from dsecd.policy.lines import Line
from dsecd.policy.mechanisms import NEEDS, Reach, Way
from dsecd.policy.rules import Verdict
from libdsec.errors import Unsupported

State = Literal["enforced", "partly", "closed", "not enforced"]
_WORSE: dict[State, int] = {"enforced": 0, "partly": 1, "closed": 2, "not enforced": 3}
_BY_LINK = ("bpf_cgroup", "resolver", "relay")  # without them a sandbox with rules has no link
_Ways = tuple[Way, ...]  # of one typed rule
_Fate = tuple[State, tuple[str, ...], tuple[str, ...], tuple[str, ...]]  # see `Row`
CLOSED = "nothing is reachable, for the rules cannot be enforced"


class Feature(Protocol):
    """A row of the probe table, `dsecd.host.probe.Feature`."""

    @property
    def name(self) -> str: ...
    @property
    def available(self) -> bool: ...
    @property
    def reason(self) -> str: ...


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of one entry of the policy, or of a default (`place` ends with ``.default``).

    ``closed`` is more than the rule asks for: where the kernel enforces no rules on networks, a
    backend that applies `bpf_cgroup` elsewhere gives a sandbox that has some no link.

    `by` are mechanisms of `mechanisms.NEEDS`, or `default` where nothing has to be done. `reasons`
    say what is missing, one sentence each; () when the rule is enforced. `remarks` are limits that
    no host could lift, and what the mechanism forbids beyond the rule.
    """

    place: str
    layer: str
    verdict: Verdict
    text: str
    state: State
    by: tuple[str, ...]
    reasons: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.layer}: {self.place}" if self.layer else self.place
        account = f"{self.state} by {', '.join(self.by)}" if self.by else self.state
        said = f"{where}: {self.verdict} {self.text} is {account}"
        return f"{said}: {'; '.join(self.reasons)}" if self.reasons else said


class Host:
    """What enforces rules on a host, in sandboxes to which the mechanisms `offered` are applied.

    `table` is that of `dsecd.host.probe.probe()`; `offered` None: all of `mechanisms.NEEDS` are.
    `there` are those of them that this host has.
    """

    def __init__(self, table: Iterable[Feature], offered: Collection[str] | None = None) -> None:
        rows = {row.name: row for row in table}
        self._missing: dict[str, str] = {"default": ""}
        lacking = set()
        for mechanism, needs in NEEDS.items():
            applied = offered is None or mechanism in offered
            self._missing[mechanism] = "" if applied else f"{mechanism} is not applied here"
            for need in needs:
                row = rows.get(need)
                if row is None or not row.available:
                    why = row.reason if row else "not in the probe's table"
                    self._missing[mechanism] = f"{mechanism} is not there ({need}: {why})"
                    lacking.add(mechanism)
        applied_here = NEEDS if offered is None else offered
        self.there = tuple(name for name in applied_here if name not in lacking)
        # a sandbox with rules on networks gets no link, for they would not hold
        self.leaves_closed = (
            "bpf_cgroup" in applied_here and "bpf_cgroup" in lacking and "netns" not in lacking
        )
        # most lines of most policies can be enforced in the same few ways
        self._judged = functools.lru_cache(256)(self._judge)

    def explain(self, compiled: Compiled, closed: bool | None = None) -> tuple[Row, ...]:
        """Return a row for each entry of the policy and for each default that denies.

        `closed`: whether the sandbox has no link, for want of rules; None for one that is to be
        made.
        """
        closed = self.leaves_closed if closed is None else closed
        reached = mechanisms.reach(compiled.net)
        lines = [(line, tuple(_ways(line, compiled, reached))) for line in compiled.lines]
        return tuple(
            _row(line, *self._judged(ways, closed))
            for line, ways in (*lines, *_defaults(compiled, reached))
        )

    def _judge(self, ways: tuple[_Ways, ...], closed: bool) -> _Fate:
        """Return what becomes of a line whose typed rules have `ways`: as good as the worst."""
        state: State = "enforced"
        by: dict[str, None] = {}
        reasons: dict[str, None] = {}
        remarks: dict[str, None] = {}
        for each in ways:
            found, mechanism, missing = self._judge_rule(each, closed)
            if mechanism:
                by[mechanism] = None
            remarks |= dict.fromkeys(
                way.remark for way in each if way.remark and mechanism in ("", way.mechanism)
            )
            if found != "enforced":
                reasons |= dict.fromkeys(missing)
            state = max(state, found, key=_WORSE.__getitem__)
        return state, tuple(by), tuple(reasons), tuple(remarks)

    def _judge_rule(self, ways: _Ways, closed: bool) -> tuple[State, str, tuple[str, ...]]:
        """Return the state, the mechanism ("" for none) and what is missing, of one rule."""
        there = [way for way in ways if not self._missing[way.mechanism]]
        for way in there:
            if not way.short:
                return "enforced", way.mechanism, ()
        missing = tuple(self._missing[way.mechanism] for way in ways if way not in there)
        if there:
            return "partly", there[0].mechanism, (there[0].short, *missing)
        if closed and any(way.mechanism in _BY_LINK for way in ways):
            return "closed", "netns", (CLOSED, *missing)
        return "not enforced", "", missing


def unenforced(rows: Iterable[Row]) -> tuple[Row, ...]:
    """Return the rows that are not fully enforced: a sandbox's notes."""
    return tuple(row for row in rows if row.state != "enforced")


def require_all(rows: Iterable[Row]) -> None:
    """Raise `Unsupported` unless all is fully enforced; the message names what is not."""
    open_rows = unenforced(rows)
    if open_rows:
        reason = "; ".join(str(row) for row in open_rows)
        raise Unsupported(
            f"strict: this host cannot enforce the whole policy ({reason}); remove these rules, "
            "or create the sandbox without strict",
            reason=reason,
            rules=[row.place for row in open_rows],
        )


def _row(
    line: Line,
    state: State,
    by: tuple[str, ...],
    reasons: tuple[str, ...],
    remarks: tuple[str, ...],
) -> Row:
    return Row(
        place=line.place, layer=line.layer, verdict=line.verdict, text=line.text,
        state=state, by=by, reasons=reasons, remarks=remarks,
    )  # fmt: skip


def _ways(line: Line, compiled: Compiled, reached: Reach) -> Iterator[_Ways]:
    """Yield the ways of each typed rule of a line."""
    system = compiled.system
    for _ in line.nets:
        yield mechanisms.for_net(reached)
    for name in line.names:
        yield mechanisms.for_name(name, reached)
    for file in line.files:
        yield mechanisms.for_file(file, compiled.files)
    for pattern in line.hidden:
        yield mechanisms.for_hidden(pattern)
    for _ in line.ioctls:
        yield mechanisms.for_ioctl()
    for mount in line.mounts:
        yield mechanisms.for_mount(mount, system)
    for unix in line.unix:
        yield mechanisms.for_unix(unix, system)
    for _ in line.vsock:
        yield mechanisms.for_vsock(system)


def _defaults(compiled: Compiled, reached: Reach) -> Iterator[tuple[Line, tuple[_Ways, ...]]]:
    """Yield a line for each default that denies, with its ways: it is a rule like any other."""
    system = compiled.system
    defaults: tuple[tuple[str, Verdict, Callable[[], _Ways]], ...] = (
        ("network", compiled.net.default, lambda: mechanisms.for_net(reached)),
        ("files", compiled.files.default, lambda: mechanisms.for_file_default(compiled.files)),
        ("ioctls", system.ioctl_default, mechanisms.for_ioctl),
        ("mounts", system.mount_default, lambda: mechanisms.for_mount_default(system)),
        ("unix", system.unix_default, mechanisms.for_unix_default),
        ("vsock", system.vsock_default, lambda: mechanisms.for_vsock(system)),
    )
    for table, verdict, ways in defaults:
        if verdict == "deny":
            place = f"{table}.default"
            yield Line(place=place, layer="", verdict="deny", text="all else"), (ways(),)
