"""Extended attributes as EROFS stores them: beside the inode, or once in an area shared by all.

Format: fs/erofs/erofs_fs.h, `struct erofs_xattr_entry` and `erofs_xattr_ibody_header`. POSIX ACLs
are kept in the form in which getxattr(2) returns them.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Iterable

from dsecd.images.model import Node
from libdsec.errors import InvalidArgument

_PREFIXES = {b"user.": 1, b"trusted.": 4, b"security.": 6}
_WHOLE = {b"system.posix_acl_access": 2, b"system.posix_acl_default": 3}
_ENTRY = struct.Struct("<BBH")  # length of the name, prefix, length of the value
_HEADER = struct.Struct("<IB7x")  # filter (none), number of shared attributes
_ID_BYTES = 4
_SHARED_MAX = 255
_NAME_MAX, _VALUE_MAX = 255, 0xFFFF
BODY_MAX = _HEADER.size + _ID_BYTES * (0xFFFF - 1)  # the inode counts words in 16 bits

Pair = tuple[bytes, bytes]


def encode_entry(name: bytes, value: bytes) -> bytes:
    """Return one attribute as EROFS stores it. Raises `InvalidArgument` for what it cannot."""
    shown = name.decode("utf-8", "replace")
    index, rest = _WHOLE.get(name, 0), b""
    if not index:
        prefix, dot, rest = name.partition(b".")
        index = _PREFIXES.get(prefix + dot, 0)
        if not index or not rest or b"\0" in name:
            raise InvalidArgument(
                f"the attribute {shown!r} cannot be stored: only user.*, trusted.*, security.* and "
                "system.posix_acl_* can",
                attribute=shown,
            )
    if len(name) > _NAME_MAX:
        raise InvalidArgument(
            f"an attribute's name has {len(name)} bytes, {_NAME_MAX} are possible", attribute=shown
        )
    if len(value) > _VALUE_MAX:
        raise InvalidArgument(
            f"the attribute {shown!r} has {len(value)} bytes, {_VALUE_MAX} are possible",
            attribute=shown,
        )
    entry = _ENTRY.pack(len(rest), index, len(value)) + rest + value
    return entry + bytes(-len(entry) % 4)


class SharedXattrs:
    """Attributes that several inodes have alike, stored once: `area`, and ids in units of 4 bytes.

    Sharing costs four bytes a use and one entry, and a second block to read: it is done when it
    saves anything. The order is that of first use.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        uses: Counter[Pair] = Counter()
        for node in nodes:
            if node.xattrs:
                uses.update(sorted(node.xattrs.items()))
        self._ids: dict[Pair, int] = {}
        parts: list[bytes] = []
        at = 0
        for pair, count in uses.items():
            if count > 1 and len(entry := encode_entry(*pair)) * (count - 1) > _ID_BYTES * count:
                self._ids[pair] = at // _ID_BYTES
                parts.append(entry)
                at += len(entry)
        self.area = b"".join(parts)

    def encode(self, xattrs: dict[bytes, bytes]) -> bytes:
        """Return what follows an inode that has `xattrs`; empty for none."""
        if not xattrs:
            return b""
        ids: list[int] = []
        inline: list[bytes] = []
        for pair in sorted(xattrs.items()):
            shared = self._ids.get(pair)
            if shared is not None and len(ids) < _SHARED_MAX:
                ids.append(shared)
            else:
                inline.append(encode_entry(*pair))
        body = _HEADER.pack(0, len(ids)) + struct.pack(f"<{len(ids)}I", *ids) + b"".join(inline)
        if len(body) > BODY_MAX:
            raise InvalidArgument(
                f"the attributes of one file have {len(body)} bytes, {BODY_MAX} are possible"
            )
        return body
