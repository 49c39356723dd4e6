"""A layer of one store directory in another one of the same file system, without a copy."""

from __future__ import annotations

import contextlib
from pathlib import Path

from dsecd.images.manifest import Manifest


def keys_of(manifest: Manifest) -> list[str]:
    """Return the objects of a layer, parents left out, in the order in which they are put."""
    blobs = [f"{prefix}/{blob.id}" for blob in manifest.blobs for prefix in ("indexes", "blobs")]
    return [*blobs, f"images/{manifest.image}", f"layers/{manifest.digest}"]


def link_layer(manifest: Manifest, source: Path, target: Path) -> None:
    """Put a layer of the store in the directory `source` into the one in `target`.

    No name moves. Raises `OSError`: EXDEV when they are not on one file system.
    """
    for key in keys_of(manifest):
        with contextlib.suppress(FileExistsError):
            (target / key).hardlink_to(source / key)
