"""The layer store: names by compare-and-swap, immutable images, nothing half done."""

from __future__ import annotations

import asyncio
import io
import os
import shutil
import tarfile
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.host import erofs
from dsecd.images import store as store_module
from dsecd.images import writer
from dsecd.images.store import Cancelled, LayerStore, Progress
from libdsec.errors import AlreadyExists, Exhausted, Internal, InvalidArgument, NotFound, WrongState

pytestmark = pytest.mark.skipif(
    shutil.which("mkfs.erofs") is None, reason="mkfs.erofs is not installed (erofs-utils)"
)


@pytest.fixture(autouse=True)
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is mounted here, so a temporary directory on tmpfs or overlayfs will do."""
    monkeypatch.setattr(store_module, "fit_for_images", lambda directory: None)


@pytest.fixture
def users() -> dict[str, int]:
    return {}


@pytest.fixture
def store(tmp_path: Path, users: dict[str, int]) -> Iterator[LayerStore]:
    made = LayerStore(tmp_path / "layers", lambda digest: users.get(digest, 0), reserve=0)
    made.start()
    yield made
    assert list((tmp_path / "layers/tmp").iterdir()) == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "tree"
    (root / "bin").mkdir(parents=True)
    (root / "bin/tool").write_text("#!/bin/sh\n")
    (root / "bin/tool").chmod(0o755)
    (root / "link").symlink_to("/bin/tool")
    os.link(root / "bin/tool", root / "bin/other")
    age(root)
    return root


def age(root: Path) -> None:
    """Give everything one time, in whole seconds, which every archive format can hold."""
    for path in (root, *root.rglob("*")):
        os.utime(path, (1_600_000_000, 1_600_000_000), follow_symlinks=False)


async def test_import_then_resolve_in_every_way(store: LayerStore, tree: Path) -> None:
    seen: list[Progress] = []
    layer = await store.import_("base/debian:12", tree, progress=seen.append)
    assert layer.path.exists()
    assert layer.size_bytes == layer.path.stat().st_size
    for reference in (
        "base/debian:12", layer.digest, f"sha256:{layer.digest}", layer.digest[:8],
    ):  # fmt: skip
        assert store.resolve(reference).digest == layer.digest
    assert erofs.inspect(layer.path).devices == 0
    assert {progress.stage for progress in seen} >= {"digest"}
    assert all(progress.done <= progress.total for progress in seen)
    store.verify("base/debian:12")


async def test_the_same_input_gives_the_same_digest(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    first = await store.import_("a:1", tree)
    shutil.copytree(tree, tmp_path / "copy", symlinks=True)
    (tmp_path / "copy/bin/other").unlink()  # copytree makes two files of a hard link
    os.link(tmp_path / "copy/bin/tool", tmp_path / "copy/bin/other")
    age(tmp_path / "copy")
    second = await store.import_("b:1", tmp_path / "copy")
    assert second.digest == first.digest
    assert len(list(first.path.parent.glob("*.erofs"))) == 1


async def test_a_taken_name_needs_replace(store: LayerStore, tree: Path) -> None:
    first = await store.import_("a:1", tree)
    (tree / "new").write_text("x")
    with pytest.raises(AlreadyExists, match="replace"):
        await store.import_("a:1", tree)
    second = await store.import_("a:1", tree, replace=True)
    assert store.resolve("a:1").digest == second.digest != first.digest
    assert store.resolve(first.digest).name == first.digest  # still there, without a name
    assert {layer.name for layer in store.list()} == {"a:1", first.digest}


async def test_names_move_by_compare_and_swap(store: LayerStore, tree: Path) -> None:
    first = await store.import_("a:1", tree)
    (tree / "new").write_text("x")
    second = await store.import_("b:1", tree)
    with pytest.raises(AlreadyExists):
        store.point("a:1", second.digest, expected=None)
    with pytest.raises(AlreadyExists):
        store.point("a:1", second.digest, expected=second.digest)
    store.point("a:1", second.digest, expected=first.digest)
    assert store.resolve("a:1").digest == second.digest
    with pytest.raises(NotFound):
        store.point("c:1", "0" * 64, expected=None)


async def test_unknown_names_come_with_a_hint(store: LayerStore, tree: Path) -> None:
    with pytest.raises(NotFound, match="dsec layer import"):
        store.resolve("base/debian:12")
    await store.import_("base/debian:12", tree)
    with pytest.raises(NotFound, match=r"did you mean base/debian:12\?"):
        store.resolve("base/debian:13")
    with pytest.raises(NotFound, match="known: base/debian:12"):
        store.resolve("qqqq/zzzzzzzz")


async def test_an_ambiguous_digest_is_refused(store: LayerStore, tmp_path: Path) -> None:
    for tail in "ab":
        (tmp_path / "layers" / f"{'0' * 63}{tail}.erofs").touch()
    with pytest.raises(InvalidArgument, match="2 digests"):
        store.resolve("00000000")
    assert store.resolve("0" * 63 + "a").digest.endswith("a")


async def test_a_layer_in_use_cannot_be_removed(
    store: LayerStore, tree: Path, users: dict[str, int]
) -> None:
    layer = await store.import_("a:1", tree)
    store.point("b:1", layer.digest, expected=None)
    users[layer.digest] = 2
    store.remove("a:1")  # another name still holds the image
    with pytest.raises(WrongState, match="2 sandboxes"):
        store.remove("b:1")
    assert layer.path.exists()
    users.clear()
    dropped: list[str] = []
    store.remove("b:1", dropped.append)
    assert dropped == [layer.digest]
    assert not layer.path.exists()
    with pytest.raises(NotFound):
        store.remove("b:1")


async def test_replaced_images_are_reclaimed(
    store: LayerStore, tree: Path, users: dict[str, int]
) -> None:
    """Fault: caches, dangling layers and logs are never reclaimed."""
    first = await store.import_("a:1", tree)
    (tree / "new").write_text("x")
    second = await store.import_("a:1", tree, replace=True)
    assert store.prune(3600) == 0  # young
    users[first.digest] = 1
    assert store.prune(-1) == 0  # in use
    users.clear()
    assert store.prune(-1) == first.size_bytes
    assert [layer.digest for layer in store.list()] == [second.digest]


async def test_removal_by_digest_takes_all_names(store: LayerStore, tree: Path) -> None:
    layer = await store.import_("a:1", tree)
    store.point("b:1", layer.digest, expected=None)
    store.remove(layer.digest[:12])
    assert store.list() == []
    assert not layer.path.exists()


async def test_another_process_is_seen(store: LayerStore, tree: Path, tmp_path: Path) -> None:
    other = LayerStore(tmp_path / "layers", reserve=0)
    other.start()
    made = await other.import_("a:1", tree)
    assert store.resolve("a:1").digest == made.digest


async def test_a_tar_and_its_tree_are_one_layer(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    with tarfile.open(tmp_path / "t.tar.gz", "w:gz", format=tarfile.PAX_FORMAT) as archive:
        archive.add(tree, ".")
    from_tar = await store.import_("tar:1", tmp_path / "t.tar.gz")
    assert from_tar.digest == (await store.import_("dir:1", tree)).digest


async def test_an_image_from_elsewhere_keeps_its_digest(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    layer = await store.import_("a:1", tree)
    image = tmp_path / "moved.erofs"
    image.write_bytes(layer.path.read_bytes())
    store.remove("a:1")
    assert (await store.import_("b:1", image)).digest == layer.digest
    image.write_bytes(image.read_bytes()[:-10])
    with pytest.raises(InvalidArgument, match="truncated"):
        await store.import_("c:1", image)


async def test_a_crash_leaves_nothing_for_long(
    store: LayerStore, tree: Path, tmp_path: Path
) -> None:
    layer = await store.import_("a:1", tree)
    scratch = tmp_path / "layers/tmp/dead"
    (scratch / "tree").mkdir(parents=True)
    (scratch / "image").write_bytes(b"half")
    (tmp_path / "layers/tmp/name").write_bytes(b"{")
    (tmp_path / "layers/names/broken").write_bytes(b"{")
    again = LayerStore(tmp_path / "layers", reserve=0)
    again.start()
    assert not scratch.exists()
    assert [found.digest for found in again.list()] == [layer.digest]


async def test_cancelling_an_import_leaves_nothing(store: LayerStore, tmp_path: Path) -> None:
    tar = tmp_path / "big.tar"
    with tarfile.open(tar, "w") as archive:
        for index in range(200):
            info = tarfile.TarInfo(f"f{index}")
            info.size, info.uid, info.gid = 200_000, os.getuid(), os.getgid()
            archive.addfile(info, io.BytesIO(os.urandom(200_000)))
    started = threading.Event()
    task = asyncio.create_task(store.import_("a:1", tar, progress=lambda progress: started.set()))
    await asyncio.to_thread(started.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert store.list() == []
    gone = threading.Event()
    gone.set()
    with pytest.raises(Cancelled):
        store.import_blocking("a:1", tar, gone=gone)


async def test_a_bad_source_is_the_callers_error(store: LayerStore, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="does not exist"):
        await store.import_("a:1", tmp_path / "nowhere")
    (tmp_path / "junk").write_bytes(b"junk" * 1000)
    with pytest.raises(InvalidArgument, match="not a readable tar"):
        await store.import_("a:1", tmp_path / "junk")
    with pytest.raises(InvalidArgument):
        await store.import_("../x", tmp_path)


async def test_a_full_disk_is_said_before_the_work(tmp_path: Path, tree: Path) -> None:
    full = LayerStore(tmp_path / "layers", reserve=1 << 60)
    full.start()
    with pytest.raises(Exhausted, match="full"):
        await full.import_("a:1", tree)


async def test_parallel_imports_of_the_same_tree(store: LayerStore, tree: Path) -> None:
    layers = await asyncio.gather(*[store.import_(f"a:{n}", tree) for n in range(6)])
    assert len({layer.digest for layer in layers}) == 1
    assert len(store.list()) == 6


async def test_a_damaged_or_missing_image_is_named(store: LayerStore, tree: Path) -> None:
    (tree / "big").write_bytes(os.urandom(20_000))
    layer = await store.import_("a:1", tree)
    whole = layer.path.read_bytes()
    layer.path.chmod(0o600)
    for damage, why in (
        (whole[:2000], "truncated|only"),
        (whole[: len(whole) - 4096], "truncated"),
        (whole[:1030] + b"\xff" + whole[1031:], "checksum"),
        (bytes(len(whole)), "no EROFS image"),
    ):
        layer.path.write_bytes(damage)
        with pytest.raises(Internal, match=why):
            erofs.inspect(layer.path)
    with pytest.raises(Internal, match="damaged"):
        store.verify("a:1")
    layer.path.unlink()
    with pytest.raises(NotFound, match="import the layer again"):
        store.resolve("a:1")
    with pytest.raises(NotFound):
        erofs.inspect(layer.path)


def test_sockets_in_a_tree_are_left_out(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
    (tmp_path / "f").write_bytes(b"abc")
    found = writer.survey(tmp_path)
    assert found.excluded == [b"s"]
    assert (found.entries, found.size_bytes) == (2, 3)
    writer.build(tmp_path, tmp_path.parent / "image", found.excluded, lambda done: None)
    (tmp_path.parent / "image").unlink()


def test_mkfs_failure_carries_its_message(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(Internal, match=r"mkfs\.erofs failed"):
        writer.build(tmp_path / "f", tmp_path / "image", [], lambda done: None)
