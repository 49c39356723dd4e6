"""One layer made of a layer and all that lies below it: the same tree, and no layers below."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import AsyncIterator, Iterator, Sequence

from dsecd.host import overlay
from dsecd.images import names
from dsecd.images.builder import Recipe
from dsecd.images.library import Gate, Library, Named
from dsecd.images.manifest import Manifest, Origin
from dsecd.images.model import Node
from dsecd.images.sources.directory import read_directory
from dsecd.images.sources.sink import Sink
from dsecd.images.tool import Report, unreported
from libdsec.errors import Internal, Unavailable


async def collapse(
    library: Library,
    name: str,
    stack: Sequence[Manifest],
    lowers: Sequence[int],
    *,
    replace: bool = False,
    report: Report = unreported,
) -> Named:
    """Make one layer of `stack`, of at least two, bottom first, mounted at `lowers`; name it.

    The kernel stacks them, so whiteouts, opaque and renamed directories mean what they mean to a
    sandbox. The defaults are the topmost one's: those of a sandbox that is made of it. Chunks that
    blobs of the stack have are not stored again. Raises what `Library.make` raises.
    """
    top, gate = stack[-1], Gate()
    total = sum(layer.content_bytes for layer in stack)  # more than is seen

    def check(done: int) -> None:
        gate.check()
        report("reading", done, total)

    def read(sink: Sink) -> Sequence[Node]:
        with _explained(top), overlay.merged(lowers) as root:
            node, _ = read_directory(root, sink, devices=True, check=check)
        return [node]

    @contextlib.asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        yield
        report("storing", 0, 0)

    report("waiting", 0, 0)
    for blob in {blob.id for layer in stack for blob in layer.blobs}:
        await library.learn(blob)
    recipe = Recipe(
        kind=names.kind(names.normalise(name)),
        config=top.config,
        origin=Origin(source=f"layer {top.digest} and below", created_at=time.time()),
    )
    return await library.make(name, read, recipe, replace, gate, hold)


@contextlib.contextmanager
def _explained(top: Manifest) -> Iterator[None]:
    try:
        yield
    except overlay.StackError as error:
        raise Internal(f"the layers of {top.digest[:12]} cannot be stacked: {error}") from error
    except OSError as error:
        if error.errno not in (errno.EIO, errno.EUCLEAN):
            raise
        raise Unavailable(
            f"a layer below {top.digest[:12]} cannot be read: {error}; look whether the store "
            "answers, and try again"
        ) from error
