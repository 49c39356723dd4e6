"""What attack scripts inside a sandbox use: raw system calls, mounts, children, one report.

Runs under the sandbox's own Python. Outcomes are texts: "ok", or the name of an errno.
"""

# ruff: noqa: PTH103, PTH123 - system calls are what this is about

from __future__ import annotations

import ctypes
import errno
import json
import os
import platform
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)

# x86_64, aarch64
_NUMBERS = {
    "accept4": (288, 242), "acct": (163, 89), "add_key": (248, 217), "bpf": (321, 280),
    "chroot": (161, 51), "clock_settime": (227, 112), "clone": (56, 220), "clone3": (435, 435),
    "delete_module": (176, 106), "fanotify_init": (300, 262), "file_setattr": (469, 469),
    "finit_module": (313, 273), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fsopen": (430, 430), "init_module": (175, 105), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "io_uring_setup": (425, 425), "ioctl": (16, 29),
    "ioprio_set": (251, 30), "kcmp": (312, 272), "kexec_file_load": (320, 294),
    "kexec_load": (246, 104), "keyctl": (250, 219), "mount": (165, 40),
    "mount_setattr": (442, 442), "move_mount": (429, 429), "name_to_handle_at": (303, 264),
    "renameat2": (316, 276), "open_by_handle_at": (304, 265),
    "open_tree": (428, 428), "perf_event_open": (298, 241), "pidfd_getfd": (438, 438),
    "pidfd_open": (434, 434), "pidfd_send_signal": (424, 424), "pivot_root": (155, 41),
    "prlimit64": (302, 261), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "ptrace": (101, 117), "quotactl": (179, 60), "reboot": (169, 142), "request_key": (249, 218),
    "setns": (308, 268), "settimeofday": (164, 170), "shmget": (29, 194), "swapoff": (168, 225),
    "swapon": (167, 224), "syslog": (103, 116), "umount2": (166, 39), "unshare": (272, 97),
    "userfaultfd": (323, 282), "mq_open": (240, 180), "getpid": (39, 172),
}  # fmt: skip
_COLUMN = 0 if platform.machine() == "x86_64" else 1
RDONLY, NOSUID, NODEV, REMOUNT, BIND, MOVE, REC = 1, 2, 4, 0x20, 0x1000, 0x2000, 0x4000
NEWNS, NEWCGROUP, NEWUTS, NEWIPC = 0x20000, 0x2000000, 0x4000000, 0x8000000
NEWUSER, NEWPID, NEWNET = 0x10000000, 0x20000000, 0x40000000
AT_FDCWD, DETACH = -100, 2


def call(name: str | int, *args: int | bytes | ctypes.Array[ctypes.c_char]) -> int:
    """Make a system call by name or number. Raises `OSError`."""
    number = name if isinstance(name, int) else _NUMBERS[name][_COLUMN]
    passed = [ctypes.c_long(arg) if isinstance(arg, int) else arg for arg in args]
    result = libc.syscall(ctypes.c_long(number), *passed)
    if result == -1:
        raise OSError(ctypes.get_errno(), str(name))
    return int(result)


def tried(action: Callable[..., object], *args: object) -> str:
    """Return "ok" when `action` succeeds, else the name of its errno."""
    try:
        action(*args)
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error.errno))
    return "ok"


def trying(name: str | int, *args: int | bytes | ctypes.Array[ctypes.c_char]) -> str:
    return tried(lambda: call(name, *args))


def apart(action: Callable[[], object]) -> object:
    """Return what `action` gives in a child of its own (an errno's name when it fails)."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        result: object = None
        try:
            result = action()
        except OSError as error:
            result = errno.errorcode[error.errno or 0]
        finally:
            os.write(writer, json.dumps(result).encode())
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def mount(source: str, path: str, kind: str = "", flags: int = 0, data: str = "") -> str:
    if kind:
        os.makedirs(path, exist_ok=True)
    return trying("mount", source.encode(), path.encode(), kind.encode(), flags, data.encode())


def umount(path: str, flags: int = 0) -> str:
    return trying("umount2", path.encode(), flags)


def peek(path: str) -> str:
    """Return the first bytes of a file as text, or the name of the errno."""
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read(4096).decode(errors="replace")
    except OSError as error:
        return errno.errorcode[error.errno or 0]


def writable(path: str) -> str:
    return tried(lambda: os.close(os.open(path, os.O_WRONLY | os.O_NONBLOCK)))


def report(**found: object) -> None:
    print(json.dumps(found))
