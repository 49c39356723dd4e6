"""What the store keeps about layers as JSON: manifests, names, leases. Pure.

A manifest is written once and named by the layer's digest, which stands for the tree and not for
these bytes; so a checksum goes in front, as for names (`dsecd.images.stores.record`).
"""

from __future__ import annotations

import hashlib

import msgspec

from dsecd.images.manifest import Manifest
from libdsec.errors import Internal

_VERSION = 1


class Name(msgspec.Struct, frozen=True):
    """Content of one name."""

    digest: str
    created_at: float  # seconds since the epoch


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """What somebody needs although no name leads to it yet, or any more."""

    holder: str
    expires_at: float  # seconds since the epoch, by the holder's clock
    layers: list[str] = []
    blobs: list[str] = []


def encode_manifest(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest)
    return hashlib.sha256(body).hexdigest().encode() + b"\n" + body


def decode_manifest(digest: str, data: bytes) -> Manifest:
    """Return the manifest of the layer `digest`. Raises `Internal` when it is damaged."""
    checksum, _, body = data.partition(b"\n")
    if hashlib.sha256(body).hexdigest().encode() != checksum:
        raise _damaged(digest, "its checksum is wrong")
    try:
        manifest = msgspec.json.decode(body, type=Manifest)
    except msgspec.DecodeError as error:
        raise _damaged(digest, str(error)) from error
    if manifest.version != _VERSION:
        raise _damaged(digest, f"version {manifest.version} is not known to this dsecd")
    if manifest.digest != digest:
        raise _damaged(digest, f"it belongs to {manifest.digest[:12]}")
    return manifest


def _damaged(digest: str, why: str) -> Internal:
    return Internal(
        f"the manifest of layer {digest[:12]} in the store cannot be used: {why}; import the "
        "layer again",
        digest=digest,
    )
