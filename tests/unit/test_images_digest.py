"""The name of a layer: same input, same digest; any difference, another; a fixed example."""

from __future__ import annotations

import copy
import functools
import hashlib
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from dsecd.images.chunks import ChunkWriter
from dsecd.images.digest import layer_digest
from dsecd.images.manifest import Config
from dsecd.images.model import Chunk, Node, directory
from libdsec.errors import InvalidArgument
from tests.unit.image_trees import Build, everything, trees

CONFIG = Config(env={"PATH": "/bin", "A": "1"}, user="app")


def tree() -> Node:
    root = directory()
    one = Node(mode=stat.S_IFREG | 0o644, size=70_000)
    one.chunks = [Chunk(b"1" * 32, 65536), Chunk(b"2" * 32, 4464)]
    one.xattrs = {b"user.a": b"1", b"user.b": b"2"}
    root.children = {
        b"a": one,
        b"b": one,
        b"hole": Node(mode=stat.S_IFREG | 0o644, size=1, chunks=[None]),
        b"link": Node(mode=stat.S_IFLNK | 0o777, target=b"a"),
        b"null": Node(mode=stat.S_IFCHR | 0o666, rdev=(1, 3)),
        b"dir": directory(),
    }
    return root


def test_a_fixed_example_has_the_digest_it_always_had() -> None:
    """When this fails, every layer in every store has got another name."""
    found = layer_digest(tree(), CONFIG, ["ab" * 32])
    assert found == "b9a79c03f0610997090c424e9ecfda3405272e615792e73427a078199fb98d2d"
    assert (
        layer_digest(directory(), Config(), [])
        == "857a7119c9f2e60f12ad5a1df3c6e1c08ecf6c587b6baafde33de1e771698aa1"
    )


def test_order_of_names_attributes_and_environment_does_not_matter() -> None:
    other = tree()
    other.children = dict(reversed(other.children.items()))
    other.children[b"a"].xattrs = dict(reversed(other.children[b"a"].xattrs.items()))
    config = Config(env=dict(reversed(CONFIG.env.items())), user="app")
    assert layer_digest(other, config, []) == layer_digest(tree(), CONFIG, [])


def _unlink(root: Node) -> None:
    root.children[b"b"] = copy.copy(root.children[b"b"])


def _deeper(root: Node) -> None:
    root.children[b"dir"].children[b"a"] = root.children.pop(b"a")


def _grow(root: Node) -> None:
    root.children[b"hole"].size = 2


def _fill(root: Node) -> None:
    root.children[b"hole"].chunks = [Chunk(bytes(32), 1)]


CHANGES: dict[str, Callable[[Node], object]] = {
    "mode": lambda root: setattr(root.children[b"a"], "mode", stat.S_IFREG | 0o600),
    "uid": lambda root: setattr(root.children[b"a"], "uid", 1),
    "gid": lambda root: setattr(root, "gid", 1),
    "nanoseconds": lambda root: setattr(root.children[b"dir"], "mtime_ns", 1),
    "before the epoch": lambda root: setattr(root.children[b"dir"], "mtime_ns", -1),
    "target": lambda root: setattr(root.children[b"link"], "target", b"b"),
    "device": lambda root: setattr(root.children[b"null"], "rdev", (3, 1)),
    "attribute": lambda root: root.children[b"a"].xattrs.update({b"user.b": b"3"}),
    "attribute of the root": lambda root: root.xattrs.update({b"user.b": b""}),
    "name": lambda root: root.children.update({b"A": root.children.pop(b"a")}),
    "depth": _deeper,
    "chunk": lambda root: root.children[b"a"].chunks.reverse(),
    "hole": _fill,
    "size": _grow,
    "hard link": _unlink,
}


@pytest.mark.parametrize("change", CHANGES)
def test_every_difference_gives_another_digest(change: str) -> None:
    other = tree()
    CHANGES[change](other)
    assert layer_digest(other, CONFIG, []) != layer_digest(tree(), CONFIG, [])


def test_config_and_parents_count() -> None:
    digests = {
        layer_digest(tree(), config, parents)
        for config in (Config(), CONFIG, Config(cmd=["a"]), Config(entrypoint=["a"]))
        for parents in ([], ["a"], ["b"], ["a", "b"], ["b", "a"], ["ab"])
    }
    assert len(digests) == 24


def test_an_independent_encoder_agrees() -> None:
    """Written from the description: the empty tree with a parent."""
    data = b"dsec layer 1\n" + b"\2\0\0\0{}" + b"\1\0\0\0" + b"\2\0\0\0ab"
    data += bytes(4) + b"\0" + (0o040755).to_bytes(4, "little") + bytes(8 + 8 + 4 + 4 + 4)
    assert layer_digest(directory(), Config(), ["ab"]) == hashlib.sha256(data).hexdigest()


def test_the_work_does_not_grow_with_depth() -> None:
    root = here = directory()
    for _ in range(50_000):
        here.children[b"n" * 255] = here = directory()
    assert len(layer_digest(root, Config(), [])) == 64


def test_a_time_that_no_file_can_have() -> None:
    root = tree()
    root.children[b"dir"].mtime_ns = 1 << 100
    with pytest.raises(InvalidArgument, match="dir: a number is out of range"):
        layer_digest(root, CONFIG, [])


def digest(build: Build) -> str:
    with tempfile.TemporaryDirectory() as folder, ChunkWriter(Path(folder) / "blob") as sink:
        return layer_digest(build(sink), Config(), [])


@settings(max_examples=15, suppress_health_check=list(HealthCheck))
@given(build=trees(), other=trees())
def test_the_same_tree_built_again_has_the_same_digest(build: Build, other: Build) -> None:
    found = digest(build)
    assert digest(build) == found
    assert digest_of_everything() not in (found, digest(other))


@functools.cache
def digest_of_everything() -> str:
    return digest(everything)
