"""A policy, in the TOML of policies, against what an audit found. Pure."""

from __future__ import annotations

import itertools
import json
from collections.abc import Collection, Iterable, Iterator

from libdsec.audit.report import Finding, Remedy, shown

MAX_PATHS = 200  # of each kind: a policy has at most 1000 entries, and people are to read it
_MAX_WILDCARDS = 8  # in a pattern, as policies have it
_MAX_BYTES = 4096


def policy(target: str, findings: Iterable[Finding], guarded: Iterable[str] = ()) -> str:
    """Return the text of a policy; `findings` come the riskiest first.

    Network sealed, answers hidden, what the grader relies on read-only. What a policy cannot help
    against is listed as a comment; low risks are left to the reader, who knows what the work needs.
    `guarded` are paths that nobody is to make or change, whether they are there or not.
    """
    known = [found for found in findings if found.risk != "low"]
    hidden = _paths(known, "hide")
    fixed = _paths(known, "read-only", hidden, guarded)
    lines = [
        f"# Proposed by dsec audit for {shown(target)}. Read it before use: what is hidden",
        "# or read-only here is so for the agent's own work, too.",
        'extends = "sealed"  # give services below when the task needs some',
    ]
    if hidden:
        lines += ["", "[files]", "hide = [", *_items(hidden), "]"]
    if fixed:
        lines += ["", "[[files.rules]]", "paths = [", *_items(fixed), "]", 'deny = ["write"]']
    rest = [found for found in known if not found.remedy]
    if rest:
        lines += ["", "# Not for a policy to mend:"]
        lines += [f"# - {shown(found.path)}: {shown(found.reason)}" for found in rest[:MAX_PATHS]]
    return "\n".join(lines) + "\n"


def _paths(
    findings: Iterable[Finding],
    remedy: Remedy,
    covered: Collection[str] = (),
    more: Iterable[str] = (),
) -> list[str]:
    """Return patterns of the paths with this remedy, none beneath another or beneath `covered`."""
    texts = [pattern(found.path) for found in findings if found.remedy == remedy]
    texts += map(pattern, more)
    found = dict.fromkeys(text for text in texts if text)
    known = {*found, *covered}
    free = (text for text in found if text not in covered and known.isdisjoint(_above(text)))
    return list(itertools.islice(free, MAX_PATHS))


def _above(path: str) -> Iterator[str]:
    """Yield the directories above `path`."""
    while path := path.rpartition("/")[0]:
        yield path


def pattern(path: str) -> str:
    """Return a pattern of policies that covers `path`, "" when there is none.

    There is no quoting in patterns: what would not stand for itself becomes ``?``.
    """
    if not path.startswith("/") or path == "/":
        return ""
    text = "".join("?" if letter == "*" or _is_no_text(letter) else letter for letter in path)
    too_wild = text.count("?") > _MAX_WILDCARDS
    return "" if too_wild or len(text.encode()) > _MAX_BYTES else text


def _is_no_text(letter: str) -> bool:
    return "\ud800" <= letter <= "\udfff"


def _items(texts: Iterable[str]) -> list[str]:
    # the escapes of JSON are a subset of TOML's, bar DEL
    quoted = (json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F") for text in texts)
    return [f"  {text}," for text in quoted]
