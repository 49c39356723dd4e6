"""The common root: one layer, mounted for the peers, and put into the stores of our own daemons."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from dsec_bench.bench import Options
from dsec_bench.cgroups import own_group
from dsec_bench.create.sdk import Sdk
from dsec_bench.leftovers import TEMPORARY, unmount_below
from dsec_bench.rootfs import small_root

from dsecd import fastpath
from dsecd.images.importing import import_layer
from dsecd.images.library import Named, open_library
from dsecd.images.links import link_layer
from dsecd.images.local import Direct, Local
from dsecd.images.manifest import Manifest
from libdsec.errors import NotFound

HOST_STATE = Path("/var/lib/dsec")  # of the host's own daemon
DATA = Path("/data")
NAME = "bench/root:1"  # in a store of the bench's


class ImageError(Exception):
    """There is no root that daemon and peers could share; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Root:
    """A layer in the directory `store`, mounted at `tree`."""

    origin: str
    tree: Path
    store: Path
    manifest: Manifest
    local: Local


def chosen_root(options: Options, stack: contextlib.ExitStack) -> Root:
    """Return the root for a daemon of our own: the one given, the host's base, or a small one."""
    if options.rootfs is not None:
        return _given(options.rootfs, stack)
    found = _found(options.image)
    if found is not None:
        return _mounted(found.manifest, HOST_STATE, f"layer {options.image}", stack)
    with small_root() as tree:
        return _made(tree, "a few programs of the host", stack)


def python_root(stack: contextlib.ExitStack) -> Root:
    """Return a root with a few of the host's programs and its Python."""
    with small_root(python=True) as tree:
        return _made(tree, "the host's Python", stack)


def data_root(size: int, stack: contextlib.ExitStack) -> Root:
    """Return a root with a few of the host's programs and `DATA`, a file of `size` random bytes."""
    with small_root() as tree:
        with tree.joinpath(DATA.relative_to("/")).open("wb") as file:
            for _ in range(size >> 20):
                file.write(os.urandom(1 << 20))
        return _made(tree, f"a few programs of the host, {size >> 20} MiB of data", stack)


def root_of(sdk: Sdk, options: Options, stack: contextlib.ExitStack) -> Root:
    """Return the root of the layer that the daemon of `sdk` uses. Raises ImageError."""
    infos = sdk.run(sdk.client.layers.list())
    digest = next((info.digest for info in infos if info.name == options.image), "")
    if not digest:
        known = ", ".join(info.name for info in infos) or "none"
        raise ImageError(f"the daemon has no layer {options.image}; it has: {known}")
    if options.rootfs is not None:
        return _given(options.rootfs, stack)
    found = _found(digest)
    if found is None:
        raise ImageError(f"{options.image} is not in {HOST_STATE}: give its tree with --rootfs")
    return _mounted(found.manifest, HOST_STATE, f"layer {options.image}", stack)


def place(root: Root, state: Path, name: str) -> None:
    """Name the layer of `root` in the store below `state`, of a daemon that does not run yet.

    Its files are linked where they can be, else the tree is imported: by default the daemon runs
    on the very files that the peers run on.
    """
    asyncio.run(_place(root, state, name))


async def _place(root: Root, state: Path, name: str) -> None:
    async with open_library(state) as library:
        try:
            link_layer(root.manifest, root.store, state / "store")
        except OSError as error:
            if error.errno != errno.EXDEV:
                raise
            await import_layer(library, name, str(root.tree))
        else:
            await library.point(name, root.manifest.digest)


def _given(path: Path, stack: contextlib.ExitStack) -> Root:
    return _made(path.resolve(), "given", stack)


def _found(reference: str) -> Named | None:
    """Return the layer `reference` of the host's own store."""

    async def look() -> Named | None:
        async with open_library(HOST_STATE) as library:
            with contextlib.suppress(NotFound):
                return await library.resolve(reference)
        return None

    return asyncio.run(look()) if (HOST_STATE / "store").is_dir() else None


def _made(source: Path, origin: str, stack: contextlib.ExitStack) -> Root:
    """Make a layer of a directory or EROFS image in a store that goes with `stack`."""

    async def make() -> Named:
        async with open_library(state) as library:
            return await import_layer(library, NAME, str(source))

    state = _directory(stack)
    return _mounted(asyncio.run(make()).manifest, state, origin, stack)


def _mounted(manifest: Manifest, state: Path, origin: str, stack: contextlib.ExitStack) -> Root:
    """Return the layer of the store below `state`, mounted until `stack` ends."""
    if manifest.parents:
        raise ImageError(f"{origin} is a stack of layers: give one tree with --rootfs")
    store = state / "store"
    local = asyncio.run(Direct(store).provide(manifest))
    tree = _directory(stack)
    mount = fastpath.mount_erofs(local.image, local.devices)
    try:
        fastpath.move_mount(mount, tree)
        stack.callback(unmount_below, tree)
    finally:
        os.close(mount)
    return Root(origin, tree, store, manifest, local)


def _directory(stack: contextlib.ExitStack) -> Path:
    """Return a directory that goes with `stack`, under a name that a later bench knows as ours."""
    return Path(stack.enter_context(TemporaryDirectory(prefix=own_group("-root-"), dir=TEMPORARY)))
