"""What runs without being called: import hooks, git hooks, preloads, runners' settings. Pure."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping

from libdsec.audit.places import Places, above, within
from libdsec.audit.report import Finding, Risk, Wanted
from libdsec.audit.tree import Entry, Tree

PRELOAD = "/etc/ld.so.preload"
_PYTHON_START = ("sitecustomize.py", "usercustomize.py")
_DISTRIBUTION = re.compile(r"/(etc|usr/lib)/python[0-9.]*/sitecustomize\.py")  # Debian's, in all
_SITE = re.compile(r"/(site|dist)-packages/[^/]+\.pth")
# of setuptools, namespace packages, editable installs and virtualenv: in every image
_KNOWN_PTH = re.compile(
    r"distutils-precedence|.+-nspkg|__editable__.*|_+editable.*|easy-install|_virtualenv", re.DOTALL
)
_RUNNER = re.compile(
    r"(tox|pytest)\.ini|setup\.cfg|pyproject\.toml|noxfile\.py|(GNUm|M|m)akefile|CMakeLists\.txt"
    r"|package\.json|(jest|vitest|karma|playwright)\.(config|conf)\..+|\.mocharc.*|build\.(rs|gradle)"
    r"|pom\.xml|Rakefile|\.bazelrc|phpunit\.xml.*",
    re.DOTALL,
)
_SHELL_START = frozenset({
    ".bash_login", ".bash_profile", ".bashrc", ".kshrc", ".profile", ".zprofile", ".zshenv",
    ".zshrc",
})  # fmt: skip
# A value that git runs, or a directory in which it looks for what it runs: git-config(1)
_GIT_RUNS = re.compile(
    rb"^[ \t]{0,64}(hookspath|fsmonitor|sshcommand|editor|pager|askpass|textconv|process|smudge"
    rb"|clean|external|program)\s*=\s*(?!(?:true|false|git-lfs .*)\s*$)(.+)$",
    re.IGNORECASE | re.MULTILINE,
)
_ENVIRONMENT = {
    "LD_PRELOAD": "every dynamically linked program loads it",
    "LD_AUDIT": "every dynamically linked program loads it",
    "PYTHONSTARTUP": "interactive Python runs it",
    "PYTHONPATH": "Python imports from there before its own library",
    "BASH_ENV": "every bash script runs it first",
    "ENV": "every sh runs it first",
    "NODE_OPTIONS": "every node obeys it, --require runs a file",
    "PERL5OPT": "every perl obeys it",
    "PERL5LIB": "Perl imports from there before its own library",
    "RUBYOPT": "every ruby obeys it",
    "GIT_EXTERNAL_DIFF": "git runs it",
    "GIT_SSH_COMMAND": "git runs it",
}


def find(
    tree: Tree,
    places: Places,
    wanted: Wanted,
    contents: Mapping[str, bytes],
    env: Mapping[str, str],
) -> Iterator[Finding]:
    """Yield hooks that are there and that the agent can change; `contents` is by path."""
    judged = set(_judged_directories(places, wanted))
    for entry in tree:
        if entry.type == "file":
            near = entry.parent in judged or within(entry.parent, wanted.grader)
            yield from _file(entry, tree, places, near)
        elif entry.path.endswith("/node_modules/.hooks") and tree.writable(entry):
            yield _hook("medium", entry, "npm runs these at every install")
    for path, content in contents.items():
        read = tree.get(path)
        if read is not None and tree.writable(read):
            yield from _content(path, content)
    yield from _environment(env)


def guarded(places: Places, wanted: Wanted) -> list[str]:
    """Return the hooks that pytest would import for the grader's paths, if they were there."""
    directories = dict.fromkeys(_judged_directories(places, wanted))
    return [posixpath.join(directory, "conftest.py") for directory in directories]


def _judged_directories(places: Places, wanted: Wanted) -> Iterator[str]:
    """Yield the directories above the grader's paths: a runner reads what is meant for it there."""
    for path in wanted.grader:
        yield from above(path, places.workdir)


def _file(entry: Entry, tree: Tree, places: Places, near: bool) -> Iterator[Finding]:
    if entry.name == "conftest.py" and places.of_task(entry.path) and tree.writable(entry):
        yield _hook(
            "high" if near else "medium", entry,
            "pytest runs it before any test: the agent can make it report every test as passed",
        )  # fmt: skip
    elif entry.name in _PYTHON_START and tree.writable(entry):
        own = not (tree.agent.is_root and _DISTRIBUTION.fullmatch(entry.path))
        reason = "every Python imports it at its start, that of the grader too"
        yield _hook("high" if own else "low", entry, reason)
    elif _RUNNER.fullmatch(entry.name) and tree.writable(entry):
        if near:
            yield _hook("medium", entry, "it tells the runner of the grader what to run, and how")
        elif entry.parent == places.workdir and places.of_task(entry.path):
            yield _hook("low", entry, "it tells a runner of tests what to run, and how")
    elif entry.name in _SHELL_START and _in_home(entry.parent) and tree.writable(entry):
        yield Finding(
            risk="low", kind="hook", path=entry.path,
            reason="a shell of this user runs it: grade with verify, or as another user",
        )  # fmt: skip
    elif _git_hook(entry, tree) and tree.writable(entry):
        yield _hook("high", entry, "git runs it, for whoever uses git here, the grader too")


def _hook(risk: Risk, entry: Entry, reason: str) -> Finding:
    return Finding(risk=risk, kind="hook", path=entry.path, reason=reason, remedy="read-only")


def _in_home(directory: str) -> bool:
    return directory == "/root" or posixpath.dirname(directory) == "/home"


def _git_hook(entry: Entry, tree: Tree) -> bool:
    directory = entry.parent
    if posixpath.basename(directory) != "hooks" or entry.name.endswith(".sample"):
        return False
    return bool(entry.mode & 0o111) and is_repository(tree, posixpath.dirname(directory))


def is_repository(tree: Tree, path: str) -> bool:
    """Say whether the directory is one of git's: as git looks, by what is in it."""
    head, objects, refs = (tree.get(posixpath.join(path, n)) for n in ("HEAD", "objects", "refs"))
    return bool(head and head.type == "file" and objects and refs)


def _content(path: str, content: bytes) -> Iterator[Finding]:
    if path == PRELOAD and content.strip():
        yield Finding(
            risk="high", kind="hook", path=path, remedy="read-only", evidence=_text(content),
            reason="every dynamically linked program loads these libraries, the grader too",
        )  # fmt: skip
    elif _SITE.search(path):
        yield from _pth(path, content)
    elif _git_config(path):
        for match in _GIT_RUNS.finditer(content):
            yield Finding(
                risk="high", kind="hook", path=path, remedy="read-only",
                reason="git runs what its configuration names, for the grader too",
                evidence=_text(match[0]),
            )  # fmt: skip


def _pth(path: str, content: bytes) -> Iterator[Finding]:
    lines = [line for line in content.splitlines() if line.startswith((b"import ", b"import\t"))]
    if lines and not _KNOWN_PTH.fullmatch(posixpath.basename(path).removesuffix(".pth")):
        yield Finding(
            risk="high", kind="hook", path=path, remedy="read-only", evidence=_text(lines[0]),
            reason="every Python runs its import lines at start, that of the grader too",
        )  # fmt: skip


def _environment(env: Mapping[str, str]) -> Iterator[Finding]:
    for name, effect in _ENVIRONMENT.items():
        value = env.get(name)
        if value:
            yield Finding(
                risk="medium", kind="hook", path=f"${name}", evidence=value[:100],
                reason=f"{effect}; start the grader without it, as verify does",
            )  # fmt: skip


def _text(content: bytes) -> str:
    return content.strip()[:100].decode(errors="replace")


def tells(entry: Entry) -> bool:
    """Say whether what matters of the file is in its content."""
    known = entry.path == PRELOAD or _SITE.search(entry.path) is not None
    return known or _git_config(entry.path)


def _git_config(path: str) -> bool:
    if path.endswith(("/.git/config", "/.gitconfig", "/git/config", "/etc/gitconfig")):
        return True
    return "/.git/modules/" in path and path.endswith("/config")
