"""The contract of `_core.pyi` in Python, through cffi in ABI mode.

Written to be read beside the C: the same calls in the same order. It needs no compiler, so it
serves hosts without the extension and shows what the C does. The one difference: a child cannot
share this process's memory from Python, so what needs another process's namespaces runs in a
thread of its own with unshared state (namespaces are a property of the thread), and `make_userns`
forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import platform
import re
import signal
import stat
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from os import PathLike
from pathlib import Path
from typing import TypeVar

import cffi

from _fastpath import StepError
from _fastpath.erofs_twin import build_erofs as build_erofs
from _fastpath.erofs_twin import read_chunks as read_chunks

StrPath = str | bytes | PathLike[str]
T = TypeVar("T")

ffi = cffi.FFI()
ffi.cdef("""
    long syscall(long number, ...);
    int setns(int fd, int kind);
    int unshare(int flags);
    int ioctl(int fd, unsigned long request, ...);
    int prctl(int option, ...);
    int umount2(const char *target, int flags);
    int socket(int domain, int kind, int protocol);
""")
_libc = ffi.dlopen(None)

# include/uapi/asm-generic/unistd.h; the new calls have one number on every architecture
_OPEN_TREE, _MOVE_MOUNT, _FSOPEN, _FSCONFIG, _FSMOUNT = 428, 429, 430, 431, 432
_MOUNT_SETATTR, _QUOTACTL_FD = 442, 443
_SETRESUID = {"x86_64": 117, "aarch64": 147}

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_CLOEXEC, _FS_CLOEXEC, _OPEN_TREE_CLONE, _MOVE_MOUNT_F_EMPTY_PATH = 0o2000000, 1, 1, 4
_SET_FLAG, _SET_STRING, _CMD_CREATE = 0, 1, 6
_ATTR_RDONLY, _ATTR_NODEV, _ATTR_IDMAP = 1, 4, 0x100000
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_NEWUSER, _NEWNET = 0x10000000, 0x40000000
_FSGETXATTR, _FSSETXATTR, _XFLAG_PROJINHERIT = 0x801C581F, 0x401C5820, 0x200
_Q_GETQUOTA, _Q_SETQUOTA, _PRJQUOTA, _QIF_LIMITS = 0x800007, 0x800008, 2, 5
_SIOCSIFFLAGS, _IFF_UP_LOOPBACK_RUNNING = 0x8914, 0x49
_PR_SCHED_CORE, _PR_SET_PDEATHSIG = 62, 1
_SCHED_GET, _SCHED_CREATE, _SCHED_TO, _SCHED_FROM = 0, 1, 2, 3
_THREAD, _PROCESS = 0, 1


def _checked(result: int, step: str) -> int:
    if result < 0:
        raise StepError(ffi.errno, step)
    return int(result)


def _call(step: str, number: int, *args: object) -> int:
    """Make a system call; ints go as long, bytes and buffers by pointer."""
    values = [ffi.cast("long", arg) if isinstance(arg, int) else arg for arg in args]
    return _checked(_libc.syscall(ffi.cast("long", number), *values), step)


def _text(value: StrPath | None) -> object:
    return ffi.NULL if value is None else ffi.new("char[]", os.fsencode(value))


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    """Name the step of an `OSError` from the standard library."""
    try:
        yield
    except StepError:
        raise
    except OSError as error:
        raise StepError(error.errno or errno.EIO, name) from error


def _in_thread(work: Callable[[], T]) -> T:
    """Run `work` in a thread that ends with it: what it unshares or enters goes with it."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


# --- namespaces ---------------------------------------------------------------------------------


def make_userns(uid_base: int, owner_uid: int) -> int:
    return _make_mapped(0, uid_base, owner_uid)


def make_shift_userns(from_base: int, to_base: int) -> int:
    return _make_mapped(from_base, to_base, 0)


def _make_mapped(first: int, base: int, owner_uid: int) -> int:
    """Fork: a user namespace cannot be unshared by a process with threads."""
    ready_read, ready_write = os.pipe()
    caller = os.getpid()
    child = os.fork()
    if child == 0:
        _live_in_userns(caller, owner_uid, ready_read, ready_write)
    os.close(ready_write)
    try:
        with _step("clone_userns"):
            if os.read(ready_read, 1) != b"+":
                raise StepError(errno.EPERM, "clone_userns")
        for name in ("uid_map", "gid_map"):
            with _step(name):
                Path(f"/proc/{child}/{name}").write_text(f"{first} {base} 65535\n")
        with _step("open_userns"):
            return os.open(f"/proc/{child}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    finally:
        os.close(ready_read)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _live_in_userns(caller: int, owner_uid: int, ready_read: int, ready_write: int) -> None:
    """In the forked child: the effective uid at this moment becomes the namespace's owner."""
    try:
        os.close(ready_read)
        _call("become_owner", _SETRESUID[platform.machine()], -1, owner_uid, -1)
        _checked(_libc.unshare(_NEWUSER), "clone_userns")
        # last: every change of credentials forgets it
        _libc.prctl(_PR_SET_PDEATHSIG, ffi.cast("long", signal.SIGKILL))
        os.write(ready_write, b"+")
        while os.getppid() == caller:
            signal.pause()
    finally:
        os._exit(1)


def make_netns() -> int:
    return _in_thread(_set_up_netns)


def _set_up_netns() -> int:
    _checked(_libc.unshare(_NEWNET), "clone_netns")
    fd = _checked(_libc.socket(2, 2 | _CLOEXEC, 0), "loopback")
    try:
        request = struct.pack("16sH22x", b"lo", _IFF_UP_LOOPBACK_RUNNING)
        buffer = ffi.from_buffer(bytearray(request))
        _checked(_libc.ioctl(fd, _SIOCSIFFLAGS, buffer), "loopback")
    finally:
        os.close(fd)
    with contextlib.suppress(OSError):
        Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 2147483647")
    with _step("open_netns"):
        return os.open("/proc/thread-self/ns/net", os.O_RDONLY | os.O_CLOEXEC)


def netns_reusable(fd: int) -> bool:
    def inspect() -> bool:
        _checked(_libc.setns(fd, _NEWNET), "setns")
        return not (_holds_sockets() or _holds_interfaces())

    return _in_thread(inspect)


def _read_net(name: str) -> str:
    try:
        return Path(f"/proc/thread-self/net/{name}").read_text()
    except FileNotFoundError:
        return ""


def _holds_sockets() -> bool:
    """`used` and `tw` of sockstat are per namespace, and no socket of ours is open in it yet."""
    text = _read_net("sockstat")
    counts = [re.search(rf"\b{label} (\d+)", text) for label in ("used", "tw")]
    return any(count is None or count[1] != "0" for count in counts)


def _holds_interfaces() -> bool:
    devices = [line for line in _read_net("dev").splitlines()[2:] if " lo:" not in line]
    routes = [line for line in _read_net("route").splitlines() if "Destination" not in line]
    addresses = [line for line in _read_net("if_inet6").splitlines() if not line.endswith(" lo")]
    return bool(devices or routes or addresses)


# --- mounts -------------------------------------------------------------------------------------


def mount_erofs(image: StrPath, devices: Iterable[StrPath] = (), direct: bool = False) -> int:
    fs = _call("fsopen", _FSOPEN, _text("erofs"), _FS_CLOEXEC)
    try:
        options = [("source", image), *(("device", device) for device in devices)]
        for key, value in options:
            _call("fsconfig", _FSCONFIG, fs, _SET_STRING, _text(key), _text(value), 0)
        for flag in ("directio", "ro") if direct else ("ro",):
            _call("fsconfig", _FSCONFIG, fs, _SET_FLAG, _text(flag), ffi.NULL, 0)
        _call("fs_create", _FSCONFIG, fs, _CMD_CREATE, ffi.NULL, ffi.NULL, 0)
        return _call("fsmount", _FSMOUNT, fs, _FS_CLOEXEC, _ATTR_RDONLY | _ATTR_NODEV)
    finally:
        os.close(fs)


def open_tree(path: StrPath, clone: bool, recursive: bool = False) -> int:
    flags = _CLOEXEC
    if clone:
        flags |= _OPEN_TREE_CLONE | (_AT_RECURSIVE if recursive else 0)
    return _call("open_tree", _OPEN_TREE, _AT_FDCWD, _text(path), flags)


def move_mount(fd: int, target: StrPath) -> None:
    flags = _MOVE_MOUNT_F_EMPTY_PATH
    _call("move_mount", _MOVE_MOUNT, fd, _text(""), _AT_FDCWD, _text(target), flags)


def idmap_mount(fd: int, userns: int) -> None:
    attributes = struct.pack("QQQQ", _ATTR_IDMAP, 0, 0, userns)
    buffer = ffi.from_buffer(attributes)
    _call("mount_setattr", _MOUNT_SETATTR, fd, _text(""), _AT_EMPTY_PATH, buffer, 32)


def umount(target: StrPath, detach: bool = True) -> None:
    flags = _UMOUNT_NOFOLLOW | (_MNT_DETACH if detach else 0)
    _checked(_libc.umount2(_text(target), flags), "umount")


# --- volumes ------------------------------------------------------------------------------------


def remove_tree(path: StrPath) -> None:
    """Depth first over descriptors; `os.unlink` with dir_fd never follows the last component."""
    with _step("remove_tree"):
        target = Path(os.fsdecode(path))
        try:
            kind = target.lstat().st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(kind):
            target.unlink()
            return
        _empty(os.open(target, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW))
        target.rmdir()


def _empty(top: int) -> None:
    """Remove what is in the directory; takes the descriptor. One descriptor at any depth."""
    names: list[str] = []
    here = top
    try:
        while True:
            deeper = _sweep(here)
            if deeper is None and not names:
                return
            if deeper is None:
                here = _move(here, "..")
                os.rmdir(names.pop(), dir_fd=here)
            else:
                here = _move(here, deeper)
                names.append(deeper)
    finally:
        os.close(here)


def _move(here: int, name: str) -> int:
    there = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=here)
    if os.fstat(there).st_dev != os.fstat(here).st_dev:
        os.close(there)
        raise StepError(errno.EXDEV, "remove_tree")
    os.close(here)
    return there


def _sweep(here: int) -> str | None:
    """Unlink all that is no directory; return the name of one directory, if any is left."""
    found = None
    with os.scandir(here) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                found = entry.name
            else:
                os.unlink(entry.name, dir_fd=here)
    return found


def remove_cgroup(path: StrPath) -> None:
    with _step("remove_cgroup"):
        for folder, _, _ in os.walk(os.fsdecode(path), topdown=False):
            with contextlib.suppress(FileNotFoundError):
                Path(folder).rmdir()


def set_project(fd: int, project: int) -> None:
    attributes = ctypes.create_string_buffer(28)  # struct fsxattr
    buffer = ffi.from_buffer(attributes)
    _checked(_libc.ioctl(fd, _FSGETXATTR, buffer), "fssetxattr")
    (flags,) = struct.unpack_from("I", attributes, 0)
    struct.pack_into("I", attributes, 0, flags | _XFLAG_PROJINHERIT)
    struct.pack_into("I", attributes, 12, project)
    _checked(_libc.ioctl(fd, _FSSETXATTR, buffer), "fssetxattr")


def set_project_quota(fd: int, project: int, limit_bytes: int, limit_inodes: int = 0) -> None:
    """Write a struct if_dqblk: block limits are in KiB."""
    blocks = (limit_bytes + 1023) >> 10
    block = struct.pack("8QI4x", blocks, 0, 0, limit_inodes, 0, 0, 0, 0, _QIF_LIMITS)
    command = _Q_SETQUOTA << 8 | _PRJQUOTA
    _call("quotactl_set", _QUOTACTL_FD, fd, command, project, ffi.from_buffer(block))


def get_project_usage(fd: int, project: int) -> tuple[int, int, int, int]:
    block = bytearray(72)
    command = _Q_GETQUOTA << 8 | _PRJQUOTA
    _call("quotactl_get", _QUOTACTL_FD, fd, command, project, ffi.from_buffer(block))
    hard, _, used, inodes_hard, _, inodes, _, _, _ = struct.unpack("8QI4x", block)
    return used, hard << 10, inodes, inodes_hard


# --- core scheduling ----------------------------------------------------------------------------


def _cookie(step: str, action: int, pid: int, scope: int, pointer: object = 0) -> None:
    last = ffi.cast("long", pointer) if isinstance(pointer, int) else pointer
    numbers = (ffi.cast("long", value) for value in (action, pid, scope))
    _checked(_libc.prctl(_PR_SCHED_CORE, *numbers, last), step)


def make_sched_cookie(pid: int) -> None:
    _cookie("sched_core_create", _SCHED_CREATE, pid, _PROCESS)


def share_sched_cookie(source: int, target: int) -> None:
    """Carried by a thread of its own, so that no other thread keeps the sandbox's cookie."""

    def carry() -> None:
        _cookie("sched_core_share", _SCHED_FROM, source, _THREAD)
        _cookie("sched_core_share", _SCHED_TO, target, _PROCESS)

    _in_thread(carry)


def get_sched_cookie(pid: int) -> int:
    cookie = ffi.new("unsigned long *")
    _cookie("sched_core_get", _SCHED_GET, pid, _THREAD, cookie)
    return int(cookie[0])


# --- network programs ---------------------------------------------------------------------------


def load_network_programs(
    sandbox_level: int, deny_unbound: bool, events_per_s: int
) -> tuple[list[int], list[int]]:
    """The skeleton is compiled into the extension: nothing to read it from here."""
    raise StepError(errno.ENOSYS, "load the programs")


def network_programs_version() -> int:
    return 0


def load_file_programs(sandbox_level: int) -> tuple[list[int], list[int]]:
    """As `load_network_programs`."""
    raise StepError(errno.ENOSYS, "load the programs")


def file_programs_version() -> int:
    return 0


def update_map(fd: int, key: bytes, value: bytes, flags: int) -> None:
    """Without programs there is no map."""
    raise StepError(errno.ENOSYS, "update")


def update_map_batch(fd: int, keys: bytes, values: bytes, count: int) -> None:
    """As `update_map`."""
    raise StepError(errno.ENOSYS, "update")


def delete_map_batch(fd: int, keys: bytes, count: int) -> None:
    """As `update_map`."""
    raise StepError(errno.ENOSYS, "delete")
