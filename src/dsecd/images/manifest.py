"""The record of one layer in the store: what its digest stands for and where its bytes are."""

from __future__ import annotations

from typing import Literal

import msgspec

Kind = Literal["base", "workspace", "toolkit", "snapshot"]


class BlobRef(msgspec.Struct, frozen=True):
    """A data blob: its id (the digest of its chunk index) and its length in bytes."""

    id: str
    size: int


class Config(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Defaults for sandboxes made from the layer, as an OCI image has them."""

    env: dict[str, str] = {}
    user: str = ""
    workdir: str = ""
    entrypoint: list[str] = []
    cmd: list[str] = []


class Origin(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who made the layer, of what and when. Not part of the digest, never shown to a sandbox."""

    source: str = ""
    builder: str = ""  # user and host, or sandbox id
    created_at: float = 0.0  # seconds since the epoch


class Manifest(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One layer. `parents` are the digests of the layers it was made on top of, bottom first."""

    version: int = 1
    digest: str  # of tree, config and parents (dsecd.images.digest)
    kind: Kind
    image: str  # SHA-256 of the metadata image
    image_bytes: int
    blobs: list[BlobRef]  # in the order of the image's device table
    content_bytes: int  # sum of the sizes of its regular files
    entries: int
    parents: list[str] = []
    config: Config = Config()
    origin: Origin = Origin()
