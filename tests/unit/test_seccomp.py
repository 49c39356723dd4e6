"""The filter, run by an interpreter of classic BPF: every listed call, each architecture."""

from __future__ import annotations

import errno
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.host import syscalls
from dsecd.policy import seccomp

X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003


def run(code: bytes, nr: int, arch: int, args: tuple[int, ...] = ()) -> int:
    """Return the verdict of `code`; raises on anything a verifier would refuse."""
    data = struct.pack(
        "=iIQ6Q", nr if nr < 1 << 31 else nr - (1 << 32), arch, 0, *args, *[0] * (6 - len(args))
    )
    program = list(struct.iter_unpack("=HBBI", code))
    accumulator, pc = 0, 0
    while True:
        op, jt, jf, k = program[pc]
        pc += 1
        if op == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, k)
        elif op == 0x54:
            accumulator &= k
        elif op == 0x06:
            return k
        elif op == 0x05:
            pc += k
        else:
            taken = {0x15: accumulator == k, 0x35: accumulator >= k, 0x45: bool(accumulator & k)}[
                op
            ]
            pc += jt if taken else jf
        assert pc < len(program)


def refused(code: int) -> int:
    return 0x00050000 | code


def number(name: str, arch: syscalls.Arch = "x86_64") -> int:
    nr = syscalls.number(name, arch)
    assert nr is not None
    return nr


@pytest.fixture(scope="module")
def code() -> bytes:
    return seccomp.default_filter(arch="x86_64")


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_every_denied_call_is_refused(arch: syscalls.Arch) -> None:
    code = seccomp.default_filter(arch=arch)
    audit = X86 if arch == "x86_64" else ARM
    for name, error in seccomp.DENIED.items():
        nr = syscalls.number(name, arch)
        if nr is not None:
            assert run(code, nr, audit) == refused(error), name


@given(nr=st.integers(0, 600))
def test_unlisted_calls_are_allowed(nr: int) -> None:
    listed = {syscalls.number(name, "x86_64") for name in seccomp.DENIED}
    listed |= {number(n) for n in ("clone3", "socket", "socketpair", "modify_ldt")}
    if nr not in listed:
        assert run(seccomp.default_filter(arch="x86_64"), nr, X86) == seccomp.ALLOW


def test_foreign_architectures_are_killed(code: bytes) -> None:
    assert run(code, 1, I386) == seccomp.KILL_PROCESS
    assert run(code, 1, ARM) == seccomp.KILL_PROCESS


def test_x32_numbers_do_not_pass(code: bytes) -> None:
    assert run(code, 0x40000000 | number("bpf"), X86) == refused(errno.ENOSYS)
    assert run(code, 0xFFFFFFFF, X86) == refused(errno.ENOSYS)


def test_i386_option_applies_the_same_list() -> None:
    code = seccomp.default_filter(seccomp.Options(i386=True), "x86_64")
    assert run(code, number("bpf", "i386"), I386) == refused(errno.EPERM)
    assert run(code, number("socketcall", "i386"), I386) == refused(errno.ENOSYS)
    assert run(code, 4, I386) == seccomp.ALLOW
    assert run(code, number("bpf"), X86) == refused(errno.EPERM)
    assert run(code, number("modify_ldt"), X86) == seccomp.ALLOW


@pytest.mark.parametrize("name", ["clone", "unshare"])
def test_nested_user_and_network_namespaces(code: bytes, name: str) -> None:
    nr = number(name)
    for flag in (seccomp.CLONE_NEWUSER, seccomp.CLONE_NEWNET):
        assert run(code, nr, X86, (flag | 17,)) == refused(errno.EPERM)
        assert run(code, nr, X86, (flag | 0x20000,)) == refused(errno.EPERM)
    assert run(code, nr, X86, (0x20000,)) == seccomp.ALLOW
    assert run(code, number("clone3"), X86) == refused(errno.ENOSYS)
    nested = seccomp.default_filter(seccomp.Options(nested_namespaces=True), "x86_64")
    assert run(nested, nr, X86, (seccomp.CLONE_NEWUSER,)) == seccomp.ALLOW
    assert run(nested, number("clone3"), X86) == seccomp.ALLOW


@pytest.mark.parametrize(
    ("args", "verdict"),
    [
        ((1, 1, 0), None),
        ((2, 1, 6), None),
        ((2, 0x80801, 6), None),
        ((10, 2, 0), None),
        ((2, 3, 1), None),  # raw: the kernel asks for a capability over the network namespace
        ((2, 10, 0), errno.EAFNOSUPPORT),  # SOCK_PACKET
        ((2, 0x8000A, 0), errno.EAFNOSUPPORT),
        ((16, 3, 0), None),
        ((16, 3, 4), None),
        ((16, 3, 9), errno.EPROTONOSUPPORT),  # audit
        ((16, 3, 12), errno.EPROTONOSUPPORT),  # netfilter
        ((17, 3, 0), errno.EAFNOSUPPORT),  # packet
        ((38, 5, 0), errno.EAFNOSUPPORT),  # alg
        ((40, 1, 0), errno.EAFNOSUPPORT),  # vsock
        ((15, 3, 2), errno.EAFNOSUPPORT),  # key
        ((1 << 32 | 40, 1, 0), errno.EAFNOSUPPORT),  # the high half is not looked at
        ((0, 1, 0), errno.EAFNOSUPPORT),
    ],
)
def test_socket_families(code: bytes, args: tuple[int, ...], verdict: int | None) -> None:
    expected = seccomp.ALLOW if verdict is None else refused(verdict)
    assert run(code, number("socket"), X86, args) == expected


@pytest.mark.parametrize(
    ("command", "allowed"),
    [
        (0xC0C0586D, False),  # XFS_IOC_SWAPEXT
        (0x40285881, False),  # XFS_IOC_EXCHANGE_RANGE
        (0x401C5820, False),  # FS_IOC_FSSETXATTR
        (0x801C581F, True),  # FS_IOC_FSGETXATTR
        (0x40086602, False),  # FS_IOC_SETFLAGS
        (0x40046602, False),  # FS_IOC32_SETFLAGS
        (0x80086601, True),  # FS_IOC_GETFLAGS
        (0xC020660B, True),  # FS_IOC_FIEMAP
        (0xC028660F, False),  # EXT4_IOC_MOVE_EXT
        (0x6611, False),  # EXT4_IOC_SWAP_BOOT
        (0xC0045877, False),  # FIFREEZE
        (0x40049409, True),  # FICLONE
        (0x5000940E, False),  # BTRFS_IOC_SUBVOL_CREATE
        (0x50009401, False),  # BTRFS_IOC_SNAP_CREATE
        (0x5412, False),  # TIOCSTI
        (0x541C, False),  # TIOCLINUX
        (0x5423, False),  # TIOCSETD
        (0x5401, True),  # TCGETS
        (0x5413, True),  # TIOCGWINSZ
        (0x541B, True),  # FIONREAD
        (7 << 32 | 0x5412, False),  # the kernel drops the high half
        (7 << 32 | 0xC0C0586D, False),
    ],
)
def test_ioctls(code: bytes, command: int, allowed: bool) -> None:
    expected = seccomp.ALLOW if allowed else refused(errno.EPERM)
    assert run(code, number("ioctl"), X86, (3, command)) == expected


def test_programs_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        seccomp.pack([(6, 0, 0, 0)] * 4097)


def test_long_branches_keep_their_meaning() -> None:
    """Jumps of classic BPF reach 255 instructions; many extra rules need the long form."""
    extra = dict.fromkeys(("mount", "umount2", "openat2", "pidfd_open"), errno.EPERM)
    code = seccomp.default_filter(seccomp.Options(extra_denied=extra), "x86_64")
    for name in extra:
        assert run(code, number(name), X86) == refused(errno.EPERM)
    wide: seccomp.Draft = [(0x20, 0, 0, 0), (0x35, "high", "low", 100)]
    wide += [(0x35, "high", "low", 1000)] * 300 + ["low", (6, 0, 0, 1), "high", (6, 0, 0, 2)]
    packed = seccomp.pack(seccomp._resolve(wide))
    assert run(packed, 99, X86) == 1
    assert run(packed, 100, X86) == 2


def test_description_names_every_rule() -> None:
    text = "\n".join(seccomp.describe())
    assert "bpf: EPERM" in text
    assert "TIOCSTI" in text
