"""Which files a COPY takes, and how they are packed."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

import pytest

from libdsec.context import Context, Ignore, Owner, pack
from libdsec.errors import InvalidArgument

FILES = ("a.txt", "b.txt", "src/main.c", "src/main.o", "src/deep/x.o", "src/deep/keep.o", ".env")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    return tmp_path


def names(context: Context, *sources: str, into: bool = True) -> list[str]:
    return [entry.name for entry in context.select(sources, into)]


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("", [*FILES]),
        ("# only a remark\n\n", [*FILES]),
        ("*.txt", [".env", "src/deep/keep.o", "src/deep/x.o", "src/main.c", "src/main.o"]),
        ("/a.txt\n./b.txt", [".env", *FILES[2:6]]),
        ("src/", ["a.txt", "b.txt", ".env"]),
        ("**/*.o", ["a.txt", "b.txt", "src/main.c", ".env"]),
        ("**/*.o\n!**/keep.o", ["a.txt", "b.txt", "src/main.c", "src/deep/keep.o", ".env"]),
        ("src\n!src/deep/keep.o", ["a.txt", "b.txt", "src/deep/keep.o", ".env"]),
        ("!a.txt\na.txt", [".env", *FILES[1:6]]),
        ("*\n!src\nsrc/deep", ["src/main.c", "src/main.o"]),
        ("src/*/x.?\n[ab].txt", ["src/main.c", "src/main.o", "src/deep/keep.o", ".env"]),
        ("[^a].txt\nsrc/**", ["a.txt", ".env"]),
        ("\\a.txt\nsrc", ["b.txt", ".env"]),
    ],
)
def test_dockerignore(root: Path, text: str, left: list[str]) -> None:
    context = Context(root, Ignore(text))
    entries = context.select(["."], True)
    assert sorted(e.name for e in entries if not e.is_directory) == sorted(left)
    order = [entry.name for entry in entries]
    for name in order:
        parent = str(Path(name).parent)
        assert parent == "." or order.index(parent) < order.index(name)


def test_sources(root: Path) -> None:
    context = Context(root, Ignore("src/main.o"))
    assert names(context, "a.txt") == ["a.txt"]
    assert names(context, "/a.txt", into=False) == [""]
    assert names(context, "./src/main.c") == ["main.c"]
    assert names(context, "src") == names(context, "src/") == [
        "deep", "deep/keep.o", "deep/x.o", "main.c",
    ]  # fmt: skip
    assert names(context, "*.txt") == ["a.txt", "b.txt"]
    assert names(context, "s*/deep/*.o", "a.txt") == ["keep.o", "x.o", "a.txt"]
    assert names(context, "*") == [
        ".env", "a.txt", "b.txt", "deep", "deep/keep.o", "deep/x.o", "main.c",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none", "none is not in the build context"),
        ("none*", "matches nothing"),
        ("a.txt/*", "matches nothing"),
        ("src/main.o", "left out of the build context by .dockerignore"),
        ("*.env", "matches nothing"),
        ("out", "out leads out of the build context"),
        ("dangling", "is a link to nothing"),
    ],
)
def test_sources_that_are_not_there(root: Path, source: str, message: str) -> None:
    (root / "out").symlink_to("/etc")
    (root / "dangling").symlink_to("nowhere")
    with pytest.raises(InvalidArgument, match=message):
        Context(root, Ignore("src/main.o\n.env")).select([source], True)


def test_several_files_need_a_directory(root: Path) -> None:
    with pytest.raises(InvalidArgument, match="2 files match: the target must end with /"):
        Context(root).select(["*.txt"], False)


def test_a_context_is_a_directory(root: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"a\.txt is not a directory"):
        Context(root / "a.txt")


def test_the_archive(root: Path) -> None:
    (root / "src/link").symlink_to("../a.txt")
    (root / "named").symlink_to("src/main.c")
    os.link(root / "src/main.c", root / "src/same.c")
    os.mkfifo(root / "src/pipe")
    (root / "src/main.c").chmod(0o4751)
    os.utime(root / "src/main.c", ns=(1, 1_500_000_000))
    pieces: list[bytes] = []
    entries = Context(root).select(["src", "named"], True)
    pack(entries, Owner(5, 6), None, pieces.append)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        found = {member.name: member for member in tar}
        assert set(found) == {
            "deep", "deep/keep.o", "deep/x.o", "link", "main.c", "main.o", "named", "same.c",
        }  # fmt: skip
        assert {(m.uid, m.gid, m.uname) for m in found.values()} == {(5, 6, "")}
        assert (found["main.c"].mode, found["main.c"].mtime) == (0o4751, 1.5)
        assert found["link"].linkname == "../a.txt"
        assert found["same.c"].linkname == "main.c"
        content = tar.extractfile("named")
        assert content is not None
        assert content.read() == b"src/main.c"
    pieces.clear()
    pack(entries, Owner(0, 0), 0o600, pieces.append)
    with tarfile.open(fileobj=io.BytesIO(b"".join(pieces))) as tar:
        assert {member.mode for member in tar if not member.issym()} == {0o600}
