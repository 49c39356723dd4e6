"""What an audit finds and says. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

Risk = Literal["critical", "high", "medium", "low"]
RISKS: tuple[Risk, ...] = ("critical", "high", "medium", "low")
Kind = Literal[
    "answer", "tests", "grader", "hook", "path", "git", "credential", "leftover", "cache",
    "setuid", "rights", "service", "network", "unenforced",
]  # fmt: skip
Remedy = Literal["hide", "read-only", ""]
MAX_OF_KIND = 50  # findings of one kind and risk that are reported; nobody reads more


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that an agent could exploit.

    `reason` says why and how; `evidence` shows it, never a secret itself. `remedy` is what the
    proposed policy does about `path`: hides it, makes it read-only, or nothing ("") where a policy
    cannot help, and `reason` says what does.
    """

    risk: Risk
    kind: Kind
    path: str
    reason: str
    evidence: str = ""
    remedy: Remedy = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What the caller knows of the task: paths that the grader uses, patterns of answers (as in
    policies: `*`, `**`, `?`; a name without a slash at any depth), the commit that fixes it.
    """

    grader: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()
    fix_commit: str = ""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """Findings, the riskiest first, and a policy (TOML) against them.

    `limits` say what the audit did not look at: what lies there is not known. `entries` and
    `read_bytes` are what it did look at. `omitted` counts findings that are left out.
    """

    target: str
    agent: str
    findings: tuple[Finding, ...]
    policy: str
    limits: tuple[str, ...] = ()
    omitted: tuple[str, ...] = ()
    entries: int = 0
    read_bytes: int = 0

    def at_least(self, risk: Risk) -> tuple[Finding, ...]:
        """Return the findings of this risk and above."""
        bar = RISKS.index(risk)
        return tuple(found for found in self.findings if RISKS.index(found.risk) <= bar)


def ranked(findings: Iterable[Finding]) -> list[Finding]:
    """Return findings, the riskiest first, each once."""
    return sorted(dict.fromkeys(findings), key=_order)


def shortened(findings: Iterable[Finding]) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Return the first findings of each kind, and a sentence for each kind cut short."""
    kept: list[Finding] = []
    seen: dict[tuple[Risk, Kind], int] = {}
    for found in findings:
        group = found.risk, found.kind
        seen[group] = seen.get(group, 0) + 1
        if seen[group] <= MAX_OF_KIND:
            kept.append(found)
    cut = tuple(
        f"{count - MAX_OF_KIND} more findings of kind {kind} and risk {risk} are not shown"
        for (risk, kind), count in seen.items()
        if count > MAX_OF_KIND
    )
    return tuple(kept), cut


# What gives the task away outranks what might help, at the same risk.
_KINDS: tuple[Kind, ...] = (
    "answer", "git", "grader", "credential", "network", "hook", "path", "tests", "setuid",
    "leftover", "service", "cache", "rights", "unenforced",
)  # fmt: skip


def _order(found: Finding) -> tuple[int, int, int, str, str]:
    depth = found.path.count("/")
    return RISKS.index(found.risk), _KINDS.index(found.kind), depth, found.path, found.evidence


def shown(text: str) -> str:
    """Return `text` with everything escaped that a terminal would obey or not show."""
    return "".join(_shown(letter) for letter in text)


def _shown(letter: str) -> str:
    if letter.isprintable():
        return "\\\\" if letter == "\\" else letter
    code = ord(letter)
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is no UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode()
