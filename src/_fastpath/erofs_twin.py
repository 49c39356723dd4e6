"""`build_erofs` and `read_chunks` of `_core.pyi` in Python: where to read how an image is laid out.

    superblock (at 1024), device table, inodes each with its attributes and with what fits behind
    it, then the whole blocks of directories and long links, then the shared attributes

The inodes come first because the superblock has only 16 bits for the root's number. Format:
fs/erofs/erofs_fs.h; of the encoded tree: dsecd/images/erofs/encode.py. Little-endian throughout.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
import struct
from collections.abc import Iterator

from _fastpath import StepError

BLOCK, CHUNK = 4096, 65536
_SUPER_AT, _SUPER_BYTES, _SLOT_BYTES = 1024, 128, 128
_NID_BYTES, _INODE_BYTES, _DIRENT_BYTES, _INDEX_BYTES = 32, 64, 12, 8
_PLAIN, _INLINE, _CHUNKS = 0, 2, 4  # layouts of an inode
_EXTENDED = 1
_CHUNK_FORMAT = 4 | 0x20  # 64 KiB = 16 blocks; indexes of 8 bytes
_TAIL_MAX = BLOCK - _NID_BYTES  # a tail of this length never needs to cross a block
_TYPES = {stat.S_IFREG: 1, stat.S_IFDIR: 2, stat.S_IFCHR: 3, stat.S_IFBLK: 4, stat.S_IFIFO: 5,
          stat.S_IFSOCK: 6, stat.S_IFLNK: 7}  # fmt: skip

_SUPER = struct.Struct("<IIIBBHQQIIII16s16sIHHHB37x")
_SLOT = struct.Struct("<64sII56x")
_INODE = struct.Struct("<HHHHQIIIIqII16x")
_DIRENT = struct.Struct("<QHBx")
_HEADER = struct.Struct("<IIII")
_DEVICE = struct.Struct("<64sI")
_RECORD = struct.Struct("<HHIIqIIQIII")
_ENTRY = struct.Struct("<IB")
_XATTRS_MAX = 12 + 4 * 0xFFFE
_TARGET_MAX = 4095
_ADDRESS_END = 0xFFFFFFFF  # block addresses have 32 bits, and one of them means "none"

Entry = tuple[int, bytes]  # an inode's number and one of its names


class _Inode:
    """A record of the tree and, later, its place in the image."""

    def __init__(self, fields: tuple[int, ...], xattrs: bytes) -> None:
        (self.mode, _, self.uid, self.gid, self.seconds, self.nanoseconds, self.links, self.size,
         self.place, _, self.count) = fields  # fmt: skip
        self.kind = stat.S_IFMT(self.mode)
        # without indexes: `place` is its only block, counted over all devices
        self.is_flat = self.kind == stat.S_IFREG and self.size > 0 and not self.count
        self.xattrs = xattrs
        self.body = b""  # chunk indexes or a link's target
        self.entries: list[list[Entry]] = []  # of a directory, by block
        self.at = self.blocks_at = self.blocks = self.tail = 0


class _Reader:
    """Takes the encoded tree apart; every length is checked."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0

    def take(self, length: int) -> bytes:
        taken = self._data[self._at : self._at + length]
        if len(taken) < length:
            raise _malformed()
        self._at += length
        return taken

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        return form.unpack(self.take(form.size))

    def finished(self) -> bool:
        return self._at == len(self._data)


def _malformed() -> StepError:
    return StepError(errno.EBADMSG, "plan")


def _align(value: int, to: int) -> int:
    return value + -value % to


# --- reading the tree ---------------------------------------------------------------------------


def _read_inode(reader: _Reader, inodes: int) -> _Inode:
    fields = reader.unpack(_RECORD)
    xattr_bytes, count = fields[-2:]
    if xattr_bytes % 4 or xattr_bytes > _XATTRS_MAX or 0 < xattr_bytes < 12:
        raise _malformed()
    inode = _Inode(fields, reader.take(xattr_bytes))
    if inode.kind == stat.S_IFDIR:
        inode.entries = _by_block(_read_entries(reader, count, inodes))
        last = sum(_DIRENT_BYTES + len(name) for _, name in inode.entries[-1])
        inode.size = (len(inode.entries) - 1) * BLOCK + last
    elif inode.kind == stat.S_IFREG:
        inode.body = reader.take(count * _INDEX_BYTES)
        good = inode.size <= BLOCK if inode.is_flat else inode.size > 0 or count == 0
    elif inode.kind == stat.S_IFLNK:
        good = 0 < count == inode.size <= _TARGET_MAX
        inode.body = reader.take(count)
    else:
        good = count == inode.size == 0
    if inode.kind != stat.S_IFDIR and not good:
        raise _malformed()
    return inode


def _read_entries(reader: _Reader, count: int, inodes: int) -> Iterator[Entry]:
    if count < 2:
        raise _malformed()
    before = b""
    for _ in range(count):
        number, length = reader.unpack(_ENTRY)
        name = reader.take(length)
        # the kernel searches by halves: names out of order could not be found
        if number >= inodes or name <= before:
            raise _malformed()
        yield number, name
        before = name


def _by_block(entries: Iterator[Entry]) -> list[list[Entry]]:
    """A block has the fixed parts of its entries and then their names; none crosses a block."""
    blocks: list[list[Entry]] = [[]]
    used = 0
    for entry in entries:
        length = _DIRENT_BYTES + len(entry[1])
        if used + length > BLOCK:
            blocks.append([])
            used = 0
        blocks[-1].append(entry)
        used += length
    return blocks


# --- layout -------------------------------------------------------------------------------------


def _place(inode: _Inode, at: int) -> int:
    """Place one inode at `at` or a little behind it; return the end of what belongs to it."""
    start = _align(at, _NID_BYTES)
    end = start + _INODE_BYTES + len(inode.xattrs)
    if inode.kind == stat.S_IFREG and inode.body:
        end = _align(end, _INDEX_BYTES) + len(inode.body)
    elif inode.kind in (stat.S_IFDIR, stat.S_IFLNK):
        inode.blocks, inode.tail = divmod(inode.size, BLOCK)
        if inode.tail > _TAIL_MAX:
            inode.blocks += 1
            inode.tail = 0
        if end % BLOCK + inode.tail > BLOCK:
            shift = _align(-end % BLOCK, _NID_BYTES)
            start += shift
            end += shift
        end += inode.tail
    inode.at = start
    return end


def _place_blocks(inodes: list[_Inode], at: int) -> int:
    for inode in inodes:
        if inode.blocks:
            inode.blocks_at = _align(at, BLOCK)
            at = inode.blocks_at + inode.blocks * BLOCK
    return at


def _addresses(at: int, devices: list[int]) -> list[int]:
    """Return the address of each device, given its blocks, and that of the end.

    They follow the image, as far as 32 bits go; the rest share the end, which no file names.
    Without its devices the kernel takes such an image for one with the blobs behind it and looks
    there: beyond the end of the image that is EIO, whereas 0 would show the image's own blocks as
    file content.
    """
    addresses = []
    full = False
    for blocks in devices:
        addresses.append(at)
        full = full or at + blocks > _ADDRESS_END
        at += 0 if full else blocks
    return [*addresses, at]


def build_erofs(tree: bytes) -> bytes:
    reader = _Reader(tree)
    count, devices, shared_bytes, _ = reader.unpack(_HEADER)
    if not 0 < count <= len(tree) // _RECORD.size or devices > 0xFFFF or shared_bytes % 4:
        raise _malformed()
    slots = [_DEVICE.unpack(reader.take(_DEVICE.size)) for _ in range(devices)]
    shared = reader.take(shared_bytes)
    inodes = [_read_inode(reader, count) for _ in range(count)]
    if not reader.finished() or inodes[0].kind != stat.S_IFDIR:
        raise _malformed()

    at = _SUPER_AT + _SUPER_BYTES + devices * _SLOT_BYTES
    for inode in inodes:
        at = _place(inode, at)
    shared_at = _align(_place_blocks(inodes, at), BLOCK)
    size = _align(shared_at + len(shared), BLOCK)
    if size >= _ADDRESS_END * BLOCK or inodes[0].at // _NID_BYTES > 0xFFFF:
        raise StepError(errno.EFBIG, "plan")
    addresses = _addresses(size // BLOCK, [blocks for _, blocks in slots])
    if any(addresses[0] + inode.place >= addresses[-1] for inode in inodes if inode.is_flat):
        raise _malformed()

    image = bytearray(size)
    for number, (tag, blocks) in enumerate(slots):
        place = _SUPER_AT + _SUPER_BYTES + number * _SLOT_BYTES
        _SLOT.pack_into(image, place, tag, blocks, addresses[number])
    for number, inode in enumerate(inodes, 1):
        _write_inode(image, number, inode)
        _write_body(image, inode, inodes)
    image[shared_at : shared_at + len(shared)] = shared
    _write_super(image, inodes, devices, shared_at if shared else 0)
    return bytes(image)


# --- writing ------------------------------------------------------------------------------------


def _write_inode(image: bytearray, number: int, inode: _Inode) -> None:
    layout, place = _PLAIN, inode.place
    if inode.is_flat:
        place += len(image) // BLOCK
    elif inode.kind == stat.S_IFREG and inode.body:
        layout, place = _CHUNKS, _CHUNK_FORMAT
    elif inode.blocks:
        place = inode.blocks_at // BLOCK
    if inode.tail:
        layout = _INLINE
    words = (len(inode.xattrs) - 12) // 4 + 1 if inode.xattrs else 0
    _INODE.pack_into(
        image, inode.at, layout << 1 | _EXTENDED, words, inode.mode, 0, inode.size, place, number,
        inode.uid, inode.gid, inode.seconds, inode.nanoseconds, inode.links,
    )  # fmt: skip


def _write_body(image: bytearray, inode: _Inode, inodes: list[_Inode]) -> None:
    behind = inode.at + _INODE_BYTES
    image[behind : behind + len(inode.xattrs)] = inode.xattrs
    behind += len(inode.xattrs)
    if inode.kind == stat.S_IFREG:
        behind = _align(behind, _INDEX_BYTES)
    for number, entries in enumerate(inode.entries):
        at = inode.blocks_at + number * BLOCK if number < inode.blocks else behind
        _write_entries(image, at, entries, inodes)
    start = inode.blocks_at if inode.blocks else behind
    image[start : start + len(inode.body)] = inode.body


def _write_entries(image: bytearray, at: int, entries: list[Entry], inodes: list[_Inode]) -> None:
    name_at = len(entries) * _DIRENT_BYTES
    for position, (number, name) in enumerate(entries):
        inode = inodes[number]
        _DIRENT.pack_into(
            image, at + position * _DIRENT_BYTES, inode.at // _NID_BYTES, name_at,
            _TYPES.get(inode.kind, 0),
        )  # fmt: skip
        image[at + name_at : at + name_at + len(name)] = name
        name_at += len(name)


def _write_super(image: bytearray, inodes: list[_Inode], devices: int, shared_at: int) -> None:
    compatible, incompatible = 1 | 2, 4 | 8  # checksum, mtime; chunks, device table
    _SUPER.pack_into(
        image, _SUPER_AT, 0xE0F5E1E2, 0, compatible, 12, 0, inodes[0].at // _NID_BYTES,
        len(inodes), 0, 0, len(image) // BLOCK, 0, shared_at // BLOCK, b"", b"", incompatible, 0,
        devices, (_SUPER_AT + _SUPER_BYTES) // _SLOT_BYTES, 0,
    )  # fmt: skip
    struct.pack_into("<I", image, _SUPER_AT + 4, _crc32c(image[_SUPER_AT:BLOCK]))


def _crc32c(data: bytes | bytearray) -> int:
    """Return the Castagnoli checksum as EROFS stores it: no final inversion."""
    value = 0xFFFFFFFF
    for byte in data:
        value ^= byte
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
    return value


# --- content ------------------------------------------------------------------------------------

_HOLES_FROM = 4 * CHUNK  # below this asking for holes costs more than reading them
_CHUNKS_MAX = 128


def read_chunks(
    fd: int, at: int, end: int, buffer: bytearray | memoryview, used: int
) -> tuple[int, int, list[bytes | None]]:
    view = memoryview(buffer)
    if used > len(view) or used % BLOCK or at < 0 or at % CHUNK:
        raise ValueError("read_chunks: not at the start of a chunk")
    found: list[bytes | None] = []
    count = 0
    until = end if end < _HOLES_FROM else 0
    while at < end and count < _CHUNKS_MAX:
        length = min(end - at, CHUNK)
        if _align(length, BLOCK) > len(view) - used:
            break
        if at >= until:
            data, until = _next_data(fd, at, end)
            if data > at:
                found += [None] * -((at - data) // CHUNK)
                at = data
                continue
        chunk = view[used : used + length]
        _read(fd, chunk, at)
        at += length
        if not any(chunk[:1]) and bytes(chunk) == bytes(length):
            found.append(None)
            continue
        found.append(hashlib.sha256(chunk).digest())
        used += length
        view[used : used + -length % BLOCK] = bytes(-length % BLOCK)
        used = _align(used, BLOCK)
        count += 1
    return at, used, found


def _read(fd: int, chunk: memoryview, at: int) -> None:
    done = 0
    while done < len(chunk):
        try:
            got = os.preadv(fd, [chunk[done:]], at + done)
        except OSError as error:
            raise StepError(error.errno or errno.EIO, "read") from error
        if not got:
            raise StepError(errno.ENODATA, "read")
        done += got


def _next_data(fd: int, at: int, end: int) -> tuple[int, int]:
    """Return where the next data starts, rounded down to a chunk, and where it ends."""
    try:
        found = os.lseek(fd, at, os.SEEK_DATA)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.ENOTSUP, errno.ESPIPE):
            return at, end  # the file system cannot tell
        if error.errno != errno.ENXIO:
            raise StepError(error.errno or errno.EIO, "seek") from error
        found = end
    data, until = min(found - found % CHUNK, end), end
    if found >= end:
        data = end
    else:
        hole = os.lseek(fd, found, os.SEEK_HOLE)
        until = hole if found < hole < end else end
    if data > at and os.fstat(fd).st_size < end:
        raise StepError(errno.ENODATA, "seek")  # cut off meanwhile: it looks like a hole
    return data, until
