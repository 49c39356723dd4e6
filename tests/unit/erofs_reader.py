"""A small reader of EROFS images, written from the format's header and sharing no code with ours.

It checks what it reads as strictly as the kernel does, and a little more: no two things may overlap
and what belongs to nothing must be zero.
"""

from __future__ import annotations

import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

BLOCK = 4096
PREFIXES = {1: b"user.", 2: b"system.posix_acl_access", 3: b"system.posix_acl_default",
            4: b"trusted.", 6: b"security."}  # fmt: skip
KINDS = {1: stat.S_IFREG, 2: stat.S_IFDIR, 3: stat.S_IFCHR, 4: stat.S_IFBLK, 5: stat.S_IFIFO,
         6: stat.S_IFSOCK, 7: stat.S_IFLNK}  # fmt: skip


@dataclass
class File:
    nid: int
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    links: int
    size: int
    rdev: tuple[int, int] = (0, 0)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)
    target: bytes = b""
    extents: list[tuple[int, int] | None] = field(default_factory=list)  # device, block
    entries: list[tuple[bytes, int]] = field(default_factory=list)


class Reader:
    """An image and, for `content`, its blobs in the order of the device table."""

    def __init__(self, image: bytes) -> None:
        self.image = image
        self._used = bytearray(len(image))
        self._claim(1024, 128)
        fields = struct.unpack_from("<IIIBBHQQIIII16s16sIHHHB", image, 1024)
        (self.magic, self.checksum, self.compatible, bits, _, self.root, self.inodes, self.built, _,
         self.blocks, meta, self._shared_block, self.uuid, self.label, self.incompatible, _,
         devices, slot, dirbits) = fields  # fmt: skip
        assert self.magic == 0xE0F5E1E2
        assert bits == 12
        assert meta == dirbits == 0
        assert self.blocks * BLOCK == len(image)
        self.devices: list[tuple[str, int, int]] = []
        for number in range(devices):
            at = slot * 128 + number * 128
            self._claim(at, 128)
            tag, blocks, mapped = struct.unpack_from("<64sII", image, at)
            assert mapped >= self.blocks  # without its devices: not the image's own blocks
            self.devices.append((tag.rstrip(b"\0").decode(), blocks, mapped))
        self._shared_claimed: set[int] = set()
        self.files: dict[bytes, File] = {}
        self._by_nid: dict[int, File] = {}
        self._walk()

    def unused(self) -> bytes:
        """Return all bytes that belong to nothing: they must be zeros."""
        pairs = zip(self.image, self._used, strict=True)
        return bytes(byte for byte, used in pairs if not used)

    def content(self, path: bytes, blobs: Mapping[str, bytes]) -> bytes:
        """Return a regular file's content."""
        file = self.files[path]
        parts = []
        for number, extent in enumerate(file.extents):
            length = min(65536, file.size - number * 65536)
            if extent is None:
                parts.append(bytes(length))
                continue
            device, block = extent
            name, blocks, _ = self.devices[device - 1]
            blob = blobs[name]
            assert len(blob) == blocks * BLOCK
            end = block * BLOCK + length
            assert end <= len(blob)
            assert not any(blob[end : end + -length % BLOCK])
            parts.append(blob[block * BLOCK : end])
        return b"".join(parts)

    def _claim(self, at: int, length: int) -> bytes:
        assert at + length <= len(self.image)
        assert not any(self._used[at : at + length]), f"{at}+{length} is used twice"
        self._used[at : at + length] = b"\1" * length
        return self.image[at : at + length]

    def _walk(self) -> None:
        root = self._inode(self.root)
        pending = [(b"", root, root)]
        while pending:
            path, file, parent = pending.pop()
            self.files[path] = file
            if not stat.S_ISDIR(file.mode):
                continue
            names = [name for name, _ in file.entries]
            assert names == sorted(set(names))
            for name, nid in file.entries:
                if name == b".":
                    assert nid == file.nid
                elif name == b"..":
                    assert nid == parent.nid
                else:
                    pending.append((path + b"/" + name if path else name, self._inode(nid), file))
        assert len(self._by_nid) == self.inodes

    def _inode(self, nid: int) -> File:
        if nid in self._by_nid:
            return self._by_nid[nid]
        assert nid > 0  # readdir(3) would not show inode 0
        at = nid * 32
        fields = struct.unpack_from("<HHHHQIIIIqII", self._claim(at, 64))
        (form, words, mode, zero, size, place, _, uid, gid, seconds, nanoseconds, links) = fields
        assert form & 1
        assert zero == 0
        assert nanoseconds < 1_000_000_000
        mtime_ns = seconds * 1_000_000_000 + nanoseconds
        file = File(nid, mode, uid, gid, mtime_ns, links, size)
        self._by_nid[nid] = file
        behind = at + 64
        if words:
            length = 12 + 4 * (words - 1)
            file.xattrs = self._xattrs(self._claim(behind, length))
            behind += length
        self._body(file, form >> 1, place, behind)
        return file

    def _body(self, file: File, layout: int, place: int, behind: int) -> None:
        kind = stat.S_IFMT(file.mode)
        if kind == stat.S_IFREG:
            if file.size and layout == 0:
                file.extents.append(self._device(place, -(-file.size // BLOCK)))
            elif file.size:
                assert (layout, place) == (4, 0x24)
                count = -(-file.size // 65536)
                data = self._claim(behind + -behind % 8, 8 * count)
                for advise, device, block in struct.iter_unpack("<HHI", data):
                    hole = (advise, device, block) == (0xFFFF, 0xFFFF, 0xFFFFFFFF)
                    assert hole or (advise == 0 and 0 < device <= len(self.devices))
                    file.extents.append(None if hole else (device, block))
            else:
                assert (layout, place) == (0, 0)
        elif kind in (stat.S_IFDIR, stat.S_IFLNK):
            data = self._flat(file.size, layout, place, behind)
            if kind == stat.S_IFLNK:
                file.target = data
            else:
                for start in range(0, len(data), BLOCK):
                    self._entries(file, data[start : start + BLOCK])
        else:
            assert layout == 0
            if kind in (stat.S_IFCHR, stat.S_IFBLK):
                file.rdev = ((place >> 8) & 0xFFF, (place & 0xFF) | ((place >> 12) & 0xFFF00))

    def _device(self, address: int, blocks: int) -> tuple[int, int]:
        """Return the device at an address and the block in it, as erofs_map_dev() finds it."""
        for number, (_, length, mapped) in enumerate(self.devices, 1):
            if mapped <= address < mapped + length:
                assert address + blocks <= mapped + length
                return number, address - mapped
        raise AssertionError(f"block {address} is on no device")

    def _flat(self, size: int, layout: int, place: int, behind: int) -> bytes:
        whole = -(-size // BLOCK) if layout == 0 else size // BLOCK
        data = self._claim(place * BLOCK, whole * BLOCK) if whole else b""
        if layout == 2:
            tail = size % BLOCK
            assert tail
            assert behind % BLOCK + tail <= BLOCK  # the kernel refuses such an image
            return data + self._claim(behind, tail)
        assert layout == 0
        assert not any(data[size:])
        return data[:size]

    def _entries(self, file: File, block: bytes) -> None:
        count = struct.unpack_from("<H", block, 8)[0] // 12
        heads = [struct.unpack_from("<QHBB", block, number * 12) for number in range(count)]
        ends = [head[1] for head in heads[1:]] + [len(block)]
        for (nid, start, kind, _), end in zip(heads, ends, strict=True):
            name = block[start:end].rstrip(b"\0")
            assert name
            assert b"\0" not in name
            file.entries.append((name, nid))
            assert stat.S_IFMT(self._mode(nid)) == KINDS[kind]

    def _mode(self, nid: int) -> int:
        return int(struct.unpack_from("<H", self.image, nid * 32 + 4)[0])

    def _xattrs(self, body: bytes) -> dict[bytes, bytes]:
        _, shared = struct.unpack_from("<IB", body)
        found: dict[bytes, bytes] = {}
        for number in struct.unpack_from(f"<{shared}I", body, 12):
            at = self._shared_block * BLOCK + number * 4
            name, value, length = self._entry(self.image, at)
            if at not in self._shared_claimed:
                self._shared_claimed.add(at)
                self._claim(at, length)
            found[name] = value
        at = 12 + 4 * shared
        while at < len(body):
            name, value, length = self._entry(body, at)
            assert name not in found
            found[name] = value
            at += length
        return found

    @staticmethod
    def _entry(data: bytes, at: int) -> tuple[bytes, bytes, int]:
        name_length, prefix, value_length = struct.unpack_from("<BBH", data, at)
        end = at + 4 + name_length + value_length
        name = PREFIXES[prefix] + data[at + 4 : at + 4 + name_length]
        return name, data[at + 4 + name_length : end], end + -end % 4 - at


def read_blobs(image: Reader, folder: Path) -> dict[str, bytes]:
    """Return the blobs of an image from files named by their ids."""
    return {name: (folder / name).read_bytes() for name, _, _ in image.devices}
