"""What an agent hands in, put on the layers that it began with. Pure but for `Pristine`.

The layer that comes of it hides what these layers have at the kept paths, so that deletions count;
directories on the way are theirs. What could make a grader say what the agent wants is found: hooks
that interpreters, test runners and git load by their name, files beside the grader's own, and links
that lead to them.
"""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import os
import re
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence

from dsecd.images.model import CHUNK, OPAQUE, Node, directory, walk, whiteout
from dsecd.images.sources.kept import find, shown
from dsecd.images.sources.paths import Parts
from libdsec.errors import InvalidArgument
from libdsec.model import KeptWarning

MAX_LINKS = 40
_PSEUDO = (b"proc", b"sys", b"dev")
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC

# By their absolute paths, in which * stands for slashes, too; the first kind that matches counts
_KINDS = {
    "bytecode": "*/__pycache__/* *.pyc *.pyo",
    "python hook": "*/sitecustomize.py */usercustomize.py *.pth *.egg-link */site-packages/*"
    " */dist-packages/*",
    "test hook": "*/conftest.py */pytest.ini */.pytest.ini */tox.ini */setup.cfg */pyproject.toml"
    " */pytest.py",
    "git hook": "*/.git */.git/hooks/* */.git/config* */.git/info/* */.gitconfig",
    "loader": "/etc/ld.so.* /lib/* /lib32/* /lib64/* /usr/lib/* /usr/lib64/*",
    "command": "/bin/* /sbin/* /usr/bin/* /usr/sbin/* /usr/local/bin/* /usr/local/sbin/*",
    "shell startup": "*/.bashrc */.bash_profile */.profile */.zshenv /etc/profile*"
    " /etc/bash.bashrc /etc/environment",
}
_HOOKS = {
    kind: re.compile("|".join(map(fnmatch.translate, patterns.split())))
    for kind, patterns in _KINDS.items()
}


class Pristine:
    """The layers that a sandbox began with, by the root directory `fd`; links are not followed."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def status(self, parts: Parts) -> os.stat_result | None:
        """Return the lstat(2) of `parts`, None where there is nothing."""
        try:
            with opened_at(self._fd, parts[:-1], _DIRECTORY) as above:
                return os.lstat(parts[-1], dir_fd=above) if parts else os.fstat(above)
        except OSError:
            return None

    def target(self, parts: Parts) -> bytes | None:
        """Return where the symbolic link at `parts` leads, None when it is none."""
        try:
            with opened_at(self._fd, parts[:-1], _DIRECTORY) as above:
                return os.fsencode(os.readlink(parts[-1], dir_fd=above))
        except OSError:
            return None

    def has(self, parts: Parts, node: Node) -> bool:
        """Return whether `parts` has the content of `node`, which is no directory."""
        if stat.S_ISLNK(node.mode):
            return self.target(parts) == node.target
        status = self.status(parts)
        if status is None or not stat.S_ISREG(status.st_mode) or status.st_size != node.size:
            return False
        with opened_at(self._fd, parts) as fd:
            for number, chunk in enumerate(node.chunks):
                data = os.pread(fd, CHUNK, number * CHUNK)
                if chunk is None:
                    if any(data):
                        return False
                elif hashlib.sha256(data).digest() != chunk.digest:
                    return False
        return True


@contextlib.contextmanager
def opened_at(root: int, parts: Parts, flags: int = _FILE) -> Iterator[int]:
    """Open `parts` below an open directory, one component after the other."""
    fd = os.open(b".", _DIRECTORY, dir_fd=root)
    try:
        for number, name in enumerate(parts, 1):
            below = os.open(name, flags if number == len(parts) else _DIRECTORY, dir_fd=fd)
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def entries(root: int) -> Iterator[tuple[Parts, bool]]:
    """Yield every path below the open directory, and whether it is a directory."""
    for path, folders, files, _ in os.fwalk(b".", dir_fd=root):
        above = tuple(part for part in path.split(b"/") if part != b".")
        for names, is_directory in ((folders, True), (files, False)):
            yield from (((*above, name), is_directory) for name in names)


def settle(
    tree: Node, keep: Sequence[Parts], pristine: Pristine, grader: Mapping[Parts, bool]
) -> list[KeptWarning]:
    """Make `tree` the layer of what is handed in; return what a grader should know of.

    `grader` holds the paths of the grader's own files, true for directories. Raises
    `InvalidArgument` for a kept path below what is a link or a file in the pristine layers.
    """
    warnings = list(_place(tree, keep, pristine))
    resolver = _Resolver(tree, keep, pristine, grader)
    for above, name, parts, node in list(_leaves(tree, keep)):
        kind = _suspicion(parts, node, resolver)
        if not kind or pristine.has(parts, node):
            continue
        if kind in ("bytecode", "link"):
            del above.children[name]
            warnings.append(KeptWarning(kind=kind, path=shown(parts), dropped=True))
        else:
            warnings.append(KeptWarning(kind=kind, path=shown(parts)))
    return _without_repeats(warnings)


def _suspicion(parts: Parts, node: Node, resolver: _Resolver) -> str:
    """Return what kind of hook the file may be, "" for an ordinary one."""
    if stat.S_ISLNK(node.mode) and resolver.leads_away(parts, node.target):
        return "link"
    path = shown(parts)
    for kind, pattern in _HOOKS.items():
        if pattern.fullmatch(path):
            return kind
    return "beside the grader's files" if resolver.is_beside(parts) else ""


def _place(tree: Node, keep: Sequence[Parts], pristine: Pristine) -> Iterator[KeptWarning]:
    """Give directories on the way their pristine selves, and hide what lies at the kept paths."""
    _renew(tree, pristine.status(()))
    for parts in keep:
        found, there = find(tree, parts), pristine.status(parts)
        if found is None:
            yield KeptWarning(kind="absent", path=shown(parts))
        above = _on_the_way(tree, parts, pristine, make=found is not None or there is not None)
        if above is None:
            continue
        if found is None:
            above.children[parts[-1]] = whiteout()
        elif found.is_dir() and there is not None and stat.S_ISDIR(there.st_mode):
            found.xattrs[OPAQUE] = b"y"


def _on_the_way(tree: Node, parts: Parts, pristine: Pristine, make: bool) -> Node | None:
    """Renew the directories above `parts`; return the last, None if one is missing and not made."""
    node = tree
    for number in range(1, len(parts)):
        status = pristine.status(parts[:number])
        if status is not None and not stat.S_ISDIR(status.st_mode):
            raise InvalidArgument(
                f"keep: {shown(parts)}: {shown(parts[:number])} is no directory in the image but a "
                "file or link; name the real path",
                field="keep",
            )
        below = node.children.get(parts[number - 1])
        if below is None and not make:
            return None
        if below is None:
            below = node.children[parts[number - 1]] = directory()
        node = below
        _renew(node, status)
    return node if make else None


def _renew(node: Node, status: os.stat_result | None) -> None:
    """Give a directory on the way the attributes that it has in the pristine layers."""
    node.xattrs, node.uid, node.gid = {}, 0, 0
    node.mode = stat.S_IFDIR | 0o755
    if status is not None:
        node.mode, node.uid, node.gid = status.st_mode, status.st_uid, status.st_gid
        node.mtime_ns = status.st_mtime_ns


def _leaves(tree: Node, keep: Sequence[Parts]) -> Iterator[tuple[Node, bytes, Parts, Node]]:
    """Yield (directory, name, path, node) of all that is kept and is no directory."""
    for parts in keep:
        top, above = find(tree, parts), find(tree, parts[:-1])
        assert above is not None or top is None
        if top is None or top.is_whiteout():
            continue
        if not top.is_dir():
            assert above is not None
            yield above, parts[-1], parts, top
            continue
        for path, node in walk(top):
            below = tuple(path.split(b"/")) if path else ()
            if node.is_dir():
                for name, child in node.children.items():
                    if not child.is_dir():
                        yield node, name, (*parts, *below, name), child


class _Resolver:
    """Follows a link as the grader would: through what is kept, else through the pristine."""

    def __init__(
        self, tree: Node, keep: Sequence[Parts], pristine: Pristine, grader: Mapping[Parts, bool]
    ) -> None:
        self._tree, self._keep, self._pristine = tree, keep, pristine
        own = {parts for parts, is_directory in grader.items() if not is_directory}
        self._grader, self._folders = grader, {parts[:-1] for parts in own}
        # with the directories that nobody but the grader has
        self._closed = own | {
            parts
            for parts, is_directory in grader.items()
            if is_directory and find(tree, parts) is None and pristine.status(parts) is None
        }

    def is_beside(self, parts: Parts) -> bool:
        """Whether `parts` is in a directory with files of the grader's, and none of them."""
        return parts[:-1] in self._folders and parts not in self._grader

    def leads_away(self, parts: Parts, target: bytes) -> bool:
        """Whether the link at `parts` leads to the grader's files, or into /proc, /sys or /dev."""
        at: list[bytes] = [] if target.startswith(b"/") else list(parts[:-1])
        ahead = _components(target)
        links = 0
        while ahead:
            name = ahead.pop(0)
            if name == b"..":
                del at[-1:]
                continue
            at.append(name)
            here = tuple(at)
            if here in self._closed:
                return True
            if here[0] in _PSEUDO:
                return [*here, *ahead] != [b"dev", b"null"]
            further = self._link(here)
            if further is not None:
                links += 1
                if links > MAX_LINKS:
                    return False  # it leads nowhere
                at = [] if further.startswith(b"/") else at[:-1]
                ahead = _components(further) + ahead
        return False

    def _link(self, parts: Parts) -> bytes | None:
        if any(parts[: len(one)] == one for one in self._keep):
            node = find(self._tree, parts)
            return node.target if node is not None and stat.S_ISLNK(node.mode) else None
        return self._pristine.target(parts)


def _components(target: bytes) -> list[bytes]:
    return [name for name in target.split(b"/") if name not in (b"", b".")]


def _without_repeats(warnings: Collection[KeptWarning]) -> list[KeptWarning]:
    """One line for the bytecode of a directory."""
    found: dict[tuple[str, str], KeptWarning] = {}
    for warning in warnings:
        path = warning.path
        if warning.kind == "bytecode":
            path = path.rpartition("/")[0]
        key = (warning.kind, path)
        found.setdefault(key, KeptWarning(kind=warning.kind, path=path, dropped=warning.dropped))
    return list(found.values())
