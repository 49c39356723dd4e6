"""What a layer holds is what the source held, and kill -9 of an import leaves nothing for long."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsecd.host.layers import LayerMounts
from dsecd.images.store import LayerStore

pytestmark = pytest.mark.root
CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000")  # cap_net_raw=ep, version 2


@pytest.fixture
def store(tmp_path: Path) -> LayerStore:
    made = LayerStore(tmp_path / "state")
    made.start()
    return made


@pytest.fixture
def mounts(tmp_path: Path) -> Iterator[LayerMounts]:
    made = LayerMounts(tmp_path / "run")
    made.start()
    yield made
    made.teardown()


def make_tree(root: Path) -> None:
    """One of everything a layer can hold, and what it cannot."""
    (root / "d/empty").mkdir(parents=True)
    (root / "d/f").write_text("content\n")
    os.chown(root / "d/f", 1234, 65534)
    (root / "d/setuid").write_bytes(b"x" * 10_000)
    (root / "d/setuid").chmod(0o4755)
    os.setxattr(root / "d/setuid", "user.note", b"\0binary")
    (root / "d/cap").write_bytes(b"y" * 5000)
    os.setxattr(root / "d/cap", "security.capability", CAPABILITY)
    (root / "d/link").symlink_to("../nowhere")
    os.link(root / "d/f", root / "hard")
    os.mkfifo(root / "fifo", 0o600)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    Path(os.fsdecode(os.fsencode(root) + b"/n\xffame\n")).write_bytes(b"z")
    with (root / "sparse").open("wb") as file:
        file.seek(3 << 20)
        file.write(b"end")
    os.mknod(root / "null", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(root / "socket"))
    for path in (*root.rglob("*"), root):
        os.utime(path, ns=(10**18 + 123_456_789, 10**18 + 123_456_789), follow_symlinks=False)


def describe(root: Path) -> dict[str, tuple[object, ...]]:
    """Everything about a tree that a sandbox could see, but for what has no place in a layer."""
    found: dict[str, tuple[object, ...]] = {}
    for path in (root, *root.rglob("*")):
        status = path.lstat()
        if stat.S_ISCHR(status.st_mode) or stat.S_ISSOCK(status.st_mode):
            continue
        regular = stat.S_ISREG(status.st_mode)
        names = [name for name in os.listxattr(path, follow_symlinks=False)]  # noqa: C416
        found[str(path.relative_to(root))] = (
            status.st_mode, status.st_uid, status.st_gid, status.st_mtime_ns,
            status.st_nlink if regular else 0, path.read_bytes() if regular else b"",
            path.readlink() if path.is_symlink() else None,
            {name: os.getxattr(path, name, follow_symlinks=False) for name in names},
        )  # fmt: skip
    return found


async def test_a_tree_arrives_whole_from_a_directory_and_from_a_tar(
    store: LayerStore, mounts: LayerMounts, tmp_path: Path
) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    make_tree(root)
    tar = tmp_path / "tree.tar.gz"
    command = ["tar", "--format=pax", "--xattrs", "--xattrs-include=*", "-C", str(root)]
    subprocess.run([*command, "-czf", str(tar), "."], check=True, capture_output=True)  # noqa: ASYNC221
    expected = describe(root)
    for name, source in (("dir:1", root), ("tar:1", tar)):
        layer = await store.import_(name, source)
        mounts.acquire(layer.digest, layer.path)
        seen = describe(tmp_path / "run" / layer.digest)
        assert seen == expected
        assert len(seen) == 12
        mounts.release(layer.digest)
    assert store.resolve("dir:1").digest == store.resolve("tar:1").digest


IMPORT = """
import sys
from pathlib import Path
from dsecd.images.store import LayerStore
store = LayerStore(Path(sys.argv[1])); store.start()
store.import_blocking("x:1", Path(sys.argv[2]))
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.02, 0.1, 0.3])
def test_kill_9_of_an_import_leaves_nothing_for_long(
    store: LayerStore, tmp_path: Path, delay_s: float
) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    for number in range(300):
        (root / f"f{number}").write_bytes(os.urandom(100_000))
    tar = tmp_path / "t.tar"
    subprocess.run(["tar", "-C", str(root), "-cf", str(tar), "."], check=True)
    state = tmp_path / "state"
    process = subprocess.Popen([sys.executable, "-c", IMPORT, str(state), str(tar)])
    deadline = time.monotonic() + 10
    while not any((state / "tmp").iterdir()) and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay_s)
    process.send_signal(signal.SIGKILL)
    process.wait()
    again = LayerStore(state)
    again.start()
    assert list((state / "tmp").iterdir()) == []
    for layer in again.list():  # it may have been finished: then it is whole
        again.verify(layer.digest)


def test_an_import_of_another_process_is_left_alone(store: LayerStore, tmp_path: Path) -> None:
    root = tmp_path / "tree"
    root.mkdir()
    for number in range(300):
        (root / f"f{number}").write_bytes(os.urandom(100_000))
    state = tmp_path / "state"
    process = subprocess.Popen([sys.executable, "-c", IMPORT, str(state), str(root)])
    while process.poll() is None:
        LayerStore(state).start()  # a daemon that starts meanwhile
        time.sleep(0.01)
    assert process.returncode == 0
    assert store.resolve("x:1").size_bytes > 30_000_000
