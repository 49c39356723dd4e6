"""Both parts of the filter, run by an interpreter of classic BPF: every call, each architecture."""

from __future__ import annotations

import errno
import functools
import hashlib
import itertools
import operator
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.host import syscalls
from dsecd.policy import seccomp
from dsecd.policy.rules import MountRule, SystemPolicy

PLAIN = "206041fa85868d30"  # sha256 of the command part for x86-64, of 25 instructions
X86, ARM, I386 = 0xC000003E, 0xC00000B7, 0x40000003
AUDIT: dict[int, syscalls.Arch] = {X86: "x86_64", ARM: "aarch64", I386: "i386"}
Pair = tuple[bytes, bytes]  # of a spawner, of a command
Args = tuple[int, ...]


def allow(fstype: str, pattern: str = "/**") -> MountRule:
    return MountRule(verdict="allow", fstype=fstype, pattern=pattern)


def deny(fstype: str, pattern: str = "/**") -> MountRule:
    return MountRule(verdict="deny", fstype=fstype, pattern=pattern)


def filters(options: seccomp.Options | None = None, arch: syscalls.Arch = "x86_64") -> Pair:
    chosen = options or seccomp.Options()
    return (
        seccomp.base_filter(i386=chosen.i386, arch=arch),
        seccomp.command_filter(chosen, arch),
    )


def run(pair: Pair, nr: int, arch: int, args: Args = ()) -> int:
    """Return the kernel's verdict (seccomp_run_filters): the last installed runs first, and only a
    stricter action replaces its answer."""
    base, command = (run_one(code, nr, arch, args) for code in pair)
    return base if _strictness(base) < _strictness(command) else command


def _strictness(verdict: int) -> int:
    action = verdict & 0xFFFF0000
    return action - (1 << 32) if action >> 31 else action


def run_one(code: bytes, nr: int, arch: int, args: Args = ()) -> int:
    """Return the verdict of `code`; raises on anything a verifier would refuse."""
    data = struct.pack(
        "=iIQ6Q", nr if nr < 1 << 31 else nr - (1 << 32), arch, 0, *args, *[0] * (6 - len(args))
    )
    program = instructions(code)
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
            pc += jt if JUMPS[op](accumulator, k) else jf
        assert pc < len(program)


JUMPS = {0x15: operator.eq, 0x35: operator.ge, 0x45: operator.and_}


@functools.lru_cache
def instructions(code: bytes) -> list[tuple[int, ...]]:
    return list(struct.iter_unpack("=HBBI", code))


def refused(code: int) -> int:
    return 0x00050000 | code


def number(name: str, arch: syscalls.Arch = "x86_64") -> int:
    nr = syscalls.number(name, arch)
    assert nr is not None
    return nr


@pytest.fixture(scope="module")
def code() -> Pair:
    return filters()


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_every_denied_call_is_refused(arch: syscalls.Arch) -> None:
    code = filters(arch=arch)
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
        assert run(filters(), nr, X86) == seccomp.ALLOW


def test_foreign_architectures_are_killed(code: Pair) -> None:
    assert run(code, 1, I386) == seccomp.KILL_PROCESS
    assert run(code, 1, ARM) == seccomp.KILL_PROCESS


def test_x32_numbers_do_not_pass(code: Pair) -> None:
    assert run(code, 0x40000000 | number("bpf"), X86) == refused(errno.ENOSYS)
    assert run(code, 0xFFFFFFFF, X86) == refused(errno.ENOSYS)


def test_i386_option_applies_the_same_list() -> None:
    code = filters(seccomp.Options(i386=True))
    assert run(code, number("bpf", "i386"), I386) == refused(errno.EPERM)
    assert run(code, number("socketcall", "i386"), I386) == refused(errno.ENOSYS)
    assert run(code, 4, I386) == seccomp.ALLOW
    assert run(code, number("bpf"), X86) == refused(errno.EPERM)
    assert run(code, number("modify_ldt"), X86) == seccomp.ALLOW


@pytest.mark.parametrize("name", ["clone", "unshare"])
def test_nested_user_and_network_namespaces(code: Pair, name: str) -> None:
    nr = number(name)
    for flag in (seccomp.CLONE_NEWUSER, seccomp.CLONE_NEWNET):
        assert run(code, nr, X86, (flag | 17,)) == refused(errno.EPERM)
        assert run(code, nr, X86, (flag | 0x20000,)) == refused(errno.EPERM)
    assert run(code, nr, X86, (0x20000,)) == seccomp.ALLOW
    assert run(code, number("clone3"), X86) == refused(errno.ENOSYS)
    nested = filters(seccomp.Options(nested_namespaces=True))
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
def test_socket_families(code: Pair, args: Args, verdict: int | None) -> None:
    expected = seccomp.ALLOW if verdict is None else refused(verdict)
    assert run(code, number("socket"), X86, args) == expected


@pytest.mark.parametrize(("arch", "audit"), [("x86_64", X86), ("aarch64", ARM)])
def test_calls_without_a_network_have_unix_sockets_only(arch: syscalls.Arch, audit: int) -> None:
    """On top of the two parts: the worker's loopback is shared by one call after the other."""
    part = seccomp.unix_only_filter(arch)
    for name in ("socket", "socketpair"):
        nr = number(name, arch)
        assert run_one(part, nr, audit, (1, 1, 0)) == seccomp.ALLOW
        for family in (0, 2, 10, 16, 17, 40):
            assert run_one(part, nr, audit, (family, 1, 0)) == refused(errno.EAFNOSUPPORT)
    assert run_one(part, number("mount", arch), audit, (3, 0, 0)) == seccomp.ALLOW


def test_calls_without_a_network_may_run_32_bit_programs() -> None:
    part, nr = seccomp.unix_only_filter("x86_64"), number("socket", "i386")
    assert run_one(part, nr, I386, (1, 1, 0)) == seccomp.ALLOW
    assert run_one(part, nr, I386, (2, 1, 0)) == refused(errno.EAFNOSUPPORT)


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
def test_ioctls(code: Pair, command: int, allowed: bool) -> None:
    expected = seccomp.ALLOW if allowed else refused(errno.EPERM)
    assert run(code, number("ioctl"), X86, (3, command)) == expected
    assert seccomp.denies_ioctl(command) != allowed


# --- the sum of both parts, against the rules in plain words --------------------------------------

# include/uapi/linux/sched.h: NEWTIME VM FS FILES SIGHAND THREAD SYSVSEM NEWNS .. NEWNET
UNSHARED = (
    0x80 | 0x100 | 0x200 | 0x400 | 0x800 | 0x10000 | 0x40000 | 0x20000 | 0x02000000 | 0x04000000
    | 0x08000000 | 0x10000000 | 0x20000000 | 0x40000000
)  # fmt: skip
SPECIAL = ("socket", "socketpair", "ioctl", "clone", "unshare")
MOUNTS = (
    "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount", "open_tree",
    "open_tree_attr", "pivot_root", "umount", "umount2",
)  # fmt: skip
EXTRA = {"mount": errno.EACCES, "bpf": errno.ENOSYS, "clone": errno.EACCES}
OPTIONS = [
    seccomp.Options(nested, i386, extra)
    for nested, i386 in itertools.product((False, True), repeat=2)
    for extra in ({}, EXTRA)
] + [
    seccomp.Options(nested, mounts=False, ioctls_allowed=allowed, ioctls_denied=denied)
    for nested, allowed, denied in (
        (False, None, frozenset({0x5401, 0x40049409})),
        (True, frozenset({0x5401, 0x5413, 0x5412, 0x801C581F}), frozenset({0x5413})),
        (False, frozenset(), frozenset()),
    )
]


@functools.cache
def known(table: syscalls.Arch) -> dict[int, str]:
    """Return the names that a rule is about, by their numbers."""
    names = {*seccomp.DENIED, *EXTRA, *SPECIAL, *MOUNTS, "clone3", "modify_ldt"}
    numbers = {name: syscalls.number(name, table) for name in names}
    return {nr: name for name, nr in numbers.items() if nr is not None}


def expected(
    options: seccomp.Options, native: syscalls.Arch, nr: int, arch: int, args: Args
) -> int:
    """Return what a command of a sandbox with `options` must get."""
    table = AUDIT.get(arch)
    if table != native and not (table == "i386" and options.i386 and native == "x86_64"):
        return seccomp.KILL_PROCESS
    assert table is not None
    if table == "x86_64" and nr >= 0x40000000:
        return refused(errno.ENOSYS)
    name = known(table).get(nr)
    errnos = seccomp.DENIED | options.extra_denied
    if not options.mounts:
        errnos |= dict.fromkeys(MOUNTS, errno.EPERM) | {"clone3": errno.ENOSYS}
    if name in errnos:
        return refused(errnos[name])
    words = [arg & 0xFFFFFFFF for arg in args]
    code = 0
    if name in ("socket", "socketpair"):
        code = _socket_errno(*words)
    elif name == "ioctl":
        code = _ioctl_errno(words[1]) or _ioctl_denied(options, words[1])
    elif name in ("clone", "unshare"):
        nested = 0 if options.nested_namespaces else 0x52000000
        unknown = 0 if options.mounts or name == "clone" else 0xFFFFFFFF - UNSHARED
        code = errno.EPERM if words[0] & (nested | unknown) else 0
    elif (name == "clone3" and not options.nested_namespaces) or (
        name == "modify_ldt" and not options.i386
    ):
        code = errno.ENOSYS
    return refused(code) if code else seccomp.ALLOW


def _ioctl_denied(options: seccomp.Options, command: int) -> int:
    listed = options.ioctls_allowed is None or command in options.ioctls_allowed
    return 0 if listed and command not in options.ioctls_denied else errno.EPERM


def _socket_errno(family: int, kind: int, protocol: int) -> int:
    if family == 16:
        return 0 if protocol in (0, 4, 15) else errno.EPROTONOSUPPORT
    if family == 2 and kind & 0xF == 10:
        return errno.EAFNOSUPPORT
    return 0 if family in (1, 2, 10) else errno.EAFNOSUPPORT


def _ioctl_errno(command: int) -> int:
    kind, number = command >> 8 & 0xFF, command & 0xFF
    stays = {ord("X"): (31,), ord("f"): (1, 11), 0x94: (9, 13, 54)}
    injects = command in (0x5412, 0x541C, 0x541D, 0x5423)
    return errno.EPERM if injects or number not in stays.get(kind, (number,)) else 0


def arguments(name: str) -> Iterator[Args]:
    """Yield one call of each class that a rule tells from others, and their neighbours."""
    high = 7 << 32
    if name in ("clone", "unshare"):
        for bit in range(64):
            yield (1 << bit, 0, 0)
            yield (1 << bit | 0x11, 0, 0)
    elif name == "ioctl":
        for low in (*range(0x5400, 0x5A00), *range(0x6600, 0x6700), *range(0x9400, 0x9500)):
            yield (3, low, 0)
            yield (3, high | 0xC0280000 | low, 0)
        for listed in (0x40049409, 0x801C581F):
            for near in (listed - 1, listed, listed + 1, high | listed):
                yield (3, near, 0)
    else:
        for family, kind in itertools.product(range(48), (1, 2, 3, 10, 0x8000A, 0x80001)):
            for protocol in range(18) if family == 16 else (0, 6):
                yield (family, kind, protocol)
                yield (high | family, high | kind, high | protocol)


@pytest.mark.parametrize("native", ["x86_64", "aarch64"])
@pytest.mark.parametrize("options", OPTIONS, ids=repr)
def test_both_parts_together_are_the_whole_list(
    native: syscalls.Arch, options: seccomp.Options
) -> None:
    pair = filters(options, native)
    numbers = [*range(600), 5000, *(0x40000000 | nr for nr in range(600)), 0x7FFFFFFF, 0xFFFFFFFF]
    for arch in (*AUDIT, 0x40000028, 0):
        for nr in numbers:
            args = (0, 0, 0)
            assert run(pair, nr, arch, args) == expected(options, native, nr, arch, args), nr
    for arch, name in itertools.product(AUDIT, SPECIAL):
        nr = syscalls.number(name, AUDIT[arch])
        for args in (
            arguments(name) if nr is not None and arch_counts(arch, native, options) else ()
        ):
            assert run(pair, nr, arch, args) == expected(options, native, nr, arch, args), args


def arch_counts(arch: int, native: syscalls.Arch, options: seccomp.Options) -> bool:
    return AUDIT[arch] == native or (arch == I386 and options.i386 and native == "x86_64")


def test_a_base_with_32_bit_programs_leaves_the_verdict_to_each_sandbox() -> None:
    pair = (seccomp.base_filter(i386=True, arch="x86_64"), seccomp.command_filter(arch="x86_64"))
    assert run(pair, 4, I386) == seccomp.KILL_PROCESS
    assert run(pair, number("modify_ldt"), X86) == refused(errno.ENOSYS)
    assert run_one(pair[0], number("bpf", "i386"), I386) == refused(errno.EPERM)
    without = seccomp.base_filter(arch="x86_64"), filters(seccomp.Options(i386=True))[1]
    assert run(without, 4, I386) == seccomp.KILL_PROCESS


def test_the_base_allows_what_spawner_and_init_call() -> None:
    base = seccomp.base_filter(arch="x86_64")
    for name in ("clone3", "mount", "setns", "seccomp", "openat2", "fsopen", "mount_setattr"):
        assert run_one(base, number(name), X86) == seccomp.ALLOW
    for flags in (0x02000000, 0x0C020000, 0x20020000):
        assert run_one(base, number("unshare"), X86, (flags,)) == seccomp.ALLOW
    # project ids of disk uppers, terminals, namespaces of a pidfd, sockets of forwarding
    for command in (0x801C581F, 0x401C5820, 0x540E, 0x5414, 0x5441, 0xFF03):
        assert run_one(base, number("ioctl"), X86, (3, command)) == seccomp.ALLOW
    for family in (1, 2, 10):
        assert run_one(base, number("socket"), X86, (family, 1, 0)) == seccomp.ALLOW


def test_programs_too_long_are_refused() -> None:
    with pytest.raises(ValueError, match="4096"):
        seccomp.pack([(6, 0, 0, 0)] * 4097)


def test_long_branches_keep_their_meaning() -> None:
    """Jumps of classic BPF reach 255 instructions; many extra rules need the long form."""
    extra = dict.fromkeys(("mount", "umount2", "openat2", "pidfd_open"), errno.EPERM)
    code = filters(seccomp.Options(extra_denied=extra))
    for name in extra:
        assert run(code, number(name), X86) == refused(errno.EPERM)
    wide: seccomp.Draft = [(0x20, 0, 0, 0), (0x35, "high", "low", 100)]
    wide += [(0x35, "high", "low", 1000)] * 300 + ["low", (6, 0, 0, 1), "high", (6, 0, 0, 2)]
    packed = seccomp.pack(seccomp._resolve(wide))
    assert run_one(packed, 99, X86) == 1
    assert run_one(packed, 100, X86) == 2


def test_description_names_every_rule() -> None:
    text = "\n".join(seccomp.describe())
    assert "bpf: EPERM" in text
    assert "TIOCSTI" in text


@given(
    allowed=st.none() | st.frozensets(st.integers(0, 0xFFFFFFFF), max_size=200),
    denied=st.frozensets(st.integers(0, 0xFFFFFFFF), max_size=200),
    asked=st.integers(0, 0xFFFFFFFF),
)
def test_lists_of_ioctls_of_any_length(
    allowed: frozenset[int] | None, denied: frozenset[int], asked: int
) -> None:
    """A jump reaches 255 instructions: long searches need longer ones."""
    options = seccomp.Options(ioctls_allowed=allowed, ioctls_denied=denied)
    pair = filters(options)
    for command in {asked, *list(allowed or ())[:3], *list(denied)[:3]}:
        args = (3, 7 << 32 | command)
        assert run(pair, number("ioctl"), X86, args) == expected(
            options, "x86_64", number("ioctl"), X86, args
        )


def test_options_that_say_nothing_change_no_byte() -> None:
    """What a sandbox without a policy installs costs what it did before there were policies."""
    plain = seccomp.command_filter(arch="x86_64")
    said = seccomp.Options(ioctls_allowed=None, ioctls_denied=frozenset(), mounts=True)
    assert seccomp.command_filter(said, arch="x86_64") == plain
    assert (len(plain) // 8, hashlib.sha256(plain).hexdigest()[:16]) == (25, PLAIN)


@pytest.mark.parametrize(
    ("system", "closed"),
    [
        (SystemPolicy(), False),
        (SystemPolicy(mount_default="deny"), True),
        (SystemPolicy(mount_default="deny", mounts=(deny("tmpfs"),)), True),
        (SystemPolicy(mount_default="deny", mounts=(allow("tmpfs"),)), False),
        (SystemPolicy(mount_default="deny", mounts=(allow("tmpfs"), deny("*"))), True),
        (SystemPolicy(mounts=(deny("*"),)), True),
        (SystemPolicy(mounts=(deny("*", "/mnt"),)), False),
    ],
)
def test_which_policies_close_all_mounts(system: SystemPolicy, closed: bool) -> None:
    assert seccomp.closes_mounts(system) == closed
