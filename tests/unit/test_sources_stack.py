"""OCI layers on top of each other, against the plainest model: a dictionary of paths."""

from __future__ import annotations

import stat
from collections import deque
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dsecd.images.model import OPAQUE, Node, directory, walk
from dsecd.images.sources.paths import Parts
from dsecd.images.sources.stack import Change, Stack
from dsecd.images.sources.tar import Entry
from libdsec.errors import InvalidArgument

Op = tuple[Any, ...]  # ("file", path, number), ("dir", …), ("sym", path, target), ("link", …), …
Layers = list[list[Op]]


def split(path: str) -> Parts:
    return tuple(part.encode() for part in path.split("/") if part)


def node_of(op: Op) -> Node:
    kind, _, what = op
    if kind == "sym":
        return Node(mode=stat.S_IFLNK | 0o777, target=what.encode())
    if kind == "dir":
        return Node(mode=stat.S_IFDIR | 0o700, uid=what)
    return Node(mode=stat.S_IFREG | 0o644, uid=what, size=what)


def change_of(ops: list[Op]) -> Change:
    change = Change()
    for op in ops:
        parts = split(op[1])
        if op[0] == "hide":
            change.add(Entry((*parts[:-1], b".wh." + parts[-1]), node_of(("file", "", 0))))
        elif op[0] == "opaque":
            change.add(Entry((*parts, b".wh..wh..opq"), node_of(("file", "", 0))))
        elif op[0] == "link":
            change.add(Entry(parts, target=split(op[2])))
        else:
            change.add(Entry(parts, node_of(op)))
    return change


def stacked(layers: Layers, cuts: list[bool]) -> list[Node]:
    stack = Stack()
    for number, ops in enumerate(layers):
        if number and cuts[number % len(cuts)]:
            stack.push()
        stack.apply(change_of(ops))
    return stack.finish()


class Refused(Exception):
    """The model's own error."""


class Model:
    """The file system a runtime ends up with: every path with its inode."""

    def __init__(self) -> None:
        self.paths: dict[Parts, Node] = {(): directory()}

    def is_dir(self, parts: Parts) -> bool:
        return all(
            (node := self.paths.get(parts[:depth])) is not None and node.is_dir()
            for depth in range(len(parts) + 1)
        )

    def remove(self, parts: Parts, itself: bool = True) -> None:
        for path in list(self.paths):
            below = len(path) > len(parts) or (itself and path == parts)
            if path[: len(parts)] == parts and below:
                del self.paths[path]

    def apply(self, ops: list[Op]) -> None:
        for op in ops:
            parts = split(op[1])
            if op[0] == "opaque" and self.is_dir(parts):
                self.remove(parts, itself=False)
        for op in ops:
            parts = split(op[1])
            if op[0] == "hide" and self.is_dir(parts[:-1]):
                self.remove(parts)
        for op in ops:
            if op[0] not in ("hide", "opaque"):
                self.add(op)

    def add(self, op: Op) -> None:
        parts = split(op[1])
        if op[0] == "link":
            target = self.resolve(split(op[2]))
            node = self.paths.get(target)
            if node is None or node.is_dir() or parts == split(op[2]):
                raise Refused
        else:
            node = node_of(op)
        where = self.resolve(parts) if parts else ()
        there = self.paths.get(where)
        if not (there is not None and there.is_dir() and node.is_dir()):
            self.remove(where)
        self.paths[where] = node

    def resolve(self, parts: Parts) -> Parts:
        """Return where the last component is, links on the way followed, directories made."""
        where: Parts = ()
        ahead, links = deque(parts[:-1]), 0
        while ahead:
            name = ahead.popleft()
            if name == b"..":
                where = where[:-1]
                continue
            node = self.paths.setdefault((*where, name), directory())
            if stat.S_ISLNK(node.mode):
                links += 1
                if links > 40:
                    raise Refused
                where = () if node.target.startswith(b"/") else where
                ahead.extendleft(
                    reversed([p for p in node.target.split(b"/") if p not in (b"", b".")])
                )
            elif node.is_dir():
                where = (*where, name)
            else:
                raise Refused
        return (*where, parts[-1])


def mounted(trees: list[Node]) -> dict[Parts, Node]:
    """What overlayfs shows of `trees`, bottom first."""
    model = Model()
    for number, tree in enumerate(trees):
        for path, node in walk(tree):
            parts = split(path.decode())
            there = model.paths.get(parts)
            if node.is_whiteout():
                assert number, "a whiteout with nothing below"
                assert there is not None, "a whiteout of nothing"
                model.remove(parts)
                continue
            if not (there is not None and there.is_dir() and node.is_dir()):
                model.remove(parts)
            if OPAQUE in node.xattrs:
                assert parts, "overlayfs ignores it on the root"
                assert number, "opaque with nothing below"
                model.remove(parts, itself=False)
            model.paths[parts] = node
    return model.paths


def outline(paths: dict[Parts, Node], links: bool) -> dict[Parts, tuple[Any, ...]]:
    numbers: dict[int, int] = {}
    return {
        parts: (
            node.mode, node.uid, node.target, node.size,
            numbers.setdefault(id(node), len(numbers)) if links else 0,
        )
        for parts, node in sorted(paths.items())
    }  # fmt: skip


PATHS = st.lists(st.sampled_from("abc"), min_size=1, max_size=3).map("/".join)
TARGETS = st.sampled_from(["a", "b", "/b", "../c", "a/b", "..", "/", "c/../a", "/c/a", "../../.."])
OPS = st.one_of(
    st.tuples(st.just("file"), PATHS, st.integers(1, 9)),
    st.tuples(st.just("dir"), PATHS, st.integers(1, 9)),
    st.tuples(st.just("sym"), PATHS, TARGETS),
    st.tuples(st.just("link"), PATHS, PATHS),
    st.tuples(st.just("hide"), PATHS),
    st.tuples(st.just("opaque"), st.one_of(PATHS, st.just(""))),
    st.tuples(st.just("dir"), st.just(""), st.integers(1, 9)),
)
LAYERS = st.lists(st.lists(OPS, max_size=6), min_size=1, max_size=4)


CUT = [False, True, False]  # the second layer starts a tree, the third goes into it


@settings(max_examples=250)
@given(LAYERS, st.lists(st.booleans(), min_size=1, max_size=4))
@example([[("file", "a/b", 1)], [("sym", "a", "b")], [("dir", "a", 2)]], [True])
@example([[("file", "a/b", 1)], [("opaque", ""), ("dir", "a", 2)]], [True])
@example([[("file", "a", 1), ("link", "b", "a")], [("link", "c", "a")]], [True])
@example([[("file", "a/b", 1)], [("opaque", "a")], [("hide", "a/b")]], CUT)
@example([[("sym", "a/b", "/c")], [("opaque", "a")], [("file", "a/b/x", 1)]], CUT)
@example([[("file", "a/b", 1)], [("opaque", "a")], [("dir", "a", 3)]], CUT)
def test_trees_show_what_the_model_holds(layers: Layers, cuts: list[bool]) -> None:
    model = Model()
    try:
        for ops in layers:
            model.apply(ops)
    except Refused:
        with pytest.raises(InvalidArgument):
            stacked(layers, cuts)
        return
    trees = stacked(layers, cuts)
    whole = len(trees) == 1  # across trees, hard links break as overlayfs breaks them
    assert outline(mounted(trees), whole) == outline(model.paths, whole)


@settings(max_examples=150)
@given(LAYERS, st.lists(st.booleans(), min_size=1, max_size=4), st.randoms())
def test_the_order_of_whiteouts_does_not_matter(
    layers: Layers, cuts: list[bool], random: Any
) -> None:
    shuffled = []
    for ops in layers:
        hiding = [op for op in ops if op[0] in ("hide", "opaque")]
        other = [op for op in ops if op[0] not in ("hide", "opaque")]
        random.shuffle(hiding)
        for op in hiding:
            other.insert(random.randint(0, len(other)), op)
        shuffled.append(other)
    results = []
    for one in (layers, shuffled):
        try:
            results.append([outline(dict(_by_parts(tree)), True) for tree in stacked(one, cuts)])
        except InvalidArgument:
            results.append([])
    assert results[0] == results[1]


def _by_parts(tree: Node) -> list[tuple[Parts, Node]]:
    return [(split(path.decode()), node) for path, node in walk(tree)]


CASES: dict[str, tuple[Layers, dict[str, str]]] = {
    "whiteout and file of one name": (
        [[("file", "a", 1)], [("file", "a", 2), ("hide", "a")]],
        {"a": "2"},
    ),
    "whiteout of a directory": ([[("file", "a/b", 1)], [("hide", "a")]], {}),
    "whiteout of what is not there": ([[("file", "a", 1)], [("hide", "b/c")]], {"a": "1"}),
    "opaque with additions": (
        [[("file", "a/old", 1)], [("file", "a/new", 2), ("opaque", "a"), ("file", "a/more", 3)]],
        {"a": "/", "a/new": "2", "a/more": "3"},
    ),
    "opaque root": (
        [[("file", "a/x", 1), ("file", "b", 1)], [("opaque", ""), ("file", "a/y", 2)]],
        {"a": "/", "a/y": "2"},
    ),
    "directory becomes a file": ([[("file", "a/b", 1)], [("file", "a", 2)]], {"a": "2"}),
    "file becomes a directory": ([[("file", "a", 1)], [("file", "a/b", 2)]], {"error": ""}),
    "file becomes a directory, said so": (
        [[("file", "a", 1)], [("dir", "a", 0), ("file", "a/b", 2)]],
        {"a": "/", "a/b": "2"},
    ),
    "directory, file, directory": (
        [[("file", "a/b", 1)], [("file", "a", 2)], [("dir", "a", 0)]],
        {"a": "/"},
    ),
    "directory removed and made again": (
        [[("file", "a/b", 1)], [("hide", "a")], [("file", "a/c", 2)]],
        {"a": "/", "a/c": "2"},
    ),
    "through a link of the layer below": (
        [[("file", "usr/lib/x", 1), ("sym", "lib", "usr/lib")], [("file", "lib/y", 2)]],
        {"usr": "/", "usr/lib": "/", "usr/lib/x": "1", "usr/lib/y": "2", "lib": "->usr/lib"},
    ),
    "through a link out of the root": (
        [[("sym", "out", "../../../etc")], [("file", "out/passwd", 2)]],
        {"out": "->../../../etc", "etc": "/", "etc/passwd": "2"},
    ),
    "a loop of links": (
        [[("sym", "a", "b"), ("sym", "b", "a")], [("file", "a/x", 2)]],
        {"error": ""},
    ),
    "a link becomes an opaque directory": (
        [
            [("file", "real/x", 1), ("sym", "d", "real")],
            [("dir", "d", 0), ("opaque", "d"), ("file", "d/y", 2)],
        ],
        {"real": "/", "real/x": "1", "d": "/", "d/y": "2"},
    ),
    "whiteout through a link": (
        [[("file", "real/x", 1), ("sym", "d", "real")], [("hide", "d/x")]],
        {"real": "/", "real/x": "1", "d": "->real"},
    ),
    "hard link to a file below": (
        [[("file", "a", 1)], [("link", "b", "a")], [("hide", "a")]],
        {"b": "1"},
    ),
    "hard link to what the layer hides": (
        [[("file", "a", 1)], [("hide", "a"), ("link", "b", "a")]],
        {"error": ""},
    ),
    "given twice": ([[("file", "a", 1), ("file", "a", 2), ("dir", "a", 0)]], {"a": "/"}),
}  # fmt: skip


@pytest.mark.parametrize("cuts", [[False], [True]], ids=["collapsed", "stacked"])
@pytest.mark.parametrize("case", CASES)
def test_corners_of_the_specification(case: str, cuts: list[bool]) -> None:
    layers, expected = CASES[case]
    if "error" in expected:
        with pytest.raises(InvalidArgument):
            stacked(layers, cuts)
        return
    trees = stacked(layers, cuts)
    found = {
        "/".join(part.decode() for part in parts): shape(node)
        for parts, node in mounted(trees).items()
        if parts
    }
    assert found == expected
    if cuts == [False]:
        assert len(trees) == 1


def shape(node: Node) -> str:
    if node.is_dir():
        return "/"
    return f"->{node.target.decode()}" if stat.S_ISLNK(node.mode) else str(node.size)


def test_implied_directories_look_as_those_below() -> None:
    trees = stacked([[("dir", "a", 7), ("file", "a/b", 1)], [("file", "a/c", 2)]], [True])
    assert trees[1].children[b"a"].uid == 7


def test_a_hard_link_across_trees_is_one_file_on_top() -> None:
    trees = stacked([[("file", "a", 1)], [("link", "b", "a")]], [True])
    assert trees[1].children[b"a"] is trees[1].children[b"b"]


@pytest.mark.parametrize(
    "name", [".wh.", ".wh..", ".wh...", "a/.wh.", ".wh.a/b", ".wh.a/.wh.b", ".wh.a/.wh..wh..opq"]
)
def test_whiteouts_of_nothing_possible(name: str) -> None:
    change, refused = Change(), False
    try:
        change.add(Entry(split(name), node_of(("file", "", 0))))
    except InvalidArgument:
        refused = True
    assert refused or (change.opaque, change.whiteouts, change.entries) == ([], [], [])


def test_bookkeeping_of_aufs_is_left_out() -> None:
    change = Change()
    for name in (".wh..wh.aufs", ".wh..wh.plnk/x", "a/.wh..wh.orph"):
        change.add(Entry(split(name), node_of(("file", "", 0))))
    assert (change.opaque, change.whiteouts, change.entries) == ([], [], [])


def test_links_cannot_multiply_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsecd.images.sources.stack.MAX_STEPS", 1000)
    detour = "x/../" * 100
    ops: list[Op] = [("dir", "x", 0), ("sym", "l", detour + "x")]
    ops += [("file", f"l/{number}", 1) for number in range(10)]
    with pytest.raises(InvalidArgument, match="too long"):
        stacked([ops], [False])


def test_implied_directories_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dsecd.images.sources.stack.MAX_ENTRIES", 20)
    ops: list[Op] = [("file", f"{number}/" + "d/" * 20 + "f", 1) for number in range(2)]
    with pytest.raises(InvalidArgument, match="the image has more than"):
        stacked([ops], [False])


def test_an_empty_layer_adds_no_tree() -> None:
    assert len(stacked([[("file", "a", 1)], [], [("hide", "b")]], [True])) == 1
