"""A layer as one file, which a virtual machine can attach as one device.

EROFS mounts such a file without `device=` ("flat device", Linux 6.4): block b of a device is then
block b behind the address in the device's slot of the table (fs/erofs/data.c, erofs_map_dev()). Our
writer sets these addresses as if the blobs lay behind the image, in order, and files of one block
are named by them; so the blobs go where the image says. Images of older versions have no addresses
and no such files: they get some.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import threading
from collections.abc import Callable
from pathlib import Path

import msgspec

from dsecd.host import erofs, sparse
from dsecd.images import disk
from dsecd.images.local import Local
from libdsec.errors import DSecError, Internal, NotFound, Unavailable, Unsupported

ALIGN = 2 << 20  # of the length: a virtio-pmem region is made of these
_ADDRESS_END = 0xFFFFFFFF  # addresses have 32 bits, and the last one means a hole


class Layout(msgspec.Struct, frozen=True):
    """Where everything lies in a layer's flat file."""

    superblock: erofs.Superblock
    addresses: tuple[int, ...]  # of the devices, in blocks
    device_bytes: tuple[int, ...]
    size_bytes: int  # of the file

    @property
    def data_bytes(self) -> int:
        """Return what the file takes on disk, at most."""
        return self.superblock.size_bytes + sum(self.device_bytes)


class Stopped(Exception):
    """`flatten` was told to stop."""


def plan(local: Local) -> Layout:
    """Return the layout of a layer's flat file; only the image is read, not the blobs.

    Raises `Unsupported` for a layer that is too large, `NotFound` or `Internal` for one whose image
    is gone or damaged.
    """
    image = Path(local.image)
    superblock = erofs.inspect(image)
    if superblock.devices != len(local.devices):
        raise Internal(
            f"{image} needs {superblock.devices} blob devices, {len(local.devices)} are given"
        )
    slots = erofs.slots(image, superblock)
    block = superblock.block_bytes
    end = superblock.size_bytes // block
    blocks = end + sum(slot.blocks for slot in slots)
    if blocks > _ADDRESS_END:
        raise Unsupported(
            f"layer {local.digest[:12]} is too large for a virtual machine: {blocks * block} bytes "
            f"with its blobs, and one device can have {_ADDRESS_END * block}; make smaller layers",
            reason="layer too large for one device",
        )
    addresses = []
    for number, slot in enumerate(slots):
        address = slot.address or end
        if address < end or address + slot.blocks > _ADDRESS_END:
            raise Internal(
                f"the layer image {image} is damaged: device {number + 1} lies over others; "
                "remove the layer and import it again"
            )
        addresses.append(address)
        end = address + slot.blocks
    return Layout(
        superblock,
        tuple(addresses),
        tuple(slot.blocks * block for slot in slots),
        end * block + -(end * block) % ALIGN,
    )


def flatten(local: Local, to: Path, stop: threading.Event | None = None) -> int:
    """Write the layer as one file to `to`, readable by everybody, and return its length in bytes.

    The file appears whole or not at all, and replaces what is there. It is not synced. It is sparse
    as the blobs are: chunks of zeros are in no blob. Blocks of zeros within a chunk (below 1% of a
    Debian base) are not looked for, so that no byte passes through this process and file systems
    that can share blocks (btrfs, XFS) do. The others need as long as the disk does. The blobs of a
    layer that dsec-blobd serves are fetched whole by it.

    Raises what `plan` does; `Exhausted` when the disk is full; `Unavailable` when dsec-blobd cannot
    fetch a blob; `Stopped` soon after `stop` was set.
    """
    layout = plan(local)
    part = to.with_name(f".{to.name}.{secrets.token_hex(4)}")

    def proceed() -> None:
        if stop is not None and stop.is_set():
            raise Stopped

    with contextlib.ExitStack() as undo, disk.full_named(_work(to, layout)):
        target = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        undo.callback(part.unlink)
        try:
            _fill(target, local, layout, proceed)
            os.fchmod(target, 0o444)  # the machine's VMM has a uid of its own
        finally:
            os.close(target)
        part.rename(to)
        undo.pop_all()
    return layout.size_bytes


def _work(to: Path, layout: Layout) -> str:
    return f"writing {to}, which takes {layout.data_bytes} bytes"


def _fill(target: int, local: Local, layout: Layout, proceed: Callable[[], None]) -> None:
    os.ftruncate(target, layout.size_bytes)
    superblock = layout.superblock
    _copy(local, local.image, target, 0, superblock.size_bytes, proceed)
    erofs.write_addresses(target, superblock, layout.addresses)
    for path, address, size in zip(
        local.devices, layout.addresses, layout.device_bytes, strict=True
    ):
        _copy(local, path, target, address * superblock.block_bytes, size, proceed)


def _copy(
    local: Local, path: str, target: int, at: int, size: int, proceed: Callable[[], None]
) -> None:
    try:
        with Path(path).open("rb", buffering=0) as source:
            found = os.fstat(source.fileno()).st_size
            if found < size:
                raise _damaged(local, path, f"it has {found} bytes instead of {size}")
            sparse.copy_data(source.fileno(), target, size, at, proceed)
    except FileNotFoundError as error:
        raise NotFound(
            f"{path} of layer {local.digest[:12]} is gone; import the layer again", path=path
        ) from error
    except OSError as error:
        if error.errno in (errno.EIO, errno.ENODATA):
            raise _unreadable(local, path, error) from error
        raise


def _unreadable(local: Local, path: str, error: OSError) -> DSecError:
    if local.served:
        return Unavailable(
            f"the content of layer {local.digest[:12]} cannot be fetched: {error}; "
            "see the log of dsec-blobd",
            path=path,
        )
    return _damaged(local, path, str(error))


def _damaged(local: Local, path: str, why: str) -> Internal:
    return Internal(
        f"{path} of layer {local.digest[:12]} is damaged: {why}; "
        "remove the layer and import it again",
        path=path,
    )
