"""What is graded of a running container: some paths of it, as a layer on what it began with.

The sandbox is frozen while the paths are read, so the layer is one moment of it. The layer has no
name: once nothing uses it, the store's garbage collection takes it.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
import time
from collections.abc import Collection, Iterator, Sequence

from dsecd.backends.abc import KeepArgs, Kept
from dsecd.backends.container_layers import ContainerLayers
from dsecd.backends.container_pack import Freeze, Subject
from dsecd.host import mountns, overlay, processes
from dsecd.host.cgroup import TreeDriver
from dsecd.images import handin
from dsecd.images.builder import Recipe, survey
from dsecd.images.digest import layer_digest
from dsecd.images.environment import Environment
from dsecd.images.library import Gate
from dsecd.images.manifest import Config, Origin
from dsecd.images.model import Node
from dsecd.images.sources.kept import find, parse, read_kept, shown
from dsecd.images.sources.paths import Parts
from dsecd.images.sources.sink import Sink
from libdsec.errors import InvalidArgument
from libdsec.model import KeptPath, KeptWarning

FD_MOUNT_NS = 8  # in dsec-init: where commands live


async def keep(
    layers: ContainerLayers, driver: TreeDriver, subject: Subject, args: KeepArgs
) -> Kept:
    """Make the layer. Raises `InvalidArgument`, what the freeze, writer and store raise."""
    paths, gate = parse(args.paths), Gate()
    toolkits = [(await layers.library.resolve(name)).digest for name in args.toolkits]
    below = await _pristine(layers, subject, toolkits, args.workspace)
    found: list[tuple[list[KeptPath], list[KeptWarning]]] = []
    async with contextlib.AsyncExitStack() as stack:
        lowers = await stack.enter_async_context(layers.mounted(Environment(below, Config())))
        graders = await stack.enter_async_context(
            layers.mounted(Environment(tuple(toolkits), Config()))
        )
        grader = {parts: folder for fd in graders for parts, folder in handin.entries(fd)}

        def read(sink: Sink) -> Sequence[Node]:
            root = mountns.open_root(processes.descriptor(subject.pid, FD_MOUNT_NS))
            try:
                tree, dropped = read_kept(root, subject.uid_base, paths, sink, gate.check)
                with _stacked(lowers) as pristine:
                    warnings = handin.settle(tree, paths, handin.Pristine(pristine), grader)
                warnings += [
                    KeptWarning(kind=kind, path="", count=count, dropped=True)
                    for kind, count in sorted(dropped.items())
                ]
                found[:] = [([_describe(root, tree, one) for one in paths], warnings)]
            finally:
                os.close(root)
            return [tree]

        recipe = Recipe(
            kind="snapshot",
            parents=below,
            origin=Origin(source=f"kept paths of {subject.sandbox}", created_at=time.time()),
        )
        freeze = Freeze(driver, subject.cgroup)
        made = await layers.library.make(None, read, recipe, gate=gate, hold=freeze.hold)
    return Kept(
        digest=made.digest,
        layers=below,
        toolkits=tuple(toolkits),
        paths=found[0][0],
        warnings=found[0][1],
        frozen_ms=freeze.ms,
    )


async def _pristine(
    layers: ContainerLayers, subject: Subject, toolkits: Collection[str], workspace: bool
) -> tuple[str, ...]:
    """Return what the container began with, bottom first, without what is stacked elsewhere.

    A toolkit of the grader's that the agent had, too, must not lie below what the agent hands in.
    """
    manifests = [await layers.library.manifest(digest) for digest in subject.layers]
    left = [
        manifest
        for manifest in manifests
        if manifest.digest not in toolkits and (workspace or manifest.kind != "workspace")
    ]
    digests = tuple(manifest.digest for manifest in left)
    for manifest in left:
        if missing := set(manifest.parents) - set(digests):
            raise InvalidArgument(
                f"layer {manifest.digest[:12]} of the sandbox was made on top of "
                f"{min(missing)[:12]}, which cannot be left out below it",
                field="toolkit" if missing & set(toolkits) else "workspace",
            )
    if not digests:
        raise InvalidArgument("a sandbox of nothing but the grader's toolkits", field="toolkit")
    return digests


@contextlib.contextmanager
def _stacked(lowers: Sequence[int]) -> Iterator[int]:
    if len(lowers) == 1:
        yield lowers[0]
        return
    with overlay.merged(lowers) as root:
        yield root


def _describe(root: int, tree: Node, parts: Parts) -> KeptPath:
    """Return what the record says of one kept path, as it is graded."""
    path, node = shown(parts), find(tree, parts)
    if node is None or node.is_whiteout():
        return KeptPath(path=path, kind="absent")
    size, entries = survey(node)
    if node.is_dir():
        digest = layer_digest(node, Config(), ())
        return KeptPath(
            path=path, kind="directory", sha256=digest, size_bytes=size, entries=entries - 1
        )
    if stat.S_ISLNK(node.mode):
        digest = hashlib.sha256(node.target).hexdigest()
        return KeptPath(path=path, kind="link", sha256=digest, size_bytes=len(node.target))
    with handin.opened_at(root, parts) as fd, os.fdopen(os.dup(fd), "rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return KeptPath(path=path, kind="file", sha256=digest, size_bytes=size)
