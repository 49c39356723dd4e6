"""Images in the kernel: every stat field, attribute and byte is that of the tree."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from dsecd import fastpath
from dsecd.host.layers import LayerMounts
from dsecd.images.chunks import ChunkWriter, Placement, blob_id, decode_index
from dsecd.images.erofs import encode
from dsecd.images.erofs.layout import Image, build_image
from dsecd.images.known import KnownChunks
from dsecd.images.model import OPAQUE, Node, directory, walk
from libdsec.errors import Internal
from tests.unit.image_trees import ACL, Build, content, everything, file, trees

pytestmark = pytest.mark.root


class Lab:
    """Builds images in a directory and mounts them below it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0

    def build(self, build: Build, known: KnownChunks | None = None) -> tuple[Node, Image]:
        """Return a tree and its image; the blobs lie in the folder under their ids."""
        path = self.folder / "new"
        with ChunkWriter(path, known) as sink:
            root = build(sink)
            placement = sink.finish()
        if placement.new:
            path.rename(self.folder / placement.new.id)
            if known is not None:
                known.add(placement.new.id, decode_index(placement.new.index, placement.new.id))
        return root, build_image(root, placement)

    def store(self, image: Image) -> Path:
        self._count += 1
        path = self.folder / f"image{self._count}"
        path.write_bytes(image.data)
        return path

    def devices(self, image: Image) -> list[Path]:
        return [self.folder / blob.id for blob in image.blobs]

    @contextlib.contextmanager
    def mounted(
        self, image: Image, devices: list[Path] | None = None, direct: bool = False
    ) -> Iterator[Path]:
        path = self.store(image)
        point = self.folder / f"mount{self._count}"
        point.mkdir()
        given = self.devices(image) if devices is None else devices
        fd = fastpath.mount_erofs(path, given, direct)
        try:
            fastpath.move_mount(fd, point)
        finally:
            os.close(fd)
        try:
            yield point
        finally:
            fastpath.umount(point)
            point.rmdir()


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def chunks_of(path: bytes) -> list[object]:
    """Return the chunks that the kernel's content makes."""
    with tempfile.TemporaryDirectory() as folder, ChunkWriter(Path(folder) / "blob") as sink:
        fd = os.open(path, os.O_RDONLY)
        try:
            size = os.fstat(fd).st_size
            with os.fdopen(os.dup(fd), "rb") as reader:
                return list(sink.add(reader.read, size))
        finally:
            os.close(fd)


def compare(root: Node, top: Path) -> None:
    """Fail unless what is mounted at `top` is the tree, and nothing else."""
    links: dict[int, int] = {}
    inodes: dict[int, int] = {}
    for _, node in walk(root):
        links[id(node)] = links.get(id(node), 0) + 1
    for path, node in walk(root):
        here = os.fsencode(top) + b"/" + path
        shown = os.lstat(here)
        assert (shown.st_mode, shown.st_uid, shown.st_gid) == (node.mode, node.uid, node.gid), path
        assert shown.st_mtime_ns == node.mtime_ns, path
        assert inodes.setdefault(id(node), shown.st_ino) == shown.st_ino, path
        assert xattrs(here) == readable(node), path
        if node.is_dir():
            assert names(here) == set(node.children), path
            assert shown.st_nlink == 2 + sum(child.is_dir() for child in node.children.values())
            continue
        assert shown.st_nlink == links[id(node)], path
        if stat.S_ISLNK(node.mode):
            assert os.readlink(here) == node.target  # noqa: PTH115
            assert shown.st_size == len(node.target)
        elif stat.S_ISREG(node.mode):
            assert shown.st_size == node.size, path
            if node.size < 1 << 30:
                assert chunks_of(here) == node.chunks, path
        elif stat.S_ISCHR(node.mode) or stat.S_ISBLK(node.mode):
            assert (os.major(shown.st_rdev), os.minor(shown.st_rdev)) == node.rdev, path
    assert len(set(inodes.values())) == len(inodes)
    assert 0 not in inodes.values()


def names(path: bytes) -> set[bytes]:
    with os.scandir(path) as entries:
        return {entry.name for entry in entries}


def xattrs(path: bytes) -> dict[bytes, bytes]:
    found = {}
    for name in os.listxattr(path, follow_symlinks=False):
        try:
            found[os.fsencode(name)] = os.getxattr(path, name, follow_symlinks=False)
        except OSError as error:
            if error.errno != errno.ENODATA:  # listed only: see `readable`
                raise
    return found


def readable(node: Node) -> dict[bytes, bytes]:
    """Return the attributes that can be read: user.* only of files and directories, xattr(7)."""
    if node.is_dir() or stat.S_ISREG(node.mode):
        return node.xattrs
    return {name: value for name, value in node.xattrs.items() if not name.startswith(b"user.")}


def test_everything_is_shown_as_it_was(lab: Lab) -> None:
    root, image = lab.build(everything)
    with lab.mounted(image) as top:
        compare(root, top)
        with (top / "huge").open("rb") as huge:
            assert os.pread(huge.fileno(), 100, 4 << 30) == bytes(100)
            end = os.pread(huge.fileno(), 65537, (5 << 30) - 65536)
            assert end == content(2, 65536)
            assert os.lseek(huge.fileno(), 0, os.SEEK_DATA) == (5 << 30) - 65536


def test_blobs_may_be_read_past_the_page_cache(lab: Lab) -> None:
    root, image = lab.build(everything)
    with lab.mounted(image, direct=True) as top:
        compare(root, top)


def test_images_that_name_the_blob_of_every_chunk_are_still_read(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores have such ones: files of one block had indexes too."""
    _, now = lab.build(everything)
    monkeypatch.setattr(encode, "_FLAT_BYTES", 0)
    root, before = lab.build(everything)
    assert before.data != now.data
    assert before.blobs == now.blobs
    with lab.mounted(before) as top:
        compare(root, top)


def test_a_file_without_indexes_has_data_up_to_its_end(lab: Lab) -> None:
    _, image = lab.build(_one_file(b"x" * 4000))
    with lab.mounted(image) as top, (top / "file").open("rb", 0) as reader:
        assert os.lseek(reader.fileno(), 100, os.SEEK_DATA) == 100
        assert os.lseek(reader.fileno(), 100, os.SEEK_HOLE) == 4000


@settings(max_examples=25, suppress_health_check=list(HealthCheck))
@given(build=trees())
def test_any_tree_is_shown_as_it_was(lab: Lab, build: Build) -> None:
    with tempfile.TemporaryDirectory(dir=lab.folder) as folder:
        inner = Lab(Path(folder))
        root, image = inner.build(build)
        with inner.mounted(image) as top:
            compare(root, top)


def test_a_mapped_file_ends_in_zeros(lab: Lab) -> None:
    import mmap

    def build(sink: ChunkWriter) -> Node:
        root = directory()
        for size in (1, 4095, 4097, 65537):
            root.children[b"%d" % size] = file(sink, b"x" * size)
        return root

    _, image = lab.build(build)
    with lab.mounted(image) as top:
        for size in (1, 4095, 4097, 65537):
            with (top / str(size)).open("rb") as reader:
                mapped = mmap.mmap(reader.fileno(), size, prot=mmap.PROT_READ)
                assert mapped[:] == b"x" * size
                mapped.close()


def test_large_and_deep_directories(lab: Lab) -> None:
    def build(sink: ChunkWriter) -> Node:
        root = directory()
        one = file(sink, b"one")
        wide = root.children[b"wide"] = directory()
        wide.children = {b"%06d" % n + b"x" * (n % 200): one for n in range(100_000)}
        here = root
        for _ in range(1000):
            here.children[b"d"] = here = directory()
        here.children[b"bottom"] = one
        return root

    root, image = lab.build(build)
    with lab.mounted(image) as top:
        wide = os.fsencode(top / "wide")
        assert names(wide) == set(root.children[b"wide"].children)
        for name in list(root.children[b"wide"].children)[::997]:
            assert os.lstat(wide + b"/" + name).st_nlink == 100_001
        with pytest.raises(FileNotFoundError):
            os.lstat(wide + b"/05000x")
        assert (top / ("d/" * 1000) / "bottom").read_bytes() == b"one"


def test_an_overlay_honours_whiteouts_and_opaque_directories(lab: Lab, tmp_path: Path) -> None:
    from dsecd.host import syscalls

    def lower(sink: ChunkWriter) -> Node:
        root = directory()
        for name in (b"kept", b"gone"):
            root.children[name] = file(sink, name)
        hidden = root.children[b"opaque"] = directory()
        hidden.children[b"hidden"] = file(sink, b"hidden")
        return root

    def upper(sink: ChunkWriter) -> Node:
        root = directory()
        root.children[b"gone"] = Node(mode=stat.S_IFCHR)
        shown = root.children[b"opaque"] = directory()
        shown.xattrs = {OPAQUE: b"y"}
        shown.children[b"new"] = file(sink, b"new")
        return root

    merged = tmp_path / "merged"
    merged.mkdir()
    with (
        lab.mounted(lab.build(lower)[1]) as below,
        lab.mounted(lab.build(upper)[1]) as above,
    ):
        syscalls.mount("overlay", str(merged), "overlay", 1, f"lowerdir={above}:{below}")
        try:
            assert names(os.fsencode(merged)) == {b"kept", b"opaque"}
            assert names(os.fsencode(merged / "opaque")) == {b"new"}
        finally:
            fastpath.umount(merged)


def test_an_acl_takes_effect(lab: Lab) -> None:
    """Uid 1 is named by the ACL, which gives others nothing."""

    def build(sink: ChunkWriter) -> Node:
        root = _one_file(b"secret")(sink)
        root.children[b"file"].mode = stat.S_IFREG | 0o660
        acl = ACL[:-8] + bytes.fromhex("20000000ffffffff")
        root.children[b"file"].xattrs = {b"system.posix_acl_access": acl}
        return root

    code = (
        "import os, sys; top = os.open(sys.argv[1], os.O_PATH); os.setgroups([]);"
        "os.setresgid(5, 5, 5); os.setresuid(*[int(sys.argv[2])] * 3);"
        "print(os.read(os.open('file', os.O_RDONLY, dir_fd=top), 9))"
    )
    with lab.mounted(lab.build(build)[1]) as top:
        done = [
            subprocess.run([sys.executable, "-c", code, top, uid], capture_output=True, text=True)
            for uid in ("1", "2")
        ]
    assert done[0].stdout == "b'secret'\n"
    assert "PermissionError" in done[1].stderr


def test_the_next_version_of_a_workspace_adds_one_small_blob(lab: Lab, tmp_path: Path) -> None:
    def version(changed: bytes) -> Build:
        def build(sink: ChunkWriter) -> Node:
            root = directory()
            for number in range(300):
                data = content(number, 200_001) + b"%d" % number
                root.children[b"%d" % number] = file(sink, data)
            root.children[b"changed"] = file(sink, changed)
            return root

        return build

    with KnownChunks(tmp_path / "known.db") as known:
        _, first = lab.build(version(b"one"), known)
        root, second = lab.build(version(b"two"), known)
        _, third = lab.build(version(b"two"), known)
    assert len(first.blobs) == 1
    assert [blob.id for blob in second.blobs[:1]] == [first.blobs[0].id]
    assert second.blobs[1].size == 4096
    assert third == second
    with lab.mounted(second) as top:
        compare(root, top)


def test_two_hundred_blobs(lab: Lab, tmp_path: Path) -> None:
    where = {}
    sizes = []
    root = directory()
    for number in range(200):
        part, image = lab.build(_one_file(b"file%d" % number))
        root.children[b"%03d" % number] = part.children[b"file"]
        (chunk,) = part.children[b"file"].chunks
        assert chunk is not None
        where[chunk.digest] = (image.blobs[0].id, 0)
        sizes += image.blobs
    image = build_image(root, Placement(sizes, where))
    assert len(image.blobs) == 200
    with lab.mounted(image) as top:
        compare(root, top)


def _one_file(data: bytes) -> Build:
    def build(sink: ChunkWriter) -> Node:
        root = directory()
        root.children[b"file"] = file(sink, data)
        return root

    return build


@pytest.mark.parametrize("size", [7, 4096, 4097, 200_001])
def test_without_its_devices_nothing_of_the_image_shows_as_content(lab: Lab, size: int) -> None:
    """Such a mount succeeds; reads fail, they do not give blocks of the metadata."""
    _, image = lab.build(_one_file(b"x" * size))
    with lab.mounted(image, devices=[]) as top, (top / "file").open("rb", 0) as reader:
        with pytest.raises(OSError, match="Input/output error") as caught:
            reader.read()
        assert caught.value.errno == errno.EIO


def test_with_another_number_of_devices_it_is_not_mounted(lab: Lab) -> None:
    _, image = lab.build(_one_file(b"content"))
    with (
        pytest.raises(fastpath.StepError, match="Invalid argument"),
        lab.mounted(image, devices=lab.devices(image) * 2),
    ):
        pass


def test_the_mount_code_counts_before_it_mounts(lab: Lab, tmp_path: Path) -> None:
    _, image = lab.build(_one_file(b"content"))
    path = lab.store(image)
    mounts = LayerMounts(tmp_path / "run")
    mounts.start()
    try:
        with pytest.raises(Internal, match="needs 1 blob devices, 0 are given"):
            mounts.acquire("a" * 64, path)
        mounts.acquire("a" * 64, path, lab.devices(image))
        assert (tmp_path / "run" / ("a" * 64) / "file").read_bytes() == b"content"
    finally:
        mounts.teardown()


def test_blobs_behind_their_image_need_no_devices(lab: Lab) -> None:
    """Every address that the image tells is where the blob would be in one large device."""
    root, image = lab.build(everything)
    content = b"".join(path.read_bytes() for path in lab.devices(image))
    with lab.mounted(Image(image.data + content, []), devices=[]) as top:
        compare(root, top)


def test_fsck_agrees(lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """erofs-utils 1.5 knows chunks and devices: it walks all directories and reads all content.

    It looks for content without indexes in the image, whichever device has it (later versions do
    not), so it reads only content that has them. Its exit status is 0 even for a wrong checksum, so
    what it says counts.
    """
    _, image = lab.build(everything)
    assert fsck(lab, image) == (0, "")
    bad = bytearray(image.data)
    bad[1024 + 40] ^= 1
    assert "failed to verify superblock checksum" in fsck(lab, Image(bytes(bad), image.blobs))[1]
    monkeypatch.setattr(encode, "_FLAT_BYTES", 0)
    _, image = lab.build(everything)
    assert fsck(lab, image, "--extract") == (0, "")


def fsck(lab: Lab, image: Image, *options: str) -> tuple[int, str]:
    devices = [f"--device={blob}" for blob in lab.devices(image)]
    command = ["fsck.erofs", *options, *devices, str(lab.store(image))]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stderr


def test_both_layers_build_what_the_kernel_reads(lab: Lab) -> None:
    """The image is one and the same, whichever implementation this process chose."""
    root, image = lab.build(everything)
    with ChunkWriter(lab.folder / "again") as sink:
        again = everything(sink)
        placement = sink.finish()
    assert build_image(again, placement) == image
    assert placement.new is not None
    assert blob_id(placement.new.index) == image.blobs[0].id
    assert (
        io.BytesIO((lab.folder / "again").read_bytes()).read()
        == (lab.folder / image.blobs[0].id).read_bytes()
    )
    assert root.children.keys() == again.children.keys()
