"""Tars of unknown origin become trees; what is hostile or damaged is an error that names it."""

from __future__ import annotations

import bz2
import contextlib
import gzip
import io
import lzma
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.images.model import walk
from dsecd.images.sources import archive, tar
from dsecd.images.sources.report import MAX_TIME
from dsecd.images.sources.tar import read_tar
from libdsec.errors import DSecError, Exhausted, InvalidArgument, Unsupported
from tests.unit.sources_sink import MemorySink, describe, find
from tests.unit.sources_tars import END, Members, entry, header, pack, padded, read, record


def test_everything_a_tar_can_hold_arrives() -> None:
    name = b"caf\xe9 \n".decode("utf-8", "surrogateescape")
    root, report, sink = read(
        pack(
            (entry("./", tarfile.DIRTYPE, mode=0o751, mtime=7), b""),
            (entry("./d", tarfile.DIRTYPE, mode=0o700, mtime=1000), b""),
            (entry("d/f", mode=0o4755, pax_headers={"mtime": "1234.567890123"}), b"hello"),
            (entry("d/hard", tarfile.LNKTYPE, linkname="./d/f"), b""),
            (entry("d/sym", tarfile.SYMTYPE, linkname="/etc/passwd"), b""),
            (entry("d/pipe", tarfile.FIFOTYPE), b""),
            (entry("deep/er/than/listed", mtime=5, uid=12, gid=34), b"x"),
            (entry("a" * 120 + "/" + "b" * 200), b"long"),
            (entry(name), b"bytes"),
            (entry("/absolute"), b""),
            (entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3), b""),
            (entry("also-null", tarfile.LNKTYPE, linkname="null"), b""),
        )
    )
    assert sink.content(find(root, "d/f")) == b"hello"
    assert find(root, "d/f").mode == stat.S_IFREG | 0o4755
    assert find(root, "d/f").mtime_ns == 1234567890123
    assert find(root, "d/f") is find(root, "d/hard")
    assert find(root, "d/sym").target == b"/etc/passwd"
    assert stat.S_ISFIFO(find(root, "d/pipe").mode)
    assert (find(root, "d").mtime_ns, root.mtime_ns) == (1000 * 10**9, 7 * 10**9)
    assert root.mode == stat.S_IFDIR | 0o751
    listed = find(root, "deep/er/than/listed")
    assert (listed.uid, listed.gid, listed.mtime_ns) == (12, 34, 5 * 10**9)
    assert find(root, "deep/er").mode == stat.S_IFDIR | 0o755
    assert sink.content(find(root, "a" * 120 + "/" + "b" * 200)) == b"long"
    assert sink.content(find(root, name)) == b"bytes"
    assert set(root.children) >= {b"absolute"}
    assert not {b"null", b"also-null"} & set(root.children)
    assert (report.entries, report.devices, report.size_bytes) == (12, 1, 15)
    assert len(report.notes()) == 1


@pytest.mark.parametrize("suffix", ["tar", "gz", "bz2", "xz", "zst"])
def test_compressions_are_told_by_content(suffix: str, tmp_path: Path) -> None:
    plain = pack((entry("f"), b"data" * 5000))
    packers: dict[str, Callable[[bytes], bytes]] = {
        "tar": bytes,
        # several streams one after the other, padded, as pigz and bgzip write them
        "gz": lambda data: gzip.compress(data[:700]) + gzip.compress(data[700:]) + bytes(600),
        "bz2": lambda data: bz2.compress(data[:700]) + bz2.compress(data[700:]),
        "xz": lzma.compress,
        "zst": zstd,
    }
    source = tmp_path / "no-suffix"
    source.write_bytes(packers[suffix](plain))
    sink = MemorySink()
    told: list[int] = []
    root, _ = read_tar(source, sink, check=told.append)
    assert sink.content(find(root, "f")) == b"data" * 5000
    assert told == sorted(told)
    assert told[-1] == source.stat().st_size
    if suffix != "tar":
        source.write_bytes(source.read_bytes().rstrip(b"\0")[:-20])
        with pytest.raises(InvalidArgument, match="not a readable tar"):
            read_tar(source, MemorySink())


def zstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    return subprocess.run(["zstd", "-q"], input=data, capture_output=True, check=True).stdout


def test_zstd_without_its_program_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="install the package zstd"):
        read(b"\x28\xb5\x2f\xfd" + bytes(100))


HOSTILE: dict[str, Members] = {
    "dotdot": [(entry("a/../../out"), b"x")],
    "dotdot link": [(entry("l", tarfile.LNKTYPE, linkname="../secret"), b"")],
    "absolute link": [(entry("l", tarfile.LNKTYPE, linkname="/secret"), b"")],
    "through symlink": [(entry("d", tarfile.SYMTYPE, linkname="/"), b""), (entry("d/out"), b"x")],
    "directory over symlink": [
        (entry("d", tarfile.SYMTYPE, linkname=".."), b""),
        (entry("d", tarfile.DIRTYPE), b""),
    ],
    "link through symlink": [
        (entry("d", tarfile.SYMTYPE, linkname=".."), b""),
        (entry("l", tarfile.LNKTYPE, linkname="d/secret"), b""),
    ],
    "twice": [(entry("f"), b"1"), (entry("./f"), b"2")],
    "device twice": [(entry("f", tarfile.CHRTYPE), b""), (entry("f"), b"2")],
    "file over directory": [(entry("d", tarfile.DIRTYPE), b""), (entry("d"), b"x")],
    "below a file": [(entry("f"), b""), (entry("f/g"), b"")],
    "link to directory": [
        (entry("d", tarfile.DIRTYPE), b""),
        (entry("l", tarfile.LNKTYPE, linkname="d"), b""),
    ],
    "link to itself": [(entry("l", tarfile.LNKTYPE, linkname="l"), b"")],
    "link to the root": [(entry("l", tarfile.LNKTYPE, linkname="."), b"")],
    "empty symlink": [(entry("l", tarfile.SYMTYPE, linkname=""), b"")],
    "long symlink": [(entry("l", tarfile.SYMTYPE, linkname="x" * 5000), b"")],
    "long component": [(entry("x" * 300), b"")],
    "deep": [(entry("x/" * 600), b"")],
    "root as file": [(entry("./"), b"x")],
    "unknown kind": [(entry("m", b"Z"), b"")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_refused(case: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read(pack(*HOSTILE[case]))
    assert caught.value.message


def test_content_beyond_the_limit_is_refused_before_it_is_taken() -> None:
    sink = MemorySink()
    data = pack((entry("f"), bytes(1000)), (entry("g"), bytes(1000)))
    with pytest.raises(Exhausted, match="1999 bytes"):
        read_tar(io.BytesIO(data), sink, limit_bytes=1999)
    assert sink.added == 1000


def test_a_compression_bomb_ends_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_OVERHEAD", 1 << 20)
    bomb = pack((entry("f"), b"x")) + bytes(200 << 20)  # zeros behind the end marker
    with pytest.raises(Exhausted, match="unpacks to more than"):
        read(gzip.compress(bomb, 1), limit_bytes=1 << 20)


def test_members_and_implied_directories_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tar, "MAX_ENTRIES", 20)
    for members in (
        [(entry(f"f{i}"), b"") for i in range(21)],
        [(entry(f"{i}/" + "d/" * 20 + "f"), b"") for i in range(2)],
    ):
        with pytest.raises(InvalidArgument, match="archive has more than"):
            read(pack(*members))


def test_headers_that_fill_the_memory_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_NAMES", 100_000)
    members = [
        (entry(f"f{i}", pax_headers={"SCHILY.xattr.user.k": "v" * 5000}), b"") for i in range(25)
    ]
    with pytest.raises(InvalidArgument, match="a header claims"):
        read(pack(*members))


SIZE = b"00000010000"  # 4,096: of the old sparse files below
DAMAGED = {
    "nothing": b"",
    "text": b"not a tar at all" * 100,
    "content ends early": header(b"f", b"0", 10**6) + bytes(512),
    "no end marker": header(b"f", b"0", 0),
    "in the middle": header(b"f", b"0", 0) + b"\x01" * 512 + END,
    "large pax header": header(b"h", b"x", 1 << 34) + END,
    "large long name": header(b"h", b"L", 1 << 34) + END,
    "chain": header(b"h", b"x", 0) * 5000 + END,
    "negative size": header(b"f", b"0", -5) + END,
    "absurd size": header(b"f", b"0", 1 << 62) + END,
    "letters for a number": header(b"f", b"0", 0, at108=b"12x4567\0") + END,
    "pax without length": header(b"h", b"x", 5) + padded(b"x=y\n") + header(b"f", b"0", 0) + END,
    "pax too long": header(b"h", b"x", 9) + padded(b"99 a=bcd\n") + header(b"f", b"0", 0) + END,
    "pax without value": header(b"h", b"x", 6) + padded(b"6 abc\n") + header(b"f", b"0", 0) + END,
    "pax size": header(b"h", b"x", 11) + padded(b"11 size=-5\n") + header(b"f", b"0", 0) + END,
    "old map backwards": header(
        b"f", b"S", 1024, at386=b"%011o %011o " * 2 % (4096, 512, 0, 512), at483=SIZE
    ) + bytes(1024) + END,
    "old map larger than the content": header(
        b"f", b"S", 512, at386=b"%011o %011o " % (0, 1024), at483=SIZE
    ) + bytes(512) + END,
    "old map beyond the file": header(
        b"f", b"S", 512, at386=b"%011o %011o " % (1 << 20, 512), at483=SIZE
    ) + bytes(512) + END,
    "old map without end": header(b"f", b"S", 0, at482=b"\1") + (bytes(504) + b"\1" + bytes(7)) * 3,
}  # fmt: skip


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_archives_are_never_half_a_success(case: str) -> None:
    with pytest.raises(InvalidArgument, match="not a readable tar archive"):
        read(DAMAGED[case])


def test_an_empty_archive_is_an_empty_tree() -> None:
    root, report, _ = read(bytes(10240))
    assert (root.children, report.entries) == ({}, 0)


@pytest.mark.parametrize(
    "mtime", ["inf", "-inf", "nan", "-5", "1e30", "1e999999999", "x", "9" * 99]
)
def test_absurd_times_are_clamped(mtime: str) -> None:
    root, _, _ = read(pack((entry("f", pax_headers={"mtime": mtime}), b"")))
    assert 0 <= find(root, "f").mtime_ns < MAX_TIME * 10**9


# --- generated ------------------------------------------------------------------------------

PARTS = st.sampled_from(["a", "b", "..", ".", "", "c d", "\u00e9"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from(
    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE,
     tarfile.CHRTYPE]
)  # fmt: skip
TARGETS = st.sampled_from(["..", "/", "../secret", "a", "b/a", "../../..", "."])
MEMBERS = st.lists(st.tuples(NAMES, KINDS, TARGETS), max_size=8)


@settings(max_examples=200)
@given(MEMBERS)
def test_trees_hold_no_impossible_names(members: list[tuple[str, bytes, str]]) -> None:
    data = pack(*[(entry(name, kind, linkname=target), b"x") for name, kind, target in members])
    try:
        root, _, _ = read(data)
    except InvalidArgument:
        return
    for path, node in walk(root):
        assert not {b"", b".", b".."} & set(path.split(b"/")) or path == b""
        assert not stat.S_ISCHR(node.mode)


ACL = "u::rwx,g::r-x,o::---"


def sparse_tar() -> bytes:
    """A tar with every construct in it, made by hand: the seed that is damaged below."""
    lines = b"2\n0\n5\n100\n5\n"
    pax = record(b"GNU.sparse.major=1") + record(b"GNU.sparse.minor=0")
    pax += record(b"GNU.sparse.realsize=200")
    return (
        header(b"p", b"x", len(pax)) + padded(pax)
        + header(b"sp", b"0", 522) + padded(padded(lines) + b"0123456789")
        + header(b"old", b"S", 512, at386=b"%011o %011o " % (1024, 512), at483=b"00000010000")
        + b"z" * 512
        + pack(
            (entry("d", tarfile.DIRTYPE, pax_headers={"SCHILY.acl.default": ACL}), b""),
            (entry("d/" + "\u00e9" * 80, pax_headers={"SCHILY.xattr.user.k": "v"}), b"c" * 700),
            (entry("s", tarfile.SYMTYPE, linkname="d"), b""),
        )
    )  # fmt: skip


def test_the_seed_is_whole() -> None:
    root, _, sink = read(sparse_tar())
    assert sink.content(find(root, "sp")) == b"01234" + bytes(95) + b"56789" + bytes(95)
    assert sink.content(find(root, "old"))[1024:1536] == b"z" * 512


DAMAGE = st.lists(
    st.tuples(
        st.integers(0, 1 << 16),
        st.sampled_from([b"\0", b"\xff", b"9", b"7" * 11, b"\x80", b"x", b"\n", b" ", b"L", b"S"]),
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=150)
@given(DAMAGE, st.sampled_from([bytes, gzip.compress, bz2.compress, lzma.compress]), st.booleans())
def test_damage_is_an_error_of_ours_or_goes_unnoticed(
    damage: list[tuple[int, bytes]], packer: Callable[[bytes], bytes], repaired: bool
) -> None:
    """`repaired`: the checksums of headers are right again, so the damage reaches the fields."""
    data = bytearray(packer(sparse_tar()) if not repaired else sparse_tar())
    for at, value in damage:
        at %= len(data)
        data[at : at + len(value)] = value
    if repaired:
        for start in range(0, len(data) - 511, 512):
            if data[start + 257 : start + 262] == b"ustar":
                data[start + 148 : start + 156] = b" " * 8
                data[start + 148 : start + 156] = b"%06o\0 " % sum(data[start : start + 512])
    try:
        root, _, sink = read(bytes(data), limit_bytes=1 << 30)
    except DSecError:
        return
    assert describe(root, sink)


@settings(max_examples=200)
@given(st.binary(max_size=2000))
def test_noise_is_an_error_of_ours(data: bytes) -> None:
    with contextlib.suppress(DSecError):
        read(data)


def test_giving_up_ends_the_work() -> None:
    data = pack(*[(entry(f"f{i}"), os.urandom(100_000)) for i in range(50)])

    class Stop(Exception):
        pass

    def check(done: int) -> None:
        if done > 1 << 20:
            raise Stop

    for packed in (data, gzip.compress(data, 1), zstd(data)):
        sink = MemorySink()
        with pytest.raises(Stop):
            read_tar(io.BytesIO(packed), sink, check=check)
        assert sink.added < 4 << 20
