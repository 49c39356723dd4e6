"""System calls by name: their numbers, and a way to make those that Python does not wrap.

Numbers come from the kernel's tables (arch/x86/entry/syscalls/syscall_{64,32}.tbl and
include/uapi/asm-generic/unistd.h); only the calls that this project filters or makes are listed.
The filter in `dsecd.policy.seccomp` reads the table, the probes and the cgroup watches make calls.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Literal

from libdsec.errors import Unsupported

Arch = Literal["x86_64", "aarch64", "i386"]

# name: (x86_64, aarch64, i386); None where the architecture lacks the call
_TABLE: dict[str, tuple[int | None, int | None, int | None]] = {
    "_sysctl": (156, None, 149),
    "acct": (163, 89, 51),
    "add_key": (248, 217, 286),
    "bpf": (321, 280, 357),
    "clock_settime": (227, 112, 264),
    "clock_settime64": (None, None, 404),
    "clone": (56, 220, 120),
    "clone3": (435, 435, 435),
    "create_module": (174, None, 127),
    "delete_module": (176, 106, 129),
    "fanotify_init": (300, 262, 338),
    "fanotify_mark": (301, 263, 339),
    "file_setattr": (469, 469, 469),
    "finit_module": (313, 273, 350),
    "fsconfig": (431, 431, 431),
    "fsmount": (432, 432, 432),
    "fsopen": (430, 430, 430),
    "fspick": (433, 433, 433),
    "get_kernel_syms": (177, None, 130),
    "init_module": (175, 105, 128),
    "inotify_add_watch": (254, 27, 292),
    "inotify_init1": (294, 26, 332),
    "inotify_rm_watch": (255, 28, 293),
    "io_uring_enter": (426, 426, 426),
    "io_uring_register": (427, 427, 427),
    "io_uring_setup": (425, 425, 425),
    "ioctl": (16, 29, 54),
    "ioperm": (173, None, 101),
    "iopl": (172, None, 110),
    "kexec_file_load": (320, 294, None),
    "kexec_load": (246, 104, 283),
    "keyctl": (250, 219, 288),
    "landlock_create_ruleset": (444, 444, 444),
    "lookup_dcookie": (212, 18, 253),
    "modify_ldt": (154, None, 123),
    "mount": (165, 40, 21),
    "mount_setattr": (442, 442, 442),
    "move_mount": (429, 429, 429),
    "nfsservctl": (180, 42, 169),
    "open_by_handle_at": (304, 265, 342),
    "open_tree": (428, 428, 428),
    "open_tree_attr": (467, 467, 467),
    "openat2": (437, 437, 437),
    "perf_event_open": (298, 241, 336),
    "pidfd_open": (434, 434, 434),
    "pivot_root": (155, 41, 217),
    "process_madvise": (440, 440, 440),
    "query_module": (178, None, 167),
    "quotactl": (179, 60, 131),
    "quotactl_fd": (443, 443, 443),
    "reboot": (169, 142, 88),
    "request_key": (249, 218, 287),
    "seccomp": (317, 277, 354),
    "setns": (308, 268, 346),
    "settimeofday": (164, 170, 79),
    "socket": (41, 198, 359),
    "socketcall": (None, None, 102),
    "socketpair": (53, 199, 360),
    "stime": (None, None, 25),
    "swapoff": (168, 225, 115),
    "swapon": (167, 224, 87),
    "sysfs": (139, None, 135),
    "syslog": (103, 116, 103),
    "umount": (None, None, 22),
    "umount2": (166, 39, 52),
    "unshare": (272, 97, 310),
    "uselib": (134, None, 86),
    "userfaultfd": (323, 282, 374),
    "ustat": (136, None, 62),
    "vhangup": (153, 58, 111),
    "vm86": (None, None, 166),
    "vm86old": (None, None, 113),
}

_COLUMN: dict[Arch, int] = {"x86_64": 0, "aarch64": 1, "i386": 2}
_libc = ctypes.CDLL(None, use_errno=True)
_libc.syscall.restype = ctypes.c_long


def host_arch() -> Arch:
    """Return this machine's architecture. Raises `Unsupported` on any other."""
    machine = platform.machine()
    if machine == "x86_64":
        return "x86_64"
    if machine in ("aarch64", "arm64"):
        return "aarch64"
    raise Unsupported(f"DSec runs on x86_64 and aarch64, not on {machine}", reason="no table")


def number(name: str, arch: Arch) -> int | None:
    """Return the number of system call `name`, or None where `arch` has no such call."""
    return _TABLE[name][_COLUMN[arch]]


def call(name: str, *args: int | bytes | ctypes.Array[ctypes.c_char] | None) -> int:
    """Make the system call `name`; bytes and buffers go by pointer. Raises `OSError`.

    A library wrapper may not exist for a new call, or may do something else (clone, mount flags);
    this is the kernel's interface itself.
    """
    nr = number(name, host_arch())
    if nr is None:
        raise OSError(38, f"{name}: no such call on {host_arch()}")
    values = [_argument(value) for value in args]
    result = int(_libc.syscall(ctypes.c_long(nr), *values))
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
    return result


def _argument(
    value: int | bytes | ctypes.Array[ctypes.c_char] | None,
) -> ctypes.c_long | ctypes.c_char_p | ctypes.Array[ctypes.c_char]:
    if value is None:
        return ctypes.c_long(0)
    if isinstance(value, int):
        return ctypes.c_long(value)
    if isinstance(value, bytes):
        return ctypes.c_char_p(value)
    return value


MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MNT_DETACH = 2


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """Mount as mount(2). Raises `OSError`."""
    call(
        "mount",
        os.fsencode(source),
        os.fsencode(target),
        kind.encode(),
        flags,
        data.encode() if data else None,
    )


def umount(target: str) -> None:
    """Detach the mount at `target` (MNT_DETACH). Raises `OSError`."""
    call("umount2", os.fsencode(target), MNT_DETACH)
