"""From configuration to a store that was tried out."""

from __future__ import annotations

import difflib
import os
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from dsecd.images.stores.abc import Store
from dsecd.images.stores.directory import DirectoryStore
from dsecd.images.stores.s3_options import S3Options
from libdsec.errors import InvalidArgument


class DirectoryOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`timeout_s`: without progress, a call is given up. `threads`: calls at the same time."""

    timeout_s: float = 30.0
    threads: int = 16


T = TypeVar("T", DirectoryOptions, S3Options)


async def open_store(
    url: str, options: Mapping[str, Any] | None = None, environ: Mapping[str, str] = os.environ
) -> Store:
    """Return the store at an absolute path, ``file:///path`` or ``s3://bucket/prefix``.

    Raises `InvalidArgument` for an option that the kind of store does not have, and what the store
    itself says when it is tried: `NotFound`, `PermissionDenied`, `Unsupported`, `Unavailable`.
    """
    scheme = urllib.parse.urlsplit(url).scheme
    if url.startswith("/") or scheme == "file":
        chosen = _converted(options or {}, DirectoryOptions, "a directory")
        if chosen.threads < 1:
            raise InvalidArgument("store.options.threads must be above 0", field="threads")
        directory = DirectoryStore(_path(url), chosen.timeout_s, chosen.threads)
        try:
            await directory.start()
        except BaseException:
            await directory.close()
            raise
        return directory
    if scheme == "s3":
        # here, so that hosts with a directory do not load it
        from dsecd.images.stores.s3 import open_s3

        return await open_s3(url, _converted(options or {}, S3Options, "S3"), environ)
    raise InvalidArgument(
        f"{url!r} is not a store: use an absolute path, file:///path or s3://bucket/prefix",
        field="store.url",
    )


def _path(url: str) -> Path:
    parts = urllib.parse.urlsplit(url)
    path = url if url.startswith("/") else urllib.parse.unquote(parts.path)
    if not path.startswith("/") or (parts.scheme and (parts.netloc or parts.query)):
        raise InvalidArgument(f"{url!r} is not file:///path", field="store.url")
    return Path(path)


def _converted(options: Mapping[str, Any], kind: type[T], of: str) -> T:
    known = [field.name for field in msgspec.structs.fields(kind)]
    for name in options:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(known)}"
            raise InvalidArgument(
                f"store.options.{name} is unknown for {of}; {hint}", field=f"store.options.{name}"
            )
    try:
        chosen = msgspec.convert(dict(options), kind)
    except msgspec.ValidationError as error:
        raise InvalidArgument(f"store.options: {error}", field="store.options") from error
    if chosen.timeout_s <= 0:
        raise InvalidArgument("store.options.timeout_s must be above 0", field="timeout_s")
    return chosen
