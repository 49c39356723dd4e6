"""The stream of a machine's changes: read as a container's upper is, and believed in nothing."""

from __future__ import annotations

import io
import stat
import tarfile

import pytest

from dsecd.images.model import OPAQUE, REDIRECT, Node
from dsecd.images.sources.report import Report
from dsecd.images.sources.upper import RESIDUE, Rule
from dsecd.images.sources.upper_tar import read_upper_tar
from libdsec.errors import DSecError, Exhausted, InvalidArgument, Unsupported
from tests.unit.sources_sink import MemorySink, find
from tests.unit.sources_tars import END, Members, entry, header, pack, padded, record

ROOT = (entry("./", tarfile.DIRTYPE, mode=0o711), b"")
LIMIT = 1 << 20
OVERLAY = "SCHILY.xattr.trusted.overlay."


def read(
    data: bytes, limit_bytes: int = LIMIT, residue: tuple[Rule, ...] = ()
) -> tuple[Node, Report, MemorySink]:
    sink = MemorySink()
    root, report = read_upper_tar(io.BytesIO(data), sink, limit_bytes=limit_bytes, residue=residue)
    return root, report, sink


def linked(name: str, **fields: object) -> tarfile.TarInfo:
    return entry(name, pax_headers={"DSEC.nlink": "2"}, **fields)


def test_all_that_an_upper_holds_arrives() -> None:
    root, report, sink = read(
        pack(
            ROOT,
            (entry("./d", tarfile.DIRTYPE, pax_headers={f"{OVERLAY}opaque": "y"}), b""),
            (
                entry(
                    "./d/moved", tarfile.DIRTYPE,
                    pax_headers={f"{OVERLAY}redirect": "/old/place", f"{OVERLAY}origin": "x"},
                ),
                b"",
            ),
            (linked("./d/f", mode=0o4755, uid=65534, gid=7, mtime=5.000000007), b"hello"),
            (entry("./d/again", tarfile.LNKTYPE, linkname="./d/f"), b""),
            (entry("./gone", tarfile.CHRTYPE, pax_headers={"DSEC.nlink": "9"}), b""),
            (entry("./gone too", tarfile.LNKTYPE, linkname="./gone"), b""),
            (entry("./null", tarfile.CHRTYPE, devmajor=1, devminor=3), b""),
            (entry("./disk", tarfile.BLKTYPE), b""),
            (entry("./p", tarfile.FIFOTYPE, mode=0o600), b""),
            (entry("./l", tarfile.SYMTYPE, linkname="../../../etc/shadow"), b""),
            (entry("./x", pax_headers={"SCHILY.xattr.user.a%3Db%25": "1=2"}), b""),
        )
    )  # fmt: skip
    assert root.mode == stat.S_IFDIR | 0o711
    assert find(root, "d").xattrs == {OPAQUE: b"y"}
    assert find(root, "d/moved").xattrs == {REDIRECT: b"/old/place"}
    file = find(root, "d/f")
    assert (file.mode & 0o7777, file.uid, file.gid) == (0o4755, 65534, 7)
    assert file.mtime_ns == 5_000_000_007
    assert sink.content(file) == b"hello"
    assert find(root, "d/again") is file
    assert find(root, "gone").is_whiteout()
    assert find(root, "gone too") is find(root, "gone")
    assert stat.S_ISFIFO(find(root, "p").mode)
    assert find(root, "l").target == b"../../../etc/shadow"
    assert find(root, "x").xattrs == {b"user.a=b%": b"1=2"}
    assert set(root.children) == {b"d", b"gone", b"gone too", b"p", b"l", b"x"}
    assert report.devices == 2


def test_residue_is_cleared_and_what_it_is_linked_with_stays() -> None:
    root, report, sink = read(
        pack(
            ROOT,
            (entry("tmp", tarfile.DIRTYPE), b""),
            (linked("tmp/first"), b"kept"),
            (entry("tmp/alone"), b"dropped"),
            (entry("tmp/opaque", tarfile.DIRTYPE, pax_headers={f"{OVERLAY}opaque": "y"}), b""),
            (entry("tmp/opaque/below"), b"1"),
            (entry("second", tarfile.LNKTYPE, linkname="tmp/first"), b""),
            (entry("var", tarfile.DIRTYPE), b""),
            (entry("var/log", tarfile.DIRTYPE), b""),
            (entry("var/log/syslog"), b"text"),
        ),
        residue=RESIDUE,
    )
    assert set(find(root, "tmp").children) == {b"opaque"}
    assert find(root, "tmp/opaque").is_whiteout()
    assert sink.content(find(root, "second")) == b"kept"
    assert find(root, "var/log/syslog").size == 0
    assert report.residue["tmp/*"].count == 4
    assert report.residue["var/log/**"].size_bytes == 4
    assert sink.added == 4


def test_holes_stay_holes() -> None:
    name, size = b"sparse", 5 << 16
    pax = record(b"GNU.sparse.major=1") + record(b"GNU.sparse.minor=0")
    pax += record(b"GNU.sparse.name=" + name) + record(b"GNU.sparse.realsize=%d" % size)
    body = padded(b"1\n%d\n4\n" % (3 << 16)) + b"data"
    data = pack(ROOT)[:512] + header(b"x", b"x", len(pax)) + padded(pax)
    data += header(name, b"0", len(body)) + padded(body) + END
    root, report, sink = read(data)
    chunks = find(root, "sparse").chunks
    assert [chunk is None for chunk in chunks] == [True, True, True, False, True]
    assert sink.content(find(root, "sparse"))[3 << 16 :][:4] == b"data"
    assert report.stored_bytes == 4


@pytest.mark.parametrize(
    "members",
    [
        [(entry("../x"), b"")],
        [(entry("a/../../x"), b"")],
        [(entry("nowhere/x"), b"")],
        [(entry("f"), b""), (entry("f/x"), b"")],
        [(entry("f"), b""), (entry("f"), b"")],
        [(entry("null", tarfile.BLKTYPE), b""), (entry("null"), b"")],
        [(entry("d", tarfile.DIRTYPE), b""), (entry("d", tarfile.DIRTYPE), b"")],
        [ROOT],
        [(entry("."), b"")],
        [(entry("l", tarfile.LNKTYPE, linkname="f"), b"")],
        [(entry("f"), b""), (entry("l", tarfile.LNKTYPE, linkname="f"), b"")],
        [(entry("l", tarfile.LNKTYPE, linkname="/../etc/shadow"), b"")],
        [(entry("d", tarfile.DIRTYPE), b""), (entry("l", tarfile.LNKTYPE, linkname="d"), b"")],
        [(entry("x", b"Z"), b"")],
        [(entry("x", uid=65535), b"")],
        [(entry("x", gid=1 << 40), b"")],
        [(entry("x", uid=-1), b"")],
        [(entry("x", tarfile.SYMTYPE, linkname=""), b"")],
        [(entry("x", tarfile.CHRTYPE, devmajor=1 << 14), b"")],
        [(entry("/".join("d" * 600)), b"")],
    ],
)  # fmt: skip
def test_what_no_upper_holds_is_refused(members: Members) -> None:
    with pytest.raises(InvalidArgument):
        read(pack(ROOT, *members))


def test_what_is_no_whole_archive_is_refused() -> None:
    whole = pack(ROOT, (entry("f"), b"x" * 2000))
    end = whole.index(b"x" * 2000) + 2048
    for cut in (b"", END, whole[:300], whole[: end - 700], whole[:end], pack((entry("f"), b""))):
        with pytest.raises(InvalidArgument):
            read(cut)


def test_sizes_that_lie_are_found() -> None:
    start = pack(ROOT)[:512]
    for size in (5000, 1 << 40, -1):
        with pytest.raises((InvalidArgument, Exhausted)):
            read(start + header(b"f", b"0", size) + padded(b"short") + END)
    with pytest.raises(Exhausted):
        read(pack(ROOT, (entry("f"), b"x" * 600), (entry("g"), b"x" * 600)), limit_bytes=1000)


def test_attributes_that_no_kernel_would_set_are_left_out() -> None:
    for value in ("", "/", "../up", "a/b", "/a/../b", "/a//b", ".", "..", "/a/."):
        member = entry("d", tarfile.DIRTYPE, pax_headers={f"{OVERLAY}redirect": value})
        root, report, _ = read(pack(ROOT, (member, b"")))
        assert find(root, "d").xattrs == {}, value
    for name, value in (
        (OVERLAY + "opaque", "y"), (OVERLAY + "redirect", "x"), ("SCHILY.xattr.", "x"),
        ("SCHILY.xattr.security.capability", "no"), ("SCHILY.xattr.user.a%00b", "x"),
        ("SCHILY.xattr.system.posix_acl_access", "no"), ("SCHILY.xattr.trusted.other", "x"),
    ):  # fmt: skip
        root, report, _ = read(pack(ROOT, (entry("f", pax_headers={name: value}), b"")))
        assert find(root, "f").xattrs == {}, name
        assert report.xattrs == 1


def test_another_overlay_s_features_are_refused() -> None:
    with pytest.raises(Unsupported, match="metacopy"):
        read(pack(ROOT, (entry("f", pax_headers={f"{OVERLAY}metacopy": ""}), b"")))


def test_noise_is_an_error_and_nothing_else() -> None:
    whole = bytearray(
        pack(ROOT, (entry("d", tarfile.DIRTYPE), b""), (linked("d/f"), b"x" * 700),
             (entry("l", tarfile.LNKTYPE, linkname="d/f"), b""))
    )  # fmt: skip
    for at in range(0, len(whole) - 1024, 7):
        for value in (0, 0x80, 0xFF, ord("9")):
            broken = bytearray(whole)
            broken[at] = value
            try:
                read(bytes(broken))
            except DSecError:
                continue
