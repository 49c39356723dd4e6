"""The keys of the store that dsec-blobd reads with.

It reads them from a file, anew for each request. Those in the environment of dsecd are put into one
of our own, which only root may read: dsec-blobd outlives dsecd, and finds there what the next dsecd
is started with. Keys of the machine (metadata service) it cannot have.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from dsecd.images.stores.abc import Source
from libdsec.errors import InvalidArgument, Unsupported

_NAMES = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_PROFILE = "default"


def expect_readable(source: Source) -> None:
    """Raise `Unsupported` when dsec-blobd can have no keys for such a source."""
    if source.credentials == "instance":
        raise Unsupported(
            "dsec-blobd cannot use the credentials of the machine; put keys into a file and set "
            "store.options.credentials_file, which is read again whenever it changes, or set "
            "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY in the daemon's environment",
            reason="store.options.instance_credentials",
        )


def readable(source: Source, file: Path) -> Source:
    """Return `source` as dsec-blobd reads it, when `save` put the keys into `file`."""
    expect_readable(source)
    if source.credentials != "environment":
        return source
    return msgspec.structs.replace(
        source, credentials="file", credentials_file=str(file), profile=_PROFILE
    )


def save(file: Path, environ: Mapping[str, str]) -> None:
    """Put the keys in `environ` into `file`, whole or not at all. Raises `InvalidArgument`."""
    lines = [f"[{_PROFILE}]"]
    for name in _NAMES:
        value = environ.get(name, "")
        if any(not "!" <= character <= "~" for character in value):
            raise InvalidArgument(f"{name} has characters that no key has", field=name)
        if value:
            lines.append(f"{name.lower()} = {value}")
    temporary = file.with_name(f".{file.name}")
    with contextlib.suppress(FileNotFoundError):
        temporary.unlink()
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "w") as out:
        out.write("\n".join(lines) + "\n")
    temporary.replace(file)
