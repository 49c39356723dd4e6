"""Images: equal from C and Python, and what an independent reader finds in them is the tree."""

from __future__ import annotations

import errno
import io
import random
import stat
import struct
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from _fastpath import StepError, _core, twin
from dsecd.host import erofs
from dsecd.images.chunks import ChunkWriter, Placement
from dsecd.images.erofs.encode import encode_tree
from dsecd.images.erofs.layout import build_image
from dsecd.images.model import Chunk, Node, directory, walk
from libdsec.errors import Internal, InvalidArgument
from tests.unit.erofs_reader import Reader
from tests.unit.image_trees import Build, everything, file, trees


def encoded(root: Node, placement: Placement) -> bytes:
    sizes = {blob.id: blob.size for blob in placement.blobs}
    return encode_tree(root, placement.where, sizes)[0]


def made(build: Build) -> tuple[Node, Placement, dict[str, bytes]]:
    """Return a tree, where its chunks are, and the blobs."""
    with tempfile.TemporaryDirectory() as folder:
        with ChunkWriter(Path(folder) / "blob") as sink:
            root = build(sink)
            placement = sink.finish()
        blobs = {placement.new.id: placement.new.path.read_bytes()} if placement.new else {}
    return root, placement, blobs


def compare(root: Node, image: Reader, contents: dict[bytes, bytes]) -> None:
    """Fail unless the image shows the tree; `contents` are of the files to be looked into."""
    links: dict[int, int] = {}
    for _, node in walk(root):
        links[id(node)] = links.get(id(node), 0) + 1
    seen: dict[int, int] = {}
    for path, node in walk(root):
        shown = image.files.pop(path)
        expected = [node.mode, node.uid, node.gid, node.mtime_ns, node.xattrs]
        assert [shown.mode, shown.uid, shown.gid, shown.mtime_ns, shown.xattrs] == expected, path
        assert seen.setdefault(id(node), shown.nid) == shown.nid
        if node.is_dir():
            assert shown.links == 2 + sum(child.is_dir() for child in node.children.values())
            continue
        assert shown.links == links[id(node)]
        assert (shown.target, shown.rdev) == (node.target, node.rdev)
        if stat.S_ISREG(node.mode):
            assert shown.size == node.size
            assert [e is None for e in shown.extents] == [c is None for c in node.chunks]
    assert not image.files


def check(build: Build) -> None:
    root, placement, blobs = made(build)
    tree = encoded(root, placement)
    data = _core.build_erofs(tree)
    assert data == twin.build_erofs(tree)
    image = Reader(data)
    assert not any(image.unused())
    assert [name for name, _, _ in image.devices] == [blob.id for blob in placement.blobs]
    for path, node in walk(root):
        if stat.S_ISREG(node.mode) and node.size < 1 << 20:
            found = image.content(path, blobs)
            with tempfile.TemporaryDirectory() as folder, ChunkWriter(Path(folder) / "b") as sink:
                assert sink.add(io.BytesIO(found).read, len(found)) == node.chunks
    compare(root, image, {})


@settings(max_examples=120, suppress_health_check=list(HealthCheck))
@given(build=trees())
def test_the_image_is_the_tree_whatever_it_is(build: Build) -> None:
    check(build)


def test_everything_that_a_file_system_can_hold() -> None:
    check(everything)


def test_the_empty_tree_is_one_block_without_devices(tmp_path: Path) -> None:
    image = build_image(directory(), Placement([], {}))
    assert len(image.data) == 4096
    assert image.blobs == []
    (tmp_path / "image").write_bytes(image.data)
    assert erofs.inspect(tmp_path / "image").size_bytes == 4096
    assert Reader(image.data).devices == []


def test_the_superblock_is_whole_and_tells_nothing_of_the_builder(tmp_path: Path) -> None:
    root, placement, _ = made(everything)
    image = build_image(root, placement)
    (tmp_path / "image").write_bytes(image.data)
    found = erofs.inspect(tmp_path / "image")  # checks the checksum
    assert found.size_bytes == len(image.data)
    read = Reader(image.data)
    assert (read.uuid, read.label, read.built) == (bytes(16), bytes(16), 0)
    assert (read.compatible, read.incompatible) == (3, 12)
    # Without its devices the kernel looks for content at this block of the image: beyond its end.
    assert read.devices[0][2] * 4096 >= len(image.data)


def test_the_mount_code_counts_the_devices(tmp_path: Path) -> None:
    for number, build in enumerate((lambda _: directory(), everything)):
        root, placement, _ = made(build)
        image = build_image(root, placement)
        (tmp_path / "image").write_bytes(image.data)
        assert erofs.inspect(tmp_path / "image").devices == len(image.blobs) == number


def test_the_order_in_which_a_directory_was_filled_does_not_matter() -> None:
    def build(order: int) -> bytes:
        def fill(sink: ChunkWriter) -> Node:
            root = everything(sink)
            names = list(root.children)
            random.Random(order).shuffle(names)
            root.children = {name: root.children[name] for name in names}
            return root

        root, placement, _ = made(fill)
        return build_image(root, placement).data

    assert build(1) == build(2)


@pytest.mark.parametrize("entries", [100_000])
def test_a_directory_with_very_many_entries(entries: int) -> None:
    root = directory()
    one = Node(mode=stat.S_IFREG | 0o644)
    root.children = {b"%06d" % number + b"x" * (number % 200): one for number in range(entries)}
    tree = encoded(root, Placement([], {}))
    data = _core.build_erofs(tree)
    assert data == twin.build_erofs(tree)
    image = Reader(data)
    assert len(image.files) == entries + 1
    assert image.files[b"000000"].links == entries


def test_a_tree_deeper_than_any_stack() -> None:
    root = here = directory()
    for _ in range(20_000):
        here.children[b"d"] = here = directory()
    tree = encoded(root, Placement([], {}))
    assert _core.build_erofs(tree) == twin.build_erofs(tree)


def test_tails_of_every_length_and_position_stay_within_a_block() -> None:
    def build(sink: ChunkWriter) -> Node:
        root = directory()
        for length in range(1, 4096, 13):
            link = Node(mode=stat.S_IFLNK | 0o777, target=b"t" * length)
            link.xattrs = {b"user.x": b"v" * (length % 37)}
            root.children[b"%04d" % length] = link
            below = root.children[b"d%04d" % length] = directory()
            below.children = {b"n" * (length % 200 + 1): link, b"m" * (length % 251 + 1): link}
        return root

    check(build)


def chunked(size: int, *chunks: Chunk | None) -> Node:
    return Node(mode=stat.S_IFREG | 0o644, size=size, chunks=list(chunks))


HERE = Chunk(b"h" * 32, 65536)
BAD: dict[str, tuple[Node, str]] = {
    "no type": (Node(mode=0o644), "no type of file"),
    "empty target": (Node(mode=stat.S_IFLNK | 0o777), "1 to 4095 bytes"),
    "long target": (Node(mode=stat.S_IFLNK | 0o777, target=b"t" * 4096), "1 to 4095 bytes"),
    "NUL in a target": (Node(mode=stat.S_IFLNK | 0o777, target=b"a\0b"), "without NUL"),
    "a file with entries": (
        Node(mode=stat.S_IFREG, children={b"a": directory()}),
        "not a directory",
    ),
    "too few chunks": (chunked(65537, HERE), "1 chunks do not make 65537 bytes"),
    "too many chunks": (chunked(65536, HERE, HERE), "2 chunks do not make 65536 bytes"),
    "chunks of nothing": (chunked(0, None), "1 chunks do not make 0 bytes"),
    "a chunk of a wrong size": (chunked(65535, HERE), "has 65536 bytes, not 65535"),
    "a major too large": (Node(mode=stat.S_IFCHR, rdev=(4096, 0)), "no device 4096:0"),
    "a minor too large": (Node(mode=stat.S_IFBLK, rdev=(0, 1 << 20)), "no device 0:1048576"),
    "uid": (Node(mode=stat.S_IFREG, uid=1 << 32), "uid 4294967296"),
    "gid": (Node(mode=stat.S_IFREG, gid=-1), "gid -1"),
    "mtime": (Node(mode=stat.S_IFREG, mtime_ns=1 << 100), "out of range"),
    "xattr prefix": (Node(mode=stat.S_IFREG, xattrs={b"foo.bar": b""}), "'foo.bar' cannot be"),
    "xattr system": (Node(mode=stat.S_IFREG, xattrs={b"system.nfs4": b""}), "cannot be stored"),
    "xattr empty": (Node(mode=stat.S_IFREG, xattrs={b"user.": b""}), "cannot be stored"),
    "xattr NUL": (Node(mode=stat.S_IFREG, xattrs={b"user.a\0": b""}), "cannot be stored"),
    "xattr name": (Node(mode=stat.S_IFREG, xattrs={b"user." + b"n" * 251: b""}), "256 bytes"),
    "xattr value": (Node(mode=stat.S_IFREG, xattrs={b"user.v": bytes(65536)}), "65536 bytes"),
    "xattrs in all": (
        Node(mode=stat.S_IFREG, xattrs={b"user.%d" % n: bytes(60_000) for n in range(5)}),
        "of one file",
    ),
}


@pytest.mark.parametrize("node", [pytest.param(value, id=name) for name, value in BAD.items()])
def test_what_cannot_be_stored_is_an_error_that_names_the_file(node: tuple[Node, str]) -> None:
    root = directory()
    root.children[b"usr"] = directory()
    root.children[b"usr"].children[b"bad"] = node[0]
    where = {HERE.digest: ("b" * 64, 0)}
    with pytest.raises(InvalidArgument, match=node[1]) as caught:
        encode_tree(root, where, {"b" * 64: 65536})
    assert caught.value.message.startswith("usr/bad: ")
    assert caught.value.detail["member"] == "usr/bad"


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0", b"n" * 256])
def test_impossible_names(name: bytes) -> None:
    root = directory()
    root.children[name] = directory()
    with pytest.raises(InvalidArgument, match="no possible name"):
        build_image(root, Placement([], {}))


def test_a_root_that_is_no_directory_and_a_directory_with_two_names() -> None:
    with pytest.raises(InvalidArgument, match="root of a layer must be"):
        build_image(Node(mode=stat.S_IFREG), Placement([], {}))
    root = directory()
    root.children = {b"a": root}
    with pytest.raises(InvalidArgument, match="two names"):
        build_image(root, Placement([], {}))


def test_a_chunk_without_a_place_or_beyond_its_blob() -> None:
    root = directory()
    root.children[b"file"] = chunked(65536, HERE)
    with pytest.raises(Internal, match=r"file: the chunk 6868.* has no place"):
        encode_tree(root, {}, {})
    with pytest.raises(Internal, match="beyond the end"):
        encode_tree(root, {HERE.digest: ("b" * 64, 16)}, {"b" * 64: 65536})


def test_more_blobs_than_a_mount_takes() -> None:
    root = directory()
    where = {}
    for number in range(201):
        chunk = Chunk(number.to_bytes(32, "little"), 1)
        where[chunk.digest] = (f"{number:064x}", 0)
        root.children[b"%03d" % number] = chunked(1, chunk)
    sizes = {blob: 4096 for blob, _ in where.values()}
    with pytest.raises(InvalidArgument, match="more than 200 blobs"):
        encode_tree(root, where, sizes)
    del root.children[b"000"]
    tree, used = encode_tree(root, where, sizes)
    assert used == [f"{number:064x}" for number in range(1, 201)]
    data = _core.build_erofs(tree)
    assert data == twin.build_erofs(tree)
    assert len(Reader(data).devices) == 200


def layouts(data: bytes) -> dict[bytes, int]:
    """Return the layout of each inode: 0 for one address, 4 for chunk indexes."""
    files = Reader(data).files
    return {path: data[file.nid * 32] >> 1 for path, file in files.items()}


def test_a_file_of_one_block_needs_no_indexes_and_a_larger_one_keeps_them() -> None:
    """The kernel reads every page of a file without indexes with a request of its own."""

    def build(sink: ChunkWriter) -> Node:
        root = directory()
        for size in (0, 1, 4096, 4097, 65536, 131072):
            root.children[b"%06d" % size] = file(sink, b"x" * size)
        root.children[b"zeros"] = file(sink, bytes(4096))
        return root

    root, placement, _ = made(build)
    found = layouts(_core.build_erofs(encoded(root, placement)))
    assert {path: found[path] for path in root.children} == {
        b"000000": 0, b"000001": 0, b"004096": 0,
        b"004097": 4, b"065536": 4, b"131072": 4, b"zeros": 4,
    }  # fmt: skip


def test_a_small_file_takes_64_bytes_and_its_name() -> None:
    def build(sink: ChunkWriter) -> Node:
        root = directory()
        root.children = {b"%04d" % number: file(sink, b"%d" % number) for number in range(1024)}
        return root

    root, placement, _ = made(build)
    names = 1024 * (12 + 4)
    assert len(build_image(root, placement).data) <= 4096 + 1024 * 64 + names + 4096


def in_blobs(*blocks: int) -> bytes:
    """Return the encoded tree of files `00`, `01` … of a byte, each at the end of a blob."""
    root, where, sizes = directory(), {}, {}
    for number, length in enumerate(blocks):
        chunk = Chunk(number.to_bytes(32, "little"), 1)
        blob = f"{number:064x}"
        where[chunk.digest], sizes[blob] = (blob, length - 1), length * 4096
        root.children[b"%02d" % number] = chunked(1, chunk)
    return encode_tree(root, where, sizes)[0]


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        ((1, 2, 3), [0, 0, 0]),
        ((1, (1 << 31) - 1), [0, 0]),
        ((1, 1 << 31, 1), [0, 4, 4]),
        ((0xFFFFFFFF, 1), [4, 4]),
        ((1, 0xFFFFFFFF, 0xFFFFFFFF, 1), [0, 4, 4, 4]),
        ((1 << 30, 1 << 30, 1 << 30, 1 << 30, 1 << 30), [0, 0, 4, 4, 4]),
        ((1,) * 66, [0] * 64 + [4] * 2),
    ],
)
def test_a_blob_that_no_address_tells_or_that_is_far_down_the_table_is_named(
    blocks: tuple[int, ...], expected: list[int]
) -> None:
    tree = in_blobs(*blocks)
    data = _core.build_erofs(tree)
    assert data == twin.build_erofs(tree)
    image = Reader(data)  # finds the device of an address as the kernel does
    for number, length in enumerate(blocks):
        assert image.files[b"%02d" % number].extents == [(number + 1, length - 1)]
    found = layouts(data)
    assert [found[b"%02d" % number] for number in range(len(blocks))] == expected


@pytest.mark.parametrize("layer", [_core, twin], ids=["c", "python"])
def test_an_address_beyond_all_blobs_is_malformed(layer: Any) -> None:
    tree = in_blobs(5, 7)
    size_and_block = struct.pack("<QI", 1, 11)
    assert tree.count(size_and_block) == 1
    for size, block, error in ((4096, 11, None), (1, 12, errno.EBADMSG), (4097, 11, errno.EBADMSG)):
        changed = tree.replace(size_and_block, struct.pack("<QI", size, block))
        found = outcome(layer, changed)
        assert (found if isinstance(found, int) else None) == error


def outcome(layer: Any, tree: bytes) -> bytes | int | None:
    try:
        return layer.build_erofs(tree)  # type: ignore[no-any-return]
    except StepError as error:
        return error.errno


def small(sink: ChunkWriter) -> Node:
    root = directory()
    root.children[b"file"] = file(sink, b"content", xattrs={b"user.a": b"b"})
    root.children[b"dir"] = directory()
    root.children[b"dir"].children[b"link"] = Node(mode=stat.S_IFLNK | 0o777, target=b"file")
    return root


def test_a_malformed_tree_is_refused_wherever_it_is_cut() -> None:
    root, placement, _ = made(small)
    tree = encoded(root, placement)
    for length in range(len(tree)):
        assert outcome(_core, tree[:length]) == outcome(twin, tree[:length]) == errno.EBADMSG
    assert outcome(_core, tree + b"\0") == outcome(twin, tree + b"\0") == errno.EBADMSG


@settings(max_examples=150)
@given(data=st.data())
def test_a_damaged_tree_gives_the_same_from_both(data: st.DataObject) -> None:
    root, placement, _ = made(small)
    tree = bytearray(encoded(root, placement))
    for _ in range(data.draw(st.integers(1, 3))):
        tree[data.draw(st.integers(0, len(tree) - 1))] = data.draw(st.integers(0, 255))
    assert outcome(_core, bytes(tree)) == outcome(twin, bytes(tree))


@pytest.mark.parametrize("layer", [_core, twin], ids=["c", "python"])
def test_a_false_count_does_not_ask_for_memory(layer: Any) -> None:
    head = struct.pack("<IIII", 0xFFFFFFFF, 0, 0, 0)
    assert outcome(layer, head) == errno.EBADMSG
    assert outcome(layer, struct.pack("<IIII", 1, 0xFFFF, 0xFFFFFFFC, 0)) == errno.EBADMSG
