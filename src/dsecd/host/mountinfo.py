"""The mount table of this process, from /proc/self/mountinfo (proc(5))."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

_OCTAL = re.compile(r"\\([0-7]{3})")


class Mount(msgspec.Struct, frozen=True):
    """One line of the table. `root` is the part of the file system that is mounted.

    `device` is the kernel's number of the file system: major << 20 | minor.
    """

    id: int
    device: int
    root: str
    point: str
    type: str
    source: str
    options: tuple[str, ...]  # of the mount and of the file system
    shared: bool


def parse(text: str) -> Iterator[Mount]:
    """Yield the mounts of a mountinfo file, in mount order."""
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(" "), right.split(" ")
        if len(fields) < 6 or len(tail) < 3:
            continue
        major, _, minor = fields[2].partition(":")
        yield Mount(
            id=int(fields[0]),
            device=int(major) << 20 | int(minor),
            root=_plain(fields[3]),
            point=_plain(fields[4]),
            type=tail[0],
            source=_plain(tail[1]),
            options=(*fields[5].split(","), *tail[2].split(",")),
            shared=any(field.startswith("shared:") for field in fields[6:]),
        )


def mounts() -> list[Mount]:
    """Return the mounts this process sees."""
    return list(parse(Path("/proc/self/mountinfo").read_text(errors="surrogateescape")))


def at(point: str | Path) -> Mount | None:
    """Return the topmost mount whose mount point is exactly `point`."""
    wanted = os.path.realpath(point)
    return next((mount for mount in reversed(mounts()) if mount.point == wanted), None)


def holding(path: str | Path) -> Mount:
    """Return the mount that `path`, or its nearest existing ancestor, lies on."""
    wanted = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts():
        prefix = mount.point.rstrip("/") + "/"
        if (wanted + "/").startswith(prefix) and (
            best is None or len(mount.point) >= len(best.point)
        ):
            best = mount
    assert best is not None  # "/" is always there
    return best


def _plain(field: str) -> str:
    """Undo the octal escapes of blanks and backslashes."""
    return _OCTAL.sub(lambda match: chr(int(match[1], 8)), field)
