"""Both parts of the filter, installed in a child: each denied call, and calls that must work."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import pytest

from dsecd.host import syscalls
from dsecd.policy import seccomp

pytestmark = [
    pytest.mark.root,
    pytest.mark.needs("seccomp"),
    pytest.mark.skipif(syscalls.host_arch() != "x86_64", reason="numbers of x86_64"),
]
libc = ctypes.CDLL(None, use_errno=True)


class Fprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def install(code: bytes) -> None:
    """prctl(PR_SET_SECCOMP) as a spawner and dsec-init do it: privileged, without no_new_privs."""
    buffer = ctypes.create_string_buffer(code, len(code))
    program = Fprog(len(code) // 8, ctypes.addressof(buffer))
    if libc.prctl(22, 2, ctypes.byref(program), 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def raw(nr: int, *args: int) -> int:
    """Return 0, or the errno of system call `nr`."""
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(nr), *[ctypes.c_long(a) for a in args])
    return ctypes.get_errno() if result == -1 else 0


def confined(work: Callable[[], str], options: seccomp.Options | None = None) -> tuple[str, int]:
    """Run `work` in a filtered child; return its text and its wait status."""
    base = seccomp.base_filter(i386=options is not None and options.i386)
    command = seccomp.command_filter(options)
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reader)
        try:
            install(base)
            install(command)
            text = work()
        except BaseException as error:
            text = f"raised {error!r}"
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as file:
        text = file.read().decode()
    return text, os.waitpid(pid, 0)[1]


def test_every_denied_call_is_refused_by_the_kernel() -> None:
    """With bad arguments and as root: EPERM or ENOSYS can only come from the filter."""

    def work() -> str:
        wrong = []
        for name, code in seccomp.DENIED.items():
            nr = syscalls.number(name, "x86_64")
            if nr is not None and raw(nr, -1, -1, -1, -1, -1) != code:
                wrong.append(name)
        return ",".join(wrong)

    assert confined(work) == ("", 0)


def test_namespaces_sockets_and_ioctls_are_refused() -> None:
    def refusal(action: Callable[[], object]) -> int | None:
        try:
            action()
        except OSError as error:
            return error.errno
        return 0

    def work() -> str:
        unshare, clone, clone3 = 272, 56, 435
        got = [
            raw(unshare, seccomp.CLONE_NEWUSER),
            raw(unshare, seccomp.CLONE_NEWNET),
            raw(unshare, seccomp.CLONE_NEWCGROUP),
            raw(clone, seccomp.CLONE_NEWUSER | 17, 0, 0, 0, 0),
            raw(clone3, 0, 0),
            refusal(lambda: socket.socket(socket.AF_ALG, socket.SOCK_SEQPACKET)),
            refusal(lambda: socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM)),
            refusal(lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW)),
            refusal(lambda: socket.socket(socket.AF_INET, 10)),
            refusal(lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12)),
            raw(16, 0, 0x5412, 0),
            raw(16, 0, 0xC0C0586D, 0),
            raw(16, 0, 0x40086602, 0),
        ]
        return ",".join(map(str, got))

    none, family = errno.EPERM, errno.EAFNOSUPPORT
    expected = [*[none] * 4, errno.ENOSYS, *[family] * 4, errno.EPROTONOSUPPORT, *[none] * 3]
    assert confined(work) == (",".join(map(str, expected)), 0)


def test_what_software_needs_goes_on_working() -> None:
    def work() -> str:
        socket.socket(socket.AF_INET6, socket.SOCK_DGRAM).close()
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
        for end in socket.socketpair():
            end.close()
        done = subprocess.run(
            [sys.executable, "-c", "import multiprocessing as m; print(m.Pool(2).map(abs, [-3]))"],
            capture_output=True, text=True, check=False, timeout=30,
        )  # fmt: skip
        if raw(272, 0x00020000):  # a mount namespace of its own
            return "unshare(CLONE_NEWNS) was refused"
        if raw(101, 0, 0, 0, 0):  # PTRACE_TRACEME
            return "ptrace was refused"
        return done.stdout.strip() + done.stderr[-300:]

    assert confined(work) == ("[3]", 0)


def test_nested_namespaces_option() -> None:
    text, _ = confined(
        lambda: str(raw(272, seccomp.CLONE_NEWUSER)), seccomp.Options(nested_namespaces=True)
    )
    assert text == "0"


def test_32_bit_calls_kill_unless_allowed() -> None:
    """int 0x80 from a 64-bit program is the other table: getpid there is 20."""
    code = bytes.fromhex("b814000000cd80c3")  # mov eax, 20; int 0x80; ret

    def work() -> str:
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        return str(ctypes.CFUNCTYPE(ctypes.c_int)(address)() == os.getpid())

    text, status = confined(work)
    assert text == ""
    assert os.WTERMSIG(status) == 31  # SIGSYS
    text, status = confined(work, seccomp.Options(i386=True))
    if status == 0:  # a kernel without CONFIG_IA32_EMULATION kills it by itself
        assert text == "True"
