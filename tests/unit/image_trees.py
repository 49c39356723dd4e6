"""Trees for tests of images: generated ones, and one with everything a file system can hold."""

from __future__ import annotations

import io
import random
import stat
from collections.abc import Callable

from hypothesis import strategies as st

from dsecd.images.chunks import ChunkWriter
from dsecd.images.model import OPAQUE, REDIRECT, Node, directory, walk, whiteout

Build = Callable[[ChunkWriter], Node]
ACL = bytes.fromhex(
    "02000000" "01000600ffffffff" "0200040001000000" "04000400ffffffff" "10000600ffffffff"
    "20000400ffffffff"
)  # fmt: skip
CAPABILITY = bytes.fromhex("0100000200040000000000000000000000000000")
SIZES = (0, 1, 100, 4095, 4096, 4097, 65535, 65536, 65537, 131072, 200_001)


def content(seed: int, size: int) -> bytes:
    """Return bytes in which chunks repeat and chunks of zeros occur."""
    source = random.Random(seed)
    data = b"".join(
        bytes(65536) if source.random() < 0.2 else random.Random(seed % 3).randbytes(65536)
        for _ in range(size // 65536 + 1)
    )
    return data[:size]


def file(sink: ChunkWriter, data: bytes, mode: int = 0o644, **rest: object) -> Node:
    chunks = sink.add(io.BytesIO(data).read, len(data))
    return Node(mode=stat.S_IFREG | mode, size=len(data), chunks=chunks, **rest)  # type: ignore[arg-type]


def everything(sink: ChunkWriter) -> Node:
    """Return a tree with one of each: kinds, numbers at their ends, long names, attributes."""
    root = directory()
    root.mtime_ns = 1_700_000_000_123_456_789
    root.xattrs = {b"user.root": b"1"}
    add = root.children
    add[b"empty"] = Node(mode=stat.S_IFREG | 0o600)
    add[b"one"] = file(sink, b"x", 0o4755, uid=0xFFFFFFFE, gid=0xFFFFFFFD)
    add[b"two chunks"] = file(sink, content(1, 65537))
    add[b"hard link"] = add[b"two chunks"]
    add[b"zeros"] = file(sink, bytes(150_000))
    add[b"holes"] = file(sink, content(1, 65536) + bytes(200_000) + b"end")
    huge = 5 << 30
    add[b"huge"] = Node(mode=stat.S_IFREG | 0o644, size=huge, chunks=[None] * (huge >> 16))
    add[b"huge"].chunks[-1] = file(sink, content(2, 65536)).chunks[0]
    add[b"\xff\xfe not utf-8"] = file(sink, b"bytes")
    add[b"!sorts before dot"] = file(sink, b"!")
    add[b"n" * 255] = file(sink, b"long name")
    add[b"link"] = Node(mode=stat.S_IFLNK | 0o777, target=b"one")
    for length in (4000, 4031, 4032, 4064, 4065, 4095):
        add[b"link%d" % length] = Node(mode=stat.S_IFLNK | 0o777, target=b"t" * length)
    add[b"fifo"] = Node(mode=stat.S_IFIFO | 0o600)
    add[b"socket"] = Node(mode=stat.S_IFSOCK | 0o600)
    add[b"null"] = Node(mode=stat.S_IFCHR | 0o666, rdev=(1, 3))
    add[b"disk"] = Node(mode=stat.S_IFBLK | 0o660, rdev=(0xFFF, 0xFFFFF), gid=6)
    add[b"gone"] = whiteout()
    for name, mtime in {b"1901": -(1 << 31), b"before": -1, b"far": 1 << 40}.items():
        add[name] = file(sink, b"", mtime_ns=mtime * 1_000_000_000 + 999_999_999)
    opaque = add[b"opaque"] = directory(0o1777)
    opaque.xattrs = {OPAQUE: b"y", REDIRECT: b"/elsewhere"}
    add[b"ping"] = file(sink, b"ping", xattrs={b"security.capability": CAPABILITY})
    add[b"acl"] = file(sink, b"acl", 0o664, xattrs={b"system.posix_acl_access": ACL})
    add[b"acls"] = directory()
    add[b"acls"].xattrs = {b"system.posix_acl_default": ACL, b"system.posix_acl_access": ACL}
    add[b"acls"].mode = stat.S_IFDIR | 0o764
    for number in range(5):
        name = b"labelled%d" % number
        shared = {b"security.selinux": b"system_u:object_r:bin_t:s0\0", b"user.n": b"%d" % number}
        add[name] = file(sink, b"label", xattrs=shared)
    add[b"big xattr"] = file(sink, b"big", xattrs={b"user.big": bytes(range(256)) * 240})
    add[b"many xattrs"] = file(sink, b"many")
    add[b"many xattrs"].xattrs = {b"user.a%d" % number: b"v" * number for number in range(300)}
    wide = add[b"wide"] = directory()
    wide.children = {b"entry%d" % number: add[b"one"] for number in range(2000)}
    deep = add[b"deep"] = directory()
    for _ in range(60):
        deep.children[b"d"] = deep = directory()
    deep.children[b"bottom"] = file(sink, b"bottom")
    return root


_names = st.one_of(
    st.binary(min_size=1, max_size=12),
    st.binary(min_size=200, max_size=255),
).filter(lambda name: b"/" not in name and b"\0" not in name and name not in (b".", b".."))
_xattrs = st.dictionaries(
    st.sampled_from([b"user.a", b"user.b", b"trusted.c", b"security.d", OPAQUE]),
    st.one_of(st.sampled_from([b"", b"y", b"shared" * 9]), st.binary(max_size=600)),
    max_size=3,
)
_times = st.one_of(
    st.integers(0, 2_000_000_000_000_000_000), st.integers(-(1 << 60), (1 << 70))
)  # fmt: skip
_ids = st.sampled_from([0, 1, 1000, 0xFFFFFFFE])


@st.composite
def _leaf(draw: st.DrawFn) -> Build:
    kind = draw(st.sampled_from("fffflcbps"))
    mode, uid, gid = draw(st.integers(0, 0o7777)), draw(_ids), draw(_ids)
    mtime, xattrs = draw(_times), draw(_xattrs)
    seed, size = draw(st.integers(0, 8)), draw(st.sampled_from(SIZES))
    target = draw(st.binary(min_size=1, max_size=4095).filter(lambda value: b"\0" not in value))

    def build(sink: ChunkWriter) -> Node:
        kinds = {"l": stat.S_IFLNK, "c": stat.S_IFCHR, "b": stat.S_IFBLK, "p": stat.S_IFIFO}
        if kind == "f":
            node = file(sink, content(seed, size), mode)
        else:
            node = Node(mode=kinds.get(kind, stat.S_IFSOCK) | mode)
        if kind == "l":
            node.target = target
        elif kind in "cb":
            node.rdev = (seed, size)
        node.uid, node.gid, node.mtime_ns, node.xattrs = uid, gid, mtime, xattrs
        return node

    return build


@st.composite
def _folder(draw: st.DrawFn, children: st.SearchStrategy[Build]) -> Build:
    below = draw(st.dictionaries(_names, children, max_size=12))
    mode, mtime, xattrs = draw(st.integers(0, 0o7777)), draw(_times), draw(_xattrs)

    def build(sink: ChunkWriter) -> Node:
        node = directory(mode)
        node.mtime_ns, node.xattrs = mtime, xattrs
        node.children = {name: child(sink) for name, child in below.items()}
        return node

    return build


@st.composite
def trees(draw: st.DrawFn) -> Build:
    """Return a function that makes a tree, the same each time, hard links among it."""
    folders = st.recursive(_leaf(), lambda inner: _folder(inner), max_leaves=25)
    top = draw(_folder(folders))
    seed = draw(st.integers(0, 1000))

    def build(sink: ChunkWriter) -> Node:
        root = top(sink)
        found = [node for _, node in walk(root)]
        files = [node for node in found if not node.is_dir()]
        source = random.Random(seed)
        for number in range(min(len(files), 3)):
            above = source.choice([node for node in found if node.is_dir()])
            above.children[b"link %d" % number] = source.choice(files)
        return root

    return build
