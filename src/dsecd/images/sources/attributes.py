"""Extended attributes of foreign origin: which are kept, and what archives write for them.

The kernel checks attributes when they are set; what goes into an image directly is checked here:
a file capability or ACL that the kernel could not read would make its file inaccessible.
"""

from __future__ import annotations

import base64
import binascii
import stat
import struct
import urllib.parse
from collections.abc import Callable, Iterable

CAPABILITY = b"security.capability"
ACLS = (b"system.posix_acl_access", b"system.posix_acl_default")

MAX_NAME = 255  # bytes, as the kernel's XATTR_NAME_MAX
MAX_VALUE = 64 << 10  # XATTR_SIZE_MAX

_PLAIN = b"SCHILY.xattr."
_ENCODED = b"LIBARCHIVE.xattr."
_TEXT_ACLS = {b"SCHILY.acl.access": ACLS[0], b"SCHILY.acl.default": ACLS[1]}

# struct posix_acl_xattr_header and _entry of the kernel's uapi/linux/posix_acl_xattr.h
_ACL_VERSION = 2
_ACL_ENTRY = struct.Struct("<HHI")
_NOBODY = 0xFFFFFFFF
_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20
_TAGS = {
    b"user": (_USER_OBJ, _USER), b"u": (_USER_OBJ, _USER),
    b"group": (_GROUP_OBJ, _GROUP), b"g": (_GROUP_OBJ, _GROUP),
    b"mask": (_MASK, 0), b"m": (_MASK, 0), b"other": (_OTHER, 0), b"o": (_OTHER, 0),
}  # fmt: skip
_BITS = {b"r": 4, b"w": 2, b"x": 1}
# struct vfs_cap_data of uapi/linux/capability.h: revision, the top byte, by length
_REVISIONS = {12: b"\x01", 20: b"\x02", 24: b"\x03"}

Entry = tuple[int, int, int]  # tag, permissions, id


def of_records(records: Iterable[tuple[bytes, bytes]], mode: int) -> tuple[dict[bytes, bytes], int]:
    """Return the attributes in a member's pax `records` for an inode of `mode`, and the dropped.

    Kept are user attributes (but those that steer overlayfs), capabilities and ACLs.
    """
    found: dict[bytes, bytes] = {}
    dropped = 0
    for key, value in records:
        decoded = _decode(key, value)
        if decoded is None:
            continue
        name, content = decoded
        if content is None or not _foreign_kept(name) or not fits(name, content, mode):
            dropped += 1
        else:
            found[name] = content
    return found, dropped


def fits(name: bytes, value: bytes, mode: int) -> bool:
    """Whether the kernel would have let `name` be set to `value` on an inode of `mode`."""
    if len(name) > MAX_NAME or len(value) > MAX_VALUE or b"\0" in name or name.endswith(b"."):
        return False
    if name.startswith(b"user."):
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    if name == CAPABILITY:
        return stat.S_ISREG(mode) and value[3:4] == _REVISIONS.get(len(value))
    if name in ACLS:
        if stat.S_ISLNK(mode) or (name == ACLS[1] and not stat.S_ISDIR(mode)):
            return False
        entries = read_acl(value)
        return entries is not None and _valid(entries)
    return True


def _foreign_kept(name: bytes) -> bool:
    if name.startswith(b"user."):
        return not name.startswith(b"user.overlay.")
    return name == CAPABILITY or name in ACLS


def _decode(key: bytes, value: bytes) -> tuple[bytes, bytes | None] | None:
    """Return name and value of the attribute in a pax record; no value if it cannot be read."""
    if key.startswith(_PLAIN):
        return key[len(_PLAIN) :], value
    if key.startswith(_ENCODED):
        name = urllib.parse.unquote_to_bytes(key[len(_ENCODED) :])
        try:  # libarchive leaves the padding out
            return name, base64.b64decode(value + b"=" * (-len(value) % 4), validate=True)
        except binascii.Error:
            return name, None
    if key in _TEXT_ACLS:
        entries = _parse_acl(value)
        return _TEXT_ACLS[key], None if entries is None else write_acl(entries)
    return None


# --- ACLs -----------------------------------------------------------------------------------


def read_acl(value: bytes) -> list[Entry] | None:
    """Return the entries of an ACL attribute, None when it is none."""
    if len(value) < 4 or (len(value) - 4) % _ACL_ENTRY.size:
        return None
    if int.from_bytes(value[:4], "little") != _ACL_VERSION:
        return None
    return list(_ACL_ENTRY.iter_unpack(value[4:]))


def write_acl(entries: Iterable[Entry]) -> bytes:
    return _ACL_VERSION.to_bytes(4, "little") + b"".join(
        _ACL_ENTRY.pack(*entry) for entry in sorted(entries, key=lambda entry: (entry[0], entry[2]))
    )


def shift_acl(value: bytes, shift: Callable[[int], int]) -> bytes:
    """Return the ACL with `shift` applied to the ids of named users and groups."""
    return write_acl(
        (tag, bits, shift(number) if tag in (_USER, _GROUP) else number)
        for tag, bits, number in read_acl(value) or ()
    )


def _valid(entries: list[Entry]) -> bool:
    """The kernel's posix_acl_valid: one owner, group and other, a mask where there are names."""
    tags = [tag for tag, _, _ in entries]
    names = _USER in tags or _GROUP in tags
    return (
        tags == sorted(tags)
        and all(tags.count(tag) == 1 for tag in (_USER_OBJ, _GROUP_OBJ, _OTHER))
        and tags.count(_MASK) in ((1,) if names else (0, 1))
        and set(tags) <= {_USER_OBJ, _USER, _GROUP_OBJ, _GROUP, _MASK, _OTHER}
        and all(bits <= 7 for _, bits, _ in entries)
        and all(number != _NOBODY for tag, _, number in entries if tag in (_USER, _GROUP))
    )


def _parse_acl(text: bytes) -> list[Entry] | None:
    """Read the text form, ``user:name:rwx:id``; a name without id stands for nobody we know."""
    entries = []
    for line in text.replace(b"\n", b",").split(b","):
        fields = line.partition(b"#")[0].strip().split(b":")
        if fields == [b""]:
            continue
        if len(fields) < 3 or fields[0] not in _TAGS:
            return None
        plain, named = _TAGS[fields[0]]
        bits = sum(_BITS.get(letter.to_bytes(1, "little"), 0) for letter in set(fields[2]))
        if not fields[1]:
            entries.append((plain, bits, _NOBODY))
            continue
        number = fields[3] if len(fields) > 3 else fields[1]
        if not named or not number.isdigit() or len(number) > 10 or int(number) >= _NOBODY:
            return None
        entries.append((named, bits, int(number)))
    return entries


# --- capabilities ---------------------------------------------------------------------------


def shift_capability(value: bytes, shift: Callable[[int], int]) -> bytes:
    """Return the capability with the root id of its namespace shifted; for root itself: without.

    Root of a user namespace sets revision 3, which names the namespace by the host's id of its
    root. In a layer, whose ids are those inside, revision 2 says the same of root.
    """
    if len(value) != 24 or value[3] != 3:
        return value
    root = shift(int.from_bytes(value[20:24], "little"))
    if root:
        return value[:20] + root.to_bytes(4, "little")
    return value[:3] + b"\x02" + value[4:20]
