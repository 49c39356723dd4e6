"""A tree of nodes as one string of bytes, from which C (or its twin) lays out the image.

What needs a dictionary or a decision is done here: the order of the inodes, numbers of hard links,
shared attributes, the place of every chunk. What is left is arithmetic. All numbers are
little-endian, as on disk:

    u32 inodes, u32 devices, u32 bytes of shared attributes, u32 zero
    devices x {64 bytes tag: the blob's id, u32 its blocks}
    the shared attributes
    inodes x {RECORD, then its xattrs, then by its type:
        a directory's entries, "." and ".." with them, in byte order: {u32 inode, u8 length, name}
        a regular file's chunk indexes: {u16 zero, u16 device, u32 block}, all ones for a hole
        a symbolic link's target}

Inodes are numbered in the order of the records, from 0, the root; devices from 1. A file of one
block may have no index: then its record has the block, counted over all devices.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Mapping

from dsecd.images.blobchoice import MAX_BLOBS
from dsecd.images.erofs.xattrs import SharedXattrs
from dsecd.images.model import BLOCK, CHUNK, MAX_CHUNKS, Node
from libdsec.errors import DSecError, Internal, InvalidArgument

NAME_MAX, TARGET_MAX = 255, 4095

HEADER = struct.Struct("<IIII")
DEVICE = struct.Struct("<64sI")
RECORD = struct.Struct("<HHIIqIIQIII")
# mode, zero, uid, gid, seconds, nanoseconds, links, size, device number or block, bytes of xattrs,
# count
_ENTRY = struct.Struct("<IB")
_INDEX = struct.Struct("<HHI")
_HOLE = b"\xff" * 8
_DOTS = (b".", b"..")
_U32 = 0xFFFFFFFF
# A file that lies at one address needs no indexes: 64 bytes instead of 96. But the kernel
# (fs/erofs/fileio.c) reads every page of such a file with a request of its own, where it reads a
# chunk at once: so only files that have no second page.
_FLAT_BYTES = BLOCK
_FLAT_BLOCKS = 1 << 31  # an address has 32 bits, and the image comes before the devices
_FLAT_DEVICES = 64  # the kernel walks the devices up to the right one at every such read

Where = Mapping[bytes, tuple[str, int]]  # a chunk's digest: its blob and the block in it


def encode_tree(root: Node, where: Where, sizes: Mapping[str, int]) -> tuple[bytes, list[str]]:
    """Return the encoded tree and the ids of the blobs it uses, in the order of first use.

    `sizes` are the blobs' lengths in bytes. Raises `InvalidArgument` for what EROFS cannot hold,
    naming the file.
    """
    return _Encoder(root, where, sizes).encode()


class _Encoder:
    def __init__(self, root: Node, where: Where, sizes: Mapping[str, int]) -> None:
        self._where = where
        self._sizes = sizes
        self._nodes: list[Node] = []
        self._numbers: dict[int, int] = {}  # by id(): the tree keeps the nodes alive
        self._links: list[int] = []
        self._parents: list[int] = []
        self._names: list[bytes] = []
        self._devices: dict[str, int] = {}
        self._starts: list[int | None] = []  # by device: its first block, counted over all of them
        self._blocks = 0  # of all devices
        self._indexes: dict[bytes, bytes] = {}  # by digest
        self._chunks = 0
        self._number(root)

    def encode(self) -> tuple[bytes, list[str]]:
        number = 0
        try:
            shared = SharedXattrs(self._nodes)
            records = []
            for number, node in enumerate(self._nodes):
                records.append(self._record(number, node, shared.encode(node.xattrs)))
        except DSecError as error:
            path = self._path(number)
            detail = error.detail | {"member": path}
            raise type(error)(f"{path}: {error.message}", **detail) from error
        head = HEADER.pack(len(records), len(self._devices), len(shared.area), 0)
        slots = [DEVICE.pack(blob.encode(), self._sizes[blob] // BLOCK) for blob in self._devices]
        return b"".join([head, *slots, shared.area, *records]), list(self._devices)

    def _number(self, root: Node) -> None:
        """Give every inode its number: the entries of a directory together, then what is below."""
        if not root.is_dir():
            raise InvalidArgument("the root of a layer must be a directory")
        self._append(root, 0, b"")
        pending = [0]
        while pending:
            parent = pending.pop()
            deeper: list[int] = []
            for name, node in sorted(self._nodes[parent].children.items()):
                if not 0 < len(name) <= NAME_MAX or b"/" in name or b"\0" in name or name in _DOTS:
                    self._refuse_name(parent, name)
                known = self._numbers.get(id(node))
                if known is None:
                    number = self._append(node, parent, name)
                    if stat.S_ISDIR(node.mode):
                        deeper.append(number)
                        self._links[parent] += 1
                elif stat.S_ISDIR(node.mode):
                    raise InvalidArgument(f"{self._path(known)}: a directory with two names")
                else:
                    self._links[known] += 1
            pending += reversed(deeper)

    def _append(self, node: Node, parent: int, name: bytes) -> int:
        number = len(self._nodes)
        self._numbers[id(node)] = number
        self._nodes.append(node)
        self._links.append(2 if stat.S_ISDIR(node.mode) else 1)
        self._parents.append(parent)
        self._names.append(name)
        return number

    def _refuse_name(self, parent: int, name: bytes) -> None:
        shown = name.decode("utf-8", "replace")
        raise InvalidArgument(
            f"{self._path(parent)}: {shown!r} is no possible name: 1 to {NAME_MAX} bytes without "
            "'/' and NUL, and not '.' or '..'",
            member=shown,
        )

    def _path(self, number: int) -> str:
        names: list[bytes] = []
        while number:
            names.append(self._names[number])
            number = self._parents[number]
        return b"/".join(reversed(names)).decode("utf-8", "replace") or "."

    def _record(self, number: int, node: Node, xattrs: bytes) -> bytes:
        kind = stat.S_IFMT(node.mode)
        size = place = 0
        if kind == stat.S_IFREG:
            body, count, size = self._content(node), len(node.chunks), node.size
            if 0 < size <= _FLAT_BYTES and (block := self._flat_block(body)) is not None:
                body, count, place = b"", 0, block
        elif kind == stat.S_IFDIR:
            body = self._entries(number, node)
            count = len(node.children) + 2
        elif kind == stat.S_IFLNK:
            body, size = self._target(node), len(node.target)
            count = size
        elif kind in (stat.S_IFCHR, stat.S_IFBLK, stat.S_IFIFO, stat.S_IFSOCK):
            body, count = b"", 0
            place = _device_number(node) if kind in (stat.S_IFCHR, stat.S_IFBLK) else 0
        else:
            raise InvalidArgument(f"mode {node.mode:#o} is no type of file")
        if node.children and kind != stat.S_IFDIR:
            raise InvalidArgument("it has entries but is not a directory")
        seconds, nanoseconds = divmod(node.mtime_ns, 1_000_000_000)
        try:
            head = RECORD.pack(
                node.mode, 0, node.uid, node.gid, seconds, nanoseconds, self._links[number], size,
                place, len(xattrs), count,
            )  # fmt: skip
        except struct.error as error:
            raise InvalidArgument(
                f"out of range: mode {node.mode:#o}, uid {node.uid}, gid {node.gid}, "
                f"mtime {seconds} s"
            ) from error
        return head + xattrs + body

    def _entries(self, number: int, node: Node) -> bytes:
        pack, numbers = _ENTRY.pack, self._numbers
        found = [(name, numbers[id(child)]) for name, child in node.children.items()]
        found += [(b".", number), (b"..", self._parents[number])]
        found.sort()
        return b"".join([pack(inode, len(name)) + name for name, inode in found])

    def _content(self, node: Node) -> bytes:
        count = len(node.chunks)
        self._chunks += count
        if self._chunks > MAX_CHUNKS:
            raise InvalidArgument(f"the files span more than {MAX_CHUNKS * CHUNK >> 40} TiB")
        if not (count - 1) * CHUNK < node.size <= count * CHUNK:
            raise InvalidArgument(f"{count} chunks do not make {node.size} bytes")
        indexes = self._indexes
        parts = []
        expected = CHUNK
        for position, chunk in enumerate(node.chunks, 1):
            if chunk is None:
                parts.append(_HOLE)
                continue
            if position == count:
                expected = node.size - (count - 1) * CHUNK
            if chunk.size != expected:
                raise InvalidArgument(f"chunk {position} has {chunk.size} bytes, not {expected}")
            parts.append(indexes.get(chunk.digest) or self._index(chunk.digest))
        return b"".join(parts)

    def _flat_block(self, index: bytes) -> int | None:
        """Return the block of an index, counted over all devices; None when no address tells it."""
        if index == _HOLE:
            return None
        _, device, block = _INDEX.unpack(index)
        start = self._starts[device - 1]
        return None if start is None else start + block

    def _index(self, digest: bytes) -> bytes:
        try:
            blob, block = self._where[digest]
            blocks = self._sizes[blob] // BLOCK
        except KeyError as error:
            raise Internal(f"the chunk {digest.hex()} has no place in a blob") from error
        device = self._devices.get(blob)
        if device is None:
            device = self._devices[blob] = len(self._devices) + 1
            if device > MAX_BLOBS:
                raise InvalidArgument(f"its content lies in more than {MAX_BLOBS} blobs")
            start, self._blocks = self._blocks, self._blocks + blocks
            near = device <= _FLAT_DEVICES and self._blocks <= _FLAT_BLOCKS
            self._starts.append(start if near else None)
        if not 0 <= block < blocks <= _U32:
            raise Internal(f"the chunk {digest.hex()} lies beyond the end of blob {blob}")
        index = self._indexes[digest] = _INDEX.pack(0, device, block)
        return index

    def _target(self, node: Node) -> bytes:
        if not 0 < len(node.target) <= TARGET_MAX or b"\0" in node.target:
            raise InvalidArgument(
                f"a symbolic link needs a target of 1 to {TARGET_MAX} bytes without NUL"
            )
        return node.target


def _device_number(node: Node) -> int:
    """Return what new_encode_dev() of the kernel's kdev_t.h makes of it."""
    major, minor = node.rdev
    if not (0 <= major < 1 << 12 and 0 <= minor < 1 << 20):
        raise InvalidArgument(f"there is no device {major}:{minor}")
    return minor & 0xFF | major << 8 | (minor & ~0xFF) << 12
