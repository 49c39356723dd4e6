"""The metadata image of a tree: file names, attributes and chunk indexes, no content.

The arithmetic is C, `_fastpath/erofs/layout.c`; `_fastpath/erofs_twin.py` does the same in Python
and is where to read how an image is laid out.
"""

from __future__ import annotations

import errno

import msgspec

from dsecd import fastpath
from dsecd.images.chunks import Placement
from dsecd.images.erofs.encode import encode_tree
from dsecd.images.manifest import BlobRef
from dsecd.images.model import Node
from libdsec.errors import Exhausted, Internal


class Image(msgspec.Struct, frozen=True):
    """An image and the blobs it needs, in the order of its device table."""

    data: bytes
    blobs: list[BlobRef]


def build_image(root: Node, placement: Placement) -> Image:
    """Return the metadata image of `root`, whose chunks lie where `placement` says.

    The same tree and places give the same bytes. Raises `InvalidArgument` for what EROFS cannot
    hold, naming the file, and `Exhausted` without memory for the image.
    """
    sizes = {blob.id: blob.size for blob in placement.blobs}
    tree, used = encode_tree(root, placement.where, sizes)
    try:
        data = fastpath.build_erofs(tree)
    except fastpath.StepError as error:
        if error.errno == errno.ENOMEM:
            raise Exhausted("no memory to lay out the image of the layer") from error
        raise Internal(f"the image cannot be laid out: {error}") from error
    return Image(data, [BlobRef(blob, sizes[blob]) for blob in used])
