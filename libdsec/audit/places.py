"""Where a path lies: in the system, among installed packages, or in what the task is made of. Pure.

Names such as ``expected`` or ``tests`` mean something only in the last: a compiler has a header
``expected``, and every package its tests.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable

SYSTEM = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib32", "/lib64", "/libx32", "/proc", "/run",
          "/sbin", "/sys", "/usr", "/var")  # fmt: skip
_NOT_SYSTEM = ("/usr/src", "/var/log", "/var/tmp", "/var/www")
_PACKAGES = frozenset({
    ".bundle", ".cache", ".cargo", ".conda", ".eggs", ".git", ".gradle", ".hg", ".m2", ".npm",
    ".nox", ".nvm", ".pyenv", ".rbenv", ".rustup", ".svn", ".tox", ".venv", "anaconda3",
    "bower_components", "conda", "dist-packages", "gems", "miniconda3", "miniforge3",
    "node_modules", "site-packages", "venv", "vendor",
})  # fmt: skip
_LIBRARY = re.compile(r"/(lib(32|64)?/(python|perl|ruby)[0-9.]*|pkg/mod)(/|$)")
TEST_DIRECTORIES = frozenset({"__tests__", "e2e", "spec", "specs", "test", "tests"})
_FIXTURES = TEST_DIRECTORIES | {"fixtures", "golden", "snapshots", "testdata"}


class Places:
    """Knows the directory in which the agent works, which is the task's wherever it lies."""

    def __init__(self, workdir: str) -> None:
        self.workdir = posixpath.normpath(workdir or "/")
        self._of_task: dict[str, bool] = {}

    def of_task(self, path: str) -> bool:
        """Say whether `path` is neither the system's nor in an installed package."""
        directory = path.rpartition("/")[0] or "/"
        known = self._of_task.get(directory)
        if known is None:
            known = self._of_task[directory] = self._judge(directory)
        return known

    def _judge(self, directory: str) -> bool:
        whole = not _PACKAGES.isdisjoint(directory.split("/")) or _LIBRARY.search(directory)
        if whole:
            return False
        if self.workdir != "/" and within(directory, (self.workdir,)):
            return True
        return not within(directory, SYSTEM) or within(directory, _NOT_SYSTEM)

    def fixture(self, path: str) -> bool:
        """Say whether `path` lies in tests, where data has the names of answers."""
        return not _FIXTURES.isdisjoint(posixpath.dirname(path).split("/"))


def within(path: str, tops: Iterable[str]) -> bool:
    """Say whether `path` is one of `tops` or beneath one."""
    return any(path == top or top == "/" or path.startswith(f"{top}/") for top in tops)


def above(path: str, top: str) -> list[str]:
    """Return the directories from that of `path` up to `top`, which may be `path`'s own."""
    found = [posixpath.dirname(path)]
    while found[-1] not in (top, "/"):
        found.append(posixpath.dirname(found[-1]))
    return found if within(found[0], (top,)) else found[:1]
