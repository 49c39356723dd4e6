"""Tars of unknown origin: nothing outside the tree is touched, and errors name the member."""

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
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.images import tarball
from libdsec.errors import Exhausted, InvalidArgument, Unsupported

BIG = 1 << 40


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    info.uid, info.gid = os.getuid(), os.getgid()
    info.mode = 0o755 if kind == tarfile.DIRTYPE else 0o644
    for key, value in fields.items():
        setattr(info, key, value)
    return info


def make(path: Path, *members: tuple[tarfile.TarInfo, bytes], pax: bool = True) -> Path:
    with tarfile.open(
        path, "w", format=tarfile.PAX_FORMAT if pax else tarfile.GNU_FORMAT
    ) as archive:
        for info, content in members:
            if info.isreg():
                info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def unpack(source: Path, target: Path, limit: int = BIG) -> tarball.Report:
    target.mkdir(exist_ok=True)
    return tarball.unpack(source, target, limit, lambda done: None)


def test_everything_a_tar_can_hold_arrives(tmp_path: Path) -> None:
    name = b"caf\xe9 \n".decode("utf-8", "surrogateescape")
    tar = make(
        tmp_path / "a.tar",
        (entry("./", tarfile.DIRTYPE, mode=0o751, mtime=7), b""),
        (entry("./d", tarfile.DIRTYPE, mode=0o700, mtime=1000), b""),
        (
            entry("d/f", mode=0o4755, mtime=1234.5, pax_headers={"mtime": "1234.567890123"}),
            b"hello",
        ),
        (entry("d/hard", tarfile.LNKTYPE, linkname="./d/f"), b""),
        (entry("d/sym", tarfile.SYMTYPE, linkname="/etc/passwd"), b""),
        (entry("d/pipe", tarfile.FIFOTYPE), b""),
        (entry("deep/er/than/listed", mtime=5), b"x"),
        (entry("a" * 120 + "/" + "b" * 200), b"long"),
        (entry(name), b"bytes"),
        (
            entry("attr", pax_headers={"SCHILY.xattr.user.k": "v", "SCHILY.xattr.trusted.x": "y"}),
            b"",
        ),
        (entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3), b""),
    )
    root = tmp_path / "root"
    report = unpack(tar, root)
    assert (root / "d/f").read_bytes() == b"hello"
    assert stat.S_IMODE((root / "d/f").stat().st_mode) == 0o4755
    assert (root / "d/f").stat().st_mtime_ns == 1234567890123
    assert (root / "d/f").stat().st_ino == (root / "d/hard").stat().st_ino
    assert (root / "d/sym").readlink() == Path("/etc/passwd")
    assert stat.S_ISFIFO((root / "d/pipe").stat().st_mode)
    assert (root / "d").stat().st_mtime == 1000  # though it was filled afterwards
    assert root.stat().st_mtime == 7
    assert stat.S_IMODE(root.stat().st_mode) == 0o751
    assert (root / "deep/er/than/listed").read_bytes() == b"x"
    assert (root / ("a" * 120) / ("b" * 200)).read_bytes() == b"long"
    assert Path(os.fsdecode(os.fsencode(root) + b"/caf\xe9 \n")).read_bytes() == b"bytes"
    assert os.getxattr(root / "attr", "user.k") == b"v"
    assert not (root / "null").exists()
    assert (report.entries, report.devices, report.xattrs) == (11, 1, 1)
    assert len(report.notes()) == 2


def test_long_zero_runs_become_holes(tmp_path: Path) -> None:
    content = b"x" * 4096 + bytes(4 << 20) + b"y" + bytes(300_000)
    root = tmp_path / "root"
    unpack(make(tmp_path / "a.tar", (entry("sparse"), content)), root)
    assert (root / "sparse").read_bytes() == content
    assert (root / "sparse").stat().st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.bz2", "tar.xz", "tar.zst"])
def test_compressions_are_told_by_content(tmp_path: Path, suffix: str) -> None:
    plain = make(tmp_path / "plain", (entry("f"), b"data" * 5000)).read_bytes()
    packers: dict[str, Callable[[bytes], bytes]] = {
        "tar": bytes,
        "tar.gz": gzip.compress,
        "tar.bz2": bz2.compress,
        "tar.xz": lzma.compress,
        "tar.zst": zstd,
    }
    source = tmp_path / "no-suffix"
    source.write_bytes(packers[suffix](plain))
    unpack(source, tmp_path / "root")
    assert (tmp_path / "root/f").read_bytes() == b"data" * 5000
    if suffix != "tar":
        source.write_bytes(packers[suffix](plain)[:-20])
        with pytest.raises(InvalidArgument, match="not a readable tar"):
            unpack(source, tmp_path / "cut")


def zstd(data: bytes) -> bytes:
    if shutil.which("zstd") is None:
        pytest.skip("zstd is not installed")
    return subprocess.run(["zstd", "-q"], input=data, capture_output=True, check=True).stdout


def test_zstd_without_its_program_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.tar.zst").write_bytes(b"\x28\xb5\x2f\xfd" + bytes(100))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(Unsupported, match="install the package zstd"):
        unpack(tmp_path / "a.tar.zst", tmp_path / "root")


HOSTILE = {
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
    "file over directory": [(entry("d", tarfile.DIRTYPE), b""), (entry("d"), b"x")],
    "below a file": [(entry("f"), b""), (entry("f/g"), b"")],
    "link to directory": [
        (entry("d", tarfile.DIRTYPE), b""),
        (entry("l", tarfile.LNKTYPE, linkname="d"), b""),
    ],
    "link to itself": [(entry("l", tarfile.LNKTYPE, linkname="l"), b"")],
    "long component": [(entry("x" * 300), b"")],
    "root as file": [(entry("./"), b"x")],
    "unknown kind": [(entry("m", b"Z"), b"")],
}


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_members_are_refused(tmp_path: Path, case: str) -> None:
    (tmp_path / "secret").write_text("s")
    tar = make(tmp_path / "a.tar", *HOSTILE[case])
    before = sorted(tmp_path.iterdir())
    with pytest.raises(InvalidArgument) as caught:
        unpack(tar, tmp_path / "root")
    assert caught.value.message
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "root"])
    assert (tmp_path / "secret").stat().st_nlink == 1


def test_content_beyond_the_limit_is_refused_before_it_is_written(tmp_path: Path) -> None:
    tar = make(tmp_path / "a.tar", (entry("f"), bytes(1000)), (entry("g"), bytes(1000)))
    with pytest.raises(Exhausted, match="1999 bytes"):
        unpack(tar, tmp_path / "root", limit=1999)
    assert not (tmp_path / "root/g").exists()


def header(name: bytes, kind: bytes, size: int) -> bytes:
    block = bytearray(512)
    block[: len(name)] = name
    block[100:108] = b"0000644\0"
    block[108:116] = b"%07o\0" % os.getuid()
    block[116:124] = b"%07o\0" % os.getgid()
    block[124:136] = b"%011o\0" % size if size < 8**11 else b"\x80" + size.to_bytes(11, "big")
    block[156:157] = kind
    block[257:265] = b"ustar\x0000"
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a tar at all" * 100,
        header(b"f", b"0", 10**6) + bytes(512),  # content ends early
        header(b"f", b"0", 0),  # no end marker: cut at a member's end
        header(b"f", b"0", 0) + b"\x01" * 512 + bytes(1024),  # damage in the middle
        header(b"h", b"x", 1 << 34) + bytes(1024),  # an extended header that would fill the memory
        header(b"h", b"L", 1 << 34) + bytes(1024),
        header(b"h", b"x", 0) * 5000 + bytes(1024),  # a chain of them
        header(b"f", b"0", -(1 << 40) & ((1 << 88) - 1)) + bytes(1024),
    ],
)
def test_damaged_archives_are_never_half_a_success(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.tar").write_bytes(content)
    with pytest.raises((InvalidArgument, Exhausted)):
        unpack(tmp_path / "a.tar", tmp_path / "root")


def test_an_empty_archive_is_an_empty_tree(tmp_path: Path) -> None:
    (tmp_path / "a.tar").write_bytes(bytes(10240))
    assert unpack(tmp_path / "a.tar", tmp_path / "root").entries == 0


@pytest.mark.parametrize("mtime", ["inf", "nan", "-5", "1e30", "x"])
def test_absurd_times_are_clamped(tmp_path: Path, mtime: str) -> None:
    tar = make(tmp_path / "a.tar", (entry("f", pax_headers={"mtime": mtime}), b""))
    unpack(tar, tmp_path / "root")
    assert 0 <= (tmp_path / "root/f").stat().st_mtime <= tarball.MAX_TIME


def test_giving_up_ends_the_work(tmp_path: Path) -> None:
    tar = make(tmp_path / "a.tar", *[(entry(f"f{i}"), bytes(100_000)) for i in range(50)])

    class Stop(Exception):
        pass

    def check(done: int) -> None:
        if done > 1 << 20:
            raise Stop

    (tmp_path / "root").mkdir()
    with pytest.raises(Stop):
        tarball.unpack(tar, tmp_path / "root", BIG, check)
    assert len(list((tmp_path / "root").iterdir())) < 50


PARTS = st.sampled_from(["a", "b", "..", ".", "", "c d", "\u00e9"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map("/".join)
KINDS = st.sampled_from(
    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE]
)
TARGETS = st.sampled_from(["..", "/", "../secret", "a", "b/a", "../../..", "."])


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(NAMES, KINDS, TARGETS), max_size=8))
def test_no_sequence_of_members_reaches_outside(members: list[tuple[str, bytes, str]]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        top = Path(scratch)
        (top / "secret").write_text("s")
        tar = make(
            top / "a.tar",
            *[(entry(name, kind, linkname=target), b"evil") for name, kind, target in members],
        )
        before = {path: path.stat().st_mtime_ns for path in top.iterdir()}
        with contextlib.suppress(InvalidArgument):
            unpack(tar, top / "root")
        after = {path: path.stat().st_mtime_ns for path in top.iterdir() if path.name != "root"}
        assert after == before
        assert (top / "secret").read_text() == "s"
        assert (top / "secret").stat().st_nlink == 1
