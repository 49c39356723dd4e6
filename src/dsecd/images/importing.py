"""What a layer can be imported from, and how each kind of source is read.

``docker://REGISTRY/NAME:TAG``, ``oci:DIRECTORY[:TAG]``, ``oci-archive:FILE[:TAG]`` and
``docker-archive:FILE[:NAME]`` are container images, ``git:URL_OR_PATH[#REF]`` is a repository;
anything else is a path: a directory, a tar, or an EROFS image. Registries are skopeo's business,
repositories git's.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import platform
import shutil
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import msgspec

from dsecd import fastpath
from dsecd.host import erofs
from dsecd.images import disk, names, tool
from dsecd.images.builder import Recipe
from dsecd.images.library import Gate, Library, Named
from dsecd.images.manifest import Config, Kind, Origin
from dsecd.images.model import Node, directory
from dsecd.images.sources import git
from dsecd.images.sources.directory import read_directory
from dsecd.images.sources.layers import merge
from dsecd.images.sources.oci import read_layout
from dsecd.images.sources.paths import split
from dsecd.images.sources.report import Check, unchecked
from dsecd.images.sources.sink import Sink
from dsecd.images.sources.tar import read_tar
from dsecd.images.tool import Report, unreported
from libdsec.errors import Internal, InvalidArgument, Unavailable

logger = logging.getLogger("dsecd.images")

SCHEMES = ("docker", "oci", "oci-archive", "docker-archive", "git")
WORKSPACE = "/workspace"
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


class Source(msgspec.Struct, frozen=True):
    """A source that was looked at: how to read it, how big it is, its defaults and remarks."""

    read: Callable[[Sink], Sequence[Node]]
    size_bytes: int
    config: Config
    notes: list[str]  # filled while it is read


def is_registry(reference: str) -> bool:
    """Whether a sandbox's image, not found as a layer, is a name in a registry.

    As container tools have it: the first component is a host, with a dot or a port.
    """
    host, slash, _ = reference.removeprefix("docker://").partition("/")
    return bool(slash) and ("." in host or ":" in host or host == "localhost")


async def import_layer(
    library: Library,
    name: str,
    source: str,
    *,
    replace: bool = False,
    insecure: bool = False,
    at: str = "",
    check: Check = unchecked,
    report: Report = unreported,
) -> Named:
    """Make a layer of `source`, its tree put at `at`, and name it.

    Without `at` it is put at the root, a workspace from git at `WORKSPACE`. `check` is told the
    bytes read, `report` every stage. Raises what `opened` and `Library.make` raise.
    """
    full = await library.expect_free(name, replace)
    kind = names.kind(full)
    gate = Gate()
    size = 0

    def check_both(done: int) -> None:
        gate.check(done)
        check(done)
        report("reading", done, size)

    @contextlib.asynccontextmanager
    async def hold() -> AsyncIterator[None]:
        yield
        report("storing", 0, 0)

    place = at or _usual_place(source, kind)
    async with (
        disk.scratch(library.scratch) as scratch,
        opened(source, scratch, check_both, insecure, place, report) as found,
    ):
        size = found.size_bytes
        origin = Origin(source=source, created_at=time.time())
        recipe = Recipe(kind=kind, config=found.config, origin=origin)
        report("waiting", 0, 0)
        made = await library.make(full, found.read, recipe, replace, gate, hold)
        for note in found.notes:
            logger.info("layer %s: %s", full, note)
    return made


def _usual_place(source: str, kind: Kind) -> str:
    return WORKSPACE if kind == "workspace" and source.startswith("git:") else "/"


@contextlib.asynccontextmanager
async def opened(
    source: str,
    scratch: Path,
    check: Check,
    insecure: bool,
    at: str = "/",
    report: Report = unreported,
) -> AsyncIterator[Source]:
    """Yield the source, fetched to `scratch` when it is elsewhere; its tree is put at `at`.

    `insecure` lets a registry on this host be asked without TLS. Raises `InvalidArgument` for what
    is none, `Unsupported` without skopeo or git, `Unavailable` when it cannot be fetched, and
    `NotFound` for a repository without the ref.
    """
    above = _above(at)
    async with _found(source, scratch, check, insecure, report) as found:
        yield msgspec.structs.replace(found, read=_below(above, found.read)) if above else found


@contextlib.asynccontextmanager
async def _found(
    source: str, scratch: Path, check: Check, insecure: bool, report: Report
) -> AsyncIterator[Source]:
    scheme, colon, rest = source.partition(":")
    if not colon or scheme not in SCHEMES:
        yield _path(_absolute(source), check)
    elif scheme in ("docker", "git"):
        place = scratch / "source"
        try:
            async with tool.watched(place, report):
                if scheme == "git":
                    await git.clone(git.parse(rest), place)
                else:
                    await _copy(rest.removeprefix("//"), place, insecure)
            yield _path(place, check) if scheme == "git" else _image(place, None, check)
        finally:
            await asyncio.to_thread(shutil.rmtree, place, ignore_errors=True)
    else:
        path, reference = _split(rest)
        yield _image(path, reference, check)


def _above(at: str) -> list[bytes]:
    """Return the names of the directories that lead to `at`. Raises `InvalidArgument`."""
    if not at.startswith("/"):
        raise InvalidArgument(f"{at!r} is not an absolute path", field="at")
    return list(split(at.encode("utf-8", "surrogateescape")))


def _below(
    above: list[bytes], read: Callable[[Sink], Sequence[Node]]
) -> Callable[[Sink], Sequence[Node]]:
    """Return `read`, its trees put below directories of root's."""

    def lowered(sink: Sink) -> Sequence[Node]:
        roots = []
        for root in read(sink):
            for name in reversed(above):
                parent = directory()
                parent.children[name] = root
                root = parent
            roots.append(root)
        return roots

    return lowered


def _split(text: str) -> tuple[Path, str | None]:
    """Return path and reference of ``PATH[:REFERENCE]``; the longest path that exists wins."""
    end = len(text)
    while end >= 0:
        if Path(text[:end]).exists():
            return _absolute(text[:end]), text[end + 1 :] or None
        end = text.rfind(":", 0, end)
    path, colon, reference = text.partition(":")
    return _absolute(path), reference if colon else None


def _absolute(text: str) -> Path:
    """Return the path. Raises `InvalidArgument` for one that means another place to the caller."""
    if not text.startswith("/"):
        raise InvalidArgument(
            f"{text!r} is not an absolute path; sources are looked for on the daemon's host",
            field="source",
        )
    return Path(text)


def _image(path: Path, reference: str | None, check: Check) -> Source:
    if not path.exists():
        raise InvalidArgument(f"{path} does not exist on the daemon's host", field="source")
    architecture = _ARCHITECTURES.get(platform.machine(), platform.machine())
    image = read_layout(path, reference=reference, architecture=architecture)
    notes: list[str] = []

    def read(sink: Sink) -> Sequence[Node]:
        roots, report = merge(image.layers, sink, check=check)
        notes[:] = report.notes()
        return roots

    size = sum(max(layer.size, 0) for layer in image.layers)
    return Source(read, size, image.config, notes)


def _path(path: Path, check: Check) -> Source:
    if not path.exists():
        raise InvalidArgument(f"{path} does not exist on the daemon's host", field="source")
    notes: list[str] = []

    def read(sink: Sink) -> Sequence[Node]:
        if path.is_dir():
            root, report = read_directory(path, sink, check=check)
        elif _is_erofs(path):
            return [_read_erofs(path, sink, check)]
        else:
            root, report = read_tar(path, sink, check=check)
        notes[:] = report.notes()
        return [root]

    return Source(read, path.stat().st_size if path.is_file() else 0, Config(), notes)


def _is_erofs(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(erofs.OFFSET)
        return file.read(4) == erofs.MAGIC.to_bytes(4, "little")


def _read_erofs(path: Path, sink: Sink, check: Check) -> Node:
    """Read a foreign image through the kernel, which must therefore trust it: root's choice."""
    try:
        devices = erofs.inspect(path).devices
    except Internal as error:
        reason = error.message.partition(" is damaged: ")[2].partition(";")[0]
        raise InvalidArgument(f"{path} is damaged: {reason}", field="source") from error
    if devices:
        raise InvalidArgument(f"{path} needs blobs beside it", field="source")
    try:
        fd = fastpath.mount_erofs(path, ())
    except fastpath.StepError as error:
        raise InvalidArgument(f"{path} cannot be mounted: {error}", field="source") from error
    try:
        root, _ = read_directory(fd, sink, devices=True, overlay=True, check=check)
    except OSError as error:
        if error.errno in (errno.EIO, errno.EUCLEAN):
            raise InvalidArgument(f"{path} is damaged: {error}", field="source") from error
        raise
    finally:
        os.close(fd)
    return root


async def _copy(reference: str, layout: Path, insecure: bool) -> None:
    """Have skopeo fetch an image into the OCI layout `layout`."""
    command = ["skopeo", "copy", "--quiet", "--retry-times", "3"]
    if insecure and reference.startswith(("localhost:", "127.0.0.1:", "[::1]:")):
        command.append("--src-tls-verify=false")
    ended = await tool.run([*command, f"docker://{reference}", f"oci:{layout}:image"])
    if ended.code:
        text = ended.errors.rpartition("\n")[2]
        raise Unavailable(f"{reference} cannot be copied from its registry: {text}")
