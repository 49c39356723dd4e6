"""A sink that keeps content in memory, and ways to look at the trees that sources make with it."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Callable
from typing import Any

from dsecd.images.model import CHUNK, Chunk, Node, walk
from libdsec.errors import InvalidArgument


class MemorySink:
    """The contract of `dsecd.images.sources.sink.Sink`, in its plainest form."""

    def __init__(self) -> None:
        self.known: dict[bytes, bytes] = {}
        self.added = 0  # bytes given to it

    def add(self, read: Callable[[int], bytes], size: int) -> list[Chunk | None]:
        chunks: list[Chunk | None] = []
        for start in range(0, size, CHUNK):
            wanted = min(CHUNK, size - start)
            data = read(wanted)
            if len(data) != wanted:
                raise InvalidArgument("truncated")
            self.added += wanted
            if not any(data):
                chunks.append(None)
                continue
            digest = hashlib.sha256(data).digest()
            self.known[digest] = data
            chunks.append(Chunk(digest, wanted))
        return chunks

    def add_fd(self, fd: int, size: int) -> list[Chunk | None]:
        return self.add(lambda count: os.read(fd, count), size)

    def content(self, node: Node) -> bytes:
        assert len(node.chunks) == -(-node.size // CHUNK)
        data = b"".join(
            bytes(CHUNK) if chunk is None else self.known[chunk.digest] for chunk in node.chunks
        )
        return data.ljust(node.size, b"\0")[: node.size]


def find(root: Node, path: str) -> Node:
    node = root
    for name in path.encode("utf-8", "surrogateescape").split(b"/"):
        node = node.children[name]
    return node


def describe(root: Node, sink: MemorySink) -> dict[bytes, tuple[Any, ...]]:
    """Everything in a tree by path; hard links show as the number of the first path's inode."""
    numbers: dict[int, int] = {}
    found: dict[bytes, tuple[Any, ...]] = {}
    for path, node in walk(root):
        number = numbers.setdefault(id(node), len(numbers))
        found[path] = (
            number, node.mode, node.uid, node.gid, node.mtime_ns, node.rdev, node.target,
            sink.content(node) if stat.S_ISREG(node.mode) else b"", dict(node.xattrs),
        )  # fmt: skip
    return found
