"""Names and digests of layers: ``base/debian:12``, ``registry.example:5000/sphinx-9658:official``.

A name is path components separated by slashes and a tag; the first component may carry a port, as
registry names do. A name without tag means ``:latest``. A digest is that of the layer's content
(`dsecd.images.digest`), in hexadecimal, with or without ``sha256:`` in front.
"""

from __future__ import annotations

import re
import urllib.parse
from typing import cast, get_args

from dsecd.images.manifest import Kind
from libdsec.errors import InvalidArgument

MAX_NAME = 200  # characters; quoted it must still be one file name (255 bytes)
MIN_PREFIX = 6  # hexadecimal digits of an abbreviated digest
_COMPONENT = r"[A-Za-z0-9][A-Za-z0-9._-]*"
_NAME = re.compile(
    rf"{_COMPONENT}(?::[0-9]{{1,5}}(?=/))?(?:/{_COMPONENT})*(?::(?P<tag>[A-Za-z0-9_][A-Za-z0-9._-]*))?"
)
_DIGEST = re.compile(r"(?:sha256:)?([0-9a-f]{6,64})")


def normalise(name: str) -> str:
    """Return the full name, with its tag. Raises `InvalidArgument` that says what is wrong."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise InvalidArgument(
            f"{name!r} is not a layer name: use components of letters, digits, '.', '_' and '-' "
            "separated by '/', then ':tag' (for example base/debian:12)",
            field="name",
        )
    full = name if match["tag"] else f"{name}:latest"
    if len(full) > MAX_NAME or len(to_file(full)) > 250:
        raise InvalidArgument(f"layer name is longer than {MAX_NAME} characters", field="name")
    return full


def kind(name: str) -> Kind:
    """Return the kind of layer that the first component names, "base" for any other."""
    first = name.partition("/")[0]
    for known in get_args(Kind):
        if first == known:
            return cast(Kind, known)
    return "base"


def digest_prefix(text: str) -> str | None:
    """Return the hexadecimal digits of a digest or an abbreviation of one, else None."""
    match = _DIGEST.fullmatch(text)
    return match[1] if match else None


def is_digest(text: str) -> bool:
    """True for exactly 64 hexadecimal digits, the form the store uses in file names."""
    return len(text) == 64 and _DIGEST.fullmatch(text) is not None


def to_file(name: str) -> str:
    """Return the file name under which the store keeps `name`; `from_file` is its inverse."""
    return urllib.parse.quote(name, safe="")


def from_file(file: str) -> str:
    """Return the layer name kept under the file name `file`."""
    return urllib.parse.unquote(file)
