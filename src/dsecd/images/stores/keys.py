"""Keys of the store: which there are, and which may change. Pure.

::

    blobs/<id> indexes/<id> images/<sha256> layers/<digest> traces/<digest> trash/<id>
                              written once, never changed
    names/<quoted name> leases/<random>
                              records that move by compare-and-swap

A key becomes part of a path and of a URL, so nothing but these forms is let through.
"""

from __future__ import annotations

import re

from libdsec.errors import InvalidArgument

_DIGEST = r"[0-9a-f]{64}"
_FORMS = {
    "blobs": _DIGEST,
    "indexes": _DIGEST,
    "images": _DIGEST,
    "layers": _DIGEST,
    "traces": _DIGEST,
    "trash": _DIGEST,
    "names": r"[A-Za-z0-9_~%-][A-Za-z0-9._~%-]{0,249}",
    "leases": r"[A-Za-z0-9_-]{1,64}",
}
PREFIXES = tuple(f"{name}/" for name in _FORMS)
MOVING = ("names/", "leases/")
_KEYS = re.compile("|".join(f"(?:{name}/{form})" for name, form in _FORMS.items()), re.ASCII)


def check(key: str) -> str:
    """Return `key`. Raises `InvalidArgument` when it is none of the store's."""
    if _KEYS.fullmatch(key) is None:
        raise InvalidArgument(
            f"{key!r} is not a key of the store: use {', '.join(PREFIXES)} and a digest "
            "(64 lower-case hexadecimal digits), a quoted name or a lease id",
            field="key",
        )
    return key


def check_fixed(key: str) -> str:
    """Return `key`, one that is written once. Raises `InvalidArgument`."""
    if check(key).startswith(MOVING):
        raise InvalidArgument(f"{key} moves: use read_name and swap_name", field="key")
    return key


def check_moving(key: str) -> str:
    """Return `key`, one that moves by compare-and-swap. Raises `InvalidArgument`."""
    if not check(key).startswith(MOVING):
        raise InvalidArgument(f"{key} never changes: use read and write", field="key")
    return key


def check_deletable(key: str) -> str:
    """Return `key`, one that `delete` may remove. Raises `InvalidArgument` for names."""
    if check(key).startswith("names/"):
        raise InvalidArgument(f"{key} is removed by swap_name(key, None, version)", field="key")
    return key


def check_prefix(prefix: str) -> str:
    """Return `prefix`, one of `PREFIXES`. Raises `InvalidArgument`."""
    if prefix not in PREFIXES:
        raise InvalidArgument(
            f"{prefix!r} is not a prefix of the store: use one of {', '.join(PREFIXES)}",
            field="prefix",
        )
    return prefix
