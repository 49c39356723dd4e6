"""dsec-init, PID 1 of a sandbox, against root and an ordinary user inside."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from libdsec import Sandbox, Session
from libdsec.errors import DSecError, NotFound
from tests.security.conftest import USER, Target, attack

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]
BOTH = pytest.mark.parametrize("user", ["root", USER])


@BOTH
async def test_proc_shows_nothing_of_init(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
names = "status cmdline environ maps mem fd fd/3 ns/mnt root cwd exe stat comm cgroup mountinfo io "
names += "limits syscall task fdinfo pagemap auxv stack timers"
report(
    init={name: tried(os.lstat, f"/proc/1/{name}") for name in names.split()},
    own=tried(os.lstat, f"/proc/{os.getpid()}/fd/0"),
    listed=sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    me=os.getpid(),
)
""",
        user,
    )
    assert set(found["init"].values()) == {"ENOENT"}
    assert found["own"] == "ok"
    assert found["me"] in found["listed"]
    assert 1 not in found["listed"]


@BOTH
async def test_signals_and_tracing_do_not_reach_init(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
import resource, struct
child = os.fork()
if child == 0:
    os.execv("/bin/sleep", ["sleep", "30"])
import time
time.sleep(0.1)
buffer = ctypes.create_string_buffer(64)
local = struct.pack("QQ", ctypes.addressof(buffer), 8)
def probes(pid):
    handle = call("pidfd_open", pid, 0)
    return {
        "kill": tried(os.kill, pid, 0), "stop": tried(os.kill, pid, 19 if pid == 1 else 18),
        "pidfd_getfd": trying("pidfd_getfd", handle, 3 if pid == 1 else 0, 0),
        "pidfd_kill": trying("pidfd_send_signal", handle, 9 if pid == 1 else 18, 0, 0),
        "setns": trying("setns", handle, NEWNS | NEWUTS),
        "readv": trying("process_vm_readv", pid, local, 1, struct.pack("QQ", 4096, 8), 1, 0),
        "kcmp": trying("kcmp", pid, os.getpid(), 0, 0, 0),
        "prlimit": trying("prlimit64", pid, 7, 0, buffer),
        "affinity": tried(os.sched_setaffinity, pid, {0}),
        "nice": tried(os.setpriority, os.PRIO_PROCESS, pid, 10),
        "seize": trying("ptrace", 0x4206, pid, 0, 0),
    }
init, own = probes(1), probes(child)
os.kill(child, 9)
report(init=init, own=own)
""",
        user,
    )
    assert set(found["init"].values()) == {"EPERM"}
    # control: the same on a process of one's own. setns needs root; nothing is mapped at 4096.
    own = {name: outcome for name, outcome in found["own"].items() if outcome != "ok"}
    assert own == {"readv": "EFAULT"} | ({"setns": "EPERM"} if user == USER else {})
    assert (await box.run("true")).ok


# Seizes each process as soon as its number exists. EPERM: it was there and refused (the target's
# memory is init's until its exec). An exec seen by the tracer would mean that it was caught before.
RACE = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <stdlib.h>
#include <time.h>
#include <fcntl.h>
#include <unistd.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static int refused, seized_late, seized_early, files, fds;

/* Whether the program opened it, after its exec: the dynamic linker's cache or a library. */
static int of_the_linker(int fd)
{
    char path[64], target[256];
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(path, target, sizeof target - 1);
    if (n < 0)
        return 0;
    target[n] = 0;
    return strstr(target, "/ld.so.cache") || strstr(target, ".so.");
}

static void look(int pid)
{
    static const char *const names[] = { "environ", "mem", "maps", "fd/3", "fd/5", "fd/6", "root",
                                         "cwd", "exe", "ns/mnt" };
    char path[64], text[256];
    for (unsigned i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(path, sizeof path, "/proc/%d/%s", pid, names[i]);
        int fd = open(path, O_RDONLY);
        if (fd < 0)
            continue;
        snprintf(path, sizeof path, "/proc/%d/comm", pid);
        int comm = open(path, O_RDONLY);
        ssize_t n = comm >= 0 ? read(comm, text, sizeof text) : -1;
        files += n > 0 && !strncmp(text, "dsec-init", 9);
        close(comm);
        close(fd);
    }
    int handle = (int)syscall(SYS_pidfd_open, pid, 0);
    for (int fd = 3; handle >= 0 && fd < 12; fd++) {
        int got = (int)syscall(SYS_pidfd_getfd, handle, fd, 0);
        if (got < 0)
            continue;
        fds += !of_the_linker(got);
        close(got);
    }
    if (handle >= 0)
        close(handle);
}

/* The number of the next process. Guesses that fell behind while this stood still meet nobody. */
static int unborn(int guess)
{
    int pid = fork();
    if (pid == 0)
        _exit(0);
    return pid > 0 && waitpid(pid, NULL, 0) == pid ? pid + 1 : guess;
}

int main(int argc, char **argv)
{
    time_t end = time(NULL) + atoi(argv[1]);
    int stop = argc > 2, next = getpid() + 1;
    printf("ready\n");
    fflush(stdout);
    /* A busy machine may take its time until the first is met. */
    for (unsigned round = 0; time(NULL) < end || (!stop && !refused); round++) {
        if (round % 4096 == 0)
            next = unborn(next);
        for (int pid = next; pid < next + (stop ? 12 : 3); pid++) {
            if (stop) {
                if (kill(pid, SIGSTOP) == 0) {
                    printf("stopped %d\n", pid);
                    return 0;
                }
                if (errno == EPERM && pid != next)
                    next = pid;
                continue;
            }
            if (ptrace(PTRACE_SEIZE, pid, 0, PTRACE_O_TRACEEXEC) < 0) {
                if (errno == EPERM) {
                    refused++;
                    if (refused % 64 == 1)
                        look(pid);
                    if (pid != next)
                        next = pid;
                }
                continue;
            }
            int status, stops = 0, early = 0;
            ptrace(PTRACE_INTERRUPT, pid, 0, 0);
            while (waitpid(pid, &status, __WALL) == pid && WIFSTOPPED(status)) {
                /* The first stop may be the end of the exec: attaching waits for it. */
                early |= stops++ && status >> 8 == (SIGTRAP | PTRACE_EVENT_EXEC << 8);
                ptrace(PTRACE_CONT, pid, 0, 0);
            }
            early ? seized_early++ : seized_late++;
            next = pid + 1;
        }
    }
    printf("{\"refused\": %d, \"late\": %d, \"early\": %d, \"files\": %d, \"fds\": %d}\n", refused,
           seized_late, seized_early, files, fds);
    return 0;
}
"""


async def _compile(box: Sandbox, name: str, source: str) -> str:
    await box.files.write(f"/attack/{name}.c", source)
    await box.run_shell(f"gcc -O2 -o /attack/{name} /attack/{name}.c", check=True, timeout=60)
    return f"/attack/{name}"


async def test_children_of_init_cannot_be_caught_before_their_exec(target: Target) -> None:
    box = await target.sibling(cpu_cores_limit=2)
    program = await _compile(box, "race", RACE)
    running = await box.commands.run([program, "8"], background=True)
    assert (await anext(running)).data == b"ready\n"
    ended = asyncio.ensure_future(running.wait())
    while not ended.done():
        await box.run("true", timeout=10)
        with contextlib.suppress(NotFound):
            await box.files.get_info("/attack/none")
    lines = (await ended).stdout.splitlines()
    await box.stop()
    found = json.loads(lines[-1])
    assert found["refused"] > 0, found  # control: it met them
    assert (found["early"], found["files"], found["fds"]) == (0, 0, 0), found


STOPPABLE: dict[str, Callable[[Sandbox], Awaitable[object]]] = {
    "command": lambda box: box.run("true", timeout=1),
    "file": lambda box: box.files.read("/etc/hostname"),
    "session": lambda box: box.create_session(),
}


@pytest.mark.parametrize("kind", list(STOPPABLE))
async def test_a_child_stopped_from_inside_does_not_hold_its_call(
    target: Target, kind: str
) -> None:
    """Root inside may signal a child of init as soon as that is in the user namespace."""
    box = await target.sibling(cpu_cores_limit=2)
    program = await _compile(box, "race", RACE)
    rounds = met = 0
    while rounds < 3 or not met:  # control: until one was stopped
        rounds += 1
        running = await box.commands.run([program, "10", "stop"], background=True)
        assert (await anext(running)).data == b"ready\n"
        done = asyncio.ensure_future(running.wait())
        while not done.done():
            calls = [asyncio.ensure_future(STOPPABLE[kind](box)) for _ in range(4)]
            _, hanging = await asyncio.wait(calls, timeout=4)
            if hanging:  # or the machine stands still: what is asked later is answered later
                with contextlib.suppress(DSecError):
                    await box.run("true", timeout=1)
                hanging = {task for task in hanging if not task.done()}
            for task in hanging:
                task.cancel()
            outcomes = await asyncio.gather(*calls, return_exceptions=True)
            if hanging:
                await box.stop()
            assert not hanging, outcomes
            for opened in outcomes:
                if isinstance(opened, Session):
                    await opened.close()
        met += (await done).stdout.count("stopped")
        assert (await box.run("echo", "alive", timeout=5)).stdout == "alive\n"
    await box.stop()


@BOTH
async def test_a_command_inherits_three_descriptors(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
report(fds=os.listdir("/proc/self/fd"))
""",
        user,
    )
    assert found["fds"] == ["0", "1", "2", "3"]  # 3 is the listing's own
    async with await box.create_session(user=user) as session:
        assert (await session.run("ls /proc/self/fd")).stdout.split() == ["0", "1", "2", "3"]


async def test_a_terminal_gives_no_other_descriptor(box: Sandbox) -> None:
    done = await (await box.pty.create(cmd=["ls", "/proc/self/fd"])).wait()
    assert done.stdout_bytes.split() == [b"0", b"1", b"2", b"3"]


@BOTH
async def test_the_agents_socket_is_not_reachable(target: Target, user: str) -> None:
    box = target.sandbox
    path = target.daemon.runtime / "sb" / box.id / "agent.sock"
    assert path.is_socket()  # control
    found = await attack(
        box,
        f"""
import socket, subprocess
host = {str(path)!r}
def connect(address):
    with socket.socket(socket.AF_UNIX) as s:
        s.connect(address)
names = [host, "/proc/1/root" + host, "/proc/1/cwd/agent.sock", "agent.sock", "\\0agent.sock",
         "/proc/1/fd/3", "/run/dsec/dsecd.sock"]
listed = peek("/proc/net/unix")
found = subprocess.run(["find", "/", "-xdev", "-type", "s"], capture_output=True, text=True)
with socket.socket(socket.AF_UNIX) as own, socket.socket(socket.AF_UNIX) as peer:
    own.bind("\\0control"); own.listen()
    control = tried(peer.connect, "\\0control")
    mine = "@control" in peek("/proc/net/unix")
report(outcomes={{n: tried(connect, n) for n in names}}, control=control, mine=mine,
       listed="agent" in listed or "dsec" in listed, sockets=found.stdout)
""",
        user,
    )
    assert set(found["outcomes"].values()) <= {"ENOENT", "ECONNREFUSED", "ENOTDIR"}
    assert (found["control"], found["mine"]) == ("ok", True)
    assert not found["listed"]
    assert "agent.sock" not in found["sockets"]


PING = """
import socket, sys
s = socket.socket(socket.AF_UNIX)
s.settimeout(5)
s.connect(sys.argv[1])
body = b"\\x94\\x00\\x01\\xa8sys.ping\\x80"
try:
    s.sendall(len(body).to_bytes(4, "big") + body)
    print(repr(s.recv(100)))
except ConnectionError:
    print("ended")
"""


async def test_init_refuses_a_peer_from_inside(target: Target) -> None:
    """Should its socket ever become reachable: a process of the sandbox has a pid in its view."""
    box = target.sandbox
    pid = target.init(box)
    path = target.daemon.runtime / "sb" / box.id / "agent.sock"
    enter = ["nsenter", f"--pid=/proc/{pid}/ns/pid", "/usr/bin/python3", "-c", PING, str(path)]
    inside = await _output(enter)
    assert inside in ("b''", "ended")
    outside = await _output(["/usr/bin/python3", "-c", PING, str(path)])
    assert outside == "b'\\x00\\x00\\x00\\x04\\x93\\x01\\x01\\xc0'"  # control: its pong
    assert (await box.run("true")).ok


async def _output(command: list[str]) -> str:
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    out, _ = await process.communicate()
    return out.decode().strip()


async def test_host_sees_no_root_among_the_sandboxs_processes(target: Target) -> None:
    box = target.sandbox
    commands = [
        await box.commands.run(["sleep", "20"], background=True, user=u) for u in ("root", USER)
    ]
    base = 0x20000000
    pids = target.daemon.pids_of(box.id)
    init = target.init(box)
    ids = {pid: _status(pid) for pid in pids}
    assert len(pids) >= 3
    owner = ids[init]["Uid"][0]
    assert owner >= base
    assert (owner + 1) % 65536 == 0  # the last of its range, mapped nowhere
    for pid, status in ids.items():
        assert set(status["Groups"]) <= set(range(owner - 65535, owner + 1))
        for value in (*status["Uid"], *status["Gid"]):
            assert owner - 65535 <= value <= owner
            assert (value == owner) == (pid == init)
    assert _capabilities(init) == {"CapInh": 0, "CapPrm": 0, "CapEff": 0, "CapAmb": 0}
    for command in commands:
        await command.kill()


def _status(pid: int) -> dict[str, list[int]]:
    lines = (line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {k: [int(v) for v in vs.split()] for k, vs in lines if k in ("Uid", "Gid", "Groups")}


def _capabilities(pid: int) -> dict[str, int]:
    lines = (line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {k: int(v, 16) for k, v in lines if k in ("CapInh", "CapPrm", "CapEff", "CapAmb")}


async def test_init_carries_nothing_of_the_host(target: Target) -> None:
    pid = target.init(target.sandbox)
    assert Path(f"/proc/{pid}/environ").read_bytes() == b""
    assert Path(f"/proc/{pid}/cmdline").read_bytes() == b"dsec-init\0"
    known = ("socket:", "/dev/null", "anon_inode:", "user:", "mnt:", "ipc:", "uts:", "cgroup:", "/")

    def strange() -> list[str]:
        found = []
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                found.append(str(entry.readlink()))
        return [target for target in found if not target.startswith(known)]

    deadline = time.monotonic() + 5
    while found := strange():  # pipes of commands that were killed a moment ago
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.02)


@pytest.mark.parametrize("file", ["/etc/passwd", "/etc/group"])
async def test_account_files_do_not_lead_through_inits_descriptors(
    target: Target, file: str
) -> None:
    """A link to /proc/self/fd/N/.. is followed by the process that looks users up (the kind of
    CVE-2024-21626): it must hold no directory of the host by then."""
    box = await target.sibling()
    host = target.daemon.root / "planted"
    host.write_text("planted:x:4242:4242::/leaked/from/host:/bin/false\n")
    host.chmod(0o644)
    try:
        for number in range(13):
            link = f"/proc/self/fd/{number}" + "/.." * 12 + str(host)
            await box.run_shell(f"ln -sfn {link} {file}", user="0:0", check=True)
            user = "planted" if file == "/etc/passwd" else "0:planted"
            with pytest.raises(DSecError) as caught:
                await box.run_shell("id; env", user=user)
            assert "no such user" in str(caught.value), number
    finally:
        await box.stop()


async def test_hostile_shells_directories_and_terminals_are_errors(target: Target) -> None:
    """What init opens on behalf of a call may be anything: it answers, and never waits."""
    box = await target.sibling()
    await box.run_shell("mkfifo /fifo; mkdir /mnt/e; touch /plain", check=True)

    async def refused(action: Awaitable[object]) -> bool:
        with pytest.raises(DSecError):
            await asyncio.wait_for(action, 5)
        return True

    for where in ("/proc/self/fd/3", "/proc/1/cwd", "/fifo", "/proc/self/exe", "/plain"):
        assert await refused(box.run("true", cwd=where))
    assert await refused(box.run("/fifo"))
    for over in ("/fifo", "/plain", "/dev/null", "/dev/zero"):
        # a command's mount is the sandbox's: its namespace is one
        await box.run_shell(f"mount --bind {over} /dev/pts/ptmx", check=True)
        assert await refused(box.pty.create(cmd=["true"]))
        await box.run_shell("umount /dev/pts/ptmx", check=True)
    done = await (await box.pty.create(cmd=["echo", "control"])).wait()
    assert done.stdout_bytes == b"control\r\n"
    for over in ("/fifo", "/mnt/e"):
        await box.run_shell(f"rm -rf /bin/bash; cp -a {over} /bin/bash", check=True)
        outcome = await asyncio.gather(
            asyncio.wait_for(box.run_shell("echo x"), 5), return_exceptions=True
        )
        assert isinstance(outcome[0], DSecError) or outcome[0].stdout == "x\n"  # by /bin/sh
        assert (await box.run("/bin/dash", "-c", "cp -a /bin/dash /bin/bash.n; rm -rf /bin/bash;"
                              " mv /bin/bash.n /bin/bash")).ok  # fmt: skip
    await box.stop()


async def test_a_command_that_is_init_itself_cannot_change_it(target: Target) -> None:
    """#!/proc/self/exe runs the host's dsec-init inside (CVE-2019-5736): it stays unwritable."""
    box = await target.sibling()
    binary = Path(f"/proc/{target.init(box)}/exe").readlink()
    before = (binary.stat().st_mtime_ns, binary.stat().st_size)
    await box.files.write("/evil", "#!/proc/self/exe\n", mode=0o755)
    found = await attack(
        box,
        """
import threading, time
outcomes = set()
def chase():
    end = time.monotonic() + 3
    while time.monotonic() < end:
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                if not os.readlink(f"/proc/{name}/exe").endswith("dsec-init"):
                    continue
                outcomes.add(tried(lambda: os.open(f"/proc/{name}/exe", os.O_WRONLY)))
            except OSError:
                continue
chase()
report(outcomes=sorted(outcomes))
""",
    )
    with contextlib.suppress(DSecError):
        await box.run("/evil", timeout=5)
    assert "ok" not in found["outcomes"]
    assert (binary.stat().st_mtime_ns, binary.stat().st_size) == before
    await box.stop()
