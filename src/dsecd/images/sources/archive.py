"""The members of a tar stream: v7, ustar, GNU and pax headers, with all names as bytes.

Formats: POSIX pax(1), and the chapters "Basic Tar Format" and "Storing Sparse Files" of GNU tar's
manual. Nothing here is recursive and nothing is read into memory whose size an archive decides.
"""

from __future__ import annotations

import decimal
import re
from collections.abc import Iterator

import msgspec

from dsecd.images.sources.compression import Damage, Stream
from dsecd.images.sources.report import MAX_NAMES, MAX_SIZE, MAX_TIME

BLOCK = 512
MAX_EXTENSION = 1 << 20  # bytes of one long name or pax header
MAX_SEGMENTS = 1 << 20  # runs of data in one sparse file

REGULAR, LINK, SYMLINK, CHARACTER, BLOCKDEV, DIRECTORY, FIFO = (
    b"0",
    b"1",
    b"2",
    b"3",
    b"4",
    b"5",
    b"6",
)
_SPARSE = b"S"
_SYNONYMS = {b"\0": REGULAR, b"7": REGULAR, _SPARSE: REGULAR, b"D": DIRECTORY}
_WITHOUT_CONTENT = (LINK, SYMLINK, CHARACTER, BLOCKDEV, DIRECTORY, FIFO)
_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK = (b"x", b"X"), b"g", b"L", b"K"
_ZERO = bytes(BLOCK)
_INHERITED = (b"uid", b"gid", b"mtime")  # all that a global header may set for every member
_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_OCTAL = re.compile(rb"[0-7]*")
_OLD_SPARSE = 386  # offset of the 4 pairs in the header; the blocks that follow hold 21 each

Segments = list[tuple[int, int]]  # offset and length of runs of data, ascending
Records = list[tuple[bytes, bytes]]


class Member(msgspec.Struct, kw_only=True):
    """One header, extensions applied. `stored` bytes of content follow in the stream."""

    name: bytes
    link: bytes
    kind: bytes  # one of the constants above, or what the archive says
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    device: tuple[int, int]
    size: int  # of the file, holes included
    stored: int
    segments: Segments | None  # of a sparse file
    records: Records  # of its pax header


class _Extension(msgspec.Struct):
    """What the headers in front of a member say about it."""

    name: bytes | None = None
    link: bytes | None = None
    records: Records = []
    present: bool = False


class Archive:
    """Reads members one after the other; what is left of one's content is passed over.

    A stream without an end marker was cut off, unless `open_end`: some builders write none, which
    may only be accepted where a digest proves that the stream is whole.
    """

    def __init__(self, stream: Stream, open_end: bool = False) -> None:
        self._stream, self._open_end = stream, open_end
        self._left = 0  # of the current member's content
        self._padding = 0
        self._extensions = 0
        self._globals: dict[bytes, bytes] = {}

    def read(self, size: int) -> bytes:
        """Return up to `size` bytes of the current member's content. Raises `Damage` at a cut."""
        size = min(size, self._left)
        data = self._stream.read(size)
        if len(data) < size:
            raise Damage("content ends early")
        self._left -= size
        return data

    def __iter__(self) -> Iterator[Member]:
        while (found := self._next()) is not None:
            yield found

    def _next(self) -> Member | None:
        if not self._stream.skip(self._left + self._padding):
            raise Damage("content ends early")
        self._left = self._padding = 0
        extension = _Extension()
        while True:
            block = self._stream.read(BLOCK)
            if not block and self._open_end and not extension.present:
                return None
            if len(block) < BLOCK:
                raise Damage("no end marker, it was cut off")
            if block == _ZERO:
                if extension.present:
                    raise Damage("an extended header stands before the end")
                return None
            kind = _checked(block)
            if kind not in (*_PAX, _GLOBAL, _LONG_NAME, _LONG_LINK):
                return self._member(block, kind, extension)
            self._extend(extension, kind, _number(block[124:136]))

    def _extend(self, extension: _Extension, kind: bytes, size: int) -> None:
        self._extensions += size
        if not 0 <= size <= MAX_EXTENSION or self._extensions > MAX_NAMES:
            raise Damage(f"a header claims {size} bytes")
        data = self._stream.read(size)
        if len(data) < size or not self._stream.skip(-size % BLOCK):
            raise Damage("an extended header ends early")
        if kind == _GLOBAL:
            self._globals.update((key, value) for key, value in _records(data) if key in _INHERITED)
            return
        extension.present = True
        if kind == _LONG_NAME:
            extension.name = data.partition(b"\0")[0]
        elif kind == _LONG_LINK:
            extension.link = data.partition(b"\0")[0]
        else:
            extension.records = extension.records + _records(data)

    def _member(self, block: bytes, kind: bytes, extension: _Extension) -> Member:
        merged = self._globals | dict(extension.records)
        fields = {key: value for key, value in merged.items() if value}  # empty: taken back
        name = fields.get(b"path") or extension.name or _name(block)
        size = _field(fields, b"size", block[124:136])
        if not 0 <= size <= MAX_SIZE:
            raise Damage(f"a member claims {size} bytes")
        self._left = 0 if kind in _WITHOUT_CONTENT else size
        self._padding = -self._left % BLOCK
        old_sparse = kind == _SPARSE
        if kind == b"\0" and name.endswith(b"/"):
            kind = DIRECTORY  # as v7 wrote them
        kind = _SYNONYMS.get(kind, kind)
        is_device = kind in (CHARACTER, BLOCKDEV)
        member = Member(
            name=name,
            link=fields.get(b"linkpath") or extension.link or block[157:257].partition(b"\0")[0],
            kind=kind,
            mode=_number(block[100:108]) & 0o7777,
            uid=_field(fields, b"uid", block[108:116]),
            gid=_field(fields, b"gid", block[116:124]),
            mtime_ns=_time(fields, block[136:148]),
            device=(_number(block[329:337]), _number(block[337:345])) if is_device else (0, 0),
            size=self._left,
            stored=self._left,
            segments=None,
            records=extension.records,
        )
        if old_sparse:
            self._old_sparse(member, block)
        elif kind == REGULAR and any(key.startswith(b"GNU.sparse.") for key in fields):
            self._pax_sparse(member, fields)
        return member

    # --- sparse files -----------------------------------------------------------------------

    def _old_sparse(self, member: Member, block: bytes) -> None:
        """GNU's first form: four pairs in the header, more in blocks between it and the content."""
        segments = _pairs(block, _OLD_SPARSE, 4)
        more = block[482]
        while more:
            extra = self._stream.read(BLOCK)
            if len(extra) < BLOCK or len(segments) > MAX_SEGMENTS:
                raise Damage("the map of a sparse file ends early or never")
            segments += _pairs(extra, 0, 21)
            more = extra[504]
        _make_sparse(member, segments, _number(block[483:495]))

    def _pax_sparse(self, member: Member, fields: dict[bytes, bytes]) -> None:
        member.name = fields.get(b"GNU.sparse.name") or member.name
        size = _integer(fields.get(b"GNU.sparse.realsize") or fields.get(b"GNU.sparse.size") or b"")
        if fields.get(b"GNU.sparse.major") == b"1":
            numbers = self._leading_map()
            member.stored = self._left
        elif b"GNU.sparse.map" in fields:  # 0.1
            numbers = [_integer(text) for text in fields[b"GNU.sparse.map"].split(b",")]
        else:  # 0.0: the keywords alternate
            keys = (b"GNU.sparse.offset", b"GNU.sparse.numbytes")
            pairs = [(key, value) for key, value in member.records if key in keys]
            if [key for key, _ in pairs] != [*keys] * (len(pairs) // 2):
                raise Damage("the map of a sparse file is not one of pairs")
            numbers = [_integer(value) for _, value in pairs]
        if len(numbers) % 2:
            raise Damage("the map of a sparse file is not one of pairs")
        _make_sparse(member, list(zip(numbers[::2], numbers[1::2], strict=True)), size)

    def _leading_map(self) -> list[int]:
        """Form 1.0: decimal lines in front of the content, the first says how many pairs."""
        blocks = [self.read(BLOCK)]
        lines = blocks[0].count(b"\n")
        count = _integer(blocks[0].partition(b"\n")[0])
        if not 0 <= count <= MAX_SEGMENTS:
            raise Damage(f"a sparse file claims {count} runs of data")
        while lines < 1 + 2 * count:
            block = self.read(BLOCK)
            if not block:
                raise Damage("the map of a sparse file ends early")
            blocks.append(block)
            lines += block.count(b"\n")
        return [_integer(text) for text in b"".join(blocks).split(b"\n")[1 : 1 + 2 * count]]


def _make_sparse(member: Member, segments: Segments, size: int) -> None:
    """Check the map against the size and the content, so that reading needs no more checks."""
    position = 0
    for offset, length in segments:
        if offset < position or length < 0:
            raise Damage("the map of a sparse file goes backwards")
        position = offset + length
    if not position <= size <= MAX_SIZE:
        raise Damage(f"a sparse file of {size} bytes has data up to {position}")
    if sum(length for _, length in segments) != member.stored:
        raise Damage("the map of a sparse file does not fit its content")
    member.size = size
    member.segments = [(offset, length) for offset, length in segments if length]


def _pairs(block: bytes, start: int, count: int) -> Segments:
    """Return the pairs of an old sparse map; an empty field ends it."""
    found = []
    for at in range(start, start + 24 * count, 24):
        if not block[at]:
            if block[at : at + 24].strip(b"\0"):
                raise Damage("the map of a sparse file is not one of pairs")
            break
        found.append((_number(block[at : at + 12]), _number(block[at + 12 : at + 24])))
    return found


# --- fields ---------------------------------------------------------------------------------


def _checked(block: bytes) -> bytes:
    """Return the kind of a header block. Raises `Damage` for a wrong checksum."""
    claimed = _number(block[148:156])
    covered = block[:148] + b" " * 8 + block[156:]
    # some old programs summed signed characters
    if claimed != sum(covered) and claimed != sum(memoryview(covered).cast("b")):
        raise Damage("bad checksum")
    return block[156:157]


def _name(block: bytes) -> bytes:
    name = block[:100].partition(b"\0")[0]
    if block[257:263] != b"ustar\0":
        return name  # GNU keeps times where ustar has the prefix
    end = 476 if block[508:512] == b"tar\0" else 500  # star keeps times behind a shorter one
    prefix = block[345:end].partition(b"\0")[0]
    return prefix + b"/" + name if prefix else name


def _number(field: bytes) -> int:
    """Return a number in octal digits or, marked by the top bit, in two's complement."""
    if field[0] & 0x80:
        bits = 8 * len(field) - 1
        value = int.from_bytes(field, "big") & ((1 << bits) - 1)
        return value - (1 << bits) if value >> (bits - 1) else value
    digits = field.partition(b"\0")[0].strip(b" ")
    if not _OCTAL.fullmatch(digits):
        raise Damage(f"{field!r} is not a number")
    return int(digits or b"0", 8)


def _integer(text: bytes) -> int:
    if not _NUMBER.fullmatch(text):
        raise Damage(f"{text[:30]!r} is not a number")
    return int(text)


def _field(fields: dict[bytes, bytes], key: bytes, field: bytes) -> int:
    return _integer(fields[key]) if key in fields else _number(field)


def _time(fields: dict[bytes, bytes], field: bytes) -> int:
    """Return the time of change, exact where the archive is, within what an image can hold."""
    latest = MAX_TIME * 10**9 - 1
    if b"mtime" not in fields:
        return min(max(_number(field) * 10**9, 0), latest)
    text = fields[b"mtime"]
    try:
        seconds = decimal.Decimal(text.decode("ascii")) if len(text) < 64 else decimal.Decimal(0)
        return int(min(max(seconds * 10**9, decimal.Decimal(0)), decimal.Decimal(latest)))
    except (ArithmeticError, ValueError):  # "nan"
        return 0


def _records(data: bytes) -> Records:
    """Return the records of a pax header: decimal length, space, keyword, '=', value, newline."""
    found = []
    position = 0
    while position < len(data) and data[position]:
        space = data.find(b" ", position, position + 9)
        if space < 0 or not data[position:space].isdigit():
            raise Damage("a pax header has a record without length")
        end = position + int(data[position:space])
        if end > len(data) or end <= space or data[end - 1 : end] != b"\n":
            raise Damage("a pax header has a record of the wrong length")
        keyword, equals, value = data[space + 1 : end - 1].partition(b"=")
        if not equals:
            raise Damage("a pax header has a record without value")
        found.append((keyword, value))
        position = end
    return found
