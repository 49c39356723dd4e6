"""What a repository holds that its checked-out commit does not: the fix, as a rule. Pure.

`git log --all`, `git reflog` and `git fsck --lost-found` show an agent every commit of the object
store, whether a branch names it or not.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from libdsec.audit.gitobjects import Commit, Objects
from libdsec.audit.report import Finding, Risk

_MAX_HOPS = 5  # from one symbolic ref to the next; git has the same limit
_NAME = re.compile(r"[0-9a-f]{40}(?:[0-9a-f]{24})?")
_SHOWN = 3
_ORIGINS = (
    ("refs/heads/", "branches"), ("refs/remotes/", "branches of remotes"), ("refs/tags/", "tags"),
    ("refs/stash", "the stash"), ("logs/", "the reflog"), ("", "other references"),
)  # fmt: skip


@dataclass(slots=True)
class Repository:
    """A repository's text files and objects; `path` is the directory with HEAD in it.

    `refs` are files by name relative to that: HEAD, refs/…, packed-refs, logs/….
    """

    path: str
    refs: Mapping[str, bytes] = field(default_factory=dict)
    objects: Objects = field(default_factory=Objects)


def find(repository: Repository, fix_commit: str = "") -> Iterator[Finding]:
    """Yield a finding for each place that leads beyond HEAD, and for the fix when it is there."""
    commits = repository.objects.commits
    yield from _fix(repository, fix_commit)
    names = _references(repository)
    head = names.pop("HEAD", "")
    if head not in commits:
        if commits:
            yield _finding(repository, "high", "HEAD names no commit that is there: all are beyond",
                           _told(commits.values(), "git fsck --lost-found"))  # fmt: skip
        return
    left = set(commits) - _reached(commits, [head])
    later = _descendants(commits, left, head)
    for origin, starts in _by_origin(names).items():
        found = _reached(commits, starts) & left
        left -= found
        yield from _beyond(repository, origin, found, head, later)
    yield from _beyond(repository, "no reference (git fsck --lost-found)", left, head, later)


def _fix(repository: Repository, fix_commit: str) -> Iterator[Finding]:
    wanted = fix_commit.lower()
    for commit in repository.objects.commits.values():
        if wanted and commit.name.startswith(wanted):
            yield _finding(
                repository, "critical", "the commit of the fix is in the object store: `git show` "
                "prints it, whatever branches there are", _told([commit], "git show"),
            )  # fmt: skip


def _beyond(
    repository: Repository, origin: str, names: set[str], head: str, later: set[str]
) -> Iterator[Finding]:
    if not names:
        return
    commits = repository.objects.commits
    count = "1 commit" if len(names) == 1 else f"{len(names)} commits"
    newest = sorted((commits[name] for name in names), key=lambda one: (-one.time, one.name))
    if names & later:
        risk: Risk = "critical"
        reason = f"{count} on top of HEAD by {origin}: the next one is likely the fix"
    elif newest[0].time > commits[head].time:
        risk, reason = "high", f"{count} later than HEAD by {origin}"
    else:
        risk, reason = "low", f"{count} that HEAD does not have by {origin}"
    yield _finding(repository, risk, reason, _told(newest, ""))


def _finding(repository: Repository, risk: Risk, reason: str, evidence: str) -> Finding:
    advice = (
        "make the image from a clone without them (git clone --single-branch, or delete the "
        "references and the reflog, then git gc --prune=now)"
    )
    return Finding(
        risk=risk, kind="git", path=repository.path, reason=f"{reason}; {advice}", evidence=evidence
    )


def _told(commits: Iterable[Commit], how: str) -> str:
    first = itertools.islice(commits, _SHOWN + 1)
    shown = [f"{commit.name[:12]} {commit.subject}" for commit in first]
    more = ["…"] if len(shown) > _SHOWN else []
    return ", ".join(shown[:_SHOWN] + more) + (f" ({how})" if how else "")


def _reached(commits: Mapping[str, Commit], starts: Iterable[str]) -> set[str]:
    """Return `starts` and their ancestors, as far as they are there."""
    seen: set[str] = set()
    waiting = [name for name in starts if name in commits]
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting += [parent for parent in commits[name].parents if parent in commits]
    return seen


def _descendants(commits: Mapping[str, Commit], names: set[str], head: str) -> set[str]:
    """Return those of `names` that have `head` for an ancestor."""
    children: dict[str, list[str]] = {}
    for name in names:
        for parent in commits[name].parents:
            children.setdefault(parent, []).append(name)
    seen: set[str] = set()
    waiting = [head]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            if child not in seen:
                seen.add(child)
                waiting.append(child)
    return seen


def _by_origin(names: Mapping[str, str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {origin: [] for _, origin in _ORIGINS}
    for name, target in names.items():
        origin = next(origin for prefix, origin in _ORIGINS if name.startswith(prefix))
        found[origin].append(target)
    return found


def _references(repository: Repository) -> dict[str, str]:
    """Return what each reference names: a commit, tags followed."""
    texts = {name: text.decode(errors="replace") for name, text in repository.refs.items()}
    raw = dict(_packed(texts.pop("packed-refs", "")))
    logs = {name: text for name, text in texts.items() if name.startswith("logs/")}
    raw |= {name: text.strip() for name, text in texts.items() if name not in logs}
    found = {name: _followed(raw, name, repository.objects) for name in raw}
    for log, text in logs.items():
        found |= {f"{log}#{at}": name for at, name in enumerate(_NAME.findall(text))}
    return found


def _packed(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        target, _, name = line.partition(" ")
        if name and _NAME.fullmatch(target):
            yield name, target


def _followed(raw: Mapping[str, str], name: str, objects: Objects) -> str:
    value = raw[name]
    for _ in range(_MAX_HOPS):
        if not value.startswith("ref:"):
            break
        value = raw.get(value.removeprefix("ref:").strip(), "")
    value = value.split()[0] if value.split() else ""  # FETCH_HEAD goes on after the name
    for _ in range(_MAX_HOPS):
        value = objects.tags.get(value, value)
    return value
