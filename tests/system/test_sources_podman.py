"""Images as another runtime unpacks them: what its overlay shows is what our trees show.

Only layers as tools write them, with their parent directories and nothing given twice: in the rest
runtimes differ (podman unpacks a layer by itself, so a link below is not followed; it refuses a
whiteout and a file of one name).
"""

from __future__ import annotations

import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.images.model import Node
from dsecd.images.sources.directory import read_directory
from dsecd.images.sources.oci import merge, read_layout
from tests.system.test_sources_kernel import run, unfold
from tests.unit.sources_sink import MemorySink, describe
from tests.unit.sources_tars import Members, entry, pack
from tests.unit.test_sources_oci import Layout

pytestmark = [
    pytest.mark.root,
    pytest.mark.skipif(shutil.which("podman") is None, reason="podman is not installed"),
]


def directory(name: str, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.DIRTYPE, mtime=1000, **fields), b""


def file(name: str, content: bytes = b"x", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, mtime=2000, **fields), content


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, tarfile.SYMTYPE, linkname=target, mtime=3000), b""


def hard(name: str, target: str, **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    """`fields` are those of the target: podman applies them, we leave them alone."""
    return entry(name, tarfile.LNKTYPE, linkname=target, mtime=2000, **fields), b""


LOWER = [
    directory("./", mode=0o755), directory("etc", mode=0o750, uid=5), file("etc/conf", b"one"),
    file("etc/gone"), directory("opt"), directory("opt/old"), file("opt/old/a", b"a" * 200_000),
    directory("usr"), directory("usr/bin"), file("usr/bin/tool", b"tool", mode=0o4755, gid=7),
    hard("usr/bin/alias", "usr/bin/tool", mode=0o4755, gid=7), link("bin", "usr/bin"),
    directory("var"), file("var/file"), directory("srv"), directory("srv/d"), file("srv/d/f"),
    file("attr", pax_headers={"SCHILY.xattr.user.k": "v"}),
]  # fmt: skip
UPPERS: dict[str, list[Members]] = {
    "nothing": [[]],
    "changes": [[directory("etc", mode=0o700, uid=6), file("etc/conf", b"two"), file("new")]],
    "whiteouts": [[directory("etc"), file("etc/.wh.gone", b""), file(".wh.srv", b"")]],
    "opaque": [
        [directory("opt"), directory("opt/old"), file("opt/old/.wh..wh..opq"), file("opt/old/b")]
    ],
    "other kinds": [
        [directory("var"), directory("var/file"), file("var/file/x"), file("srv", b"file")]
    ],
    "links": [[link("bin", "nowhere"), file("new", b"n"), hard("hard", "new")]],
    "back and forth": [
        [file(".wh.opt", b"")],
        [directory("opt"), file("opt/new", b"1")],
        [directory("opt"), file("opt/.wh.new", b""), directory("opt/old"), file("opt/old/a", b"2")],
        [directory("srv"), file("srv/.wh.d", b"")],
        [directory("srv"), directory("srv/d", mode=0o711)],
    ],
}  # fmt: skip


class Podman:
    """A store of its own below `root`, whose path must be short."""

    def __init__(self, root: Path) -> None:
        self.storage = root / "root"
        self._base = ["podman", "--root", str(self.storage), "--runroot", str(root / "run")]
        self._base += ["--storage-driver", "overlay"]

    def __call__(self, *command: str) -> str:
        done = subprocess.run([*self._base, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


@pytest.fixture
def podman() -> Iterator[Podman]:
    with tempfile.TemporaryDirectory(prefix="p") as root:
        made = Podman(Path(root))
        yield made
        if (made.storage / "overlay").is_mount():
            run("umount", made.storage / "overlay")


def seen_by(podman: Podman, layout: Path) -> tuple[Node, MemorySink]:
    image = podman("pull", "-q", f"oci:{layout}")
    sink = MemorySink()
    try:
        tree, _ = read_directory(Path(podman("image", "mount", image)), sink)
    finally:
        podman("image", "umount", image)
        podman("rmi", "-f", image)
    return tree, sink


@pytest.mark.parametrize("threshold", [0, 1 << 40], ids=["stacked", "collapsed"])
@pytest.mark.parametrize("case", UPPERS)
def test_podman_shows_the_same(podman: Podman, tmp_path: Path, case: str, threshold: int) -> None:
    layout = Layout(tmp_path / "layout")
    layout.image(*(pack(*members) for members in (LOWER, *UPPERS[case])))
    expected, expected_sink = seen_by(podman, layout.finish())
    sink = MemorySink()
    trees, _ = merge(read_layout(layout.root).layers, sink, threshold_bytes=threshold)
    lowers = [tmp_path / "empty"]
    lowers[0].mkdir()
    for number, tree in enumerate(trees):
        lowers.insert(0, tmp_path / f"tree{number}")
        lowers[0].mkdir()
        unfold(tree, lowers[0], sink)
    (tmp_path / "merged").mkdir()
    options = "lowerdir=" + ":".join(map(str, lowers))
    run("mount", "-t", "overlay", "-o", options, "overlay", tmp_path / "merged")
    try:
        found_sink = MemorySink()
        found, _ = read_directory(tmp_path / "merged", found_sink)
    finally:
        run("umount", tmp_path / "merged")
    shown, wanted = describe(found, found_sink), describe(expected, expected_sink)
    del shown[b""], wanted[b""]  # podman gives the root attributes of its own
    assert shown == wanted
