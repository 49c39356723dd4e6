"""Which known blobs a new layer uses: not more than a mount can take, the useful ones first.

Which blobs contribute least is known only at the end, when the content has gone by. So, where the
host knows more blobs than a layer may use, what is taken from a blob is kept aside in a spool until
it is worth SETTLED_BYTES; from then on the blob will be used. At the end the blobs that are settled
stay, then those that contribute most; the chunks of the others come back from the spool, to be
written anew. The result depends only on the order of the content and on what is known.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import msgspec

from dsecd.images.manifest import BlobRef

MAX_BLOBS = 200  # of one layer, the new one included
SETTLED_BYTES = 1 << 20


class _Use(msgspec.Struct):
    ref: BlobRef
    size: int = 0
    settled: bool = False
    spooled: list[tuple[bytes, int, int, int]] = []  # digest, place in the spool, length, size


class BlobChoice:
    """Counts what each known blob contributes. `spool` is a file to be, gone after `close`."""

    def __init__(self, spool: Path, known_blobs: int) -> None:
        self._path = spool
        self._spools = known_blobs >= MAX_BLOBS
        self._uses: dict[str, _Use] = {}
        self._settled = 0
        self._fd = -1
        self._end = 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def has(self, blob: str) -> bool:
        return blob in self._uses

    def offer(self, ref: BlobRef) -> bool:
        """Return whether chunks may be taken from this blob, too."""
        if not self._spools and len(self._uses) >= MAX_BLOBS - 1:
            return False  # it became known after we had counted
        self._uses[ref.id] = _Use(ref)
        return True

    def use(self, blob: str, digest: bytes, data: memoryview, size: int) -> None:
        """Note that the chunk `digest`, `data` with its padding, is taken from `blob`."""
        use = self._uses[blob]
        use.size += size
        if not self._spools or use.settled:
            return
        if use.size >= SETTLED_BYTES and self._settled < MAX_BLOBS - 1:
            use.settled = True
            use.spooled = []
            self._settled += 1
            return
        if self._fd < 0:
            self._fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._path.unlink()  # it goes with the descriptor
        use.spooled.append((digest, self._end, len(data), size))
        while data:
            done = os.pwrite(self._fd, data, self._end)
            self._end += done
            data = data[done:]

    def drop(self, has_new: bool) -> Iterator[tuple[bytes, memoryview, int]]:
        """Give up what is above the limit; yield its chunks: digest, padded content, size."""
        if len(self._uses) + has_new <= MAX_BLOBS:
            return
        uses = self._uses.values()
        best = sorted(uses, key=lambda use: (not use.settled, -use.size, use.ref.id))
        for use in best[MAX_BLOBS - 1 :]:
            del self._uses[use.ref.id]
            for digest, at, length, size in use.spooled:
                yield digest, memoryview(os.pread(self._fd, length, at)), size

    def blobs(self) -> list[BlobRef]:
        """Return the blobs in use, in the order of their first use."""
        return [use.ref for use in self._uses.values()]
