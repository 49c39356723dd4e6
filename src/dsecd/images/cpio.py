"""Archives in the newc format of cpio, which is what the kernel unpacks as its initramfs.

Written for one reader, init/initramfs.c of Linux: it drops an entry without its parents and says
nothing, so here parents must come first. Times and owners are 0, so equal entries give equal bytes.
The format: Documentation/driver-api/early-userspace/buffer-format.rst.
"""

from __future__ import annotations

import stat
from collections.abc import Iterable

import msgspec

from libdsec.errors import InvalidArgument

_MAGIC = "070701"
_TRAILER = "TRAILER!!!"
_MAX_BYTES = (1 << 32) - 1  # every field is 8 hexadecimal digits
_MAX_NAME = 4096  # PATH_MAX with the terminating zero


class Entry(msgspec.Struct, frozen=True):
    """One name: `mode` with the type, `data` of a file or a link, major and minor of a device."""

    name: str
    mode: int
    data: bytes = b""
    device: tuple[int, int] = (0, 0)


def directory(name: str, permissions: int = 0o755) -> Entry:
    return Entry(name, stat.S_IFDIR | permissions)


def file(name: str, data: bytes, permissions: int = 0o644) -> Entry:
    return Entry(name, stat.S_IFREG | permissions, data)


def symlink(name: str, target: str) -> Entry:
    return Entry(name, stat.S_IFLNK | 0o777, target.encode("utf-8", "surrogateescape"))


def character_device(name: str, major: int, minor: int, permissions: int = 0o600) -> Entry:
    return Entry(name, stat.S_IFCHR | permissions, device=(major, minor))


def archive(entries: Iterable[Entry]) -> bytes:
    """Return the archive; names are relative. Raises `InvalidArgument`."""
    parts: list[bytes] = []
    directories = {""}
    for number, entry in enumerate(entries, 1):
        _check(entry, directories)
        if stat.S_ISDIR(entry.mode):
            directories.add(entry.name)
        parts += _encoded(entry, number)
    return b"".join([*parts, *_encoded(Entry(_TRAILER, 0), 0)])


def _check(entry: Entry, directories: set[str]) -> None:
    name = entry.name
    if any(part in ("", ".", "..") for part in name.split("/")) or "\0" in name:
        raise InvalidArgument(f"{name!r} is no name for an archive: give it relative to the root")
    if name == _TRAILER or len(_bytes(name)) >= _MAX_NAME:
        raise InvalidArgument(f"the archive's format has no room for the name {name[:40]!r}")
    parent = name.rpartition("/")[0]
    if parent not in directories:
        raise InvalidArgument(f"{name!r} comes before its directory {parent!r}")
    if len(entry.data) > _MAX_BYTES:
        raise InvalidArgument(f"{name!r} is larger than 4 GiB - 1, the most an archive can hold")


def _encoded(entry: Entry, number: int) -> tuple[bytes, ...]:
    """Return header with name, and data, both padded to 4 bytes."""
    name = _bytes(entry.name) + b"\0"
    links = 2 if stat.S_ISDIR(entry.mode) else 1
    # inode, mode, uid, gid, links, time, size, device of the file, device it is, name, checksum;
    # the reader takes files of one inode for hard links, so each gets its own
    fields = (
        number, entry.mode, 0, 0, links, 0, len(entry.data), 0, 0, *entry.device, len(name), 0,
    )  # fmt: skip
    head = (_MAGIC + "".join(f"{field:08x}" for field in fields)).encode() + name
    return head, bytes(-len(head) % 4), entry.data, bytes(-len(entry.data) % 4)


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogateescape")
