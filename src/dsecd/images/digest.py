"""The name of a layer: one digest over its tree, its config and its parents, and nothing else.

Where the content lies, who built the layer and when do not count, so every host gives the same
input the same name. The encoding is fixed for ever; a change to it needs another first line.
Numbers are little-endian, a string has its length before it (u32):

    "dsec layer 1\\n"
    the config, a string (JSON, keys sorted, defaults left out); u32 parents, each a string
    the root, its name empty, and behind every directory its entries in byte order, each with all
    that is below it before the next. An entry is its name, a string, then either

    u8 1, u64 number: another name of an inode; they are numbered as they first come, from 0
    u8 0, u32 mode, u32 uid, u32 gid, i64 seconds, u32 nanoseconds, u32 attributes, each a name and
        a value in byte order of the names, then by the type of the inode:
        u64 size, u64 chunks, each {32 bytes digest, u32 size}, all zeros for a hole
        u32 entries of a directory
        the target of a link, a string
        u32 major, u32 minor of a device

Names and not paths, so that the work grows with the tree and not with its depth.
"""

from __future__ import annotations

import hashlib
import stat
import struct
from collections.abc import Sequence

import msgspec

from dsecd.images.manifest import Config
from dsecd.images.model import Chunk, Node
from libdsec.errors import InvalidArgument

_MAGIC = b"dsec layer 1\n"
_LENGTH = struct.Struct("<I")
_AGAIN = struct.Struct("<BQ")
_FIXED = struct.Struct("<BIIIqII")
_CONTENT = struct.Struct("<QQ")
_CHUNK = struct.Struct("<32sI")
_DEVICE = struct.Struct("<II")
_HOLE = bytes(_CHUNK.size)
_PART_BYTES = 1 << 20
_PART_CHUNKS = 1 << 14


class _Stream:
    """Collects small pieces, so that hashing them costs few calls."""

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self._part = bytearray()

    def add(self, data: bytes) -> None:
        self._part += data
        if len(self._part) >= _PART_BYTES:
            self._digest.update(self._part)
            self._part.clear()

    def finish(self) -> str:
        self._digest.update(self._part)
        return self._digest.hexdigest()


def layer_digest(root: Node, config: Config, parents: Sequence[str]) -> str:
    """Return the layer's digest, 64 hexadecimal digits.

    Raises `InvalidArgument` for numbers that no file can have.
    """
    stream = _Stream()
    stream.add(_MAGIC)
    stream.add(_string(msgspec.json.encode(config, order="deterministic")))
    stream.add(_LENGTH.pack(len(parents)))
    for parent in parents:
        stream.add(_string(parent.encode()))
    numbers: dict[int, int] = {}  # by id(): the tree keeps the nodes alive
    pending = [(b"", root)]
    while pending:
        name, node = pending.pop()
        number = numbers.get(id(node))
        if number is not None:
            stream.add(_string(name) + _AGAIN.pack(1, number))
            continue
        numbers[id(node)] = len(numbers)
        try:
            stream.add(_string(name) + _inode(node))
        except struct.error as error:
            shown = name.decode("utf-8", "replace")
            raise InvalidArgument(f"{shown}: a number is out of range: {error}") from error
        if stat.S_ISREG(node.mode):
            for start in range(0, len(node.chunks), _PART_CHUNKS):
                stream.add(b"".join(map(_chunk, node.chunks[start : start + _PART_CHUNKS])))
        elif stat.S_ISDIR(node.mode):
            pending += sorted(
                node.children.items(), reverse=True
            )  # names differ: no node is compared
    return stream.finish()


def _string(value: bytes) -> bytes:
    return _LENGTH.pack(len(value)) + value


def _inode(node: Node) -> bytes:
    seconds, nanoseconds = divmod(node.mtime_ns, 1_000_000_000)
    count = len(node.xattrs)
    head = _FIXED.pack(0, node.mode, node.uid, node.gid, seconds, nanoseconds, count)
    if count:
        pairs = sorted(node.xattrs.items())
        head += b"".join(_string(name) + _string(value) for name, value in pairs)
    kind = stat.S_IFMT(node.mode)
    if kind == stat.S_IFREG:
        return head + _CONTENT.pack(node.size, len(node.chunks))
    if kind == stat.S_IFDIR:
        return head + _LENGTH.pack(len(node.children))
    if kind == stat.S_IFLNK:
        return head + _string(node.target)
    if kind in (stat.S_IFCHR, stat.S_IFBLK):
        return head + _DEVICE.pack(*node.rdev)
    return head


def _chunk(chunk: Chunk | None) -> bytes:
    return _HOLE if chunk is None else _CHUNK.pack(chunk.digest, chunk.size)
