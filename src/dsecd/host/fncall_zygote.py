"""The program that waits in a worker of a pool and forks once per call. It runs *inside* a sandbox.

It is given to the sandbox's Python as text, so it needs nothing but the standard library (3.10 or
newer, with ctypes). Who is who in a call:

*zygote*      root of the sandbox. Has imported what the pool declares; never runs a call's code,
              never decodes what a call made.
*supervisor*  PID 1 of the call's own PID, mount, IPC and UTS namespaces, root of the sandbox.
              Everything that was there is read-only for the call, what it may write is new tmpfs.
              Kills every other process when the call ends; with it go the namespaces.
*call*        uid 65534 without capabilities, with no_new_privs and, when the pool has no network,
              without any socket family but unix. A fork of the supervisor, so as warm as that.

What a call leaves in its memory, namespaces and tmpfs ends with the supervisor; the zygote answers
only once that has been reaped, and the kernel lets it be reaped only when nothing of it lives.

On the connection both sides send messages: 4 bytes of length, a JSON object, then the byte strings
whose lengths its "blobs" lists. A request's are source, input and files, an answer's value, stdout,
stderr and files.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import platform
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from typing import Any

WORK = "/tmp/work"  # where a call starts, and its files are
UID = 65534
SPARE_S = 5.0  # beyond the call's own time, before its supervisor is held to be stuck
_CLONE = 0x08000000 | 0x20000000 | 0x00020000 | 0x04000000 | signal.SIGCHLD  # ipc pid mount uts
_NR = {"x86_64": (56, 41, 53), "aarch64": (220, 198, 199)}  # clone, socket, socketpair
_MOUNT_SETATTR = 442
_RDONLY_NOSUID, _PRIVATE = 0x1 | 0x2, 1 << 18
_FRESH = ("/tmp", "/var/tmp", "/dev/shm")
_libc = ctypes.PyDLL(None, use_errno=True)  # keeps the interpreter's lock: we fork in there


def _checked(result: int, what: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
    return result


# --- messages ---------------------------------------------------------------------------------


def _pack(head: dict[str, Any], blobs: list[bytes]) -> bytes:
    text = json.dumps({**head, "blobs": [len(blob) for blob in blobs]}).encode()
    return b"".join((struct.pack(">I", len(text)), text, *blobs))


def _read(peer: socket.socket, size: int) -> bytes:
    parts: list[bytes] = []
    while size:
        part = peer.recv(min(size, 1 << 20))
        if not part:
            raise EOFError
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _receive(peer: socket.socket) -> tuple[dict[str, Any], list[bytes]]:
    (size,) = struct.unpack(">I", _read(peer, 4))
    head = json.loads(_read(peer, size))
    return head, [_read(peer, each) for each in head["blobs"]]


# --- zygote -----------------------------------------------------------------------------------


def serve(port: int, imports: list[str]) -> None:
    """Import, wait for the one connection, answer its requests until it ends."""
    for name in imports:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that a collection in a call does not copy every page
    _checked(_libc.prctl(4, 0, 0, 0, 0), "PR_SET_DUMPABLE")
    with socket.create_server(("127.0.0.1", port)) as listening:
        peer, _ = listening.accept()
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while True:
        try:
            head, blobs = _receive(peer)
        except EOFError:
            return
        if "ping" in head:
            peer.sendall(_pack({}, []) + struct.pack(">d", 0.0))
        else:
            _answer(peer, head, blobs)


def _answer(peer: socket.socket, head: dict[str, Any], blobs: list[bytes]) -> None:
    began = time.monotonic()
    reading, writing = os.pipe()
    pid = _fork_apart()
    if pid == 0:
        try:
            peer.close()
            os.close(reading)
            _send(writing, _supervise(head, blobs, began))
        except BaseException:
            _send(writing, _pack({"error": traceback.format_exc(limit=3)}, []))
        finally:
            os._exit(0)
    os.close(writing)
    answer = _collect(reading, pid, began + head["wall_s"] + SPARE_S)
    os.close(reading)
    os.waitpid(pid, 0)
    if not answer:  # killed: it took too long to end, or there was no memory left
        late = time.monotonic() > began + head["wall_s"]
        answer = _pack({"signal": signal.SIGKILL, "timed_out": late}, [b"", b"", b""])
    peer.sendall(answer + struct.pack(">d", time.monotonic() - began))


def _fork_apart() -> int:
    """fork(2), into new namespaces: unshare(2) would serve one call only."""
    api = ctypes.pythonapi
    api.PyOS_BeforeFork()
    pid = _libc.syscall(_NR[platform_name][0], ctypes.c_ulong(_CLONE), 0, 0, 0, 0)
    if pid == 0:
        api.PyOS_AfterFork_Child()
        return 0
    api.PyOS_AfterFork_Parent()
    return _checked(pid, "clone")


def _collect(fd: int, pid: int, deadline: float) -> bytes:
    parts: list[bytes] = []
    while True:
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            os.kill(pid, signal.SIGKILL)
            return b""
        part = os.read(fd, 1 << 18)
        if not part:
            return b"".join(parts)
        parts.append(part)


def _send(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


# --- supervisor -------------------------------------------------------------------------------


def _supervise(head: dict[str, Any], blobs: list[bytes], began: float) -> bytes:
    with open("/proc/self/oom_score_adj", "w") as file:  # which becomes read-only
        file.write("1000")
    _restrict_files(head["files_bytes"])
    _write_files(head["files"], blobs[2:])
    pipes = [os.pipe() for _ in range(3)]  # value, stdout, stderr
    started = time.monotonic()
    pid = os.fork()
    if pid == 0:
        _become_call(head, blobs, [writing for _, writing in pipes])
    for _, writing in pipes:
        os.close(writing)
    outputs = _Outputs([reading for reading, _ in pipes], head["output_bytes"])
    timed_out = outputs.follow(pid, started + head["wall_s"])
    ended = time.monotonic()
    status = _kill_all(pid)
    outputs.drain()
    os.setegid(UID)
    os.seteuid(UID)  # a path may be a link: no more is read than the call could
    files = [_content(path, head["output_bytes"]) for path in head["outputs"]]
    found = [
        (path, data) for path, data in zip(head["outputs"], files, strict=True) if data is not None
    ]
    room = head["answer_bytes"] - sum(map(len, outputs.kept))
    while sum(len(data) for _, data in found) > room:
        found.pop()
        outputs.truncated = True
    answer = {
        "exit_code": os.WEXITSTATUS(status) if os.WIFEXITED(status) else None,
        "signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else None,
        "timed_out": timed_out,
        "truncated": outputs.truncated,
        "files": [path for path, _ in found],
        "started_s": started - began,
        "run_s": ended - started,
    }
    return _pack(answer, [*outputs.kept, *(data for _, data in found)])


def _restrict_files(size: int) -> None:
    """Nothing of the sandbox can be written, and what can be is empty."""
    attributes = struct.pack("QQQQ", _RDONLY_NOSUID, 0, _PRIVATE, 0)
    done = _libc.syscall(_MOUNT_SETATTR, -100, b"/", 0x8000, attributes, len(attributes))
    _checked(done, "mount_setattr: the worker's policy must allow mounts")
    options = f"size={size},mode=1777,nr_inodes=65536".encode()
    for place in _FRESH:
        done = _libc.mount(b"tmpfs", place.encode(), b"tmpfs", 0x2 | 0x4, options)
        _checked(done, f"mount on {place}")


def _write_files(names: list[str], contents: list[bytes]) -> None:
    os.mkdir(WORK)
    os.chown(WORK, UID, UID)
    for name, content in zip(names, contents, strict=True):
        path = os.path.join(WORK, name)
        directory = os.path.dirname(path)
        while not os.path.isdir(directory):
            _make_directory(directory)
        with open(path, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o755)
            os.fchown(file.fileno(), UID, UID)


def _make_directory(path: str) -> None:
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        _make_directory(parent)
    os.mkdir(path)
    os.chown(path, UID, UID)


class _Outputs:
    """What the call writes to its three pipes: each kept up to a limit, all of it read."""

    def __init__(self, fds: list[int], limit: int) -> None:
        self._parts: dict[int, list[bytes]] = {fd: [] for fd in fds}
        self._left = dict.fromkeys(fds, limit)
        self._open = set(fds)
        self.truncated = False

    @property
    def kept(self) -> list[bytes]:
        return [b"".join(parts) for parts in self._parts.values()]

    def follow(self, pid: int, deadline: float) -> bool:
        """Read until the process ends; True when the deadline came first."""
        pidfd = os.pidfd_open(pid)
        while True:
            wait = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select([pidfd, *self._open], [], [], wait)
            if not ready:
                return True
            if pidfd in ready:
                return False
            for fd in ready:
                self._take(fd)

    def drain(self) -> None:
        """Read to the end: the writers are gone."""
        while self._open:
            for fd in tuple(self._open):
                self._take(fd)

    def _take(self, fd: int) -> None:
        part = os.read(fd, 1 << 16)
        if not part:
            self._open.discard(fd)
            return
        kept = part[: self._left[fd]]
        self._left[fd] -= len(kept)
        self._parts[fd].append(kept)
        self.truncated |= len(kept) < len(part)


def _kill_all(pid: int) -> int:
    """End every process of the namespace but this one; return how the call itself ended."""
    status = 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    while True:
        try:
            reaped, how = os.wait()
        except ChildProcessError:
            return status
        if reaped == pid:
            status = how


def _content(path: str, limit: int) -> bytes | None:
    try:
        fd = os.open(os.path.join(WORK, path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError:
        return None
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            return None
        with os.fdopen(os.dup(fd), "rb") as file:
            content = file.read(limit + 1)
        return content if len(content) <= limit else None
    finally:
        os.close(fd)


# --- call -------------------------------------------------------------------------------------


def _become_call(head: dict[str, Any], blobs: list[bytes], writing: list[int]) -> None:
    status = 1
    try:
        _give_up_rights(head, blobs[1], writing)
        status = _run(head, blobs)
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


def _exit_code(end: SystemExit) -> int:
    if end.code is None:
        return 0
    if isinstance(end.code, int):
        return end.code & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _give_up_rights(head: dict[str, Any], given: bytes, writing: list[int]) -> None:
    os.setsid()
    stdin = os.memfd_create("input", os.MFD_CLOEXEC)
    if head["argv"]:
        _send(stdin, given)
        os.lseek(stdin, 0, os.SEEK_SET)
    places = zip((stdin, *writing), (40, 43, 41, 42), strict=True)
    kept = [os.dup2(fd, to, inheritable=True) for fd, to in places]
    for to, fd in enumerate(sorted(kept)):  # input, stdout, stderr, value
        os.dup2(fd, to, inheritable=to < 3)
    os.closerange(4, 1 << 16)
    cpu = max(1, round(head["cpu_s"]))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu, cpu + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.setgroups([])
    os.setresgid(UID, UID, UID)
    os.setresuid(UID, UID, UID)  # takes every capability
    _checked(_libc.prctl(38, 1, 0, 0, 0), "PR_SET_NO_NEW_PRIVS")
    if not head["network"]:
        _refuse_sockets()
    _libc.prctl(4, 1, 0, 0, 0)  # dumpable again, for /proc/self
    os.umask(0o022)
    os.chdir(WORK)
    os.environ.update({"HOME": WORK, "USER": "nobody", "LOGNAME": "nobody", **head["env"]})


def _refuse_sockets() -> None:
    """Two calls of one worker, one after the other, share its loopback: not even that is left."""
    _, one, pair = _NR[platform_name]
    program = b"".join(
        struct.pack("=HBBI", *step)
        for step in (
            (0x20, 0, 0, 0),  # the call's number
            (0x15, 1, 0, one),
            (0x15, 0, 2, pair),
            (0x20, 0, 0, 16),  # its family
            (0x15, 0, 1, socket.AF_UNIX),
            (0x06, 0, 0, 0x7FFF0000),  # where any other call goes, too
            (0x06, 0, 0, 0x00050000 | 97),  # EAFNOSUPPORT
        )
    )
    buffer = ctypes.create_string_buffer(program)
    layout = struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    _checked(_libc.prctl(22, 2, layout, 0, 0), "PR_SET_SECCOMP")


def _run(head: dict[str, Any], blobs: list[bytes]) -> int:
    if head["argv"]:
        os.execvp(head["argv"][0], head["argv"])
    sys.path.insert(0, WORK)
    module, _, name = head["entry"].rpartition(":")
    if module:
        function = getattr(importlib.import_module(module), name)
    else:
        names: dict[str, Any] = {"__name__": "__fncall__"}
        exec(compile(blobs[0], "<fncall>", "exec"), names)
        if name not in names:
            raise LookupError(f"the code defines no {name!r}: name its function in `entry`")
        function = names[name]
    value = function(json.loads(blobs[1])) if blobs[1] else function()
    _send(3, json.dumps(value).encode())
    return 0


platform_name = platform.machine()

if __name__ == "__main__":
    sys.argv, _arguments = sys.argv[:1], json.loads(sys.argv[1])
    serve(_arguments["port"], _arguments["imports"])
