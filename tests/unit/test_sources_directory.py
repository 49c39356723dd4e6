"""Directories become trees: everything is read, nothing is followed, changes are noticed."""

from __future__ import annotations

import os
import re
import socket
import stat
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsecd.images.chunks import ChunkWriter
from dsecd.images.model import CHUNK, Chunk
from dsecd.images.sources import walker
from dsecd.images.sources.directory import read_directory
from dsecd.images.sources.paths import compile_patterns
from dsecd.images.sources.tar import read_tar
from dsecd.images.sources.upper import RESIDUE, Rule, read_upper
from libdsec.errors import InvalidArgument, NotFound, WrongState
from tests.unit.sources_sink import MemorySink, find

BASE = os.getuid()  # of an upper whose files are ours


def test_everything_in_a_directory_arrives(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "d").mkdir(parents=True, mode=0o750)
    (root / "d/f").write_bytes(b"content" * 20_000)
    (root / "d/f").chmod(0o640)
    os.utime(root / "d/f", ns=(1, 1_234_567_890_123_456_789))
    os.link(root / "d/f", root / "hard")
    (root / "d/link").symlink_to("/etc/passwd")
    os.link(root / "d/link", root / "hard-link-to-link", follow_symlinks=False)
    os.mkfifo(root / "pipe")
    (root / "empty").touch()
    Path(os.fsdecode(os.fsencode(root) + b"/n\xffame\n")).write_bytes(b"z")
    with (root / "sparse").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"end")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
    sink = MemorySink()
    told: list[int] = []
    tree, report = read_directory(root, sink, check=told.append)
    assert sink.content(find(tree, "d/f")) == b"content" * 20_000
    assert find(tree, "d/f").mode == stat.S_IFREG | 0o640
    assert find(tree, "d/f").mtime_ns == 1_234_567_890_123_456_789
    assert find(tree, "d/f") is find(tree, "hard")
    assert find(tree, "d/link").target == b"/etc/passwd"
    assert find(tree, "d/link") is find(tree, "hard-link-to-link")
    assert stat.S_ISFIFO(find(tree, "pipe").mode)
    assert find(tree, "empty").chunks == []
    assert sink.content(tree.children[b"n\xffame\n"]) == b"z"
    assert sink.content(find(tree, "sparse")) == bytes(3 << 20) + b"end"
    assert b"socket" not in tree.children
    assert (report.entries, report.sockets) == (10, 1)
    assert told == sorted(told)
    assert told[-1] == report.size_bytes == 140_000 + 1 + (3 << 20) + 3
    assert find(tree, "d").mode == (root / "d").stat().st_mode
    assert (tree.uid, tree.gid) == (os.getuid(), os.getgid())


def test_the_writer_of_blobs_is_a_sink_as_the_tests_have_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (root / "f").write_bytes(os.urandom(3 * CHUNK + 5))
    with (root / "sparse").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"end")
        file.truncate((4 << 20) + 7)
    (root / "zeros").write_bytes(bytes(CHUNK + 9))
    plain, sink = read_directory(root, MemorySink())[0], MemorySink()
    packed = tmp_path / "packed.tar"
    subprocess.run(["tar", "-cSf", packed, "-C", root, "."], check=True)
    with ChunkWriter(tmp_path / "blob") as writer:
        trees = [read_directory(root, writer)[0], read_tar(packed, writer)[0]]
    trees.append(read_tar(packed, sink)[0])
    for name, node in plain.children.items():
        assert all(tree.children[name].chunks == node.chunks for tree in trees)


def test_an_open_directory_stays_the_callers(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("x")
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for _ in range(2):
            assert set(read_directory(fd, MemorySink())[0].children) == {b"f"}
    finally:
        os.close(fd)


def test_what_is_no_directory(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(InvalidArgument, match="is not a directory"):
        read_directory(tmp_path / "f", MemorySink())
    with pytest.raises(NotFound, match="does not exist"):
        read_directory(tmp_path / "g", MemorySink())


def test_exclusion(tmp_path: Path) -> None:
    for path in ("a/x.o", "a/b/y.o", "a/keep", "b/x.o", "cache/deep/f", "keep/cache/f"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text("x")
    tree, report = read_directory(tmp_path, MemorySink(), exclude=["a/**/*.o", "cache"])
    assert report.excluded == 3
    assert set(find(tree, "a").children) == {b"b", b"keep"}
    assert set(tree.children) == {b"a", b"b", b"keep"}
    assert find(tree, "keep/cache/f").size == 1
    assert find(tree, "b/x.o").size == 1


@pytest.mark.parametrize(
    ("pattern", "yes", "no"),
    [
        ("a", ["a"], ["a/b", "b/a", "ab"]),
        ("/a/", ["a"], ["b"]),
        ("*.pyc", ["x.pyc", ".pyc"], ["a/x.pyc", "xpyc"]),
        ("**/*.pyc", ["x.pyc", "a/x.pyc", "a/b/x.pyc"], ["x.pyc/a"]),
        ("a/**", ["a/b", "a/b/c"], ["a", "b"]),
        ("a/**/b", ["a/b", "a/x/b", "a/x/y/b"], ["a/xb", "ab"]),
        ("a?", ["ab", "a."], ["a", "a/", "abc"]),
        ("[a]+(", ["[a]+("], ["a"]),
        ("\u00e9\n*", ["\u00e9\nx"], ["e"]),
    ],
)
def test_patterns(pattern: str, yes: list[str], no: list[str]) -> None:
    expression = compile_patterns([pattern])
    assert expression is not None
    assert all(expression.fullmatch(path.encode()) for path in yes)
    assert not any(expression.fullmatch(path.encode()) for path in no)


@pytest.mark.parametrize("pattern", ["", "/", "a//b", "../a", "a/./b"])
def test_impossible_patterns(pattern: str) -> None:
    with pytest.raises(InvalidArgument, match="is not a pattern"):
        compile_patterns([pattern])


class Meddler(MemorySink):
    """A sink during whose reading something happens to the file."""

    def __init__(self, meddle: Callable[[int, int], None]) -> None:
        super().__init__()
        self.meddle = meddle
        self.tries = 0

    def add_fd(self, fd: int, size: int) -> list[Chunk | None]:
        self.tries += 1
        found: list[Chunk | None] = []
        try:
            found = super().add_fd(fd, size)
        finally:
            self.meddle(fd, self.tries)
        return found


@pytest.mark.parametrize("how", ["grow", "rewrite", "shrink"])
@pytest.mark.parametrize("often", [1, 99])
def test_a_file_that_changes_is_read_again_or_named(tmp_path: Path, how: str, often: int) -> None:
    path = tmp_path / "d" / "busy"
    path.parent.mkdir()
    path.write_bytes(b"x" * 3 * CHUNK)

    def meddle(_: int, tries: int) -> None:
        if tries > often:
            return
        if how == "grow":
            with path.open("ab") as file:
                file.write(b"more")
        elif how == "shrink":
            os.truncate(path, CHUNK - tries)
        else:
            with path.open("r+b") as file:
                file.write(b"%d" % tries)
        os.utime(path, ns=(tries, tries))  # two changes in one tick of the clock differ, too

    sink = Meddler(meddle)
    if often == 1:
        tree, _ = read_directory(tmp_path, sink)
        assert sink.content(find(tree, "d/busy")) == path.read_bytes()
        assert sink.tries == 2
    else:
        with pytest.raises(WrongState, match="d/busy changed while it was read"):
            read_directory(tmp_path, sink)


def test_a_file_cut_while_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "busy"
    path.write_bytes(b"x" * 3 * CHUNK)

    class Cutter(MemorySink):
        def add_fd(self, fd: int, size: int) -> list[Chunk | None]:
            if path.stat().st_size > 1:
                os.truncate(path, 1)
            return super().add_fd(fd, size)

    sink = Cutter()
    tree, _ = read_directory(tmp_path, sink)
    assert sink.content(find(tree, "busy")) == b"x"


def test_something_that_goes_away(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_text(name)

    def remove(_: int, __: int) -> None:
        (tmp_path / "b").unlink(missing_ok=True)

    with pytest.raises(WrongState, match="b changed while it was read"):
        read_directory(tmp_path, Meddler(remove))


def test_a_directory_swapped_for_a_link_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "f").write_text("secret")
    root = tmp_path / "root"
    (root / "z").mkdir(parents=True)
    (root / "a").write_text("a")

    def swap(_: int, __: int) -> None:
        (root / "z").rmdir()
        (root / "z").symlink_to(secret)

    sink = Meddler(swap)
    tree, _ = read_directory(root, sink)
    assert find(tree, "z").target == os.fsencode(secret)


def test_trees_too_deep_are_named(tmp_path: Path) -> None:
    top = fd = os.open(tmp_path, os.O_RDONLY)
    for _ in range(600):
        os.mkdir("d", dir_fd=fd)
        below = os.open("d", os.O_RDONLY, dir_fd=fd)
        if fd != top:
            os.close(fd)
        fd = below
    os.close(fd)
    os.close(top)
    try:
        with pytest.raises(InvalidArgument, match="deeper than 512 directories"):
            read_directory(tmp_path, MemorySink())
    finally:
        subprocess.run(["rm", "-rf", tmp_path / "d"], check=True)  # too deep for shutil


@pytest.mark.parametrize(("limit", "value"), [("MAX_ENTRIES", 9), ("MAX_NAMES", 200)])
def test_directories_that_would_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: str, value: int
) -> None:
    for number in range(10):
        (tmp_path / str(number)).symlink_to("x" * 50)
    monkeypatch.setattr(walker, limit, value)
    with pytest.raises(InvalidArgument, match="the directory has more than"):
        read_directory(tmp_path, MemorySink())


def test_a_file_too_large_is_named(tmp_path: Path) -> None:
    for name in ("a", "b"):
        with (tmp_path / name).open("wb") as file:
            file.truncate(700 << 30)

    class Holes(MemorySink):
        def add_fd(self, fd: int, size: int) -> list[Chunk | None]:
            return []

    with pytest.raises(InvalidArgument, match="with b the files are larger than"):
        read_directory(tmp_path, Holes())


def test_cancelling_leaves_no_descriptor_open(tmp_path: Path) -> None:
    (tmp_path / "a/b/c").mkdir(parents=True)
    (tmp_path / "a/b/c/f").write_text("x")

    class Stop(Exception):
        pass

    def check(done: int) -> None:
        raise Stop

    with pytest.raises(Stop):
        read_directory(tmp_path, MemorySink(), check=check)


CONTENT = st.dictionaries(
    st.binary(min_size=1, max_size=20).filter(
        lambda name: not re.search(rb"[/\0]", name) and name not in (b".", b"..")
    ),
    st.binary(max_size=300),
    max_size=6,
)


@settings(max_examples=40)
@given(CONTENT)
def test_any_names_and_contents(content: dict[bytes, bytes]) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        for name, data in content.items():
            Path(os.fsdecode(os.fsencode(scratch) + b"/" + name)).write_bytes(data)
        sink = MemorySink()
        tree, _ = read_directory(Path(scratch), sink)
        assert {name: sink.content(node) for name, node in tree.children.items()} == content


# --- uppers ---------------------------------------------------------------------------------


def test_ids_are_those_inside(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d/f").write_text("x")
    tree, _ = read_upper(tmp_path, BASE, MemorySink())
    assert (find(tree, "d/f").uid, find(tree, "d").uid, tree.uid) == (0, 0, 0)
    with pytest.raises(InvalidArgument, match=rf"belongs to the host's id {BASE}, which is none"):
        read_upper(tmp_path, BASE + 1, MemorySink())


@pytest.mark.parametrize(
    ("path", "what"),
    [
        ("root/.bash_history", "gone"), ("root/.python_history", "gone"),
        ("home/me/.zsh_history", "gone"), ("home/me/.viminfo", "gone"),
        ("home/me/deeper/.bash_history", "kept"), ("root/.cache/pip/http/0", "gone"),
        ("root/.cache/other", "kept"), ("tmp/x", "gone"), ("tmp/d/e/f", "gone"), ("tmp", "kept"),
        ("var/tmp/x", "gone"), ("srv/tmp/x", "kept"), ("var/cache/apt/pkgcache.bin", "gone"),
        ("var/cache/apt/archives/x.deb", "gone"), ("var/lib/apt/lists/x", "kept"),
        ("var/log/syslog", "empty"), ("var/log/apt/history.log", "empty"), ("var/logs", "kept"),
        ("app/__pycache__/x.pyc", "kept"),
    ],
)  # fmt: skip
def test_residue(tmp_path: Path, path: str, what: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_bytes(b"x" * 10)
    tree, report = read_upper(tmp_path, BASE, MemorySink())
    sizes = {}
    node = tree
    for name in path.encode().split(b"/"):
        if name not in node.children:
            break
        node = node.children[name]
    else:
        sizes[path] = node.size
    assert sizes == ({} if what == "gone" else {path: 0 if what == "empty" else 10})
    total = sum(found.size_bytes for found in report.residue.values())
    assert total == (0 if what == "kept" else 10)
    assert bool(report.notes()) == (what != "kept")


def test_residue_is_counted_by_rule_to_the_bottom(tmp_path: Path) -> None:
    for path in ("tmp/d/a", "tmp/d/b", "tmp/c", "var/log/x"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(b"x" * 100)
    _, report = read_upper(tmp_path, BASE, MemorySink())
    counts = {rule: (found.count, found.size_bytes) for rule, found in report.residue.items()}
    assert counts == {"tmp/*": (4, 300), "var/log/**": (1, 100)}


def test_a_link_to_a_cleared_file_keeps_its_content(tmp_path: Path) -> None:
    (tmp_path / "var/log").mkdir(parents=True)
    (tmp_path / "var/log/a").write_bytes(b"content")
    for name in ("first", "zlast"):
        os.link(tmp_path / "var/log/a", tmp_path / name)
    tree, _ = read_upper(tmp_path, BASE, MemorySink())
    assert find(tree, "first") is find(tree, "zlast")
    assert (find(tree, "zlast").size, find(tree, "var/log/a").size) == (7, 0)


def test_other_rules_or_none(tmp_path: Path) -> None:
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp/f").write_text("x")
    (tmp_path / "g").write_text("x")
    tree, _ = read_upper(tmp_path, BASE, MemorySink(), residue=[Rule("g")])
    assert set(tree.children) == {b"tmp"}
    assert find(tree, "tmp/f").size == 1
    tree, _ = read_upper(tmp_path, BASE, MemorySink(), residue=[])
    assert set(tree.children) == {b"tmp", b"g"}
    assert len({rule.pattern for rule in RESIDUE}) == len(RESIDUE)
