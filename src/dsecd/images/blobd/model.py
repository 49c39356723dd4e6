"""What dsecd and dsec-blobd say to each other, as types. Sizes are bytes, times milliseconds."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of the cache and of requests to the store; they may change while it runs."""

    cache_bytes: int = 0  # of everything below blobs/; 0: no bound
    demand_ms: int = 120_000  # a read fails with EIO after it
    attempt_ms: int = 10_000  # one request to the store; then another is made
    fetch_min: int = 128 << 10  # asked for at once around a missing chunk
    fetch_max: int = 1 << 20  # the same at most; in between by the pace of the store
    demand_threads: int = 16  # these two only grow while the process lives
    prefetch_threads: int = 16


class Hello(msgspec.Struct, frozen=True):
    """Who answers. `keeper` is the pid of the parent that starts it again, 0: nobody does."""

    version: int
    pid: int
    keeper: int
    blobs: int
    resend: bool  # requests of a dead process are asked for again (Linux 6.9)
    capabilities: frozenset[str]


class BlobState(msgspec.Struct, frozen=True):
    """A registered blob. `whole`: every chunk is there, so that a layer can hold it.

    `pinned`: asked for, or held by a mounted layer.
    """

    length: int
    chunks: int
    present: int  # chunks that are there and were checked
    bytes: int  # on disk
    pinned: bool
    whole: bool


class Trace(msgspec.Struct, frozen=True):
    """In which order chunks were first read: `ranges` are (position in `blobs`, first, count)."""

    blobs: tuple[str, ...]
    ranges: tuple[tuple[int, int, int], ...]
