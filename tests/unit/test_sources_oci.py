"""OCI layouts and docker archives: the right image is found, every blob is checked."""

from __future__ import annotations

import gzip
import hashlib
import json
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dsecd.images.model import OPAQUE
from dsecd.images.sources.oci import merge, read_layout
from libdsec.errors import DSecError, InvalidArgument, NotFound
from tests.unit.sources_sink import MemorySink, find
from tests.unit.sources_tars import entry, pack

OCI = "application/vnd.oci"
INDEX = f"{OCI}.image.index.v1+json"


class Layout:
    """Writes an OCI layout."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "blobs/sha256").mkdir(parents=True)
        self.manifests: list[dict[str, Any]] = []

    def blob(self, data: bytes) -> dict[str, Any]:
        digest = hashlib.sha256(data).hexdigest()
        (self.root / "blobs/sha256" / digest).write_bytes(data)
        return {"digest": f"sha256:{digest}", "size": len(data)}

    def document(self, value: Any) -> dict[str, Any]:
        return self.blob(json.dumps(value).encode())

    def image(
        self,
        *tars: bytes,
        packer: Callable[[bytes], bytes] = gzip.compress,
        architecture: str = "amd64",
        config: dict[str, Any] | None = None,
        name: str = "",
        **descriptor: Any,
    ) -> dict[str, Any]:
        suffix = "" if packer is bytes else "+gzip"
        layers = [
            self.blob(packer(data)) | {"mediaType": f"{OCI}.image.layer.v1.tar{suffix}"}
            for data in tars
        ]
        made = self.document(image_config(tars, architecture, config))
        made["mediaType"] = f"{OCI}.image.config.v1+json"
        manifest = self.document({"schemaVersion": 2, "config": made, "layers": layers})
        manifest |= {"mediaType": f"{OCI}.image.manifest.v1+json"} | descriptor
        if name:
            manifest["annotations"] = {"org.opencontainers.image.ref.name": name}
        self.manifests.append(manifest)
        return manifest

    def finish(self) -> Path:
        (self.root / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (self.root / "index.json").write_text(
            json.dumps({"schemaVersion": 2, "manifests": self.manifests})
        )
        return self.root


def image_config(
    tars: tuple[bytes, ...], architecture: str, config: dict[str, Any] | None
) -> dict[str, Any]:
    diff_ids = [f"sha256:{hashlib.sha256(data).hexdigest()}" for data in tars]
    return {
        "os": "linux", "architecture": architecture, "config": config,
        "rootfs": {"type": "layers", "diff_ids": diff_ids}, "history": [{"created_by": "x"}],
    }  # fmt: skip


BELOW = pack((entry("a/old"), b"old"), (entry("b"), b"b" * 1000))
ABOVE = pack((entry("a/new"), b"new"), (entry("a/.wh..wh..opq"), b""), (entry(".wh.b"), b""))


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "layout")


def in_tar(root: Path) -> Path:
    packed = root.with_suffix(".tar")
    subprocess.run(["tar", "-cf", packed, "-C", root, "."], check=True)
    return packed


@pytest.mark.parametrize("packer", [bytes, gzip.compress])
@pytest.mark.parametrize("form", [lambda root: root, in_tar], ids=["directory", "tar"])
def test_layers_collapse_or_stack(
    layout: Layout, form: Callable[[Path], Path], packer: Callable[[bytes], bytes]
) -> None:
    layout.image(BELOW, ABOVE, packer=packer)
    image = read_layout(form(layout.finish()))
    assert image.platform == "linux/amd64"
    sink = MemorySink()
    told: list[int] = []
    (tree,), report = merge(image.layers, sink, check=told.append)
    assert sink.content(find(tree, "a/new")) == b"new"
    assert set(tree.children) == {b"a"}
    assert set(tree.children[b"a"].children) == {b"new"}
    assert tree.children[b"a"].xattrs == {}
    assert told == sorted(told)
    assert told[-1] == sum(layer.size for layer in image.layers)
    assert report.entries == 5
    below, above = merge(image.layers, sink, threshold_bytes=100)[0]
    assert set(below.children) == {b"a", b"b"}
    assert above.children[b"b"].is_whiteout()
    assert above.children[b"a"].xattrs == {OPAQUE: b"y"}


def test_an_image_above_the_threshold_only_stacks_what_comes_later(layout: Layout) -> None:
    layout.image(*(pack((entry(f"f{i}"), b"x" * 100)) for i in range(6)))
    trees, _ = merge(read_layout(layout.finish()).layers, MemorySink(), threshold_bytes=250)
    assert [sorted(tree.children) for tree in trees] == [
        [b"f0", b"f1", b"f2"],
        [b"f3", b"f4", b"f5"],
    ]


def test_defaults_of_the_image(layout: Layout) -> None:
    layout.image(
        config={
            "Env": ["PATH=/bin", "A=1=2", "EMPTY=", "NONE", "=x"], "User": "1000:1000",
            "WorkingDir": "/app", "Entrypoint": ["/entry"], "Cmd": None, "Labels": {"a": "b"},
        }
    )  # fmt: skip
    config = read_layout(layout.finish()).config
    assert config.env == {"PATH": "/bin", "A": "1=2", "EMPTY": ""}
    assert (config.user, config.workdir) == ("1000:1000", "/app")
    assert (config.entrypoint, config.cmd) == (["/entry"], [])


def test_an_image_without_defaults_or_layers(layout: Layout) -> None:
    layout.image()
    image = read_layout(layout.finish())
    assert (image.config.env, image.layers) == ({}, [])
    assert merge(image.layers, MemorySink())[0][0].children == {}


def test_the_platform_chooses(layout: Layout) -> None:
    arm = layout.image(BELOW, architecture="arm64")
    amd = layout.image(ABOVE, architecture="amd64")
    layout.manifests = [
        layout.document({"manifests": [
            arm | {"platform": {"os": "linux", "architecture": "arm64", "variant": "v8"}},
            amd | {"platform": {"os": "linux", "architecture": "amd64"}},
            {"digest": "sha256:" + "0" * 64, "size": 1,
             "platform": {"os": "unknown", "architecture": "unknown"}},
        ]}) | {"mediaType": INDEX}
    ]  # fmt: skip
    root = layout.finish()
    assert read_layout(root).digest == amd["digest"]
    assert read_layout(root, architecture="arm64").digest == arm["digest"]
    with pytest.raises(NotFound, match="no image for linux/riscv64; there is: linux/amd64, linux"):
        read_layout(root, architecture="riscv64")


def test_the_name_chooses(layout: Layout) -> None:
    one = layout.image(BELOW, name="one")
    two = layout.image(ABOVE, name="two")
    root = layout.finish()
    assert read_layout(root, reference="one").digest == one["digest"]
    assert read_layout(root, reference=two["digest"]).digest == two["digest"]
    with pytest.raises(InvalidArgument, match=r"several images that fit.*one, two"):
        read_layout(root)
    with pytest.raises(NotFound, match=r"no image 'three'.*there is: one, two"):
        read_layout(root, reference="three")


def test_one_image_under_two_names_is_one(layout: Layout) -> None:
    layout.image(BELOW, name="one")
    layout.image(BELOW, name="two")
    assert read_layout(layout.finish()).layers


@pytest.mark.parametrize("victim", ["manifest", "config", "layer"])
@pytest.mark.parametrize("how", ["flip", "cut", "gone"])
def test_every_blob_is_checked(layout: Layout, victim: str, how: str) -> None:
    manifest = layout.image(BELOW, ABOVE)
    root = layout.finish()
    path = root / "blobs" / manifest["digest"].replace(":", "/")
    if victim != "manifest":
        document = json.loads(path.read_bytes())
        chosen = document["config"] if victim == "config" else document["layers"][1]
        path = root / "blobs" / chosen["digest"].replace(":", "/")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    if how == "gone":
        path.unlink()
    else:
        path.write_bytes(data if how == "flip" else data[:-1])
    with pytest.raises(InvalidArgument, match=r"damaged|not there"):
        merge(read_layout(root).layers, MemorySink())


def test_a_flipped_bit_anywhere_in_a_plain_layer_is_found(layout: Layout) -> None:
    layout.image(BELOW, packer=bytes)
    root = layout.finish()
    layer = read_layout(root).layers[0]
    path = root / layer.name
    good = path.read_bytes()
    for at in range(0, len(good), 97):
        path.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        with pytest.raises(InvalidArgument, match=r"damaged: .* hashes to"):
            merge([layer], MemorySink())


@pytest.mark.parametrize(
    "index",
    [
        b"", b"{", b"[]", b'{"manifests": 3}', b'{"manifests": []}', b"[" * 100_000,
        b'{"manifests": [{"digest": "sha256:../../../etc/passwd", "size": 3}]}',
        b'{"manifests": [{"digest": "md5:00", "size": 3}]}',
        b'{"manifests": [{"digest": "sha256:' + b"0" * 64 + b'", "size": 3}]}',
        b'{"manifests": [{"digest": "sha256:' + b"0" * 64 + b'", "size": 99999999999999999999}]}',
        b"\xff\xfe",
    ],
)  # fmt: skip
def test_hostile_indexes(tmp_path: Path, index: bytes) -> None:
    (tmp_path / "index.json").write_bytes(index)
    with pytest.raises((InvalidArgument, NotFound)):
        read_layout(tmp_path)


def test_an_index_that_holds_itself_ends(layout: Layout) -> None:
    inner: dict[str, Any] = {"manifests": []}
    for _ in range(10):
        inner = {"manifests": [layout.document(inner) | {"mediaType": INDEX}]}
    layout.manifests = inner["manifests"]
    with pytest.raises(InvalidArgument, match="nested too deep"):
        read_layout(layout.finish())


def test_links_out_of_the_layout_are_refused(layout: Layout, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text('{"manifests": []}')
    root = layout.finish()
    (root / "index.json").unlink()
    (root / "index.json").symlink_to(tmp_path / "secret")
    with pytest.raises(InvalidArgument, match="leads out of it"):
        read_layout(root)


@pytest.mark.parametrize("name", ["loop", "../x", "a\\u0000b", "\\ud800", "x" * 300, "", "."])
def test_names_that_an_archive_cannot_mean(tmp_path: Path, name: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    config = json.dumps(image_config((b"",), "amd64", None)).encode()
    digest = hashlib.sha256(config).hexdigest()
    (tmp_path / f"{digest}.json").write_bytes(config)
    manifest = f'[{{"Config": "{digest}.json", "Layers": ["{name}"]}}]'
    (tmp_path / "manifest.json").write_text(manifest)
    with pytest.raises(InvalidArgument):
        merge(read_layout(tmp_path).layers, MemorySink())


def test_neither_layout_nor_archive(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"neither index\.json"):
        read_layout(tmp_path)
    with pytest.raises(InvalidArgument, match="neither a directory nor a file"):
        read_layout(tmp_path / "nothing")
    (tmp_path / "packed.tar").write_bytes(gzip.compress(BELOW))
    with pytest.raises(InvalidArgument, match="not compressed"):
        read_layout(tmp_path / "packed.tar")


# --- docker archives ------------------------------------------------------------------------


def docker_archive(path: Path, *tars: bytes, tags: tuple[str, ...] = ("name:tag",)) -> Path:
    """As docker save wrote it: the layer that comes twice is a link to the first."""
    config = json.dumps(image_config(tars, "amd64", {"User": "me"})).encode()
    members: list[tuple[tarfile.TarInfo, bytes]] = []
    names: list[str] = []
    for number, data in enumerate(tars):
        names.append(f"{number}/layer.tar")
        if data in tars[:number]:
            target = f"../{tars.index(data)}/layer.tar"
            members.append((entry(names[-1], tarfile.SYMTYPE, linkname=target), b""))
        else:
            members.append((entry(names[-1]), data))
    name = hashlib.sha256(config).hexdigest() + ".json"
    manifest = [{"Config": name, "RepoTags": list(tags) or None, "Layers": names}]
    members += [(entry(name), config), (entry("manifest.json"), json.dumps(manifest).encode())]
    path.write_bytes(pack(*members))
    return path


def test_docker_archives(tmp_path: Path) -> None:
    image = read_layout(docker_archive(tmp_path / "a.tar", BELOW, ABOVE, BELOW))
    assert image.config.user == "me"
    sink = MemorySink()
    (tree,), _ = merge(image.layers, sink)
    assert sink.content(find(tree, "a/old")) == b"old"
    assert set(find(tree, "a").children) == {b"old", b"new"}
    assert read_layout(tmp_path / "a.tar", reference="name:tag").digest == image.digest
    with pytest.raises(NotFound, match="there is: name:tag"):
        read_layout(tmp_path / "a.tar", reference="other")
    with pytest.raises(NotFound, match="there is: linux/amd64"):
        read_layout(tmp_path / "a.tar", architecture="arm64")


def test_layers_of_docker_archives_are_checked_by_what_they_unpack_to(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "a.tar", BELOW)
    path.write_bytes(path.read_bytes().replace(b"b" * 1000, b"B" * 1000))
    with pytest.raises(InvalidArgument, match="unpacks to something else"):
        merge(read_layout(path).layers, MemorySink())


def test_a_layer_may_end_without_a_marker_where_its_digest_is_known(layout: Layout) -> None:
    cut = BELOW[: 512 * 6]  # two headers in front of files, their content, nothing else
    layout.image(cut, packer=bytes)
    try:
        merge(read_layout(layout.finish()).layers, MemorySink())
    except DSecError as error:
        pytest.fail(error.message)


def test_a_stream_of_links_in_an_archive_ends(tmp_path: Path) -> None:
    data = pack(
        (entry("index.json", tarfile.SYMTYPE, linkname="b"), b""),
        (entry("b", tarfile.SYMTYPE, linkname="index.json"), b""),
    )
    (tmp_path / "a.tar").write_bytes(data)
    with pytest.raises(InvalidArgument, match=r"neither index\.json"):
        read_layout(tmp_path / "a.tar")
    (tmp_path / "b.tar").write_bytes(
        pack((entry("index.json", tarfile.SYMTYPE, linkname="../etc/passwd"), b""))
    )
    with pytest.raises(InvalidArgument, match="leads out"):
        read_layout(tmp_path / "b.tar")


def test_limits_are_of_the_image_not_of_each_layer(layout: Layout) -> None:
    layout.image(*(pack((entry(f"f{i}"), b"x" * 100)) for i in range(4)))
    with pytest.raises(DSecError, match="passes 350 bytes"):
        merge(read_layout(layout.finish()).layers, MemorySink(), limit_bytes=350)
