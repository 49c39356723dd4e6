"""The common root as a layer: found on the host, or put into the store of a daemon of our own."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from dsec_bench.bench import Options
from dsec_bench.create.sdk import Sdk
from dsec_bench.rootfs import small_root

from dsecd.images.store import LayerStore
from libdsec.errors import DSecError

HOST_LAYERS = Path("/var/lib/dsec/layers")  # of the host's own daemon


class ImageError(Exception):
    """There is no root that daemon and peers could share; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Root:
    """A directory, or an EROFS image whose SHA-256 may be known."""

    path: Path
    origin: str
    digest: str = ""


def chosen_root(options: Options, stack: contextlib.ExitStack) -> Root:
    """Return the root for a daemon of our own: the one given, the host's base, or a small one."""
    if options.rootfs is not None:
        return Root(options.rootfs.resolve(), "given")
    if HOST_LAYERS.is_dir():
        with contextlib.suppress(DSecError):
            layer = LayerStore(HOST_LAYERS).resolve(options.image)
            return Root(layer.path, f"layer {options.image}", layer.digest)
    return Root(stack.enter_context(small_root()), "a few programs of the host")


def root_of(sdk: Sdk, options: Options) -> Root:
    """Return the root of the layer that the daemon of `sdk` uses. Raises ImageError."""
    infos = sdk.run(sdk.client.layers.list())
    digest = next((info.digest for info in infos if info.name == options.image), "")
    if not digest:
        known = ", ".join(info.name for info in infos) or "none"
        raise ImageError(f"the daemon has no layer {options.image}; it has: {known}")
    if options.rootfs is not None:
        return Root(options.rootfs.resolve(), "given", "")
    path = HOST_LAYERS / f"{digest}.erofs"
    if not path.exists():
        raise ImageError(f"{path} is not there: give the file of {options.image} with --rootfs")
    return Root(path, f"layer {options.image}", digest)


def place(root: Root, layers: Path, name: str) -> None:
    """Put `root` into the layer store `layers` of a daemon that does not run yet, as `name`.

    An image is linked where it can be, else copied: the daemon runs on the very file of the peers.
    """
    store = LayerStore(layers)
    store.start()
    if root.path.is_dir():
        asyncio.run(store.import_(name, root.path, True))
        return
    digest = root.digest or _sha256(root.path)
    target = layers / f"{digest}.erofs"
    try:
        os.link(root.path, target)
    except OSError:  # another file system
        shutil.copyfile(root.path, target)
    store.point(name, digest, None)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
