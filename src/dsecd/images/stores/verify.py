"""Objects checked against the digest that names them: a store's bytes are not trusted."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import os
import secrets
from pathlib import Path

from dsecd.images.stores.abc import Store
from libdsec.errors import Exhausted, Internal, NotFound

PIECE = 8 << 20
_TRIES = 2  # damage on the way passes, damage in the store does not


async def read_verified(store: Store, key: str, sha256: str) -> bytes:
    """Return the object, a small one, whose SHA-256 is `sha256`.

    Raises `NotFound`, `Internal` when it is damaged, and what the store raises.
    """
    found = ""
    for _ in range(_TRIES):
        data = await store.read(key)
        found = hashlib.sha256(data).hexdigest()
        if found == sha256:
            return data
    raise _damaged(store, key, sha256, found)


async def fetch_verified(
    store: Store, key: str, sha256: str, target: Path, most: int | None = None
) -> None:
    """Copy the object to the file `target`, which appears whole and with digest `sha256`.

    It has no more than `most` bytes; None: the store is asked first. The copy is not synced, for
    that takes longer than the rest: after a crash of the machine it may be there and damaged, so
    ask `holds` before the first use of a copy that an earlier process made.

    Raises `NotFound`, `Exhausted` when the disk is full, `Internal` when the object is damaged, and
    what the store raises; then no file is left.
    """
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}")
    found = ""
    try:
        for _ in range(_TRIES):
            found = await _copy(store, key, temporary, most)
            if found == sha256:
                temporary.rename(target)
                return
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise Exhausted(f"the disk of {target.parent} is full; free space there") from error
        raise Internal(f"cannot write {target}: {error.strerror}") from error
    finally:
        temporary.unlink(missing_ok=True)
    raise _damaged(store, key, sha256, found)


def holds(file: Path, sha256: str) -> bool:
    """Whether the file is there and has this digest."""
    try:
        with file.open("rb", buffering=0) as reader:
            return hashlib.file_digest(reader, "sha256").hexdigest() == sha256
    except OSError:  # a file that cannot be read is as good as none
        return False


async def _copy(store: Store, key: str, target: Path, most: int | None) -> str:
    """Copy the object piece by piece and return its digest; one is written while the next comes."""
    size = most if most is not None else await store.size(key)
    if size is None:
        raise NotFound(f"the store {store.url} has no {key}", key=key)
    digest = hashlib.sha256()
    written: asyncio.Future[None] | None = None
    with target.open("wb", buffering=0) as file:
        try:
            for start in range(0, size, PIECE):
                end = min(start + PIECE, size)
                piece = await store.read(key, start, end)
                if written is not None:
                    await written
                written = asyncio.ensure_future(
                    asyncio.to_thread(_take, piece, digest, file.fileno())
                )
                if most is not None and len(piece) < end - start:
                    break  # it ends here
        finally:
            if written is not None:
                await written  # it uses the descriptor
    return digest.hexdigest()


def _take(piece: bytes, digest: hashlib._Hash, fd: int) -> None:
    digest.update(piece)
    view = memoryview(piece)
    while view:
        view = view[os.write(fd, view) :]


def _damaged(store: Store, key: str, expected: str, found: str) -> Internal:
    return Internal(
        f"{key} in the store {store.url} is damaged: its content has the digest {found} instead of "
        f"{expected}; delete it and put it again from its source",
        key=key,
        expected=expected,
        found=found,
    )
