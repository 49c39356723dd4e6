"""Sources against the kernel: attributes, devices, mounts below, and uppers made by overlayfs."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings

from dsecd import fastpath
from dsecd.images.model import OPAQUE, REDIRECT, Node, walk
from dsecd.images.sources.attributes import read_acl, write_acl
from dsecd.images.sources.directory import read_directory
from dsecd.images.sources.upper import read_upper
from libdsec.errors import InvalidArgument, Unsupported
from tests.unit.sources_sink import MemorySink, describe, find
from tests.unit.test_sources_stack import LAYERS, Layers, Model, Refused, outline, split, stacked

pytestmark = pytest.mark.root
BASE = 1 << 28
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw=ep
IN_NAMESPACE = CAPABILITY[:3] + b"\x03" + CAPABILITY[4:] + BASE.to_bytes(4, "little")
OBJECTS = [(1, 7, 0xFFFFFFFF), (4, 5, 0xFFFFFFFF), (16, 5, 0xFFFFFFFF), (32, 0, 0xFFFFFFFF)]


def run(*command: str | Path, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=cwd)


class Overlay:
    """An overlay in a directory of the test's, mounted as dsecd mounts its own."""

    def __init__(self, root: Path) -> None:
        self.lower, self.upper, self.work, self.merged = (
            root / name for name in ("lower", "u", "w", "merged")
        )
        for path in (self.lower, self.upper, self.work, self.merged):
            path.mkdir(parents=True)

    def mount(self, *more: Path) -> None:
        lowers = ":".join(str(path) for path in (*more, self.lower))
        options = f"lowerdir={lowers},upperdir={self.upper},workdir={self.work}"
        options += ",redirect_dir=on,metacopy=off,index=off"
        run("mount", "-t", "overlay", "-o", options, "overlay", self.merged)

    def umount(self) -> None:
        run("umount", self.merged)


@pytest.fixture
def overlay(tmp_path: Path) -> Overlay:
    return Overlay(tmp_path)


def unfold(tree: Node, root: Path, sink: MemorySink) -> None:
    """Write a tree to disk: the plainest reverse of `read_directory`."""
    made: dict[int, Path] = {}
    for path, node in walk(tree):
        target = root / os.fsdecode(path)
        if id(node) in made:
            os.link(made[id(node)], target, follow_symlinks=False)
            continue
        if node.is_dir():
            target.mkdir(exist_ok=True)
        elif stat.S_ISLNK(node.mode):
            target.symlink_to(os.fsdecode(node.target))
        elif stat.S_ISREG(node.mode):
            target.write_bytes(sink.content(node))
        else:
            os.mknod(target, node.mode, os.makedev(*node.rdev))
        if not node.is_dir():
            made[id(node)] = target
        os.chown(target, node.uid, node.gid, follow_symlinks=False)
        if not stat.S_ISLNK(node.mode):
            target.chmod(stat.S_IMODE(node.mode))
        for name, value in node.xattrs.items():
            os.setxattr(target, name, value, follow_symlinks=False)
    for path, node in reversed(list(walk(tree))):
        when = (node.mtime_ns, node.mtime_ns)
        os.utime(root / os.fsdecode(path), ns=when, follow_symlinks=False)


def test_attributes_devices_and_owners(tmp_path: Path) -> None:
    acl = write_acl([*OBJECTS, (2, 6, 1000)])
    (tmp_path / "f").write_text("x")
    os.chown(tmp_path / "f", 1234, 100_000)
    for name, value in {
        "user.note": b"\0binary", "security.capability": CAPABILITY,
        "system.posix_acl_access": acl, "trusted.other": b"x", "trusted.overlay.opaque": b"y",
    }.items():  # fmt: skip
        os.setxattr(tmp_path / "f", name, value)
    (tmp_path / "l").symlink_to("x")
    os.setxattr(tmp_path / "l", "security.note", b"of a link", follow_symlinks=False)
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(tmp_path / "white", stat.S_IFCHR, 0)
    tree, report = read_directory(tmp_path, MemorySink())
    kept = {
        b"user.note": b"\0binary", b"security.capability": CAPABILITY,
        b"system.posix_acl_access": acl,
    }  # fmt: skip
    node = find(tree, "f")
    assert (node.uid, node.gid, node.xattrs) == (1234, 100_000, kept)
    assert find(tree, "l").xattrs == {b"security.note": b"of a link"}
    assert not {b"null", b"white"} & set(tree.children)
    assert (report.xattrs, report.devices) == (2, 2)
    tree, _ = read_directory(tmp_path, MemorySink(), devices=True, overlay=True)
    assert find(tree, "null").rdev == (1, 3)
    assert find(tree, "white").is_whiteout()
    assert find(tree, "f").xattrs == kept | {OPAQUE: b"y"}


@pytest.fixture
def mounted_below(tmp_path: Path) -> Iterator[Path]:
    (tmp_path / "root/a/point").mkdir(parents=True)
    run("mount", "-t", "tmpfs", "none", tmp_path / "root/a/point")
    yield tmp_path / "root"
    run("umount", tmp_path / "root/a/point")


def test_mounts_below_are_not_entered_unless_asked(mounted_below: Path) -> None:
    (mounted_below / "a/point/f").write_text("x")
    tree, report = read_directory(mounted_below, MemorySink())
    assert find(tree, "a/point").children == {}
    assert report.mounts == ["a/point"]
    assert "not entered: a/point" in " ".join(report.notes())
    tree, report = read_directory(mounted_below, MemorySink(), enter_mounts=True)
    assert find(tree, "a/point/f").size == 1
    assert report.mounts == []


def test_files_of_an_overlay_are_no_mounts(overlay: Overlay) -> None:
    (overlay.lower / "f").write_text("lower")
    overlay.mount()
    try:
        tree, report = read_directory(overlay.merged, MemorySink())
    finally:
        overlay.umount()
    assert find(tree, "f").size == 5
    assert report.mounts == []


# --- uppers ---------------------------------------------------------------------------------

LIFE = """
set -e
rm whiteout; rm -r gone; rm -r replaced; mkdir replaced; echo new > replaced/new
mv renamed moved; echo more >> moved/inside
echo changed > changed; ln changed linked; chmod 4755 suid
rm file-dir; mkdir file-dir; echo x > file-dir/x; rm -r dir-file; echo y > dir-file
ln -s /etc/passwd sym; mkfifo pipe; echo tmp > tmp/residue; rm tmp/old
mkdir deep; mkdir deep/er; echo d > deep/er/d
"""


def populate(lower: Path) -> None:
    for name in (
        "gone/f",
        "replaced/old",
        "renamed/inside",
        "renamed/sub/f",
        "dir-file/f",
        "tmp/old",
    ):
        (lower / name).parent.mkdir(parents=True, exist_ok=True)
        (lower / name).write_text(name)
    for name in ("whiteout", "changed", "suid", "file-dir", "untouched"):
        (lower / name).write_text(name)


def own(root: Path) -> None:
    """Give a tree to a sandbox's range, as an idmapped lower looks to the overlay."""
    for path in (root, *root.rglob("*")):
        os.chown(path, BASE, BASE, follow_symlinks=False)


def live(overlay: Overlay) -> None:
    """Change the overlay as root of a sandbox would."""
    for path in (overlay.upper, overlay.work):
        os.chown(path, BASE, BASE)
    overlay.mount()
    try:
        owner = (f"--reuid={BASE}", f"--regid={BASE}", "--clear-groups")
        run("setpriv", *owner, "sh", "-c", LIFE, cwd=overlay.merged)
    finally:
        overlay.umount()


def test_an_upper_on_top_of_its_lower_is_what_the_sandbox_saw(
    overlay: Overlay, tmp_path: Path
) -> None:
    populate(overlay.lower)
    own(overlay.lower)
    live(overlay)
    overlay.mount()
    try:
        seen = MemorySink()
        expected, _ = read_directory(overlay.merged, seen)
    finally:
        overlay.umount()
    sink = MemorySink()
    tree, _ = read_upper(overlay.upper, BASE, sink, residue=())
    assert find(tree, "whiteout").is_whiteout()
    assert find(tree, "tmp/old").is_whiteout()
    assert find(tree, "replaced").xattrs == {OPAQUE: b"y"}
    assert set(find(tree, "moved").xattrs) == {REDIRECT}
    assert find(tree, "changed") is find(tree, "linked")
    assert b"untouched" not in tree.children
    assert all(not node.uid and not node.gid for _, node in walk(tree))
    # again as a lower of another sandbox, ids shifted as an idmapped mount does it
    again = Overlay(tmp_path / "again")
    layer = tmp_path / "layer"
    unfold(tree, layer, sink)
    populate(again.lower)
    again.mount(layer)
    try:
        found_sink = MemorySink()
        found, _ = read_directory(again.merged, found_sink)
    finally:
        again.umount()
    for node in {id(node): node for _, node in walk(expected)}.values():
        node.uid, node.gid = node.uid - BASE, node.gid - BASE
    now, then = describe(found, found_sink), describe(expected, seen)
    timeless = [
        {path: (*fields[1:4], *fields[5:]) for path, fields in one.items() if path}
        for one in (now, then)
    ]
    assert timeless[0] == timeless[1]
    for path in (b"changed", b"moved/inside", b"replaced/new", b"deep/er"):
        assert now[path][4] == then[path][4]  # times of what the upper holds


def test_devices_are_no_whiteouts_unless_they_are(tmp_path: Path) -> None:
    os.mknod(tmp_path / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    os.mknod(tmp_path / "white", stat.S_IFCHR, 0)
    assert set(read_directory(tmp_path, MemorySink(), devices=True)[0].children) == {b"null"}
    assert set(read_directory(tmp_path, MemorySink(), overlay=True)[0].children) == {b"white"}
    tree, report = read_upper(tmp_path, 0, MemorySink())
    assert set(tree.children) == {b"white"}
    assert report.devices == 1


def test_residue_of_an_upper_hides_what_it_hid(overlay: Overlay) -> None:
    for name in ("tmp/d/below", "tmp/f", "tmp/g"):
        (overlay.lower / name).parent.mkdir(parents=True, exist_ok=True)
        (overlay.lower / name).write_text("below")
    overlay.mount()
    try:
        run("rm", "-r", overlay.merged / "tmp/d", overlay.merged / "tmp/f")
        (overlay.merged / "tmp/d").mkdir()
        (overlay.merged / "tmp/d/new").write_text("new")
        (overlay.merged / "tmp/g").write_text("changed")
    finally:
        overlay.umount()
    tree, report = read_upper(overlay.upper, 0, MemorySink())
    assert set(find(tree, "tmp").children) == {b"d", b"f"}
    assert all(node.is_whiteout() for node in find(tree, "tmp").children.values())
    assert report.residue["tmp/*"].count == 3  # d, d/new, g


def test_ids_inside_attributes_are_shifted(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "f").write_text("x")
    os.chown(tmp_path / "f", BASE + 5, BASE + 65535)
    os.chown(tmp_path, BASE, BASE)
    acl = [*OBJECTS, (2, 6, BASE + 1000), (8, 4, BASE + 7)]
    os.setxattr(tmp_path / "f", "system.posix_acl_access", write_acl(acl))
    os.setxattr(tmp_path / "f", "security.capability", IN_NAMESPACE)
    node = find(read_upper(tmp_path, BASE, MemorySink())[0], "f")
    assert (node.uid, node.gid) == (5, 65535)
    assert read_acl(node.xattrs[b"system.posix_acl_access"]) == sorted(
        [*OBJECTS, (2, 6, 1000), (8, 4, 7)]
    )
    assert node.xattrs[b"security.capability"] == CAPABILITY
    os.setxattr(tmp_path / "f", "system.posix_acl_access", write_acl([*OBJECTS, (2, 6, 1000)]))
    with pytest.raises(InvalidArgument, match="f belongs to the host's id 1000"):
        read_upper(tmp_path, BASE, MemorySink())


SET = """
import os, sys
for name, value in zip(sys.argv[1::2], sys.argv[2::2]):
    os.setxattr("f", name, bytes.fromhex(value))
"""


def test_attributes_that_root_of_a_sandbox_set(overlay: Overlay) -> None:
    (overlay.lower / "f").write_text("x")
    own(overlay.lower)
    for path in (overlay.upper, overlay.work):
        os.chown(path, BASE, BASE)
    acl = write_acl([*OBJECTS, (2, 6, 1000), (8, 4, 7)])
    wanted = {
        "security.capability": CAPABILITY, "system.posix_acl_access": acl, "user.note": b"n",
    }  # fmt: skip
    pairs = [text for name, value in wanted.items() for text in (name, value.hex())]
    namespace = fastpath.make_userns(BASE, BASE + 65535)
    overlay.mount()
    try:
        inside = (f"--user=/proc/{os.getpid()}/fd/{namespace}", "-S", "0", "-G", "0")
        run("nsenter", *inside, "/usr/bin/python3", "-c", SET, *pairs, cwd=overlay.merged)
    finally:
        overlay.umount()
        os.close(namespace)
    assert (
        os.getxattr(overlay.upper / "f", "security.capability") == IN_NAMESPACE
    )  # the host's view
    node = find(read_upper(overlay.upper, BASE, MemorySink())[0], "f")
    assert node.xattrs == {name.encode(): value for name, value in wanted.items()}


LOCAL: Sequence[str] = ("origin", "impure", "nlink", "upper", "uuid", "protattr")


def test_attributes_of_one_overlay_only(tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    for name in (*LOCAL, "overlay.opaque"):
        os.setxattr(tmp_path / "d", f"trusted.overlay.{name}", b"y")
    tree, report = read_upper(tmp_path, 0, MemorySink())
    assert find(tree, "d").xattrs == {b"trusted.overlay.overlay.opaque": b"y"}
    assert report.xattrs == 0


@pytest.mark.parametrize(("name", "value"), [("metacopy", b""), ("opaque", b"x"), ("new", b"")])
def test_features_we_do_not_mount_with_are_refused(tmp_path: Path, name: str, value: bytes) -> None:
    (tmp_path / "f").write_text("x")
    os.setxattr(tmp_path / "f", f"trusted.overlay.{name}", value)
    with pytest.raises(Unsupported, match=r"f: .*overlays mounted by dsecd never have"):
        read_upper(tmp_path, 0, MemorySink())


# --- layers ---------------------------------------------------------------------------------


@settings(max_examples=25)
@given(layers=LAYERS)
def test_stacked_trees_mounted_show_what_the_model_holds(
    tmp_path_factory: pytest.TempPathFactory, layers: Layers
) -> None:
    model = Model()
    try:
        for ops in layers:
            model.apply(ops)
    except Refused:
        return
    scratch = tmp_path_factory.mktemp("stack")
    for node in model.paths.values():
        node.size = 0  # what `node_of` made has no content
    trees = stacked([[("file", "anchor", 0)], *layers], [True])
    paths = []
    for number, tree in enumerate(trees):
        for _, node in walk(tree):
            node.size = 0
        unfold(tree, scratch / str(number), MemorySink())
        paths.append(scratch / str(number))
    point = scratch / "merged"
    point.mkdir()
    lowers = ":".join(str(path) for path in reversed([scratch / "empty", *paths]))
    (scratch / "empty").mkdir()
    run("mount", "-t", "overlay", "-o", f"lowerdir={lowers}", "overlay", point)
    try:
        found, _ = read_directory(point, MemorySink())
    finally:
        run("umount", point)
    found.children.pop(b"anchor", None)  # gone where a layer hides all below it
    shown = outline({split(path.decode()): node for path, node in walk(found)}, False)
    expected = outline(model.paths, False)
    assert shown == expected
