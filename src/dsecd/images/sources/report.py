"""What reading a source left out or changed, for the people who build layers."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dsecd.images.sources.paths import Parts, show
from libdsec.errors import DSecError, InvalidArgument

MAX_ID = 65534  # the largest id a sandbox can map
MAX_ENTRIES = 2_000_000  # of one source; a tree in memory takes about 600 bytes for each
MAX_SIZE = 1 << 40  # bytes of all files, holes included
MAX_NAMES = 1 << 30  # bytes of names, link targets and attributes, which stay in memory
MAX_TIME = 1 << 33  # seconds; the year 2242

Check = Callable[[int], None]  # told the bytes of the source read so far; raises to give up


def unchecked(done: int) -> None:
    """The `Check` of callers that neither show progress nor cancel."""


class Residue(msgspec.Struct):
    """What one rule left out or emptied."""

    count: int = 0
    size_bytes: int = 0


class Report(msgspec.Struct, kw_only=True):
    """What a source held, and what of it is not in the tree."""

    entries: int = 0
    size_bytes: int = 0  # sum of the sizes of regular files
    stored_bytes: int = 0  # the same, holes as an archive stores them not counted
    devices: int = 0  # left out
    sockets: int = 0  # left out
    xattrs: int = 0  # left out
    excluded: int = 0  # left out, as asked, what is below not counted
    mounts: list[str] = []  # not entered
    clamped_ids: int = 0  # owner above MAX_ID became MAX_ID
    residue: dict[str, Residue] = {}  # by the pattern of the rule

    def notes(self) -> list[str]:
        """Return what the builder should know, as sentences."""
        lines = []
        if self.devices:
            lines.append(f"{self.devices} device nodes left out: a sandbox has its own /dev")
        if self.sockets:
            lines.append(f"{self.sockets} sockets left out: nobody listens on them any more")
        if self.xattrs:
            lines.append(
                f"{self.xattrs} extended attributes left out (not user, capability or ACL)"
            )
        if self.mounts:
            shown = ", ".join(self.mounts[:5]) + (", …" if len(self.mounts) > 5 else "")
            lines.append(f"{len(self.mounts)} file systems mounted below were not entered: {shown}")
        if self.excluded:
            lines.append(f"{self.excluded} entries excluded")
        if self.clamped_ids:
            lines.append(f"{self.clamped_ids} entries with ids above {MAX_ID} given to {MAX_ID}")
        for pattern, found in self.residue.items():
            lines.append(f"{pattern}: {found.count} entries, {found.size_bytes} bytes cleared")
        return lines


def too_many(source: str) -> DSecError:
    return InvalidArgument(
        f"the {source} has more than {MAX_ENTRIES} entries, or names and attributes of more than "
        f"{MAX_NAMES} bytes; pack directories of many small files",
        field="source",
    )


def too_large(parts: Parts) -> DSecError:
    return InvalidArgument(
        f"with {show(parts)} the files are larger than {MAX_SIZE} bytes, holes included; "
        "remove or exclude it",
        path=show(parts),
    )
