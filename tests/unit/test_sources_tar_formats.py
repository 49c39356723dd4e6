"""What the formats of tar can say: numbers, attributes, ACLs, sparse files."""

from __future__ import annotations

import base64
import subprocess
import tarfile
from pathlib import Path

import pytest

from dsecd.images.model import CHUNK
from libdsec.errors import InvalidArgument
from tests.unit.sources_sink import find
from tests.unit.sources_tars import END, entry, header, pack, padded, read


def test_numbers_in_base_256() -> None:
    block = header(
        b"f", b"0", 0, at108=b"\x80" + (3000).to_bytes(7, "big"), at136=b"\xff" * 11 + b"\xfe"
    )
    root, _, _ = read(block + END)
    assert (find(root, "f").uid, find(root, "f").mtime_ns) == (3000, 0)  # -2 s


def test_signed_checksums_of_old_programs() -> None:
    block = bytearray(header(b"caf\xe9", b"0", 0))
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(memoryview(bytes(block)).cast("b"))
    assert set(read(bytes(block) + END)[0].children) == {b"caf\xe9"}


def test_v7_directories_and_contiguous_files() -> None:
    data = header(b"d/", b"\0", 0) + header(b"c", b"7", 3) + padded(b"abc") + END
    root, _, sink = read(data)
    assert find(root, "d").is_dir()
    assert sink.content(find(root, "c")) == b"abc"


def test_global_headers_set_times_and_owners_but_no_names() -> None:
    body = b"11 mtime=7\n" + b"10 path=x\n" + b"9 uid=12\n"
    data = header(b"g", b"g", len(body)) + padded(body) + header(b"f", b"0", 0) + END
    node = find(read(data)[0], "f")
    assert (node.mtime_ns, node.uid) == (7 * 10**9, 12)


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_all_formats_say_the_same(form: int) -> None:
    root, _, sink = read(
        pack(
            (entry("p" * 90 + "/" + "n" * 90, uid=1 << 20, mtime=1 << 32), b"data"),
            (entry("link", tarfile.SYMTYPE, linkname="t" * 100), b""),
            form=form,
        )
    )
    node = find(root, "p" * 90 + "/" + "n" * 90)
    assert (sink.content(node), node.mtime_ns) == (b"data", (1 << 32) * 10**9)
    assert node.uid == 65534  # clamped
    assert find(root, "link").target == b"t" * 100


# --- attributes -----------------------------------------------------------------------------

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw=ep
ACL = bytes.fromhex(
    "02000000" "01000700ffffffff" "02000500e8030000" "04000500ffffffff" "10000500ffffffff"
    "20000000ffffffff"
)  # fmt: skip
CAP, ACCESS = "security.capability", "system.posix_acl_access"
TEXT = "user::rwx,user:joe:r-x:1000,group::r-x,mask::r-x,other::---"


def text(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


@pytest.mark.parametrize(
    ("records", "kept", "dropped"),
    [
        ({"SCHILY.xattr.user.k": text(b"\0\xff=\n")}, {b"user.k": b"\0\xff=\n"}, 0),
        ({"SCHILY.xattr.user.empty": ""}, {b"user.empty": b""}, 0),
        (
            {"LIBARCHIVE.xattr.user.a%20b": base64.b64encode(b"value").decode().rstrip("=")},
            {b"user.a b": b"value"},
            0,
        ),
        ({"LIBARCHIVE.xattr.user.k": "***"}, {}, 1),
        ({f"SCHILY.xattr.{CAP}": text(CAPABILITY)}, {CAP.encode(): CAPABILITY}, 0),
        ({f"SCHILY.xattr.{CAP}": "short"}, {}, 1),
        ({f"SCHILY.xattr.{CAP}": text(CAPABILITY[:12])}, {}, 1),
        ({f"SCHILY.xattr.{ACCESS}": text(ACL)}, {ACCESS.encode(): ACL}, 0),
        ({f"SCHILY.xattr.{ACCESS}": text(ACL[:-1])}, {}, 1),
        ({f"SCHILY.xattr.{ACCESS}": text(ACL[:4])}, {}, 1),
        ({f"SCHILY.xattr.{ACCESS}": text(ACL[:4] + ACL[12:] + ACL[4:12])}, {}, 1),
        ({"SCHILY.acl.access": TEXT}, {ACCESS.encode(): ACL}, 0),
        (
            {"SCHILY.acl.access": TEXT.replace("joe:r-x:1000", "1000:r-x")},
            {ACCESS.encode(): ACL},
            0,
        ),
        ({"SCHILY.acl.access": TEXT.replace(":1000", "")}, {}, 1),  # who is joe?
        ({"SCHILY.acl.access": "user:" + "9" * 5000 + ":rwx"}, {}, 1),
        ({"SCHILY.acl.default": TEXT}, {}, 1),  # of a file
        ({"SCHILY.xattr.trusted.overlay.opaque": "y"}, {}, 1),
        ({"SCHILY.xattr.user.overlay.opaque": "y"}, {}, 1),
        ({"SCHILY.xattr.security.selinux": "x"}, {}, 1),
        ({"SCHILY.xattr.user." + "k" * 300: "x"}, {}, 1),
        ({"comment": "x"}, {}, 0),
    ],
)  # fmt: skip
def test_attributes(records: dict[str, str], kept: dict[bytes, bytes], dropped: int) -> None:
    root, report, _ = read(pack((entry("f", pax_headers=records), b"")))
    assert (find(root, "f").xattrs, report.xattrs) == (kept, dropped)


def test_user_attributes_and_default_acls_are_where_the_kernel_has_them() -> None:
    headers = {"SCHILY.xattr.user.k": "v", "SCHILY.acl.default": TEXT}
    root, report, _ = read(
        pack(
            (entry("d", tarfile.DIRTYPE, pax_headers=headers), b""),
            (entry("l", tarfile.SYMTYPE, linkname="x", pax_headers=headers), b""),
        )
    )
    assert find(root, "d").xattrs == {b"user.k": b"v", b"system.posix_acl_default": ACL}
    assert find(root, "l").xattrs == {}
    assert report.xattrs == 2


# --- sparse files ---------------------------------------------------------------------------

SPARSE = {
    "old": ["--format=gnu"],
    "0.0": ["--format=pax", "--sparse-version=0.0"],
    "0.1": ["--format=pax", "--sparse-version=0.1"],
    "1.0": ["--format=pax", "--sparse-version=1.0"],
}


@pytest.mark.parametrize("version", SPARSE)
@pytest.mark.parametrize("pieces", [1, 3, 40])
def test_sparse_files_of_gnu_tar(tmp_path: Path, version: str, pieces: int) -> None:
    path = tmp_path / ("long-name-" * 12)
    with path.open("wb") as file:
        for number in range(pieces):
            file.seek(number * 5 * CHUNK + 8192)
            file.write(b"piece %d" % number * 1000)
        file.truncate(pieces * 5 * CHUNK + 10 * CHUNK + 17)
    (tmp_path / "after").write_bytes(b"after")
    done = subprocess.run(
        ["tar", "-cS", *SPARSE[version], path.name, "after"],
        cwd=tmp_path, capture_output=True, check=True,
    )  # fmt: skip
    assert len(done.stdout) < path.stat().st_size / 2  # the test is about a sparse one
    root, report, sink = read(done.stdout)
    assert sink.content(find(root, path.name)) == path.read_bytes()
    assert sink.content(find(root, "after")) == b"after"
    assert sink.added < path.stat().st_size / 2  # holes are not read as zeros
    assert report.size_bytes == path.stat().st_size + 5


def test_a_huge_hole_costs_nothing() -> None:
    def huge(name: bytes) -> bytes:
        start = b"\x80" + (1 << 39).to_bytes(11, "big")
        size = b"\x80" + ((1 << 39) + 512).to_bytes(11, "big")
        return header(name, b"S", 512, at386=start + b"%011o " % 512, at483=size)

    block = huge(b"f")
    root, report, sink = read(block + b"d" * 512 + END)
    assert sink.added == 512
    assert find(root, "f").chunks[:3] == [None] * 3
    assert report.size_bytes == (1 << 39) + 512
    with pytest.raises(InvalidArgument, match="larger than"):
        read(block + b"d" * 512 + huge(b"g") + b"d" * 512 + END)
