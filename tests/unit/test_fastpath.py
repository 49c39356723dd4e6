"""The system-call layer: the same tests on the C extension and on its Python twin."""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from _fastpath import StepError
from dsecd import fastpath
from libdsec.errors import Unsupported

UID_BASE = 0x6E000000
_NS_GET_OWNER_UID = 0xB704
_SUBREAPER, _WALL = 36, 0x40000000  # include/uapi/linux/{prctl,wait}.h


@pytest.fixture(params=["c", "python"])
def layer(request: pytest.FixtureRequest) -> Any:
    names = {"c": "_fastpath._core", "python": "_fastpath.twin"}
    return importlib.import_module(names[request.param])


def _import(choice: str) -> subprocess.CompletedProcess[str]:
    code = "import dsecd.fastpath as f; print(f.IMPLEMENTATION)"
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"DSEC_FASTPATH": choice},
        capture_output=True,
        text=True,
    )


def test_the_environment_chooses_and_a_wrong_choice_fails_loudly() -> None:
    assert _import("c").stdout == "c\n"
    assert _import("python").stdout == "python\n"
    assert _import("").stdout == "c\n"
    assert "DSEC_FASTPATH='fast': must be one of c, python" in _import("fast").stderr


def test_both_layers_export_the_whole_contract(layer: Any) -> None:
    raised_above = {"IMPLEMENTATION", "StepError"}
    assert [n for n in fastpath.__all__ if n not in raised_above and not hasattr(layer, n)] == []


def test_remove_tree_takes_deep_and_wide_trees(layer: Any, tmp_path: Path) -> None:
    top = tmp_path / "tree"
    here = top
    for _ in range(400):
        here = here / "deeper"
    here.mkdir(parents=True)
    for number in range(3000):
        (top / f"file{number}").touch()
    for number in range(300):
        (top / f"dir{number}/x").mkdir(parents=True)
        (top / f"dir{number}/x/\udcff\n").touch()
    layer.remove_tree(top)
    assert not top.exists()
    layer.remove_tree(top)


def test_remove_tree_never_follows_a_link(layer: Any, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").touch()
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree/link").symlink_to(kept)
    (tmp_path / "direct").symlink_to(kept)
    layer.remove_tree(str(tmp_path / "tree").encode())
    layer.remove_tree(tmp_path / "direct")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept"]
    assert (kept / "file").exists()


def test_errors_name_the_step(layer: Any, tmp_path: Path) -> None:
    with pytest.raises(StepError) as caught:
        layer.open_tree(tmp_path / "absent", clone=False)
    assert (caught.value.step, caught.value.errno) == ("open_tree", 2)
    with pytest.raises(StepError) as caught:
        layer.umount(tmp_path / "absent")
    assert caught.value.step == "umount"


def test_core_scheduling_is_there_or_is_refused_with_a_reason() -> None:
    child = subprocess.Popen(["sleep", "10"])
    reason = ""
    try:
        fastpath.make_sched_cookie(child.pid)
    except Unsupported as error:
        reason = str(error.detail["reason"])
    else:
        assert fastpath.get_sched_cookie(child.pid) != 0
    finally:
        child.kill()
        child.wait()
    assert reason in ("", "the kernel has no CONFIG_SCHED_CORE", "the processor has no SMT")


def test_cookie_calls_reach_the_kernel(layer: Any) -> None:
    try:
        known = layer.get_sched_cookie(0) == 0
    except StepError as error:
        known = error.step == "sched_core_get" and error.errno in (22, 19)
    assert known


@pytest.mark.root
def test_a_user_namespace_belongs_to_its_owner(layer: Any) -> None:
    import fcntl

    fd = layer.make_userns(UID_BASE, UID_BASE + 65535)
    try:
        owner = fcntl.ioctl(fd, _NS_GET_OWNER_UID, struct.pack("I", 0))
        assert struct.unpack("I", owner) == (UID_BASE + 65535,)
        mapped = subprocess.run(
            ["nsenter", f"--user=/proc/self/fd/{fd}", "cat", "/proc/self/uid_map"],
            pass_fds=[fd],
            capture_output=True,
            text=True,
        )
        assert mapped.stdout.split() == ["0", str(UID_BASE), "65535"]
    finally:
        os.close(fd)
    assert os.geteuid() == 0
    Path("/proc/self/environ").read_bytes()  # this process is dumpable as before


@pytest.mark.root
def test_who_is_killed_while_it_makes_a_user_namespace_leaves_no_process(layer: Any) -> None:
    """It would hold the lock of the daemon, which could not start again."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_SUBREAPER, 1, 0, 0, 0) == 0
    try:
        for number in range(60):
            pid = os.fork()
            if pid == 0:
                for _ in range(1000):
                    os.close(layer.make_userns(UID_BASE, UID_BASE + 65535))
                os._exit(0)
            time.sleep(0.002 + number * 0.0001)
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            deadline = time.monotonic() + 20
            while _has_children():
                assert time.monotonic() < deadline, number
                time.sleep(0.001)
    finally:
        prctl(_SUBREAPER, 0, 0, 0, 0)


def _has_children() -> bool:
    try:
        os.waitpid(-1, os.WNOHANG | _WALL)
    except ChildProcessError:
        return False
    return True


@pytest.mark.root
def test_a_mount_shows_one_range_as_another(layer: Any, tmp_path: Path) -> None:
    other, tree = UID_BASE + (1 << 20), tmp_path / "tree"
    tree.mkdir(mode=0o755)
    for name, uid in (("first", UID_BASE), ("last", UID_BASE + 65534), ("owner", UID_BASE + 65535)):
        (tree / name).touch()
        os.chown(tree / name, uid, uid)
    userns = layer.make_shift_userns(UID_BASE, other)
    clone = layer.open_tree(tree, clone=True)
    try:
        layer.idmap_mount(clone, userns)
        seen = {name: os.stat(name, dir_fd=clone).st_uid for name in ("first", "last", "owner")}
    except StepError as error:
        pytest.skip(f"no idmapped mounts of this file system: {error}")
    finally:
        os.close(clone)
        os.close(userns)
    assert seen == {"first": other, "last": other + 65534, "owner": 65534}  # nobody's


@pytest.mark.root
def test_user_namespaces_from_many_threads_keep_root(layer: Any) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def make(number: int) -> int:
        base = UID_BASE + number * 65536
        os.close(layer.make_userns(base, base + 65535))
        return os.geteuid()

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(make, range(40))) == {0}


@pytest.mark.root
def test_a_network_namespace_is_reusable_until_something_is_left(layer: Any) -> None:
    fd = layer.make_netns()
    enter = ["nsenter", f"--net=/proc/self/fd/{fd}"]
    try:
        assert layer.netns_reusable(fd)
        code = "import socket,sys; s=socket.create_server(('127.0.0.1',0)); print(flush=True); "
        code += "sys.stdin.read()"
        user = subprocess.Popen(
            [*enter, sys.executable, "-c", code],
            pass_fds=[fd],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert user.stdout is not None
        user.stdout.readline()
        assert not layer.netns_reusable(fd)
        user.communicate()
        _until(lambda: layer.netns_reusable(fd))

        # whoever closes first keeps the connection in TIME_WAIT for a minute
        code = (
            "import socket; s=socket.create_server(('127.0.0.1',0));"
            "c=socket.create_connection(s.getsockname()); a=s.accept()[0];"
            "c.close(); a.recv(1); a.close()"
        )
        subprocess.run([*enter, sys.executable, "-c", code], pass_fds=[fd], check=True)
        assert not layer.netns_reusable(fd)
    finally:
        os.close(fd)


@pytest.mark.root
def test_an_interface_left_behind_is_seen(layer: Any) -> None:
    fd = layer.make_netns()
    enter = ["nsenter", f"--net=/proc/self/fd/{fd}", "ip", "link"]
    try:
        subprocess.run(
            [*enter, "add", "v0", "type", "veth", "peer", "v1"], pass_fds=[fd], check=True
        )
        assert not layer.netns_reusable(fd)
        subprocess.run([*enter, "del", "v0"], pass_fds=[fd], check=True)
        _until(lambda: layer.netns_reusable(fd))
    finally:
        os.close(fd)


@pytest.mark.root
def test_a_descriptor_that_is_no_network_namespace_is_refused(layer: Any) -> None:
    with socket.socket() as other, pytest.raises(StepError) as caught:
        layer.netns_reusable(other.fileno())
    assert caught.value.step == "setns"


@pytest.mark.root
def test_an_image_is_mounted_cloned_mapped_and_attached(layer: Any, tmp_path: Path) -> None:
    source, image, point = tmp_path / "source", tmp_path / "image", tmp_path / "point"
    source.mkdir()
    point.mkdir()
    (source / "file").write_text("content")
    subprocess.run(["mkfs.erofs", image, source], check=True, capture_output=True)
    userns = layer.make_userns(UID_BASE, UID_BASE + 65535)
    mount = layer.mount_erofs(image)
    try:
        layer.move_mount(mount, point)
        assert (point / "file").read_text() == "content"
        clone = layer.open_tree(point, clone=True)
        layer.idmap_mount(clone, userns)
        assert os.stat("file", dir_fd=clone).st_uid == UID_BASE
        assert (point / "file").stat().st_uid == 0
        with pytest.raises(OSError, match="Read-only"):
            (point / "new").touch()
        os.close(clone)
        layer.umount(point)
        assert not (point / "file").exists()
    finally:
        os.close(mount)
        os.close(userns)
    with pytest.raises(StepError) as caught:
        layer.mount_erofs(tmp_path / "absent")
    assert caught.value.step == "fs_create"


@pytest.mark.root
def test_an_image_whose_device_is_missing_is_refused(layer: Any, tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    image = tmp_path / "image"
    subprocess.run(["mkfs.erofs", image, tmp_path / "source"], check=True, capture_output=True)
    with pytest.raises(StepError):
        layer.mount_erofs(image, [tmp_path / "no-such-blob"])


def test_what_a_map_refuses_is_an_error(layer: Any, tmp_path: Path) -> None:
    code = errno.ENOSYS if layer.__name__.endswith("twin") else errno.EINVAL
    with (tmp_path / "no-map").open("wb") as file:
        fd = file.fileno()
        calls = (
            lambda: layer.update_map(fd, b"key!", b"value!!!", 0),
            lambda: layer.update_map_batch(fd, b"key!" * 2, b"value!!!" * 2, 2),
            lambda: layer.delete_map_batch(fd, b"key!" * 2, 2),
        )
        for call in calls:
            with pytest.raises(StepError) as caught:
                call()
            assert caught.value.errno == code


def _until(condition: Any) -> None:
    import time

    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not come about within 10 s")
