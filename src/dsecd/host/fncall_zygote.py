"""The Python that waits in a worker of a pool and forks into the room of each call.

It is given to the sandbox's Python as text, so it needs nothing but the standard library (3.10 or
newer, with ctypes). Who is who: src/_fastpath/init/fncall.h.

The zygote imports what the pool declares and never sees what a call is given or makes: it is told
to fork, with the descriptors that belong to the call, and forks. The fork enters the room and gives
up what it must not have; then it waits for its one request, still invisible to others. From there
on it is the call: it reads its files, runs its code and writes back what that returned.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import resource
import signal
import socket
import struct
import sys
import traceback
from types import ModuleType
from typing import Any

WORK = "/tmp/work"  # where a call starts, and its files are
UID = 65534
FORKED = 5  # REPORT_READY of the keeper: the kind of our only message, the pid behind it
FDS = 6  # with each order to fork: three namespaces, then line, stdout and stderr
CONTROL = LINE = 3  # the zygote's socket to the keeper; the call's
_PARENT, _SETTID = 0x8000, 0x01000000  # CLONE_...
_NEWPID, _NEWNS, _NEWIPC = 0x20000000, 0x20000, 0x08000000
_DUMPABLE, _TID_ADDRESS = 4, 40  # PR_SET_..., PR_GET_...
_CLONE = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
_CLOSE_RANGE = 436
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: we fork in there
# Looked up here, once: whatever is done first in a fork is done in every one
_before_fork = ctypes.pythonapi.PyOS_BeforeFork
_after_fork = ctypes.pythonapi.PyOS_AfterFork_Parent
_after_fork_in_child = ctypes.pythonapi.PyOS_AfterFork_Child


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


# --- zygote -----------------------------------------------------------------------------------


def serve(imports: list[str]) -> None:
    """Import, then fork for each message until the keeper is gone."""
    for name in imports:
        importlib.import_module(name)
    os.environ.update(HOME=WORK, USER="nobody", LOGNAME="nobody")
    os.umask(0o022)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _refuse_threads()
    _refuse_shared_memory()
    for _ in range(20):  # the interpreter rewrites code until it has run often enough
        _rehearse()
    gc.collect()
    gc.freeze()  # so that a collection in a call does not copy every page
    _flush()
    number = _thread_number()
    score, standing = _oom_score()
    _checked(_libc.prctl(_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    control = socket.socket(fileno=CONTROL)
    room = socket.CMSG_SPACE(FDS * 4)
    while True:
        order, ancillary, _, _ = control.recvmsg(16, room)
        if not order:
            return
        fds = struct.unpack(f"={FDS}i", ancillary[0][2])
        pid = _fork_into(fds, number, score, standing)
        os.closerange(min(fds), max(fds) + 1)  # the zygote opens nothing in between
        control.send(struct.pack("=B3xi", FORKED, pid))


def _refuse_threads() -> None:
    """A fork has none of them, but the locks that they held when it was made."""
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("a module that was imported has started threads: import it in the call")


def _refuse_shared_memory() -> None:
    """A fork shares it with us, and so with each fork after it: nothing could clean that."""
    where = ""
    with open("/proc/self/smaps") as file:
        for line in file:
            name, _, flags = line.partition(":")
            if "-" in name.split(" ", 1)[0]:
                where = line.strip()
            elif name == "VmFlags" and {"sh", "mw"} <= set(flags.split()):
                raise RuntimeError(f"a module that was imported shares memory with forks: {where}")


def _flush() -> None:
    """What imports have printed: each fork would write what is left in buffers."""
    sys.stdout.flush()
    sys.stderr.flush()
    _libc.fflush(None)


def _thread_number() -> int:
    """Return where the C library keeps the number of its thread; 0 where it does not say.

    fork(3) renews it, clone(2) alone does not, and recursive locks go by it: a thread of the call
    that has by chance the zygote's number would share those of the main thread.
    """
    place = ctypes.c_void_p()
    _libc.prctl(_TID_ADDRESS, ctypes.byref(place), 0, 0, 0)
    if not place.value or ctypes.c_int.from_address(place.value).value != os.getpid():
        return 0
    return place.value


def _oom_score() -> tuple[int, bytes]:
    """Return the open file of our own score and what it holds; -1 where we may not change it."""
    score = os.open("/proc/self/oom_score_adj", os.O_RDWR)
    standing = os.read(score, 16)
    try:
        os.write(score, b"1000")
        os.write(score, standing)
    except PermissionError:
        return -1, b""
    return score, standing


def _rehearse() -> None:
    """Do what every call does: its modules are then imported, and its code has settled."""
    names: dict[str, Any] = {}
    exec(compile("def main(x): return [x]", "<fncall>", "exec"), names)
    json.loads(json.dumps(names["main"]({"a": [1.5, "b", None]})))


def _fork_into(fds: tuple[int, ...], number: int, score: int, standing: bytes) -> int:
    """Fork into the PID namespace of the room; return the pid of the call, the keeper's child.

    Each page that is written between here and the next message is copied once per call.
    """
    pids, mounts, ipc, *own = fds
    _checked(_libc.setns(pids, _NEWPID), "setns")
    _before_fork()
    if score >= 0:
        os.write(score, b"1000")  # inherited: the kernel is to prefer calls
    flags = ctypes.c_ulong(_PARENT | signal.SIGCHLD | (_SETTID if number else 0))
    child = ctypes.c_void_p(number)  # fourth or fifth by architecture; the other is not looked at
    pid = _libc.syscall(_CLONE, flags, 0, 0, child, child)
    if pid == 0:
        _after_fork_in_child()
        _be_call(mounts, ipc, own)
    if score >= 0:
        os.write(score, standing)
    _after_fork()
    return _checked(pid, "clone")


# --- call -------------------------------------------------------------------------------------


def _be_call(mounts: int, ipc: int, own: list[int]) -> None:
    status = 1
    try:
        line, out, err = own
        os.dup2(line, LINE, inheritable=False)
        os.dup2(out, 1)
        os.dup2(err, 2)  # first of all: what fails from here on is said there
        _checked(_libc.setns(mounts, _NEWNS), "setns")
        _checked(_libc.setns(ipc, _NEWIPC), "setns")
        _give_up_rights()
        os.write(LINE, b"r")
        status = _run(*_receive())
    except SystemExit as end:
        status = _exit_code(end)
    except BaseException:
        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def _give_up_rights() -> None:
    os.setsid()
    # Not the zygote's: locks and flags of one open file are shared by all who inherit it
    os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
    _checked(_libc.syscall(_CLOSE_RANGE, LINE + 1, (1 << 32) - 1, 0), "close_range")
    os.chdir(WORK)
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)  # takes every capability
    _checked(_libc.prctl(_DUMPABLE, 0, 0, 0, 0), "PR_SET_DUMPABLE")


def _receive() -> tuple[dict[str, Any], list[memoryview]]:
    """Read the request: the size of its head, the head, then parts whose sizes the head lists."""
    size, head_size = struct.unpack("=II", _read(8))
    text = memoryview(_read(size))
    head = json.loads(bytes(text[:head_size]))
    parts, at = [], head_size
    for each in head["parts"]:
        parts.append(text[at : at + each])
        at += each
    return head, parts


def _read(size: int) -> bytearray:
    data = bytearray(size)
    rest = memoryview(data)
    while rest:
        n = os.readv(LINE, [rest])
        if n == 0:
            os._exit(0)
        rest = rest[n:]
    return data


def _run(head: dict[str, Any], parts: list[memoryview]) -> int:
    code, given, *contents = parts
    for name, content in zip(head["files"], contents, strict=True):
        os.makedirs(os.path.dirname(os.path.join(WORK, name)), exist_ok=True)
        with open(name, "wb", opener=_executable) as file:
            file.write(content)
    cpu = head["cpu_s"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    os.environ.update(head["env"])
    _libc.prctl(_DUMPABLE, 1, 0, 0, 0)  # for /proc/self; nobody else is there any more
    if head["argv"]:
        _become_program(head["argv"], given)
    sys.path.insert(0, WORK)
    module, _, name = head["entry"].rpartition(":")
    if module:
        function = getattr(importlib.import_module(module), name)
    else:
        made = sys.modules["__fncall__"] = ModuleType("__fncall__")  # dataclasses look for it
        exec(compile(bytes(code), "<fncall>", "exec"), made.__dict__)
        if not hasattr(made, name):
            raise LookupError(f"the code defines no {name!r}: name its function in `entry`")
        function = getattr(made, name)
    value = function(json.loads(bytes(given))) if len(given) else function()
    _write(LINE, json.dumps(value, allow_nan=False).encode())
    return 0


def _become_program(argv: list[str], given: memoryview) -> None:
    stdin = os.memfd_create("input")
    _write(stdin, given)
    os.lseek(stdin, 0, os.SEEK_SET)
    os.dup2(stdin, 0)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores
        signal.signal(number, signal.SIG_DFL)
    os.execvp(argv[0], argv)


def _executable(path: str, flags: int) -> int:
    return os.open(path, flags, 0o755)


def _write(fd: int, data: bytes | memoryview) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


if __name__ == "__main__":
    sys.argv, _imports = sys.argv[:1], json.loads(sys.argv[1])
    serve(_imports)
