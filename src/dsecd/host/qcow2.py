"""Disk images in the format qcow2 (docs/interop/qcow2.txt of QEMU), as far as we need it.

What QEMU itself runs is not asked: qemu-img would be one more program that opens images of others.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path

from libdsec.errors import InvalidArgument

MAGIC = b"QFI\xfb"
_CLUSTER_BITS = 16
_CLUSTER = 1 << _CLUSTER_BITS
_HEADER_BYTES = 104
_HEADER = struct.Struct(">4sIQIIQIIQQIIQ")  # version 2
_MORE = struct.Struct(">QQQII")  # what version 3 has beyond
_REFCOUNT_ORDER = 4  # 16 bits each


def virtual_bytes(image: Path) -> int:
    """Return how large the disk of a qcow2 image is. Raises `InvalidArgument`, `OSError`."""
    with image.open("rb") as file:
        head = file.read(_HEADER.size)
    if len(head) < _HEADER.size or head[:4] != MAGIC:
        raise InvalidArgument(f"{image} is no qcow2 image", field="image")
    size: int = _HEADER.unpack(head)[5]
    return size


def empty(size: int) -> bytes:
    """Return an image of a disk of `size` bytes that holds nothing: the file may grow from it.

    Clusters: the header, the table of refcount blocks, one of these, then the first-level table.
    """
    covered = _CLUSTER * (_CLUSTER // 8)  # by one entry of the first-level table
    entries = -(-size // covered)
    l1_clusters = max(1, -(-entries * 8 // _CLUSTER))
    used = 3 + l1_clusters
    header = _HEADER.pack(
        MAGIC, 3, 0, 0, _CLUSTER_BITS, size, 0, entries, 3 * _CLUSTER, _CLUSTER, 1, 0, 0
    )
    more = _MORE.pack(0, 0, 0, _REFCOUNT_ORDER, _HEADER_BYTES)
    clusters = [
        header + more,
        struct.pack(">Q", 2 * _CLUSTER),
        struct.pack(">H", 1) * used,
    ]
    image = b"".join(cluster.ljust(_CLUSTER, b"\0") for cluster in clusters)
    return image + bytes(l1_clusters * _CLUSTER)


def write_empty(fd: int, size: int) -> None:
    """Write `empty` into the empty file `fd`. Raises `OSError`."""
    image = empty(size)
    while image:
        image = image[os.write(fd, image) :]
