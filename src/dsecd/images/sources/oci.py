"""OCI image layouts and docker archives: which image they hold for a platform, and its layers.

OCI image specification 1.1 (image-layout, index, manifest, config), as skopeo, buildah and buildx
write it; the older docker archive has ``manifest.json`` and proves its layers only by the digests
of their unpacked form.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from dsecd.images.manifest import Config
from dsecd.images.sources.layers import Image, Layer, Verified, damaged, merge
from dsecd.images.sources.layout import Files, files
from libdsec.errors import DSecError, InvalidArgument, NotFound

MAX_DOCUMENT = 8 << 20  # bytes of one JSON document
MAX_LAYERS = 1000
MAX_IMAGES = 1000  # looked at in one layout
_NESTING = 4  # indexes in indexes
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_REFERENCE = "org.opencontainers.image.ref.name"
_INDEXES = (
    "application/vnd.oci.image.index.v1+json",
    "application/vnd.docker.distribution.manifest.list.v2+json",
)
_T = TypeVar("_T")

__all__ = ["Image", "Layer", "merge", "read_layout"]


class _Platform(msgspec.Struct):
    os: str = ""
    architecture: str = ""


class _Descriptor(msgspec.Struct, rename="camel"):
    digest: str
    size: int
    media_type: str = ""
    platform: _Platform | None = None
    annotations: dict[str, str] | None = None


class _Index(msgspec.Struct):
    manifests: list[_Descriptor]


class _Manifest(msgspec.Struct):
    config: _Descriptor
    layers: list[_Descriptor]


class _Docker(msgspec.Struct, rename="pascal"):
    config: str
    layers: list[str]
    repo_tags: list[str] | None = None


class _Process(msgspec.Struct, rename="pascal"):
    env: list[str] | None = None
    user: str | None = None
    working_dir: str | None = None
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None


class _RootFs(msgspec.Struct):
    diff_ids: list[str]


class _ImageConfig(msgspec.Struct):
    rootfs: _RootFs
    os: str = ""
    architecture: str = ""
    config: _Process | None = None

    @property
    def platform(self) -> str:
        return f"{self.os}/{self.architecture}"


def read_layout(
    source: Path, *, reference: str | None = None, architecture: str = "amd64"
) -> Image:
    """Return the image for linux/`architecture` in an OCI layout or docker archive.

    `source` is a directory or a tar that is not compressed; `reference` chooses one of several
    images by its name or digest there. Documents are checked against their digests. Raises
    `NotFound` when no image fits, with what there is; `InvalidArgument` for what is no image, is
    damaged, or holds several that fit.
    """
    found = files(source)
    wanted = f"linux/{architecture}"
    index = _document(found, "index.json", _Index)
    if index is not None:
        return _Layout(found, wanted).choose(index, reference, source)
    images = _document(found, "manifest.json", list[_Docker])
    if images is None:
        raise InvalidArgument(
            f"{source} holds neither index.json (an OCI layout) nor manifest.json (a docker "
            "archive); make one with skopeo copy docker://… oci:DIRECTORY",
            field="source",
        )
    return _docker_image(found, images, wanted, reference, source)


class _Layout:
    """Search of one image in an OCI layout."""

    def __init__(self, layout: Files, wanted: str) -> None:
        self._files, self._wanted = layout, wanted
        self._seen: list[str] = []  # platforms and names that did not fit
        self._looked = 0

    def choose(self, index: _Index, reference: str | None, source: Path) -> Image:
        names = [name for one in index.manifests if (name := _name(one))]
        descriptors = index.manifests
        if reference is not None:
            descriptors = [one for one in descriptors if reference in (_name(one), one.digest)]
            self._seen += names
        images = {image.digest: image for image in self._images(descriptors, _NESTING)}
        if not images:
            raise _missing(source, self._wanted, reference, self._seen)
        if len(images) > 1:
            raise _several(source, names or list(images))
        return next(iter(images.values()))

    def _images(self, descriptors: Sequence[_Descriptor], depth: int) -> Iterator[Image]:
        for one in descriptors:
            self._looked += 1
            if depth == 0 or self._looked > MAX_IMAGES:
                raise InvalidArgument("the image's indexes are nested too deep", field="source")
            if one.platform is not None and one.platform.os:
                platform = f"{one.platform.os}/{one.platform.architecture}"
                if platform != self._wanted:
                    self._seen.append(platform)
                    continue
            if one.media_type in _INDEXES:
                nested = _required(self._files, _blob(one.digest), _Index, one)
                yield from self._images(nested.manifests, depth - 1)
            elif (image := self._image(one)) is not None:
                yield image

    def _image(self, one: _Descriptor) -> Image | None:
        manifest = _required(self._files, _blob(one.digest), _Manifest, one)
        name = _blob(manifest.config.digest)
        config = _required(self._files, name, _ImageConfig, manifest.config)
        if config.platform != self._wanted:
            self._seen.append(config.platform)
            return None
        diff_ids = _diff_ids(config, len(manifest.layers))
        layers = [
            Layer(self._files, _blob(layer.digest), layer.digest, diff_id, layer.size)
            for layer, diff_id in zip(manifest.layers, diff_ids, strict=True)
        ]
        return Image(one.digest, config.platform, _defaults(config), layers)


def _docker_image(
    found: Files, images: list[_Docker], wanted: str, reference: str | None, source: Path
) -> Image:
    tags = [tag for image in images for tag in image.repo_tags or ()]
    if reference is not None:
        images = [image for image in images if reference in (image.repo_tags or ())]
    if len(images) > 1:
        raise _several(source, tags)
    if not images:
        raise _missing(source, wanted, reference, tags)
    image = images[0]
    # the name of the config is its digest: abc….json, or blobs/sha256/abc…
    digest = "sha256:" + image.config.removesuffix(".json").rpartition("/")[2]
    _blob(digest)
    config = _required(found, image.config, _ImageConfig, _Descriptor(digest, -1))
    if config.platform != wanted:
        raise _missing(source, wanted, reference, [config.platform])
    layers = [
        Layer(found, name, "", diff_id, -1)
        for name, diff_id in zip(image.layers, _diff_ids(config, len(image.layers)), strict=True)
    ]
    return Image(digest, config.platform, _defaults(config), layers)


# --- documents ------------------------------------------------------------------------------


def _document(
    found: Files, name: str, kind: type[_T], expected: _Descriptor | None = None
) -> _T | None:
    """Return a JSON document, checked; None when there is none."""
    with found.open(name) as opened:
        if opened is None:
            return None
        raw, size = opened
        if size > MAX_DOCUMENT or (expected is not None and expected.size not in (-1, size)):
            raise damaged(name, f"has {size} bytes")
        checked = Verified(raw, expected.digest if expected is not None else "", name)
        data = b""
        while piece := checked.read(size + 1 - len(data)):
            data += piece
        checked.verify()
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise damaged(name, f"is not what it should be: {error}") from error


def _required(found: Files, name: str, kind: type[_T], expected: _Descriptor) -> _T:
    document = _document(found, name, kind, expected)
    if document is None:
        raise InvalidArgument(
            f"the image's part {name} is not there; copy the image whole", field="source"
        )
    return document


def _blob(digest: str) -> str:
    """Return the name of the blob in the layout."""
    if not _DIGEST.fullmatch(digest):
        raise InvalidArgument(
            f"{digest[:80]!r} is not a digest that is understood here (sha256)", field="source"
        )
    return "blobs/" + digest.replace(":", "/")


def _diff_ids(config: _ImageConfig, count: int) -> list[str]:
    found = config.rootfs.diff_ids
    if len(found) != count or count > MAX_LAYERS:
        raise InvalidArgument(
            f"the image has {count} layers and digests of {len(found)}", field="source"
        )
    for digest in found:
        _blob(digest)
    return found


def _defaults(config: _ImageConfig) -> Config:
    """Return what sandboxes get; an entry of Env without '=' is none."""
    process = config.config or _Process()
    pairs = (entry.partition("=") for entry in process.env or ())
    return Config(
        env={key: value for key, equals, value in pairs if key and equals},
        user=process.user or "",
        workdir=process.working_dir or "",
        entrypoint=process.entrypoint or [],
        cmd=process.cmd or [],
    )


def _name(one: _Descriptor) -> str:
    return (one.annotations or {}).get(_REFERENCE, "")


def _missing(source: Path, wanted: str, reference: str | None, seen: Sequence[str]) -> DSecError:
    what = f"image {reference!r} for {wanted}" if reference is not None else f"image for {wanted}"
    there = ", ".join(sorted(set(seen))) or "nothing"
    return NotFound(f"{source} holds no {what}; there is: {there}", name=reference or wanted)


def _several(source: Path, names: Sequence[str]) -> DSecError:
    return InvalidArgument(
        f"{source} holds several images that fit: choose one by its name ({', '.join(names)})",
        field="reference",
    )
