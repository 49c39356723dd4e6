"""Files of a sandbox opened from outside: no link in them leads to the host."""

from __future__ import annotations

import errno
import os
import socket
from pathlib import Path

import pytest

from dsecd.host.inside import open_inside, reach, socket_inside, threads
from libdsec.errors import Unavailable


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("the host's")
    (tmp_path / "root/vm").mkdir(parents=True)
    return tmp_path / "root"


def test_a_path_begins_at_the_root(root: Path) -> None:
    (root / "vm/state").write_text("x")
    for path in ("/vm/state", "vm/state", "/../../vm/state"):
        fd = open_inside(root, path, os.O_RDONLY)
        assert os.read(fd, 9) == b"x"
        os.close(fd)
    with pytest.raises(FileNotFoundError):
        open_inside(root, "/../secret", os.O_RDONLY)


@pytest.mark.parametrize("target", ["../../secret", "/proc/self/exe", "state"])
def test_links_are_not_followed(root: Path, target: str) -> None:
    (root / "vm/state").write_text("x")
    (root / "vm/link").symlink_to(target)
    with pytest.raises(OSError, match="openat2") as caught:
        open_inside(root, "/vm/link", os.O_RDONLY)
    assert caught.value.errno == errno.ELOOP
    (root / "elsewhere").symlink_to("vm")
    with pytest.raises(OSError, match="openat2"):
        open_inside(root, "/elsewhere/state", os.O_RDONLY)


def test_a_new_file_has_the_mode_asked_for(root: Path) -> None:
    fd = open_inside(root, "/vm/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    assert not os.get_inheritable(fd)
    os.close(fd)


def test_a_socket_is_connected_to_and_says_who_listens(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(root / "vm")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("a.sock")
        listener.listen(1)
        Path("link.sock").symlink_to("a.sock")
        with pytest.raises(OSError, match="not in the sandbox"):
            socket_inside(root, "/vm/a.sock")  # this process has another root
        path = str(root / "vm/a.sock")
        connection, pid = socket_inside(Path("/"), path)
        with connection:
            assert pid == os.getpid()
            assert not connection.getblocking()
        with pytest.raises(OSError, match="openat2"):
            socket_inside(Path("/"), str(root / "vm/link.sock"))


async def test_reach_gives_up_in_time(root: Path) -> None:
    with pytest.raises(Unavailable, match=r"/vm/none\.sock"):
        await reach(root, "/vm/none.sock", 0.05)
    (root / "vm/link.sock").symlink_to("/run/x.sock")
    with pytest.raises(Unavailable, match=r"/vm/link\.sock"):
        await reach(root, "/vm/link.sock", 60)  # waiting makes it no better


def test_threads_have_both_ids() -> None:
    found = threads(os.getpid())
    assert os.getpid() in [thread for thread, _, _ in found]
    assert all(inner > 0 and name for _, inner, name in found)
    assert threads(2**22 + 1) == ()
