"""What an agent hands in: which files are taken, what hides what, and which links are left out."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from dsecd.images.handin import Pristine, entries, settle
from dsecd.images.model import OPAQUE, Node, walk
from dsecd.images.sources.kept import NOBODY, find, parse, read_kept
from dsecd.images.sources.paths import Parts
from libdsec.errors import InvalidArgument
from tests.unit.sources_sink import MemorySink

HERE = os.getuid()


class Lab:
    """The agent's view, the pristine layers and the grader's toolkit as three directories."""

    def __init__(self, folder: Path) -> None:
        self.agent, self.pristine, self.grader = (
            folder / name for name in ("agent", "pristine", "grader")
        )
        for root in (self.agent, self.pristine, self.grader):
            root.mkdir()

    def put(self, path: str, text: str = "x", *, both: bool = False) -> None:
        for root in (self.agent, self.pristine) if both else (self.agent,):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)

    def link(self, path: str, target: str, *, both: bool = False) -> None:
        for root in (self.agent, self.pristine) if both else (self.agent,):
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).symlink_to(target)

    def grade(self, path: str) -> None:
        (self.grader / path).parent.mkdir(parents=True, exist_ok=True)
        (self.grader / path).write_text("the grader's")

    def take(self, *keep: str) -> tuple[Node, set[tuple[str, str, bool]]]:
        paths = parse([path.encode() for path in keep])
        fds = [os.open(root, os.O_RDONLY) for root in (self.agent, self.pristine, self.grader)]
        try:
            tree, _ = read_kept(fds[0], HERE, paths, MemorySink())
            told = settle(tree, paths, Pristine(fds[1]), dict(entries(fds[2])))
        finally:
            for fd in fds:
                os.close(fd)
        return tree, {(one.kind, one.path, one.dropped) for one in told}


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def names(tree: Node) -> list[str]:
    return [path.decode() for path, _ in walk(tree) if path]


def at(tree: Node, path: str) -> Node:
    parts: Parts = tuple(part.encode() for part in path.split("/"))
    node = find(tree, parts)
    assert node is not None
    return node


def test_only_what_is_kept_is_taken(lab: Lab) -> None:
    for path in ("w/src/a", "w/src/deep/b", "w/other", "w/srcx", "etc/passwd", "w/one"):
        lab.put(path)
    tree, told = lab.take("/w/src", "/w/one")
    assert names(tree) == ["w", "w/one", "w/src", "w/src/a", "w/src/deep", "w/src/deep/b"]
    assert told == set()


def test_a_kept_directory_hides_the_pristine_one(lab: Lab) -> None:
    lab.put("w/src/a", both=True)
    lab.put("w/new/a")
    tree, _ = lab.take("/w/src", "/w/new")
    assert at(tree, "w/src").xattrs == {OPAQUE: b"y"}
    assert at(tree, "w/new").xattrs == at(tree, "w").xattrs == {}


def test_what_was_deleted_is_hidden(lab: Lab) -> None:
    lab.put("w/src/a", both=True)
    (lab.agent / "w/src/a").unlink()
    (lab.agent / "w/src").rmdir()
    tree, told = lab.take("/w/src/a", "/w/none")
    assert at(tree, "w/src/a").is_whiteout()
    assert names(tree) == ["w", "w/src", "w/src/a"]
    assert told == {("absent", "/w/src/a", False), ("absent", "/w/none", False)}


def test_directories_on_the_way_are_the_pristine_ones(lab: Lab) -> None:
    lab.put("w/src/a", both=True)
    (lab.agent / "w").chmod(0o777)
    (lab.pristine / "w").chmod(0o751)
    lab.put("mine/a")
    (lab.agent / "mine").chmod(0o700)
    tree, _ = lab.take("/w/src", "/mine/a")
    assert (at(tree, "w").mode, at(tree, "mine").mode) == (0o40751, 0o40755)
    assert at(tree, "mine").uid == 0


def test_a_link_on_the_way_is_not_followed(lab: Lab) -> None:
    lab.put("w/src/a", both=True)
    (lab.agent / "w").rename(lab.agent / "elsewhere")
    lab.link("w", "elsewhere")
    tree, told = lab.take("/w/src")
    assert at(tree, "w/src").is_whiteout()
    assert told == {("absent", "/w/src", False)}


def test_a_link_on_the_way_in_the_image_is_an_error(lab: Lab) -> None:
    lab.put("usr/bin/tool", both=True)
    lab.link("bin", "usr/bin", both=True)
    with pytest.raises(InvalidArgument, match=r"/bin is no directory in the image"):
        lab.take("/bin/tool")


@pytest.mark.parametrize(
    ("target", "left_out"),
    [
        ("a", False),
        ("/w/src/a", False),
        ("../../w/src/a", False),
        ("/usr/bin/python3", False),
        ("nowhere", False),
        ("/dev/null", False),
        ("loop", False),
        ("/grader/expected", True),
        ("../../grader/expected", True),
        ("/grader", True),
        ("/proc/self/root/grader/expected", True),
        ("/sys/kernel", True),
        ("/dev/stdin", True),
        ("/dev/null/..", True),
        ("up/grader/expected", True),
        ("through/grader/expected", True),
        ("tests/hidden", True),
        ("up/./w/src/../../grader/expected", True),
    ],
)
def test_a_link_to_the_graders_files_is_left_out(lab: Lab, target: str, left_out: bool) -> None:
    lab.put("w/src/a")
    lab.put("usr/bin/python3", both=True)
    lab.link("w/src/loop", "loop")
    lab.link("w/src/up", "../..")
    lab.link("w/src/through", "/root-link")
    lab.link("root-link", "/", both=True)
    lab.grade("grader/expected")
    lab.grade("w/src/tests/hidden")
    lab.link("w/src/link", target)
    tree, told = lab.take("/w/src")
    assert ("w/src/link" not in names(tree)) == left_out
    assert (("link", "/w/src/link", True) in told) == left_out


def test_a_link_that_the_image_has_stays(lab: Lab) -> None:
    lab.grade("grader/expected")
    lab.link("w/src/link", "/grader/expected", both=True)
    tree, told = lab.take("/w/src")
    assert ("w/src/link" in names(tree), told) == (True, set())


HOOKS = {
    "w/conftest.py": "test hook",
    "w/a/pytest.ini": "test hook",
    "w/sitecustomize.py": "python hook",
    "w/x.pth": "python hook",
    "w/lib/site-packages/six.py": "python hook",
    "w/.git/hooks/pre-commit": "git hook",
    "w/.git/config": "git hook",
    "etc/ld.so.preload": "loader",
    "usr/local/bin/python3": "command",
    "root/.bashrc": "shell startup",
    "w/tests/random.py": "beside the grader's files",
}


@pytest.mark.parametrize("path", HOOKS)
def test_hooks_are_told_when_they_are_the_agents(lab: Lab, path: str) -> None:
    lab.grade("w/tests/test_hidden.py")
    lab.put(path, both=True)
    keep = "/" + path.partition("/")[0]
    assert lab.take(keep)[1] == set()
    (lab.agent / path).write_text("y")
    assert lab.take(keep)[1] == {(HOOKS[path], "/" + path, False)}
    (lab.pristine / path).unlink()
    assert lab.take(keep)[1] == {(HOOKS[path], "/" + path, False)}


def test_a_file_like_the_pristine_one_is_known_by_its_content(lab: Lab) -> None:
    lab.put("w/conftest.py", "a" * 200_000, both=True)
    assert lab.take("/w")[1] == set()
    lab.put("w/conftest.py", "a" * 199_999 + "b")
    assert lab.take("/w")[1] == {("test hook", "/w/conftest.py", False)}


def test_bytecode_is_left_out_unless_it_is_the_images(lab: Lab) -> None:
    lab.put("w/__pycache__/a.cpython-311.pyc")
    lab.put("w/__pycache__/b.cpython-311.pyc")
    lab.put("w/__pycache__/c.cpython-311.pyc", both=True)
    tree, told = lab.take("/w")
    assert names(tree) == ["w", "w/__pycache__", "w/__pycache__/c.cpython-311.pyc"]
    assert told == {("bytecode", "/w/__pycache__", True)}


def test_rights_and_attributes_that_act_are_left_out(lab: Lab) -> None:
    lab.put("w/a")
    (lab.agent / "w/a").chmod(0o6755)
    os.mkfifo(lab.agent / "w/pipe")
    os.setxattr(lab.agent / "w/a", "user.note", b"kept")
    paths = parse([b"/w"])
    fd = os.open(lab.agent, os.O_RDONLY)
    tree, dropped = read_kept(fd, HERE, paths, MemorySink())
    os.close(fd)
    node = at(tree, "w/a")
    assert (stat.S_IMODE(node.mode), node.xattrs) == (0o755, {b"user.note": b"kept"})
    assert names(tree) == ["w", "w/a"]
    assert dropped == {"setuid": 1, "fifo": 1}


def test_an_owner_outside_of_the_sandbox_is_nobody(lab: Lab) -> None:
    lab.put("w/a")
    fd = os.open(lab.agent, os.O_RDONLY)
    tree, _ = read_kept(fd, HERE + 5, parse([b"/w"]), MemorySink())
    os.close(fd)
    assert at(tree, "w/a").uid == NOBODY


@pytest.mark.parametrize("path", [b"", b"/", b"//", b"w", b"./w", b"/w/../x", b"/w\0"])
def test_a_path_that_is_none_is_refused(path: bytes) -> None:
    with pytest.raises(InvalidArgument):
        parse([path])


def test_paths_below_another_are_part_of_it() -> None:
    assert parse([b"/w/src/", b"/w//src/a", b"/w/srcx", b"/a"]) == [
        (b"a",), (b"w", b"src"), (b"w", b"srcx")
    ]  # fmt: skip
    with pytest.raises(InvalidArgument, match="at least one"):
        parse([])
