"""Layers for tests of flat files: an image and its blobs in a directory, as a store has them."""

from __future__ import annotations

import hashlib
from pathlib import Path

from dsecd.images.chunks import ChunkWriter, Placement, decode_index
from dsecd.images.erofs.layout import Image, build_image
from dsecd.images.known import KnownChunks
from dsecd.images.local import Local
from dsecd.images.manifest import BlobRef
from dsecd.images.model import Node, directory
from tests.unit.image_trees import Build, content, file


def make_layer(folder: Path, build: Build, known: KnownChunks | None = None) -> tuple[Node, Local]:
    """Return a tree and its layer, whose digest is one of the image."""
    path = folder / "new"
    with ChunkWriter(path, known) as sink:
        root = build(sink)
        placement = sink.finish()
    if new := placement.new:
        path.rename(folder / new.id)
        if known is not None:
            known.add(new.id, decode_index(new.index, new.id))
    return root, store(folder, build_image(root, placement))


def store(folder: Path, image: Image) -> Local:
    """Write the image into the folder."""
    digest = hashlib.sha256(image.data).hexdigest()
    path = folder / f"{digest}.image"
    path.write_bytes(image.data)
    return Local(digest, str(path), tuple(str(folder / blob.id) for blob in image.blobs))


def of_files(*contents: bytes) -> Build:
    """Return what makes a tree of files 0, 1, … with this content."""

    def build(sink: ChunkWriter) -> Node:
        root = directory()
        for number, data in enumerate(contents):
            root.children[b"%d" % number] = file(sink, data)
        return root

    return build


def two_versions(folder: Path) -> tuple[tuple[Node, Local], tuple[Node, Local]]:
    """Return two layers that share a blob; the second has one of its own, too."""
    common = content(1, 200_001)
    with KnownChunks(folder / "known.db") as known:
        first = make_layer(folder, of_files(common, b"one"), known)
        second = make_layer(folder, of_files(common, b"two" * 30_000), known)
    return first, second


def many_blobs(folder: Path, count: int) -> tuple[Node, Local]:
    """Return a layer of `count` files, each with a blob of its own."""
    where: dict[bytes, tuple[str, int]] = {}
    blobs: list[BlobRef] = []
    root = directory()
    for number in range(count):
        size = (7, 4097, 70_000)[number % 3]
        with ChunkWriter(folder / "new") as sink:
            node = root.children[b"%03d" % number] = file(sink, b"%03d" % number * size)
            new = sink.finish().new
        assert new is not None
        new.path.rename(folder / new.id)
        blobs.append(BlobRef(new.id, new.size))
        index = decode_index(new.index, new.id)
        for chunk, block in zip(index.chunks, index.blocks, strict=True):
            where[chunk.digest] = (new.id, block)
        assert node.chunks
    return root, store(folder, build_image(root, Placement(blobs, where)))
