"""The contract of a store that hosts share.

A store holds *objects*, written once and named by digests, and *names*, small records that move by
compare-and-swap. Both become visible whole or not at all, whatever dies meanwhile. A store answers
within bounded time: a fault that may pass is tried again, up to the time limit, and then raised as
`Unavailable`, which is retryable. A store does not check content; the digest in the key does: see
`dsecd.images.stores.verify`.

A layer is published bottom up (blobs and indexes, image, layer, then the name), so that whatever a
name leads to is there. After an `Unavailable` from `swap_name` it is not known whether the name
moved: read it before trying again.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Literal, Protocol

import msgspec

from dsecd.host.probe import Feature
from libdsec.errors import AlreadyExists, InvalidArgument


class Conflict(AlreadyExists):
    """The name is not at the version expected: somebody moved it. Read it again, then decide.

    Goes over the wire as `AlreadyExists`.
    """


class Entry(msgspec.Struct, frozen=True):
    """One line of a listing. `modified`: seconds since the epoch, by the store's clock."""

    key: str
    size: int
    modified: float


class Source(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """How a program that is not ours in Python reads one object.

    file: by pread of `path`. http: by GET with a Range header of `url`; signed with AWS Signature 4
    for service s3 in `region` when `credentials` is not none: environment (AWS_ACCESS_KEY_ID and so
    on, of our process), file (`profile` in `credentials_file`, AWS shared credentials format) or
    instance (metadata service). `ca_file`: PEM with more certificate authorities to trust.
    """

    kind: Literal["file", "http"]
    path: str = ""
    url: str = ""
    region: str = ""
    credentials: Literal["none", "environment", "file", "instance"] = "none"
    credentials_file: str = ""
    profile: str = ""
    ca_file: str = ""


class Store(Protocol):
    """See the module. Every method but `source` may raise `Unavailable` and `PermissionDenied`."""

    @property
    def url(self) -> str:
        """What the store was opened with, without secrets."""

    @property
    def features(self) -> tuple[Feature, ...]:
        """What this store can do, found by trying; `store_swap` says if names can be moved."""

    async def read(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        """Return bytes `start` to `end` (exclusive; None: all) of an object.

        Fewer only where the object ends. Raises `NotFound`.
        """

    async def size(self, key: str) -> int | None:
        """Return the size of an object, None when there is none."""

    async def write(self, key: str, source: bytes | Path) -> bool:
        """Put an object if there is none; return True when it is new.

        After a lost answer it may be True for what another writer put in the same moment, which has
        the same content by its name. Raises `Internal` when an object of another size is there,
        `Exhausted` when the store is full.
        """

    async def read_name(self, key: str) -> tuple[bytes, str] | None:
        """Return content and version of a name, None when there is none.

        Raises `Internal` when the record is damaged.
        """

    async def swap_name(self, key: str, data: bytes | None, expected: str | None) -> str:
        """Set a name (None: delete it) that is at version `expected` (None: that is not there).

        Returns the new version. Raises `Conflict` when it is at another one, `Unsupported` when the
        server cannot compare and swap.
        """

    def list(self, prefix: str) -> AsyncIterator[Entry]:
        """Yield what is under one of `keys.PREFIXES`; deleted names are not. Order not defined.

        What is written or deleted meanwhile may be left out or not.
        """

    async def delete(self, key: str) -> None:
        """Remove an object or a lease; nothing happens when there is none. Not for names."""

    def source(self, key: str) -> Source:
        """Return how dsec-blobd reads the object."""

    async def tidy(self) -> None:
        """Remove what writers left that died long ago, where the store does not do that itself."""

    async def close(self) -> None:
        """Let go of threads and connections. What still runs is given up."""


def size_of(source: bytes | Path) -> int:
    """Return the size of what is to be written. Raises `InvalidArgument` when it is no file."""
    if isinstance(source, bytes):
        return len(source)
    try:
        return source.stat().st_size
    except OSError as error:
        raise InvalidArgument(f"cannot read {source}: {error.strerror}", field="source") from error
