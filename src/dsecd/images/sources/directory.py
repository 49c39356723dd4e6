"""A directory on the host becomes a tree."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from dsecd.images.model import Node
from dsecd.images.sources.paths import Parts, compile_patterns
from dsecd.images.sources.report import Check, Report, unchecked
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.walker import KEEP, OMIT, Walker, opened

_KEPT = (b"user.", b"security.", b"system.posix_acl_")
_OVERLAY = b"trusted.overlay."


def read_directory(
    path: Path | int,
    sink: Sink,
    *,
    exclude: Sequence[str] = (),
    enter_mounts: bool = False,
    devices: bool = False,
    overlay: bool = False,
    check: Check = unchecked,
) -> tuple[Node, Report]:
    """Return the tree at `path` (or below the open directory), and what was left out.

    `exclude` holds patterns relative to the root (``*``, ``?``, ``**``). Sockets are left out, and
    device nodes unless `devices`; a directory on which another file system is mounted stays empty
    unless `enter_mounts`; whiteouts and overlayfs' own attributes are kept only with `overlay`.
    `check` is told the bytes of content taken, after each entry.

    Raises `WrongState` naming a file that changes while it is read, `InvalidArgument` for more than
    512 levels, `NotFound`; other errors of the system pass through.
    """
    rules = _Rules(exclude, overlay)
    with opened(path) as root:
        walker = Walker(
            rules, sink, check, enter_mounts=enter_mounts, devices=devices, whiteouts=overlay
        )
        node = walker.read(root)
    walker.report.excluded = rules.excluded
    walker.report.xattrs = rules.dropped
    return node, walker.report


class _Rules:
    """Everything as it is, but for what is excluded."""

    def __init__(self, exclude: Sequence[str], overlay: bool) -> None:
        self._exclude = compile_patterns(exclude)
        self._kept = (*_KEPT, _OVERLAY) if overlay else _KEPT
        self.excluded = 0
        self.dropped = 0

    def action(self, parts: Parts, status: os.stat_result) -> str:
        if self._exclude is not None and self._exclude.fullmatch(b"/".join(parts)):
            self.excluded += 1
            return OMIT
        return KEEP

    def make(self, parts: Parts, status: os.stat_result, xattrs: dict[bytes, bytes]) -> Node:
        kept = {name: value for name, value in xattrs.items() if name.startswith(self._kept)}
        self.dropped += len(xattrs) - len(kept)
        is_device = stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode)
        return Node(
            mode=status.st_mode,
            uid=status.st_uid,
            gid=status.st_gid,
            mtime_ns=status.st_mtime_ns,
            rdev=(os.major(status.st_rdev), os.minor(status.st_rdev)) if is_device else (0, 0),
            xattrs=kept,
        )

    def omitted(self, node: Node) -> Node | None:
        return None

    @property
    def tells_omitted(self) -> bool:
        return False
