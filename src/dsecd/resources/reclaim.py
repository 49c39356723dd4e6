"""Which sandboxes give memory back, how much, and why. Pure.

Below the target nothing is asked of anybody, unless the policy says `always`. Above it the coldest
idle sandboxes are asked first, until what was asked covers the need; the target is then aimed at
with a margin, so that a round is not followed by another for a few pages. Whoever is in use is left
alone, and so is whoever waits for memory already, or took back what an earlier trim had freed: each
such time doubles how long it rests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from libdsec.model import CpuClass

FLOOR_BYTES = 4 << 20  # what an idle sandbox keeps: its init, kernel memory, hot pages
MIN_GAIN_BYTES = 1 << 20  # less is not worth the faults
STALLED_PERCENT = 10.0  # a sandbox that waits for memory this much is short of it
FRUITLESS_SHARE = 0.125  # a trim that frees less of what it was asked for was in vain
RETURNED_SHARE = 0.5  # and so was one of which this much came back before the next
DOUBLINGS_MAX = 6


@dataclass(frozen=True, kw_only=True)
class Policy:
    """Times in seconds of idleness; 0: never. `target` is a share of the host's memory in use."""

    target: float = 0.85
    margin: float = 0.03
    when: Literal["pressure", "always"] = "pressure"
    trim_after_s: float = 30.0
    pause_after_s: float = 600.0
    rest_s: float = 60.0
    step_bytes: int = 256 << 20  # of one sandbox in one round
    sandboxes: int = 32  # in one round


@dataclass(frozen=True, kw_only=True)
class Host:
    """`short`: the kernel says that tasks wait for memory, whatever is available."""

    total_bytes: int
    available_bytes: int
    short: bool = False


@dataclass(frozen=True, kw_only=True)
class Past:
    """The last trim of a sandbox: how long ago, what it held then, how often in vain in a row."""

    ago_s: float
    after_bytes: int
    fruitless: int = 0


@dataclass(frozen=True, kw_only=True)
class Subject:
    """A running or paused sandbox. `in_use`: a call is open, or its processes ran of late.

    One that is not `pausable` is only trimmed.
    """

    id: str
    memory_bytes: int
    idle_s: float
    cpu_class: CpuClass = "standard"
    in_use: bool = False
    paused: bool = False
    pausable: bool = True
    stall_percent: float = 0.0
    past: Past | None = None


@dataclass(frozen=True, kw_only=True)
class Decision:
    """`memory_bytes` is how much to free."""

    action: Literal["trim", "pause"]
    sandbox: str
    memory_bytes: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Round:
    """What to do now. `need_bytes` is what the host is above its target, margin included.

    `going` is to be handed to the next round: it has begun and goes on down to the margin.
    """

    decisions: tuple[Decision, ...]
    need_bytes: int
    going: bool
    reason: str

    @property
    def asked_bytes(self) -> int:
        return sum(decision.memory_bytes for decision in self.decisions)


def need(host: Host, policy: Policy, going: bool = False) -> int:
    """Return how many bytes are to be freed; 0 at or below the target."""
    used = host.total_bytes - host.available_bytes
    above = used - int(host.total_bytes * policy.target)
    margin = int(host.total_bytes * policy.margin)
    if above > 0 or (going and above + margin > 0):
        return above + margin
    return policy.step_bytes if host.short else 0


def decide(host: Host, subjects: Iterable[Subject], policy: Policy, going: bool = False) -> Round:
    """Return the next round. What is asked exceeds the need by `MIN_GAIN_BYTES` at most, unless
    the policy is `always`, which asks every sandbox once after each time it was used."""
    needed = need(host, policy, going)
    if not needed and policy.when == "pressure":
        return Round(decisions=(), need_bytes=0, going=False, reason="memory is below the target")
    open_end = policy.when == "always"
    cold = sorted((s for s in subjects if _may(s, policy, bool(needed))), key=_warmth)
    decisions: list[Decision] = []
    left = needed
    for subject in cold:
        if len(decisions) == policy.sandboxes or (left <= 0 and not open_end):
            break
        decision = _ask(subject, policy, None if open_end else left)
        if decision is not None:
            decisions.append(decision)
            left -= decision.memory_bytes
    return Round(
        decisions=tuple(decisions),
        need_bytes=needed,
        going=needed > 0,
        reason=_reason(host, needed, decisions, len(cold)),
    )


def _may(subject: Subject, policy: Policy, pressed: bool) -> bool:
    """Whether it may be asked at all."""
    if subject.paused or subject.in_use or subject.stall_percent >= STALLED_PERCENT:
        return False
    pause_after_s = policy.pause_after_s if subject.pausable else 0.0
    if not policy.trim_after_s and not pause_after_s:
        return False
    # under pressure a sandbox that is best effort need not have been idle for long
    patient = not (pressed and subject.cpu_class == "best_effort")
    after = min(after for after in (policy.trim_after_s, pause_after_s) if after)
    if patient and subject.idle_s < after:
        return False
    past = subject.past
    return past is None or past.ago_s >= policy.rest_s * 2 ** min(past.fruitless, DOUBLINGS_MAX)


def _warmth(subject: Subject) -> tuple[bool, float, int, str]:
    """The coldest first; what is latency sensitive after all others."""
    sensitive = subject.cpu_class == "latency_sensitive"
    return sensitive, -subject.idle_s, -subject.memory_bytes, subject.id


def gain_bytes(subject: Subject) -> int:
    """Return what asking it may give: nothing twice in one time of idleness."""
    keeps = FLOOR_BYTES
    if subject.past is not None and subject.past.ago_s < subject.idle_s:
        keeps = max(keeps, subject.past.after_bytes)
    return subject.memory_bytes - keeps


def _ask(subject: Subject, policy: Policy, left: int | None) -> Decision | None:
    pause = bool(policy.pause_after_s) and subject.idle_s >= policy.pause_after_s
    pause = pause and subject.pausable
    if not pause and not policy.trim_after_s:
        return None
    # a pause saves CPU and, frozen, all of it may go
    gain = subject.memory_bytes - FLOOR_BYTES if pause else gain_bytes(subject)
    if gain < MIN_GAIN_BYTES:
        return None
    most = min(gain, policy.step_bytes)
    asked = most if left is None else min(most, max(left, MIN_GAIN_BYTES))
    return Decision(
        action="pause" if pause else "trim",
        sandbox=subject.id,
        memory_bytes=asked,
        reason=f"idle for {subject.idle_s:.0f} s, holds {subject.memory_bytes >> 20} MiB",
    )


def _reason(host: Host, needed: int, decisions: Sequence[Decision], cold: int) -> str:
    if not needed:
        return "idle sandboxes are asked always"
    used = 100 * (host.total_bytes - host.available_bytes) / max(1, host.total_bytes)
    state = f"{used:.0f}% of the host's memory is used"
    if host.short:
        state += ", and tasks wait for memory"
    if decisions:
        return f"{state}; {needed >> 20} MiB are to be freed"
    return f"{state}; none of {cold} idle sandboxes has memory to give"


class History:
    """What trims gave, by sandbox. Times are any clock's seconds."""

    def __init__(self) -> None:
        self._last: dict[str, tuple[float, int, int, int]] = {}  # when, after, freed, fruitless

    def note(self, sandbox: str, now: float, before: int, asked: int, freed: int) -> None:
        """Remember a trim of a sandbox that held `before` bytes."""
        fruitless = 0
        last = self._last.get(sandbox)
        if last is not None:
            _, after, gave, in_vain = last
            returned = before - after >= max(MIN_GAIN_BYTES, int(gave * RETURNED_SHARE))
            fruitless = in_vain + 1 if returned else 0
        if freed < asked * FRUITLESS_SHARE:
            fruitless = max(fruitless, (last[3] if last is not None else 0) + 1)
        self._last[sandbox] = (now, max(0, before - freed), freed, min(fruitless, DOUBLINGS_MAX))

    def past(self, sandbox: str, now: float) -> Past | None:
        """Return the last trim of `sandbox`, None when there was none."""
        last = self._last.get(sandbox)
        if last is None:
            return None
        return Past(ago_s=now - last[0], after_bytes=last[1], fruitless=last[3])

    def keep(self, sandboxes: Iterable[str]) -> None:
        """Forget all others."""
        present = set(sandboxes)
        for name in [name for name in self._last if name not in present]:
            del self._last[name]
