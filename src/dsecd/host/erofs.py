"""The superblock of an EROFS image: is this file one, whole, and which devices does it want.

Offsets follow `struct erofs_super_block` of the kernel's fs/erofs/erofs_fs.h: 1024 bytes into the
file, little-endian; the checksum is crc32c over the superblock to the end of its block.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from pathlib import Path

import msgspec

from libdsec.errors import Internal, NotFound

OFFSET = 1024
MAGIC = 0xE0F5E1E2
_FIXED = struct.Struct("<IIIBBHQQIIII16s16sI2sHHB")
_CHECKSUM = 0x1  # compatible feature: the checksum field is filled in
_DEVICES = 0x8  # incompatible feature: data lies on further devices
_SIZE = 128
_SLOT = 128  # bytes of one device in the table
_SLOT_BLOCKS = 64  # where in a slot: u32 length, then u32 address, both in blocks


class Superblock(msgspec.Struct, frozen=True):
    """What dsecd wants to know of an image."""

    size_bytes: int  # the image's own length, blobs not counted
    devices: int
    block_bytes: int = 4096
    table_at: int = 0  # the first slot of the device table


class Slot(msgspec.Struct, frozen=True):
    """A device in the table: its length, and where it lies when one device holds everything."""

    blocks: int
    address: int  # in blocks from the start of the image; 0: nowhere


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
    blocks, incompatible, devices, slot = fields[9], fields[14], fields[16], fields[17]
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
    if not incompatible & _DEVICES or not devices:
        return Superblock(size, 0, 1 << block_bits)
    if slot * _SLOT + devices * _SLOT > size:
        raise _damaged(image, f"it has no room for {devices} devices")
    return Superblock(size, devices, 1 << block_bits, slot * _SLOT)


def slots(image: Path, superblock: Superblock) -> list[Slot]:
    """Return the device table of an image that `inspect` found whole."""
    with image.open("rb") as file:
        file.seek(superblock.table_at)
        table = file.read(superblock.devices * _SLOT)
    return [
        Slot(*struct.unpack_from("<II", table, at + _SLOT_BLOCKS))
        for at in range(0, len(table), _SLOT)
    ]


def write_addresses(fd: int, superblock: Superblock, addresses: Sequence[int]) -> None:
    """Set the address of each device in an image open for writing, and its checksum anew."""
    table = bytearray(os.pread(fd, superblock.devices * _SLOT, superblock.table_at))
    for number, address in enumerate(addresses):
        struct.pack_into("<I", table, number * _SLOT + _SLOT_BLOCKS + 4, address)
    os.pwrite(fd, table, superblock.table_at)
    head = bytearray(os.pread(fd, superblock.block_bytes - OFFSET % superblock.block_bytes, OFFSET))
    if struct.unpack_from("<I", head, 8)[0] & _CHECKSUM:
        struct.pack_into("<I", head, 4, 0)
        struct.pack_into("<I", head, 4, crc32c(head))
        os.pwrite(fd, head, OFFSET)


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


def crc32c(data: bytes | bytearray, value: int = 0xFFFFFFFF) -> int:
    """Return the Castagnoli checksum as EROFS stores it: no final inversion."""
    for byte in data:
        value = _CRC[(value ^ byte) & 0xFF] ^ value >> 8
    return value
