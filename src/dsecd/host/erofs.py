"""The superblock of an EROFS image: is this file one, whole, and how many devices does it want.

Offsets follow `struct erofs_super_block` of the kernel's fs/erofs/erofs_fs.h: 1024 bytes into the
file, little-endian; the checksum is crc32c over the superblock to the end of its block.
"""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec

from libdsec.errors import Internal, NotFound

OFFSET = 1024
MAGIC = 0xE0F5E1E2
_FIXED = struct.Struct("<IIIBBHQQIIII16s16sI2sHHB")
_CHECKSUM = 0x1  # compatible feature: the checksum field is filled in
_DEVICES = 0x8  # incompatible feature: data lies on further devices
_SIZE = 128


class Superblock(msgspec.Struct, frozen=True):
    """What dsecd wants to know of an image."""

    size_bytes: int  # the image's own length, device table and blobs not counted
    devices: int


def inspect(image: Path) -> Superblock:
    """Return the superblock of `image`.

    Raises `NotFound` when the file is missing and `Internal` when it is not a whole EROFS image: a
    layer's file never changes after import, so that is damage to the store.
    """
    try:
        with image.open("rb") as file:
            length = file.seek(0, 2)
            file.seek(OFFSET)
            block = file.read(64 << 10)
    except FileNotFoundError as error:
        raise NotFound(
            f"the image file {image} is gone; import the layer again", path=str(image)
        ) from error
    if len(block) < _SIZE:
        raise _damaged(image, f"it has only {length} bytes")
    fields = _FIXED.unpack_from(block)
    magic, checksum, compatible, block_bits = fields[:4]
    blocks, incompatible, devices = fields[9], fields[14], fields[16]
    if magic != MAGIC:
        raise _damaged(image, "it is no EROFS image")
    if not 9 <= block_bits <= 16:
        raise _damaged(image, f"its block size is 2^{block_bits}")
    size = blocks << block_bits
    if size > length:
        raise _damaged(image, f"it is truncated: {length} of {size} bytes")
    if compatible & _CHECKSUM:
        covered = block[: (1 << block_bits) - OFFSET % (1 << block_bits)]
        if crc32c(covered[:4] + bytes(4) + covered[8:]) != checksum:
            raise _damaged(image, "the superblock's checksum is wrong")
    return Superblock(size, devices if incompatible & _DEVICES else 0)


def _damaged(image: Path, why: str) -> Internal:
    return Internal(
        f"the layer image {image} is damaged: {why}; remove the layer and import it again",
        path=str(image),
    )


def _table() -> tuple[int, ...]:
    rows = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        rows.append(value)
    return tuple(rows)


_CRC = _table()


def crc32c(data: bytes, value: int = 0xFFFFFFFF) -> int:
    """Return the Castagnoli checksum as EROFS stores it: no final inversion."""
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ value >> 8
    return value
