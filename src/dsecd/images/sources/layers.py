"""The layer blobs of an image become trees; each is checked against its digest while it is read."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from dsecd.images.manifest import Config
from dsecd.images.model import Node
from dsecd.images.sources.compression import PIECE, Readable
from dsecd.images.sources.layout import Files
from dsecd.images.sources.report import Check, Report, unchecked
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.stack import Change, Stack
from dsecd.images.sources.tar import DEFAULT_LIMIT, Counted, read_entries
from libdsec.errors import DSecError, InvalidArgument

COLLAPSE_BYTES = 3_000_000_000


class Layer(msgspec.Struct, frozen=True):
    """One layer blob of an image."""

    files: Files
    name: str  # in the layout
    digest: str  # what `name` must hash to, "" when only `diff_id` tells
    diff_id: str  # digest of the unpacked tar
    size: int  # of the blob, -1: not known

    @contextlib.contextmanager
    def open(self, check: Check, done: int) -> Iterator[Verified]:
        """Yield the blob; `check` is told `done` plus what was read."""
        with self.files.open(self.name) as found:
            if found is None:
                raise InvalidArgument(
                    f"the image's layer {self.name} is not there; copy the image whole "
                    "(layers kept elsewhere are not fetched)",
                    field="source",
                )
            raw, size = found
            if self.size not in (-1, size):
                raise damaged(self.name, f"has {size} bytes instead of {self.size}")
            yield Verified(Counted(raw, check, done), self.digest, self.name)


class Image(msgspec.Struct, frozen=True):
    """An image for one platform; its layers bottom first, not yet read."""

    digest: str  # of its manifest; of its config in a docker archive
    platform: str  # as linux/amd64
    config: Config
    layers: list[Layer]


class Verified:
    """A file that is read once, from start to end, and must have `digest` then ("": any)."""

    def __init__(self, raw: Readable, digest: str, name: str) -> None:
        self._raw, self._digest, self._name = raw, digest, name
        self._hash = hashlib.sha256()
        self.size = 0

    def read(self, size: int, /) -> bytes:
        data = self._raw.read(size)
        self.size += len(data)
        if self._digest:
            self._hash.update(data)
        return data

    def verify(self) -> None:
        """Raise `InvalidArgument` when what was read is not what the image names."""
        found = f"sha256:{self._hash.hexdigest()}"
        if self._digest and found != self._digest:
            raise damaged(self._name, f"hashes to {found}, not to {self._digest}")


def damaged(name: str, how: str) -> DSecError:
    return InvalidArgument(f"the image is damaged: {name} {how}; copy it again", field="source")


def merge(
    layers: Sequence[Layer],
    sink: Sink,
    *,
    threshold_bytes: int = COLLAPSE_BYTES,
    limit_bytes: int = DEFAULT_LIMIT,
    check: Check = unchecked,
) -> tuple[list[Node], Report]:
    """Return the trees of `layers`, bottom first, and what was left out.

    Layers are collapsed into one tree until its files pass `threshold_bytes`; the next layer then
    starts a tree that is to be stacked on top: it holds whiteouts (0/0 devices) and the attribute
    OPAQUE, but only where they hide something below. Raises what `read_tar` does, and
    `InvalidArgument` for a layer that does not have its digest.
    """
    stack = Stack()
    report = Report()
    done = 0
    pushed = 0  # bytes that went into the trees before the last one
    for layer in layers:
        # what was put in bounds what is there, and is cheaper to know
        if report.size_bytes - pushed > threshold_bytes < stack.content_bytes():
            stack.push()
            pushed = report.size_bytes
        with layer.open(check, done) as raw:
            stack.apply(_read(layer, raw, sink, report, limit_bytes))
            done += raw.size
    return stack.finish(), report


def _read(layer: Layer, raw: Verified, sink: Sink, report: Report, limit_bytes: int) -> Change:
    """Return what one layer changes. It may end without a marker, for its digest is checked."""
    change = Change()
    unpacked = None if layer.digest else hashlib.sha256()
    entries = read_entries(
        layer.name, raw, sink, report, limit_bytes, open_end=True, digest=unpacked
    )
    try:
        for entry in entries:
            change.add(entry)
    except InvalidArgument:
        while raw.read(PIECE):  # damage on the way is the better explanation
            pass
        raw.verify()
        raise
    raw.verify()
    if unpacked is not None and f"sha256:{unpacked.hexdigest()}" != layer.diff_id:
        raise damaged(layer.name, f"unpacks to something else than {layer.diff_id}")
    return change
