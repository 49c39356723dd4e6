"""From a source to the finished parts of a layer, in files of one scratch directory.

Blocking: runs in a thread. Nothing here knows the store.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from dsecd.images.chunks import ChunkWriter, Known, NewBlob, Placement
from dsecd.images.digest import layer_digest
from dsecd.images.erofs.layout import build_image
from dsecd.images.manifest import Config, Kind, Manifest, Origin
from dsecd.images.model import Node
from dsecd.images.sources.sink import Sink


class Part(msgspec.Struct, frozen=True):
    """A layer's record and its image."""

    manifest: Manifest
    image: bytes


class Built(msgspec.Struct, frozen=True):
    """Layers that are ready to be published, bottom first, and what no blob had yet."""

    parts: list[Part]
    blob: NewBlob | None

    @property
    def top(self) -> Manifest:
        return self.parts[-1].manifest


class Recipe(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer is apart from its tree. `config` is the topmost one's."""

    kind: Kind
    config: Config = Config()
    parents: tuple[str, ...] = ()
    origin: Origin = Origin()


def build(
    read: Callable[[Sink], Sequence[Node]],
    scratch: Path,
    known: Known | None,
    recipe: Recipe,
    room: int | None = None,
) -> Built:
    """Return the layers of the trees that `read` makes while it fills the sink, bottom first.

    The new blob is a file in `scratch`, of at most `room` bytes. Raises what `read` and the writer
    raise; then no file is left.
    """
    with ChunkWriter(scratch / "blob", known, room) as sink:
        roots = read(sink)
        placement = sink.finish()
    try:
        parts: list[Part] = []
        for root in roots:
            parents = [*recipe.parents, *(part.manifest.digest for part in parts)]
            config = recipe.config if root is roots[-1] else Config()
            parts.append(_part(root, placement, config, parents, recipe))
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            (scratch / "blob").unlink()
        raise
    new = placement.new
    used = {blob.id for part in parts for blob in part.manifest.blobs}
    if new is not None and new.id not in used:  # all of it was overwritten by later members
        new.path.unlink()
        new = None
    return Built(parts, new)


def _part(
    root: Node, placement: Placement, config: Config, parents: list[str], recipe: Recipe
) -> Part:
    image = build_image(root, placement)
    content, entries = survey(root)
    manifest = Manifest(
        digest=layer_digest(root, config, parents),
        kind=recipe.kind,
        image=hashlib.sha256(image.data).hexdigest(),
        image_bytes=len(image.data),
        blobs=image.blobs,
        content_bytes=content,
        entries=entries,
        parents=parents,
        config=config,
        origin=recipe.origin,
    )
    return Part(manifest, image.data)


def survey(root: Node) -> tuple[int, int]:
    """Return the bytes of all regular files, each counted once, and the number of names."""
    content, entries = 0, 0
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        entries += 1
        if id(node) not in seen:
            seen.add(id(node))
            content += node.size
        pending.extend(node.children.values())
    return content, entries
