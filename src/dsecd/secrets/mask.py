"""Hiding a secret in what comes back: where it stands as it is, asterisks of the same length. Pure.

A service that repeats a header (in an error message, in a debugging page) would hand the secret to
the sandbox. The length stays, so that neither Content-Length nor chunks change.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Iterator

LEAST = 8  # characters; shorter ones stand in ordinary text by chance


class Mask:
    """Hides the values of one name's headers, and the tokens in them."""

    def __init__(self, values: Iterable[str]) -> None:
        found = {part for value in values for part in _parts(value.encode()) if len(part) >= LEAST}
        self.needles = tuple(sorted(found, key=len, reverse=True))

    def clean(self, data: bytes) -> bytes:
        """Return `data` with every whole needle in it hidden."""
        for needle in self.needles:
            if needle in data:
                data = data.replace(needle, b"*" * len(needle))
        return data

    def stream(self) -> Stream:
        """Return a mask for a body that comes in pieces."""
        return Stream(self)


class Stream:
    """Hides needles that lie across pieces, too; holds back no more than the start of one."""

    def __init__(self, mask: Mask) -> None:
        self._mask = mask
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return what can be passed on of all that was fed so far."""
        whole = self._mask.clean(self._held + data)
        kept = max((_begun(whole, needle) for needle in self._mask.needles), default=0)
        cut = len(whole) - kept
        self._held = whole[cut:]
        return whole[:cut]

    def end(self) -> bytes:
        """Return what was held back."""
        held, self._held = self._held, b""
        return held


def _parts(value: bytes) -> Iterator[bytes]:
    """Yield `value`, the credentials after its scheme, and a password (RFC 7617)."""
    yield value
    scheme, _, rest = value.partition(b" ")
    if not rest:
        return
    yield rest.strip()
    if scheme.lower() == b"basic":
        try:
            pair = base64.b64decode(rest.strip(), validate=True)
        except binascii.Error:
            return
        yield pair
        yield pair.partition(b":")[2]


def _begun(data: bytes, needle: bytes) -> int:
    """Return the length of the longest start of `needle`, less than all, that ends `data`."""
    at = max(0, len(data) - len(needle) + 1)
    while (at := data.find(needle[:1], at)) >= 0:
        if needle.startswith(data[at:]):
            return len(data) - at
        at += 1
    return 0
