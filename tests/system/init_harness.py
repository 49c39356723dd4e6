"""Starts a real `dsec-init` in a PID namespace of its own, and a client that sees every frame.

Two settings. *plain*: init is root and commands run in its own namespaces, on the host's root.
*owned*: as in a sandbox, init runs under an unmapped uid that owns the user namespace which
commands enter, with mount, IPC, UTS and cgroup namespaces of their own.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from libdsec import wire
from libdsec.errors import Unavailable, from_wire

ROOT = Path(__file__).resolve().parents[2]
BINARY = os.environ.get("DSEC_INIT", str(ROOT / "src/dsecd/bin/dsec-init"))
CGROUPS = Path("/sys/fs/cgroup/unified")
UID_BASE = 0x2F000000
OWNER_UID = UID_BASE + 65535

# Becomes dsec-init; runs as PID 1 of a new PID and mount namespace with fds 3..6 in place.
_LAUNCHER = """
import ctypes, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
def check(result, what):
    if result < 0:
        raise OSError(ctypes.get_errno(), what)
    return result
binary, owned, uid_base = sys.argv[1], sys.argv[2] == "owned", int(sys.argv[3])
check(libc.mount(b"none", b"/", None, 0x44000, None), "private")
check(libc.mount(b"proc", b"/proc", b"proc", 0, None), "proc")
os.chdir("/")
if owned:
    owner = uid_base + 65535
    ready, go = os.pipe(), os.pipe()
    holder = os.fork()
    if holder == 0:
        check(libc.setresgid(owner, owner, owner), "setresgid")
        check(libc.setresuid(owner, owner, owner), "setresuid")
        check(libc.unshare(0x10000000), "user namespace")
        libc.prctl(4, 1, 0, 0, 0)  # dumpable again: the parent writes our maps
        os.write(ready[1], b"x"); os.read(go[0], 1)
        check(libc.setresgid(0, 0, 0), "setresgid")
        check(libc.setresuid(0, 0, 0), "setresuid")
        check(libc.unshare(0x00020000 | 0x08000000 | 0x04000000 | 0x02000000), "inner")
        os.write(ready[1], b"x"); signal.pause()
    os.read(ready[0], 1)
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/{holder}/{name}", "w") as f:
            f.write(f"0 {uid_base} 65535")
    os.write(go[1], b"x"); os.read(ready[0], 1)
    for number, name in enumerate(("user", "mnt", "ipc", "uts", "cgroup"), start=7):
        fd = os.open(f"/proc/{holder}/ns/{name}", os.O_RDONLY)
        os.dup2(fd, number, inheritable=True)
        if fd != number:
            os.close(fd)
        os.set_inheritable(number, True)  # dup2 to itself leaves it as it is
    os.kill(holder, signal.SIGKILL); os.waitpid(holder, 0)
    os.setgroups([])
    os.setresgid(owner, owner, owner); os.setresuid(owner, owner, owner)
os.execv(binary, [binary])
"""


class InitClient:
    """A blocking connection that keeps every frame of every call."""

    def __init__(self, path: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX)
        self.socket.settimeout(20)
        self.socket.connect(path)
        self.splitter = wire.Splitter()
        self.ids = itertools.count(1)
        self.frames: dict[int, deque[wire.Frame]] = defaultdict(deque)

    def open(self, op: str, /, **args: Any) -> int:
        call = next(self.ids)
        self.send(wire.Request(call, op, wire.pack(args)))
        return call

    def send(self, frame: wire.Frame) -> None:
        self.socket.sendall(wire.encode(frame))

    def frame(self, call: int, timeout_s: float = 20) -> wire.Frame:
        """Return the next frame of `call`. Raises `TimeoutError`, or `Unavailable` at the end."""
        deadline = time.monotonic() + timeout_s
        while not self.frames[call]:
            self.socket.settimeout(max(0.001, deadline - time.monotonic()))
            data = self.socket.recv(1 << 20)
            if not data:
                raise Unavailable("dsec-init closed the connection")
            for frame in self.splitter.feed(data):
                self.frames[frame.id].append(frame)
        return self.frames[call].popleft()

    def finish(
        self, call: int, *, grant: bool = True, timeout_s: float = 30
    ) -> tuple[Any, list[Any]]:
        """Return the result and the items of `call`; raises the error it failed with."""
        items: list[Any] = []
        while True:
            frame = self.frame(call, timeout_s)
            if isinstance(frame, wire.Item):
                items.append(msgspec.msgpack.decode(frame.data))
                if grant:
                    self.send(wire.Credit(call, 1))
            elif isinstance(frame, wire.Reply):
                return msgspec.msgpack.decode(frame.result), items
            elif isinstance(frame, wire.Failure):
                raise from_wire(frame.error)

    def call(self, op: str, /, **args: Any) -> Any:
        return self.finish(self.open(op, **args))[0]

    def run(self, shell: str | bytes | None = None, /, **args: Any) -> dict[str, Any]:
        """exec.run with all output put together in `stdout` and `stderr`."""
        if shell is not None:
            args["shell"] = shell if isinstance(shell, bytes) else shell.encode()
        args.setdefault("cid", f"t{time.monotonic_ns()}")
        result, items = self.finish(self.open("exec.run", **args))
        for name, stream in (("stdout", 1), ("stderr", 2)):
            streamed = b"".join(i["data"] for i in items if i["stream"] == stream)
            result[name] = streamed + result.get(name, b"")
        result["items"] = len(items)
        return dict(result)

    def upload(self, call: int, data: bytes, chunk: int = wire.MAX_ITEM) -> Any:
        """Stream `data` into `call` under its credits, end it and return the result."""
        credit = wire.INITIAL_CREDIT
        for at in range(0, len(data), chunk):
            while credit == 0:
                frame = self.frame(call)
                if isinstance(frame, wire.Failure):
                    raise from_wire(frame.error)
                assert isinstance(frame, wire.Credit)
                credit += frame.n
            self.send(wire.Item(call, wire.pack(data[at : at + chunk])))
            credit -= 1
        self.send(wire.End(call))
        return self.finish(call)[0]

    def close(self) -> None:
        self.socket.close()


class Init:
    """One running dsec-init; `path` is its socket, `work` a directory its commands start in."""

    def __init__(self, owned: bool = False, cgroup: bool = True, **config: Any) -> None:
        self.dir = Path(tempfile.mkdtemp(prefix="dsec-inittest-"))
        self.path = str(self.dir / "agent.sock")
        self.work, self.spool = self.dir / "work", self.dir / "spool"
        self.cgroup = CGROUPS / f"dsec-inittest-{os.getpid()}-{self.dir.name[-8:]}"
        self.dir.chmod(0o711)
        for directory in (self.work, self.spool):
            directory.mkdir()
        if cgroup:
            self.cgroup.mkdir()
        if owned:
            self._give_away(cgroup)
        self.config = {"workdir": str(self.work), "sandbox": "test", **config}
        self.process = self._start(owned, cgroup)
        self.client = InitClient(self.path)
        self.client.call("sys.ping")

    def _give_away(self, cgroup: bool) -> None:
        os.chown(self.work, UID_BASE, UID_BASE)
        os.chown(self.spool, OWNER_UID, OWNER_UID)
        if cgroup:
            for name in (".", "cgroup.procs"):
                os.chown(self.cgroup / name, OWNER_UID, OWNER_UID)

    def _start(self, owned: bool, cgroup: bool) -> subprocess.Popen[bytes]:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(self.path)
        listener.listen(16)
        reader, writer = os.pipe()
        os.write(writer, msgspec.msgpack.encode(self.config))
        os.close(writer)
        spool = os.open(self.spool, os.O_RDONLY | os.O_DIRECTORY)
        group = os.open(self.cgroup, os.O_RDONLY | os.O_DIRECTORY) if cgroup else -1
        wanted = [listener.fileno(), reader, spool] + ([group] if cgroup else [])

        def place() -> None:
            high = [os.dup(fd) for fd in wanted]
            lifted = [os.dup2(fd, 100 + i, inheritable=True) for i, fd in enumerate(high)]
            for number, fd in enumerate(lifted, start=3):
                os.dup2(fd, number, inheritable=True)
            os.closerange(3 + len(lifted), 256)
            if cgroup:
                (self.cgroup / "cgroup.procs").write_text("0")

        unshare = ["unshare", "--pid", "--mount", "--ipc", "--fork", "--kill-child"]
        setting = "owned" if owned else "plain"
        command = [*unshare, sys.executable, "-c", _LAUNCHER, BINARY, setting, str(UID_BASE)]
        process = subprocess.Popen(command, preexec_fn=place, close_fds=False)
        for fd in wanted[1:]:
            os.close(fd)
        listener.close()
        return process

    def pid(self) -> int:
        """Return the host pid of dsec-init."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return int(children.split()[0])

    def processes(self) -> set[int]:
        """Return the host pids of everything that runs below dsec-init."""
        found, queue = set(), [self.pid()]
        while queue:
            pid = queue.pop()
            with contextlib.suppress(OSError):
                text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
                new = {int(word) for word in text.split()}
                found |= new
                queue += new
        return found

    def stop(self) -> None:
        self.client.close()
        with contextlib.suppress(OSError, IndexError):
            os.kill(self.pid(), signal.SIGKILL)  # unshare's --kill-child ends with a setresuid
        self.process.kill()
        self.process.wait()
        deadline = time.monotonic() + 10
        if self.cgroup.exists():
            (self.cgroup / "cgroup.kill").write_text("1")
        while self.cgroup.exists() and time.monotonic() < deadline:
            for directory in sorted(self.cgroup.rglob("*/"), reverse=True):
                with contextlib.suppress(OSError):
                    directory.rmdir()
            with contextlib.suppress(OSError):
                self.cgroup.rmdir()
                break
            time.sleep(0.01)
        shutil.rmtree(self.dir, ignore_errors=True)


@contextlib.contextmanager
def running(**options: Any) -> Iterator[Init]:
    init = Init(**options)
    try:
        yield init
    finally:
        init.stop()


@pytest.fixture(scope="module", params=["plain", "owned"])
def init(request: pytest.FixtureRequest) -> Iterator[Init]:
    with running(owned=request.param == "owned") as started:
        yield started


@pytest.fixture
def client(init: Init) -> Iterator[InitClient]:
    connection = InitClient(init.path)
    yield connection
    connection.close()


@pytest.fixture
def here(init: Init, request: pytest.FixtureRequest) -> bytes:
    name = f"d{abs(hash(request.node.name))}".encode()
    init.client.call("files.mkdir", path=name)
    return name


def wait_until(condition: Any, timeout_s: float = 5.0) -> None:
    """Wait until `condition()` is true; fails the test when it never is."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
