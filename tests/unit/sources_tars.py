"""Tars for tests: made by tarfile, or header by header where they are hostile or old."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Sequence
from typing import Any

from dsecd.images.model import Node
from dsecd.images.sources.report import Report
from dsecd.images.sources.tar import read_tar
from tests.unit.sources_sink import MemorySink

Members = Sequence[tuple[tarfile.TarInfo, bytes]]


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def pack(*members: tuple[tarfile.TarInfo, bytes], form: int = tarfile.PAX_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as packed:
        for info, content in members:
            if info.isreg():
                info.size = len(content)
            packed.addfile(info, io.BytesIO(content))
    return file.getvalue()


def read(data: bytes, **options: Any) -> tuple[Node, Report, MemorySink]:
    sink = MemorySink()
    root, report = read_tar(io.BytesIO(data), sink, **options)
    return root, report, sink


def header(name: bytes, kind: bytes, size: int, **fields: bytes) -> bytes:
    """One ustar header; `fields` are by their offset, as at156=b"x"."""
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[108:116] = block[116:124] = b"0000000\0"
    octal = 0 <= size < 8**11
    block[124:136] = b"%011o\0" % size if octal else struct.pack(">iq", -(size < 0), size)
    block[124] |= 0 if octal else 0x80
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    for key, value in fields.items():
        at = int(key.removeprefix("at"))
        block[at : at + len(value)] = value
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 512)


END = bytes(1024)


def record(text: bytes) -> bytes:
    """One record of a pax header shorter than 100 bytes."""
    return b"%d %s\n" % (len(text) + 4, text)
