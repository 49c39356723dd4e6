"""The upper of a sandbox becomes the tree of a layer: what the sandbox changed, and nothing else.

Kernel: Documentation/filesystems/overlayfs.rst. A whiteout is a character device 0/0, made by the
kernel as whoever mounted the overlay; a directory that replaces one below has the attribute
``trusted.overlay.opaque``, one that was renamed has ``trusted.overlay.redirect``. These hide and
find what is below and stay; the other attributes hold inode numbers and handles of this one upper.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from dsecd.images.model import OPAQUE, REDIRECT, Node, whiteout
from dsecd.images.sources import attributes
from dsecd.images.sources.paths import Parts, compile_patterns, show
from dsecd.images.sources.report import MAX_ID, Check, Report, Residue, unchecked
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.walker import EMPTY, KEEP, OMIT, Walker, opened
from libdsec.errors import InvalidArgument, Unsupported

RANGE = 65536  # ids of one sandbox
_OVERLAY = b"trusted.overlay."
_METACOPY = b"trusted.overlay.metacopy"
_ESCAPED = b"trusted.overlay.overlay."  # of an overlay mounted inside the sandbox: content
_KEPT = (b"user.", b"security.", b"system.posix_acl_", _ESCAPED)
_LOCAL = frozenset(
    _OVERLAY + name for name in (b"origin", b"impure", b"nlink", b"upper", b"uuid", b"protattr")
)


class Rule(msgspec.Struct, frozen=True):
    """What of a sandbox has no place in a layer: `pattern` as of `compile_patterns`.

    ``omit`` leaves out what matches and all below; ``empty`` keeps files without their content.
    """

    pattern: str
    action: Literal["omit", "empty"] = "omit"


RESIDUE = (
    *(
        Rule(f"{home}/{name}")
        for home in ("root", "home/*")
        for name in (
            ".*_history", ".lesshst", ".viminfo", ".wget-hsts", ".cache/pip", ".cache/uv",
        )
    ),
    Rule("tmp/*"),
    Rule("var/tmp/*"),
    Rule("var/cache/apt/*.bin"),
    Rule("var/cache/apt/archives/*.deb"),
    Rule("var/cache/apt/archives/partial/*"),
    Rule("var/log/**", "empty"),
)  # fmt: skip


def read_upper(
    upper: Path | int,
    uid_base: int,
    sink: Sink,
    *,
    residue: Sequence[Rule] = RESIDUE,
    check: Check = unchecked,
) -> tuple[Node, Report]:
    """Return the tree of the overlay's upper directory (not of the one that holds it and the work
    directory), ids as they are inside, and what was left out by rule.

    Nothing may write there meanwhile: the sandbox is stopped or frozen. Sockets and device nodes
    are left out. A whiteout always stays, and an omitted opaque directory becomes one: what they
    hide must not come back.

    Raises `InvalidArgument` naming a file whose owner is outside of uid_base…+65535, `Unsupported`
    for an overlay with features we do not mount with (metacopy), `WrongState` for a change.
    """
    rules = UpperRules(uid_base, residue)
    with opened(upper) as root:
        walker = Walker(rules, sink, check, whiteouts=True)
        node = walker.read(root)
    walker.report.residue = rules.found
    walker.report.xattrs = rules.dropped
    return node, walker.report


class UpperRules:
    """Ids shifted, overlay attributes sorted, residue cleared."""

    tells_omitted = True

    def __init__(self, uid_base: int, residue: Sequence[Rule]) -> None:
        self._base = uid_base
        self._residue = residue
        self._patterns = compile_patterns((rule.pattern for rule in residue), below=True)
        self.found: dict[str, Residue] = {}
        self.dropped = 0

    def action(self, parts: Parts, status: os.stat_result) -> str:
        match = self._patterns.fullmatch(b"/".join(parts)) if self._patterns is not None else None
        if match is None or match.lastindex is None or _is_whiteout(status):
            return KEEP
        rule = self._residue[match.lastindex - 1]
        regular = stat.S_ISREG(status.st_mode)
        if rule.action == "empty" and not (regular and status.st_size):
            return KEEP
        found = self.found.setdefault(rule.pattern, Residue())
        found.count += 1
        found.size_bytes += status.st_size if regular else 0
        return OMIT if rule.action == "omit" else EMPTY

    def omitted(self, node: Node) -> Node | None:
        return whiteout() if node.is_dir() and OPAQUE in node.xattrs else None

    def make(self, parts: Parts, status: os.stat_result, xattrs: dict[bytes, bytes]) -> Node:
        if _is_whiteout(status):
            return whiteout()
        return Node(
            mode=status.st_mode,
            uid=self._inside(status.st_uid, parts),
            gid=self._inside(status.st_gid, parts),
            mtime_ns=status.st_mtime_ns,
            rdev=(os.major(status.st_rdev), os.minor(status.st_rdev)),
            xattrs=self._xattrs(parts, xattrs),
        )

    def _inside(self, number: int, parts: Parts) -> int:
        if not self._base and not 0 <= number <= MAX_ID:
            raise InvalidArgument(
                f"{show(parts)} belongs to id {number}, which a container cannot have; "
                f"give it to one from 0 to {MAX_ID}",
                path=show(parts),
            )
        if not self._base <= number < self._base + RANGE:
            raise InvalidArgument(
                f"{show(parts)} belongs to the host's id {number}, which is none of the sandbox's "
                f"({self._base} to {self._base + RANGE - 1})",
                path=show(parts),
            )
        return number - self._base

    def _xattrs(self, parts: Parts, xattrs: dict[bytes, bytes]) -> dict[bytes, bytes]:
        kept = {}
        for name, value in xattrs.items():
            if name == REDIRECT or (name == OPAQUE and value == b"y") or name.startswith(_KEPT):
                kept[name] = self._translated(name, value, parts)
            elif name.startswith(_OVERLAY) and name not in _LOCAL:
                raise _foreign(parts, name)
            elif not name.startswith(_OVERLAY):
                self.dropped += 1
        return kept

    def _translated(self, name: bytes, value: bytes, parts: Parts) -> bytes:
        """Shift the ids inside attributes, which the kernel keeps as the host's, too."""
        if name in attributes.ACLS:
            return attributes.shift_acl(value, lambda number: self._inside(number, parts))
        if name == attributes.CAPABILITY:
            return attributes.shift_capability(value, lambda number: self._inside(number, parts))
        return value


def _is_whiteout(status: os.stat_result) -> bool:
    return stat.S_ISCHR(status.st_mode) and status.st_rdev == 0


def _foreign(parts: Parts, name: bytes) -> Unsupported:
    attribute = name.decode("utf-8", "replace")
    if name == _METACOPY:
        reason = "its content is in a layer below (metacopy)"
    else:
        reason = f"it has the attribute {attribute}"
    return Unsupported(
        f"{show(parts)}: {reason}, which overlays mounted by dsecd never have; is this another "
        "program's upper?",
        reason=reason,
        path=show(parts),
    )
