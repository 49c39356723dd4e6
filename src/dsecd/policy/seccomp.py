"""The system call filter of every command in a sandbox: an assembler of classic BPF and the list.

The filter is in two parts. The *base* denies what neither a spawner nor PID 1 ever needs: each
spawner installs it once, and every process that it makes inherits it. The *command* part, a sixth
of the size, is installed in each command: what those two need and a sandbox must not have, and what
the sandbox's options decide. The kernel runs both and takes the stricter verdict; of two errnos,
that of the part installed last.

Together they are a deny list: unmodified software must run as root inside, so everything is allowed
that the user namespace, the locked mounts and the empty network namespace already contain. What is
denied is reachable state that no namespace covers (keys, BPF, module loading, clocks), large
kernel surfaces that agents do not need (io_uring, userfaultfd, perf), and ways around a mount or a
file policy (file handles, extent swapping, nested user namespaces).

Shape of each: one check of the architecture, then a binary search over call numbers. The kernel
emulates a program, when it is installed, for each number that those before it let through
(kernel/seccomp.c, action cache); a search costs it seven steps where a list costs sixty.
"""

from __future__ import annotations

import errno
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dsecd.host import syscalls
from dsecd.host.syscalls import Arch
from dsecd.policy.rules import SystemPolicy

# Classic BPF (linux/bpf_common.h) and seccomp(2)
_LD_W_ABS, _ALU_AND_K, _RET_K = 0x20, 0x54, 0x06
_JA, _JEQ_K, _JGE_K, _JSET_K = 0x05, 0x15, 0x35, 0x45
_NR, _ARCH, _ARGS = 0, 4, 16
ALLOW = 0x7FFF0000
KILL_PROCESS = 0x80000000
_ERRNO = 0x00050000
_AUDIT_ARCH: dict[Arch, int] = {
    "x86_64": 0xC000003E,
    "aarch64": 0xC00000B7,
    "i386": 0x40000003,
}
_X32_BIT = 0x40000000
_ALLOWED = "allowed"
MAX_INSTRUCTIONS = 4096  # BPF_MAXINSNS

Instruction = tuple[int, int, int, int]  # code, jt, jf, k
Program = list[Instruction]
Target = int | str  # a distance, or the name of a place
Step = tuple[int, Target, Target, int] | str  # a str names the place where it stands
Draft = list[Step]
Block = Sequence[Step]

CLONE_NEWUSER = 0x10000000
CLONE_NEWNET = 0x40000000
CLONE_NEWCGROUP = 0x02000000  # its owner may mount cgroup hierarchies

# call: errno. EPERM is "not here"; ENOSYS makes software take its fall-back path.
DENIED: dict[str, int] = {
    # keyrings are per uid and user namespace and would survive into the range's next sandbox
    "add_key": errno.EPERM,
    "keyctl": errno.EPERM,
    "request_key": errno.EPERM,
    # kernel surfaces with a record of privilege escalation and no use in a sandbox
    "bpf": errno.EPERM,
    "perf_event_open": errno.EPERM,
    "userfaultfd": errno.EPERM,
    "io_uring_setup": errno.ENOSYS,
    "io_uring_enter": errno.ENOSYS,
    "io_uring_register": errno.ENOSYS,
    "fanotify_init": errno.EPERM,
    # opens any file of a file system by number, below masks and outside the root (CVE "shocker")
    "open_by_handle_at": errno.EPERM,
    # the call form of FS_IOC_FSSETXATTR: project ids carry the disk limit
    "file_setattr": errno.EPERM,
    # state of the host that no namespace covers
    "acct": errno.EPERM,
    "clock_settime": errno.EPERM,
    "clock_settime64": errno.EPERM,
    "settimeofday": errno.EPERM,
    "stime": errno.EPERM,
    "create_module": errno.EPERM,
    "delete_module": errno.EPERM,
    "finit_module": errno.EPERM,
    "init_module": errno.EPERM,
    "ioperm": errno.EPERM,
    "iopl": errno.EPERM,
    "kexec_file_load": errno.EPERM,
    "kexec_load": errno.EPERM,
    "lookup_dcookie": errno.EPERM,
    "quotactl": errno.EPERM,
    "quotactl_fd": errno.EPERM,
    "reboot": errno.EPERM,
    "swapoff": errno.EPERM,
    "swapon": errno.EPERM,
    "syslog": errno.EPERM,
    "vhangup": errno.EPERM,
    # obsolete; some kernels still carry code behind them
    "_sysctl": errno.ENOSYS,
    "get_kernel_syms": errno.ENOSYS,
    "nfsservctl": errno.ENOSYS,
    "query_module": errno.ENOSYS,
    "sysfs": errno.ENOSYS,
    "uselib": errno.ENOSYS,
    "ustat": errno.ENOSYS,
    "vm86": errno.ENOSYS,
    "vm86old": errno.ENOSYS,
    # its arguments lie behind a pointer; 32-bit libraries fall back to socket(2)
    "socketcall": errno.ENOSYS,
}

# All that makes, moves, changes or ends a mount
MOUNT_CALLS = (
    "fsconfig", "fsmount", "fsopen", "fspick", "mount", "mount_setattr", "move_mount", "open_tree",
    "open_tree_attr", "pivot_root", "umount", "umount2",
)  # fmt: skip
# CLONE_* that unshare(2) takes; a kernel may come to make a mount namespace without the mounts
_UNSHARED = 0x7E070F80

# socket(2) families that stay; all others answer as on a kernel without them
_AF_UNIX, _AF_INET, _AF_INET6, _AF_NETLINK = 1, 2, 10, 16
_SOCK_PACKET = 10  # socket(AF_INET, SOCK_PACKET) is AF_PACKET in disguise
# routes and addresses, ss, udev's monitor. libaudit takes EPROTONOSUPPORT as "no audit here".
_NETLINK_ALLOWED = (0, 4, 15)

# ioctl(2) by type byte: which numbers stay. The file-system types reach swapping of extents
# (XFS_IOC_SWAPEXT, EXCHANGE_RANGE, EXT4_IOC_MOVE_EXT, SWAP_BOOT), immutable flags, project ids,
# freezing, and btrfs snapshots; denying all but the known reads leaves no room for a new one.
_IOCTL_TYPES: dict[int, tuple[int, ...]] = {
    ord("X"): (31, 32),  # FS_IOC_FSGETXATTR, and FSSETXATTR, which the command part denies
    ord("f"): (1, 11),  # FS_IOC_GETFLAGS, FS_IOC_FIEMAP
    0x94: (9, 13, 54),  # FICLONE, FICLONERANGE, FIDEDUPERANGE
}
_FSSETXATTR = 0x5820  # type and number: a spawner sets the project of a disk upper
# Terminal injection (TIOCSTI, TIOCLINUX), console capture, loading of line disciplines
IOCTLS_DENIED = (0x5412, 0x541C, 0x541D, 0x5423)


@dataclass(frozen=True)
class Options:
    """What a sandbox may have beyond the default.

    `nested_namespaces` allows user and network namespaces inside (a browser's own sandbox,
    rootless containers) at the price of the kernel surface behind them; `i386` lets 32-bit x86
    programs run, under the same list, where the base lets them through. Requests of ioctls are of
    32 bits; one that is denied stays so when it is allowed, too, and so does what the base denies.
    """

    nested_namespaces: bool = False
    i386: bool = False
    extra_denied: dict[str, int] = field(default_factory=dict)
    ioctls_allowed: frozenset[int] | None = None  # None: all that are not denied
    ioctls_denied: frozenset[int] = frozenset()
    mounts: bool = True  # whether any can be made


def base_filter(*, i386: bool = False, arch: Arch | None = None) -> bytes:
    """Return the part for a spawner, as an array of `struct sock_filter` (8 bytes each).

    `i386`: some sandbox of this host may run 32-bit x86 programs. Host byte order.
    """
    native = arch or syscalls.host_arch()
    return pack(_assemble(native, i386, _base_body))


def command_filter(options: Options | None = None, arch: Arch | None = None) -> bytes:
    """Return the part for commands, in the same form; it counts on the base below it."""
    chosen = options or Options()
    native = arch or syscalls.host_arch()
    return pack(_assemble(native, chosen.i386, lambda each: _command_body(chosen, each)))


def unix_only_filter(arch: Arch | None = None) -> bytes:
    """Return a part that leaves sockets of the unix family only, on top of the two others, which
    decide whether 32-bit programs run.
    """

    def body(each: Arch) -> Program:
        rules = _Rules(each)
        answer = (_argument(0), (_JEQ_K, 0, 1, _AF_UNIX), _allow(), _refuse(errno.EAFNOSUPPORT))
        rules.add(list(answer), "socket", "socketpair")
        return rules.compile()

    return pack(_assemble(arch or syscalls.host_arch(), True, body))


def denies_ioctl(request: int) -> bool:
    """Say whether the two parts deny this ioctl(2) request, of 32 bits, in every sandbox."""
    kind, number = request >> 8 & 0xFF, request & 0xFF
    if request & 0xFFFFFFFF in IOCTLS_DENIED or request & 0xFFFF == _FSSETXATTR:
        return True
    return kind in _IOCTL_TYPES and number not in _IOCTL_TYPES[kind]


def closes_mounts(system: SystemPolicy) -> bool:
    """Say whether a policy denies every mount: a filter sees neither their type nor their path."""
    if system.mount_default == "deny" and all(rule.verdict == "deny" for rule in system.mounts):
        return True
    return any(
        rule.verdict == "deny" and rule.fstype == "*" and rule.pattern in ("/", "/**")
        for rule in system.mounts
    )


def pack(program: Program) -> bytes:
    """Return `program` in the kernel's layout. Raises `ValueError` when it is too long."""
    if len(program) > MAX_INSTRUCTIONS:
        raise ValueError(f"filter has {len(program)} instructions, the kernel takes 4096")
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _assemble(native: Arch, i386: bool, body_of: Callable[[Arch], Program]) -> Program:
    """Return the whole program: one part for each architecture, every other is killed.

    Killed and not refused: a program of a foreign architecture cannot even exit when each of its
    calls fails, and would spin.
    """
    arches: list[Arch] = [native]
    if i386 and native == "x86_64":
        arches.append("i386")
    program: Program = [(_LD_W_ABS, 0, 0, _ARCH)]
    for arch in arches:
        body = body_of(arch)
        program += _skip_unless(_AUDIT_ARCH[arch], body)
        program += body
    program.append((_RET_K, 0, 0, KILL_PROCESS))
    return program


def _skip_unless(value: int, body: Program) -> Program:
    """Fall into `body` when the accumulator is `value`, jump behind it otherwise."""
    return [(_JEQ_K, 1, 0, value), (_JA, 0, 0, len(body))]


def _base_body(arch: Arch) -> Program:
    """Return the base for `arch`."""
    rules = _Rules(arch)
    rules.refuse(DENIED)
    rules.add(_socket(), "socket", "socketpair")
    rules.add(_ioctl(), "ioctl")
    # x32 calls carry the architecture of x86_64 and would pass by under other numbers
    x32: Draft = [(_JGE_K, 0, 1, _X32_BIT), _refuse(errno.ENOSYS)] if arch == "x86_64" else []
    return rules.compile(x32)


def _command_body(options: Options, arch: Arch) -> Program:
    """Return the command part for `arch`."""
    rules = _Rules(arch)
    errnos = dict(options.extra_denied)
    rules.add(_command_ioctl(options), "ioctl")
    flags = 0 if options.nested_namespaces else CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWCGROUP
    if flags:
        rules.add(_refuse_flags(flags), "clone", "unshare")
    if not options.mounts:
        rules.add(_refuse_flags(flags | ~_UNSHARED & 0xFFFFFFFF), "unshare")
        errnos |= dict.fromkeys(MOUNT_CALLS, errno.EPERM)
    if flags or not options.mounts:
        # flags lie behind a pointer: libraries fall back to clone(2) on ENOSYS
        errnos["clone3"] = errno.ENOSYS
    if not options.i386:
        errnos["modify_ldt"] = errno.ENOSYS  # segments serve 16- and 32-bit code only
    rules.refuse(errnos)
    return rules.compile()


class _Rules:
    """By call number of one architecture, the place that decides it; by place its code."""

    def __init__(self, arch: Arch) -> None:
        self._arch = arch
        self._places: dict[int, str] = {}
        self._blocks: dict[str, Block] = {_ALLOWED: [_allow()]}

    def add(self, block: Block, *names: str, place: str = "") -> None:
        """Let `block` decide the calls `names`; those that the architecture lacks are left out."""
        where = place or names[0]
        for name in names:
            number = syscalls.number(name, self._arch)
            if number is not None:
                self._places[number] = where
                self._blocks[where] = block

    def refuse(self, errnos: Mapping[str, int]) -> None:
        """Answer each call with its errno."""
        for name, code in errnos.items():
            self.add([_refuse(code)], name, place=f"errno {code}")

    def compile(self, first: Draft | None = None) -> Program:
        """Return `first` and then the search, over a loaded number; it always ends in a verdict."""
        draft: Draft = [(_LD_W_ABS, 0, 0, _NR), *(first or [])]
        draft += _search(sorted(self._places.items()))
        for name, block in self._blocks.items():
            draft += [name, *block]
        return _resolve(draft)


def _search(rules: list[tuple[int, str]], other: str = _ALLOWED, what: str = "") -> Draft:
    """Return a binary search for the number in the accumulator; unlisted ones go to `other`.

    `what` keeps the names of places apart from those of another search.
    """
    if len(rules) == 1:
        number, place = rules[0]
        return [(_JEQ_K, place, other, number)]
    middle = len(rules) // 2
    first = rules[middle][0]
    upper = f"{what}from {first}"
    below, above = (_search(half, other, what) for half in (rules[:middle], rules[middle:]))
    return [(_JGE_K, upper, 0, first), *below, upper, *above]


def _resolve(draft: Draft) -> Program:
    """Replace names by distances. A conditional jump reaches 255 instructions; one that must go
    further gets two unconditional ones behind it, which may push others out of reach in turn."""
    far: set[int] = set()
    while True:
        at, places = 0, {}
        starts: list[int] = []
        for index, item in enumerate(draft):
            starts.append(at)
            if isinstance(item, str):
                places[item] = at
            else:
                at += 3 if index in far else 1
        program, too_far = _place(draft, starts, places, far)
        if not too_far:
            return program
        far |= too_far


def _place(
    draft: Draft, starts: list[int], places: dict[str, int], far: set[int]
) -> tuple[Program, set[int]]:
    """Return the program for these positions, and the indexes of jumps that do not reach."""
    program: Program = []
    too_far: set[int] = set()
    for index, item in enumerate(draft):
        if isinstance(item, str):
            continue
        code, yes, no, value = item
        behind = starts[index] + (3 if index in far else 1)
        goals = [t + behind if isinstance(t, int) else places[t] for t in (yes, no)]
        if index in far:
            program.append((code, 0, 1, value))
            program += [(_JA, 0, 0, goals[0] - behind + 1), (_JA, 0, 0, goals[1] - behind)]
            continue
        if max(goals) - behind > 255:
            too_far.add(index)
        program.append((code, goals[0] - behind, goals[1] - behind, value))
    return program, too_far


def _refuse(code: int) -> Instruction:
    return (_RET_K, 0, 0, _ERRNO | code)


def _allow() -> Instruction:
    return (_RET_K, 0, 0, ALLOW)


def _argument(index: int) -> Instruction:
    """Load an argument's low half: ints and ioctl commands ignore the high one, so must we."""
    return (_LD_W_ABS, 0, 0, _ARGS + 8 * index)


def _refuse_flags(flags: int) -> Program:
    return [_argument(0), (_JSET_K, 0, 1, flags), _refuse(errno.EPERM), _allow()]


def _one_of(values: tuple[int, ...], refusal: int) -> Program:
    """Return: allow when the accumulator is one of `values`, refuse otherwise."""
    program: Program = []
    for position, value in enumerate(values):
        program.append((_JEQ_K, len(values) - position, 0, value))
    return [*program, _refuse(refusal), _allow()]


def _socket() -> Program:
    """Families unix, inet, inet6 and, by protocol, netlink."""
    netlink = [_argument(2), *_one_of(_NETLINK_ALLOWED, errno.EPROTONOSUPPORT)]
    inet = [
        _argument(1),
        (_ALU_AND_K, 0, 0, 0xF),
        (_JEQ_K, 0, 1, _SOCK_PACKET),
        _refuse(errno.EAFNOSUPPORT),
        _allow(),
    ]
    start: Program = [
        _argument(0),
        (_JEQ_K, 0, 1, _AF_UNIX),
        _allow(),
        (_JEQ_K, 0, 1, _AF_INET6),
        _allow(),
        (_JEQ_K, 0, len(inet), _AF_INET),
        *inet,
        (_JEQ_K, 0, len(netlink), _AF_NETLINK),
        *netlink,
        _refuse(errno.EAFNOSUPPORT),
    ]
    return start


def _command_ioctl(options: Options) -> Draft:
    """Refuse project ids, then what the policy denies."""
    attributes: Draft = [
        _argument(1),
        (_ALU_AND_K, 0, 0, 0xFFFF),
        (_JEQ_K, 0, 1, _FSSETXATTR),
        _refuse(errno.EPERM),
    ]
    allowed, refused = "ioctl allowed", "ioctl refused"  # jumps go forward only
    places = dict.fromkeys(options.ioctls_allowed or (), allowed)
    places |= dict.fromkeys(options.ioctls_denied, refused)
    if options.ioctls_allowed is None and not places:
        return [*attributes, _allow()]
    other = allowed if options.ioctls_allowed is None else refused
    search = _search(sorted(places.items()), other, "ioctl ") if places else []
    verdicts: Draft = [refused, _refuse(errno.EPERM), allowed, _allow()]
    return [*attributes, _argument(1), *search, *verdicts]


def _ioctl() -> Program:
    """Refuse single commands, then types but for their reads; allow the rest."""
    program: Program = [_argument(1)]
    for command in IOCTLS_DENIED:
        program += [(_JEQ_K, 0, 1, command), _refuse(errno.EPERM)]
    for kind, numbers in _IOCTL_TYPES.items():
        numbered = [
            _argument(1),
            (_ALU_AND_K, 0, 0, 0xFF),
            *_one_of(numbers, errno.EPERM),
        ]
        program += [
            _argument(1),
            (_ALU_AND_K, 0, 0, 0xFF00),
            (_JEQ_K, 0, len(numbered), kind << 8),
            *numbered,
        ]
    return [*program, _allow()]


def describe(options: Options | None = None) -> list[str]:
    """Return the refused calls and families in words, for documentation and `dsec policy`."""
    chosen = options or Options()
    lines = [
        f"{name}: {errno.errorcode[code]}"
        for name, code in sorted((DENIED | chosen.extra_denied).items())
    ]
    if not chosen.mounts:
        lines += [f"{name}: EPERM" for name in MOUNT_CALLS]
    if not chosen.nested_namespaces:
        lines.append("clone, unshare: EPERM with CLONE_NEW{USER,NET,CGROUP}; clone3: ENOSYS")
    lines.append("socket: unix, inet, inet6 and netlink (route, sock_diag, uevent) only")
    lines.append(
        "ioctl: no extent swapping, file flags, btrfs control, TIOCSTI, TIOCLINUX, TIOCSETD"
    )
    return lines
