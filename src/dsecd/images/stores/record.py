"""How the content of a name is kept: a line with version and checksum, then the data. Pure.

::

    dsec1 <version, 32 hex digits> <SHA-256 of version and data, hex>\n<data>

The version is random, so no two writes make the same bytes: a name that went from A to B and back
to A is told from one that never moved, and a writer whose answer was lost recognises its own write.
A record without data says that the name was deleted; its fixed size shows that in a listing. Names
are not verified by a digest in their key, so the checksum stands in for it.
"""

from __future__ import annotations

import hashlib
import re
import secrets

import msgspec

from libdsec.errors import InvalidArgument

MAX_DATA = 64 << 10
_HEAD = re.compile(rb"dsec1 ([0-9a-f]{32}) ([0-9a-f]{64})\n")
SIZE_DELETED = len("dsec1 ") + 32 + 1 + 64 + 1


class Record(msgspec.Struct, frozen=True):
    """Content of a name. `data` b"": the name was deleted."""

    version: str
    data: bytes


class Damaged(Exception):
    """The bytes are no record, or another one than was written."""


def new(data: bytes | None) -> Record:
    """Return a record of its own version. None: deleted. Raises `InvalidArgument`."""
    if data is not None and not 0 < len(data) <= MAX_DATA:
        raise InvalidArgument(f"a name holds 1 to {MAX_DATA} bytes, not {len(data)}", field="data")
    return Record(secrets.token_hex(16), data or b"")


def encode(record: Record) -> bytes:
    """Return the bytes to keep."""
    head = f"dsec1 {record.version} {_checksum(record)}\n"
    return head.encode() + record.data


def decode(body: bytes) -> Record:
    """Return the record in `body`. Raises `Damaged`."""
    match = _HEAD.match(body)
    if match is None:
        raise Damaged("it does not begin as a name's record does")
    record = Record(match[1].decode(), body[match.end() :])
    if _checksum(record) != match[2].decode():
        raise Damaged("its checksum is wrong")
    return record


def _checksum(record: Record) -> str:
    return hashlib.sha256(record.version.encode() + record.data).hexdigest()
