"""A function that is called in workers: it looks for what calls before it left, and leaves more.

It is sent as text and runs inside; `KINDS` is what it can leave, `REFUSED` what must not be
possible. What it looks for does not depend on what it was told to leave.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from typing import Any

_libc = ctypes.CDLL(None, use_errno=True)
PLACES = ("/tmp", "/tmp/work", "/var/tmp", "/dev/shm")
REFUSED = (
    "root_files", "sysctl", "inet_socket", "keyring", "ptrace_parent", "namespace", "hostname",
    "kill_supervisor", "mount", "outer_process", "packet_socket", "netlink", "vsock",
)  # fmt: skip
KINDS = [
    "files", "shm_posix", "shm_sysv", "sem_sysv", "msg_sysv", "mqueue", "abstract_socket",
    "path_socket", "background", "daemonised", "stopped", "signals", "modules", "environment",
    "cwd", "rlimits", "umask", "descriptors", "timer", "locks", "memory", "nice", "affinity",
    "fifo", "memfd", "sibling", "subreaper", "passed_descriptor", "lease", "thread", "line",
    *REFUSED,
]  # fmt: skip


def main(plan: dict[str, Any]) -> dict[str, list[str]]:
    found = _look(plan["nice"])
    planted = []
    for kind in plan["kinds"]:
        with contextlib.suppress(OSError, PermissionError, subprocess.SubprocessError):
            globals()[f"_plant_{kind}"](plan["mark"])
            planted.append(kind)
    found += [f"could {kind}" for kind in planted if kind in REFUSED]
    return {"found": found, "planted": planted}


# --- looking ----------------------------------------------------------------------------------


def _look(nice: int) -> list[str]:
    found = []
    for place in PLACES:
        known = {"work"} if place == "/tmp" else set()
        found += [f"file {place}/{name}" for name in set(os.listdir(place)) - known]
    pids = []
    for pid in range(1, 64):
        with contextlib.suppress(OSError):
            os.getpgid(pid)
            pids.append(pid)
    if set(pids) - {1, os.getpid()} or os.getpid() != 2:
        found.append(f"processes {pids}, own {os.getpid()}")
    visible = {name for name in os.listdir("/proc") if name.isdecimal()}
    if visible != {os.readlink("/proc/self")}:
        found.append(f"/proc shows {visible}")
    found += _look_ipc()
    if hasattr(sys, "planted") or hasattr(os, "planted") or "planted" in sys.modules:
        found.append("memory of the interpreter")
    if "PLANTED" in os.environ:
        found.append("environment")
    if os.getcwd() != "/tmp/work" or os.umask(0o022) != 0o022:
        found.append("cwd or umask")
    if signal.getsignal(signal.SIGUSR1) != signal.SIG_DFL:
        found.append("signal handler")
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        found.append("timer")
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] == 1 << 20:
        found.append("rlimit")
    if os.nice(0) != nice:
        found.append("nice")
    descriptors = [int(fd) for fd in os.listdir("/proc/self/fd") if int(fd) > 3]
    for fd in descriptors:
        with contextlib.suppress(OSError):  # the listing's own is closed again
            found.append(f"descriptor {fd} {os.fstat(fd)}")
    with open("/proc/net/unix") as file:
        found += [f"socket {line}" for line in file if "planted" in line]
    with open("/etc/passwd") as file:
        fresh = os.open("/etc/passwd", os.O_RDONLY)
        try:
            _lock(file.fileno())
        except OSError:
            found.append("lock")
        os.close(fresh)
    return found


def _look_ipc() -> list[str]:
    found = []
    for kind in ("shm", "sem", "msg"):
        with open(f"/proc/sysvipc/{kind}") as file:
            found += [f"sysv {kind}: {line}" for line in file.readlines()[1:]]
    get = (("shmget", (0x5EED, 0, 0)), ("semget", (0x5EED, 0, 0)), ("msgget", (0x5EED, 0)))
    for name, arguments in get:
        if getattr(_libc, name)(*arguments) >= 0:
            found.append(f"sysv {name}")
    if _mq_open(0) >= 0:
        found.append("mqueue")
    return found


def _lock(fd: int) -> None:
    import fcntl

    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def _mq_open(flags: int) -> int:
    with contextlib.suppress(AttributeError):
        return int(_libc.mq_open(b"/planted", flags | os.O_RDWR, 0o600, None))
    return -1


# --- leaving ----------------------------------------------------------------------------------


def _checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), "refused")
    return result


def _keep(thing: Any) -> None:
    sys.__dict__.setdefault("kept", []).append(thing)


def _plant_files(mark: str) -> None:
    for place in PLACES:
        with open(f"{place}/{mark}", "w") as file:
            file.write(mark)
    os.makedirs(f"/tmp/{mark}.d/.hidden")
    os.symlink("/etc/passwd", f"/var/tmp/{mark}.link")


def _plant_shm_posix(mark: str) -> None:
    fd = os.open(f"/dev/shm/sem.{mark}", os.O_RDWR | os.O_CREAT, 0o666)
    os.truncate(fd, 4096)
    _keep(mmap.mmap(fd, 4096))


def _plant_shm_sysv(mark: str) -> None:
    _checked(_libc.shmget(0x5EED, 4096, 0o1666))


def _plant_sem_sysv(mark: str) -> None:
    _checked(_libc.semget(0x5EED, 1, 0o1666))


def _plant_msg_sysv(mark: str) -> None:
    _checked(_libc.msgget(0x5EED, 0o1666))


def _plant_mqueue(mark: str) -> None:
    _checked(_mq_open(os.O_CREAT))


def _plant_abstract_socket(mark: str) -> None:
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"\0planted-{mark}")
    made.listen()
    _keep(made)
    os.set_inheritable(made.fileno(), True)
    subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)


def _plant_path_socket(mark: str) -> None:
    made = socket.socket(socket.AF_UNIX)
    made.bind(f"/tmp/{mark}.planted")
    made.listen()
    _keep(made)


def _plant_background(mark: str) -> None:
    _keep(subprocess.Popen(["sh", "-c", "trap '' TERM INT HUP; while :; do sleep 60; done"]))


def _plant_daemonised(mark: str) -> None:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            while True:
                time.sleep(60)
        os._exit(0)


def _plant_stopped(mark: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    child.send_signal(signal.SIGSTOP)
    _keep(child)


def _plant_signals(mark: str) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})


def _plant_modules(mark: str) -> None:
    sys.modules["planted"] = sys
    os.planted = mark  # type: ignore[attr-defined]


def _plant_environment(mark: str) -> None:
    os.environ["PLANTED"] = mark
    os.environ["PYTHONPATH"] = "/tmp"


def _plant_cwd(mark: str) -> None:
    os.chdir("/usr")


def _plant_rlimits(mark: str) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def _plant_umask(mark: str) -> None:
    os.umask(0o077)


def _plant_descriptors(mark: str) -> None:
    for _ in range(20):
        _keep(os.open("/etc/passwd", os.O_RDONLY))


def _plant_timer(mark: str) -> None:
    signal.setitimer(signal.ITIMER_REAL, 500)


def _plant_locks(mark: str) -> None:
    fd = os.open("/etc/passwd", os.O_RDONLY)
    _lock(fd)
    os.set_inheritable(fd, True)
    subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)


def _plant_memory(mark: str) -> None:
    sys.planted = mark  # type: ignore[attr-defined]
    main.__globals__["planted"] = mark


def _plant_nice(mark: str) -> None:
    os.nice(3)


def _plant_affinity(mark: str) -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})


def _plant_fifo(mark: str) -> None:
    os.mkfifo(f"/dev/shm/{mark}.fifo")
    _keep(os.open(f"/dev/shm/{mark}.fifo", os.O_RDWR))


def _plant_memfd(mark: str) -> None:
    fd = os.memfd_create(mark, 0)
    os.write(fd, b"x" * 4096)
    _keep(fd)


def _plant_sibling(mark: str) -> None:
    """A child of the call's parent, which is outside of its namespace."""
    number = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    pid = ctypes.PyDLL(None).syscall(number, ctypes.c_ulong(0x8000 | signal.SIGCHLD), 0, 0, 0, 0)
    if pid == 0:
        while True:
            time.sleep(60)
    _checked(pid)


def _plant_subreaper(mark: str) -> None:
    _checked(_libc.prctl(36, 1, 0, 0, 0))
    if os.fork() == 0:
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)


def _plant_passed_descriptor(mark: str) -> None:
    """In flight in a socket that holds itself: only the kernel's collector frees such."""
    one, two = socket.socketpair()
    socket.send_fds(one, [b"x"], [one.fileno(), two.fileno()])
    one.close()
    two.close()


def _plant_lease(mark: str) -> None:
    import fcntl

    with open(f"/tmp/{mark}.lease", "w") as file:
        _keep(os.dup(file.fileno()))
        fcntl.fcntl(file.fileno(), fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(file.fileno(), fcntl.F_SETLEASE, fcntl.F_WRLCK)


def _plant_thread(mark: str) -> None:
    import threading

    threading.Thread(target=time.sleep, args=(600,), daemon=True).start()


def _plant_line(mark: str) -> None:
    """Somebody else keeps the call's own stream."""
    os.set_inheritable(3, True)
    subprocess.Popen(["sleep", "600"], close_fds=False, start_new_session=True)


# --- what must be refused -----------------------------------------------------------------------


def _plant_root_files(mark: str) -> None:
    for place in ("/", "/etc", "/usr/lib/python3", "/root", "/run", "/home", "/var/lib"):
        with contextlib.suppress(OSError):
            os.close(os.open(f"{place}/{mark}", os.O_CREAT | os.O_WRONLY))
            return
    raise OSError("all refused")


def _plant_sysctl(mark: str) -> None:
    for name in ("net/ipv4/ip_forward", "kernel/msgmax", "net/unix/max_dgram_qlen"):
        with contextlib.suppress(OSError):
            with open(f"/proc/sys/{name}", "r+") as file:
                file.write("1")
            return
    raise OSError("all refused")


def _plant_inet_socket(mark: str) -> None:
    with socket.socket(socket.AF_INET) as made:
        made.bind(("127.0.0.1", 5000))


def _plant_keyring(mark: str) -> None:
    number = {"x86_64": 248, "aarch64": 217}[os.uname().machine]
    _checked(_libc.syscall(number, b"user", mark.encode(), b"x", 1, -4))


def _plant_ptrace_parent(mark: str) -> None:
    _checked(_libc.ptrace(0x4206, os.getppid(), 0, 0))  # PTRACE_SEIZE of the supervisor


def _plant_namespace(mark: str) -> None:
    _checked(_libc.unshare(0x10000000))


def _plant_hostname(mark: str) -> None:
    _checked(_libc.sethostname(mark.encode(), len(mark)))


def _plant_kill_supervisor(mark: str) -> None:
    os.kill(1, 0)  # the supervisor; no number names the zygote


def _plant_mount(mark: str) -> None:
    _checked(_libc.mount(b"tmpfs", b"/mnt", b"tmpfs", 0, None))


def _plant_outer_process(mark: str) -> None:
    """/proc is the worker's, and hides whoever is outside; `_look` has seen nobody."""
    reached = set()
    for pid in range(1, 60):
        with contextlib.suppress(OSError):
            os.close(os.open(f"/proc/{pid}/mem", os.O_RDWR))
            reached.add(pid)
        with contextlib.suppress(OSError):
            os.listdir(f"/proc/{pid}/fd")
            reached.add(pid)
    # Listed last: what else this call has started may fork meanwhile. Threads have a place, too
    seen = [name for name in os.listdir("/proc") if name.isdecimal()]
    if reached <= {int(task) for name in seen for task in os.listdir(f"/proc/{name}/task")}:
        raise OSError("all refused")


def _plant_packet_socket(mark: str) -> None:
    socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close()


def _plant_netlink(mark: str) -> None:
    socket.socket(socket.AF_NETLINK, socket.SOCK_RAW).close()


def _plant_vsock(mark: str) -> None:
    socket.socket(socket.AF_VSOCK, socket.SOCK_STREAM).close()
