"""What a layer is made of: a tree of nodes whose content is chunks named by their digests. Pure.

Every source (directory, tar, OCI layers, a sandbox's upper) becomes a tree; the writer turns a tree
into a metadata image; the tree's digest is the layer's name for ever, whatever blobs its chunks
happen to lie in.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator

import msgspec

CHUNK = 64 << 10  # bytes of content one chunk covers; a file's last one may be shorter
BLOCK = 4 << 10  # of EROFS, and of the blobs: every chunk starts on one
MAX_CHUNKS = 16 << 20  # of all files of a layer, holes included: 1 TiB of apparent content

OPAQUE = b"trusted.overlay.opaque"
REDIRECT = b"trusted.overlay.redirect"


class Chunk(msgspec.Struct, frozen=True):
    """Content by digest: SHA-256 of its `size` bytes (1 to CHUNK), padding not included."""

    digest: bytes
    size: int


class Node(msgspec.Struct, kw_only=True, eq=False):
    """One inode. Two names of one file (hard links) hold the same object.

    A regular file of `size` bytes has ceil(size / CHUNK) chunks; None is a hole. A whiteout, as
    overlayfs wants it, is a character device 0/0; an opaque directory has the attribute OPAQUE.
    """

    mode: int  # type and permissions, as st_mode
    uid: int = 0
    gid: int = 0
    mtime_ns: int = 0
    rdev: tuple[int, int] = (0, 0)  # major, minor of a device
    target: bytes = b""  # of a symbolic link
    size: int = 0  # of a regular file
    chunks: list[Chunk | None] = []
    xattrs: dict[bytes, bytes] = {}
    children: dict[bytes, Node] = {}  # of a directory, by name

    @property
    def kind(self) -> int:
        return stat.S_IFMT(self.mode)

    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def is_whiteout(self) -> bool:
        return stat.S_ISCHR(self.mode) and self.rdev == (0, 0)


def directory(mode: int = 0o755) -> Node:
    """Return an empty directory of root's."""
    return Node(mode=stat.S_IFDIR | mode)


def whiteout() -> Node:
    return Node(mode=stat.S_IFCHR)


def walk(root: Node) -> Iterator[tuple[bytes, Node]]:
    """Yield (path, node) depth first, names in byte order, the root as b"" first.

    A hard-linked file is yielded once per name. Not recursive: trees may be deep.
    """
    pending = [(b"", root)]
    while pending:
        path, node = pending.pop()
        yield path, node
        for name in sorted(node.children, reverse=True):
            pending.append((path + b"/" + name if path else name, node.children[name]))
