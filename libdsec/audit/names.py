"""What the names of files give away: answers, tests, graders, leftovers, caches. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator

from libdsec.audit.patterns import Pattern
from libdsec.audit.places import TEST_DIRECTORIES, Places, within
from libdsec.audit.report import Finding, Kind, Risk, Wanted
from libdsec.audit.tree import Entry, Tree

_ANSWER = re.compile(
    r"(the[_-]?)?((reference|gold|oracle)[_-])?(solution|answer|gold|ground[_-]?truth)s?([^a-z].*)?"
    r"|hidden[_-]?tests?([^a-z].*)?|(test|gold|fix|oracle|solution|model)[._-]?patch([^a-z].*)?"
    r"|fix\.(patch|diff)|oracle\.(sh|py|txt|patch|diff|jsonl?)",
    re.DOTALL,
)
_PERHAPS = re.compile(
    r"expected.*|golden.*|.*\.(patch|diff)|reference[_-]?(output|result)s?.*", re.DOTALL
)
_GRADER = re.compile(
    r"(grader?s?|grading)([._-].*)?|(run|eval)[_-]?tests?\.sh|(eval|verify|test)\.sh"
    r"|rewards?([._-].*)?\.(py|sh)",
    re.DOTALL,
)
_TEST_FILE = re.compile(
    r"test_.+\.py|.+_test\.(py|go|rb|cc|cpp)|.+\.(test|spec)\.[cm]?[jt]sx?|.+Tests?\.java|.+_spec\.rb",
    re.DOTALL,
)
_LEFTOVER = re.compile(
    r"(?P<half>.+\.(rej|orig))|(?P<editor>\..+\.sw[op]|.+~|.+\.bak)"
    r"|(?P<result>junit.*\.xml|test[_-]?(results?|reports?|output)(\.(xml|json|html|txt|csv))?|\.pytest_cache|lastfailed"
    r"|.+\.log(\.\d+)?|nohup\.out|\.coverage)",
    re.DOTALL,
)
_LEFTOVERS: dict[str, tuple[Risk, str]] = {
    "half": ("high", "left by patch(1): it holds parts of a change, or a file before it"),
    "editor": ("medium", "an editor's copy may hold a file as it was before the task was cut out"),
    "result": ("low", "output of a build or a test run may name tests and expected values"),
}
_CACHES = (
    "/.cache/pip", "/.cache/uv", "/.cache/pypoetry", "/.cache/yarn", "/.cache/go-build",
    "/.npm/_cacache", "/.m2/repository", "/pkg/mod/cache/download", "/.cargo/registry/cache",
)  # fmt: skip


def find(tree: Tree, places: Places, wanted: Wanted) -> Iterator[Finding]:
    """Yield what names say; of a directory that is reported, nothing beneath is reported again."""
    mine = [Pattern(text) for text in wanted.answers]
    waiting = ["/"]
    while waiting:
        for entry in tree.children(waiting.pop()):
            found = _said(entry, mine) or _judge(entry, tree, places, wanted)
            if found is not None and (found.risk == "low" or tree.readable(entry)):
                yield found
            if entry.type == "dir" and (found is None or found.kind == "tests"):
                waiting.append(entry.path)
    yield from _test_files(tree, places, wanted)
    yield from _compiled(tree, places)


def _said(entry: Entry, mine: list[Pattern]) -> Finding | None:
    """Return the finding for what the caller calls an answer."""
    if entry.type not in ("file", "dir") or not any(
        pattern.matches(entry.path) for pattern in mine
    ):
        return None
    return Finding(
        risk="critical", kind="answer", path=entry.path, remedy="hide",
        reason="an answer, as --answers says, which the agent can read",
    )  # fmt: skip


def _judge(entry: Entry, tree: Tree, places: Places, wanted: Wanted) -> Finding | None:
    if entry.type not in ("file", "dir"):
        return None
    if entry.type == "dir" and entry.path.endswith(_CACHES):
        return _cache(entry, tree)
    if not places.of_task(entry.path) or (entry.type == "file" and not entry.size):
        return None
    found = _named(entry, tree, places)
    if (
        found is not None
        and found.kind in ("grader", "tests")
        and within(entry.path, wanted.grader)
    ):
        return None  # `rights` says more of it
    return found


def _named(entry: Entry, tree: Tree, places: Places) -> Finding | None:
    name = entry.name.lower()
    if _ANSWER.fullmatch(name):
        risk: Risk = "high" if places.fixture(entry.path) else "critical"
        return _answer(entry, risk, "named like the answer, and the agent can read it")
    if _GRADER.fullmatch(name):
        return _grader(entry, tree)
    if entry.type == "dir" and name in TEST_DIRECTORIES:
        return _tests(entry, tree)
    if _PERHAPS.fullmatch(name):
        weak: Risk = "low" if places.fixture(entry.path) else "medium"
        return _answer(entry, weak, "may hold expected results or the fix, and the agent reads it")
    left = _LEFTOVER.fullmatch(name)
    if left is not None:
        risk, reason = _LEFTOVERS[str(left.lastgroup)]
        return _hidden(entry, risk, "leftover", reason)
    return None


def _answer(entry: Entry, risk: Risk, reason: str) -> Finding:
    return _hidden(entry, risk, "answer", reason)


def _hidden(entry: Entry, risk: Risk, kind: Kind, reason: str) -> Finding:
    return Finding(risk=risk, kind=kind, path=entry.path, reason=reason, remedy="hide")


def _grader(entry: Entry, tree: Tree) -> Finding:
    if tree.writable(entry):
        reason = "named like the grader: the agent can rewrite it to report success, and read it"
        return _hidden(entry, "high", "grader", reason)
    reason = "named like the grader: the agent can read what it asks for"
    return _hidden(entry, "medium", "grader", reason)


def _tests(entry: Entry, tree: Tree) -> Finding:
    if not tree.writable(entry):
        reason = "the agent can read the tests, and fit its work to exactly these"
        return Finding(risk="low", kind="tests", path=entry.path, reason=reason)
    return Finding(
        risk="medium", kind="tests", path=entry.path, remedy="read-only",
        reason="if the grader runs these tests in place, the agent can delete or weaken them; "
        "make them read-only or grade with verify",
    )  # fmt: skip


def _test_files(tree: Tree, places: Places, wanted: Wanted) -> Iterator[Finding]:
    """Yield a finding for each directory with test files among its other files."""
    counts: dict[str, list[Entry]] = {}
    for entry in tree:
        if (
            entry.type == "file"
            and _TEST_FILE.fullmatch(entry.name)
            and places.of_task(entry.path)
            and not places.fixture(entry.path)
            and not within(entry.path, wanted.grader)
        ):
            counts.setdefault(entry.parent, []).append(entry)
    for files in counts.values():
        first = min(files, key=lambda entry: entry.path)
        found = _tests(first, tree)
        yield Finding(
            risk=found.risk, kind="tests", path=found.path, reason=found.reason,
            remedy=found.remedy, evidence=f"{len(files)} in this directory",
        )  # fmt: skip


def _compiled(tree: Tree, places: Places) -> Iterator[Finding]:
    """Yield compiled Python whose source is gone: what was taken away can be read from it."""
    for entry in tree:
        if entry.type != "file" or not entry.name.endswith(".pyc"):
            continue
        if not places.of_task(entry.path) or not tree.readable(entry):
            continue
        directory, stem = entry.parent, entry.name.split(".", 1)[0]
        if posixpath.basename(directory) == "__pycache__":
            directory = posixpath.dirname(directory)
        if tree.get(posixpath.join(directory, f"{stem}.py")) is None:
            yield _hidden(
                entry, "high", "leftover",
                "compiled from a source that was removed: constants and code can be read from it",
            )  # fmt: skip


def _cache(entry: Entry, tree: Tree) -> Finding | None:
    if not any(below.type == "file" for below in tree.below(entry.path)):
        return None
    reason = "a cache of packages may hold a release of the project that has the fix"
    return _hidden(entry, "low", "cache", reason)
