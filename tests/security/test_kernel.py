"""The kernel's surface: system calls, socket families, ioctls, and the files of /proc."""

from __future__ import annotations

import asyncio
import contextlib
import platform
import stat
from pathlib import Path

import pytest

from libdsec import CommandResult, Sandbox
from tests.security.conftest import USER, Target, attack

pytestmark = [
    pytest.mark.root,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="ioctl numbers of x86_64"),
]
BOTH = pytest.mark.parametrize("user", ["root", USER])


@BOTH
async def test_system_calls_beyond_a_sandbox(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
P, b = ctypes.create_string_buffer(256), b"/etc/passwd"
denied = dict(
    bpf=(0, P, 128), perf_event_open=(P, 0, -1, -1, 0), userfaultfd=(0,), fanotify_init=(0, 0),
    add_key=(b"user", b"a", b"b", 1, -3), keyctl=(0, -3, 0), request_key=(b"user", b"a", 0, 0),
    kexec_load=(0, 0, 0, 0), kexec_file_load=(0, 0, 0, 0, 0), init_module=(P, 0, b""),
    finit_module=(0, b"", 0), delete_module=(b"x", 0), swapon=(b, 0), swapoff=(b,), acct=(b,),
    reboot=(0xfee1dead, 672274793, 0, 0), syslog=(3, P, 100), quotactl=(0, 0, 0, P),
    clock_settime=(0, P), settimeofday=(P, 0), open_by_handle_at=(AT_FDCWD, P, 0),
    file_setattr=(AT_FDCWD, b, P, 24, 0),
)
absent = dict(io_uring_setup=(1, P), io_uring_enter=(0, 0, 0, 0, 0, 0),
              io_uring_register=(0, 0, 0, 0), clone3=(bytes(88), 88))
report(
    denied={n: apart(lambda: trying(n, *a)) for n, a in denied.items()},
    absent={n: apart(lambda: trying(n, *a)) for n, a in absent.items()},
    x32=trying(0x40000000 | 39), control=trying("getpid"),
)
""",
        user,
    )
    assert set(found["denied"].values()) == {"EPERM"}
    assert set(found["absent"].values()) == {"ENOSYS"}
    assert found["x32"] == "ENOSYS"
    assert found["control"] == "ok"


INT80 = r"""
#include <stdio.h>
int main(void)
{
    long result = 20; /* getpid of i386; a 64-bit mkdir, to a filter that looks at numbers only */
    __asm__ volatile("int $0x80" : "+a"(result) : : "memory");
    printf("%ld\n", result);
    return 0;
}
"""


async def test_calls_of_another_architecture_end_the_process(box: Sandbox) -> None:
    await box.files.write("/attack/int80.c", INT80)
    await box.run_shell("gcc -o /attack/int80 /attack/int80.c", check=True, timeout=60)
    done = await box.run("/attack/int80")
    assert (done.signal, done.stdout) == (31, "")  # SIGSYS


@BOTH
async def test_the_filter_cannot_be_suspended(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
pid = os.fork()
if pid == 0:
    call("ptrace", 0, 0, 0, 0)
    os.kill(os.getpid(), 19)
    os._exit(0)
os.waitpid(pid, 0)
SETOPTIONS, SUSPEND, EXITKILL = 0x4200, 1 << 21, 1 << 20
report(suspend=trying("ptrace", SETOPTIONS, pid, 0, SUSPEND),
       control=trying("ptrace", SETOPTIONS, pid, 0, EXITKILL), killed=tried(os.kill, pid, 9))
""",
        user,
    )
    assert found == {"suspend": "EPERM", "control": "ok", "killed": "ok"}


@BOTH
async def test_priorities_are_the_hosts(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
report(
    fifo=tried(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(1)),
    nice=apart(lambda: tried(os.setpriority, os.PRIO_PROCESS, 0, -5)),
    io=apart(lambda: trying("ioprio_set", 1, 0, 1 << 13)),
    oom=[writable("/proc/self/oom_score_adj"), tried(os.write,
         os.open("/proc/self/oom_score_adj", os.O_WRONLY), b"-1000")],
    lower=apart(lambda: tried(os.setpriority, os.PRIO_PROCESS, 0, 5)),
)
""",
        user,
    )
    assert found["fifo"] == "EPERM"
    assert found["nice"] in ("EACCES", "EPERM")
    assert found["io"] == "EPERM"
    assert found["oom"] == ["ok", "EACCES"]
    assert found["lower"] == "ok"  # control


@BOTH
async def test_socket_families(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
import socket
refused = {
    "packet": (17, 3, 0x300), "sock_packet": (2, 10, 0x300), "vsock": (40, 1, 0), "alg": (38, 5, 0),
    "xdp": (44, 3, 0), "can": (29, 3, 1), "bluetooth": (31, 3, 1), "key": (15, 3, 2),
    "tipc": (30, 1, 0), "rds": (21, 5, 0), "smc": (43, 1, 0), "kcm": (41, 2, 0), "nfc": (39, 5, 0),
    "qrtr": (42, 2, 0), "ax25": (3, 5, 0), "x25": (9, 5, 0),
}
netlink = {"netfilter": 12, "generic": 16, "crypto": 21, "xfrm": 6, "audit": 9, "connector": 11}
kept = {"unix": (1, 1, 0), "tcp": (2, 1, 0), "udp6": (10, 2, 0), "route": (16, 3, 0)}
def made(*arguments):
    return tried(lambda: socket.socket(*arguments).close())
report(
    refused={n: made(*a) for n, a in refused.items()},
    netlink={n: made(16, 3, p) for n, p in netlink.items()},
    raw=[made(2, 3, 1), made(10, 3, 58), made(2, 3, 255)],
    kept={n: made(*a) for n, a in kept.items()},
)
""",
        user,
    )
    assert set(found["refused"].values()) == {"EAFNOSUPPORT"}
    assert set(found["netlink"].values()) == {"EPROTONOSUPPORT"}
    assert found["raw"] == ["EPERM"] * 3  # the network namespace is the host's
    assert set(found["kept"].values()) == {"ok"}


@BOTH
async def test_ioctls_of_files_and_terminals(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
import tempfile
file, terminal = tempfile.TemporaryFile(), os.openpty()[1]
P = ctypes.create_string_buffer(512)
on_file = {
    "XFS_IOC_SWAPEXT": 0xC0C0586D, "XFS_IOC_EXCHANGE_RANGE": 0x40285881,
    "FS_IOC_SETFLAGS": 0x40086602, "FS_IOC_FSSETXATTR": 0x401C5820, "FIFREEZE": 0xC0045877,
    "FITRIM": 0xC0185879, "EXT4_IOC_MOVE_EXT": 0xC028660F, "EXT4_IOC_SWAP_BOOT": 0x6611,
    "BTRFS_IOC_SNAP_CREATE": 0x50009401, "FS_IOC_ENABLE_VERITY": 0x40806685, "FIBMAP": 1,
}
on_terminal = {"TIOCSTI": 0x5412, "TIOCLINUX": 0x541C, "TIOCCONS": 0x541D, "TIOCSETD": 0x5423,
               "TIOCSTI above 32 bits": 0x100005412}
def outcome(fd, command):
    return trying("ioctl", fd, command, ctypes.addressof(P))
report(
    file={n: outcome(file.fileno(), c) for n, c in on_file.items()},
    terminal={n: outcome(terminal, c) for n, c in on_terminal.items()},
    control=[outcome(file.fileno(), 0x80086601), outcome(terminal, 0x5413)],
)
""",
        user,
    )
    assert set(found["file"].values()) == {"EPERM"}
    assert set(found["terminal"].values()) == {"EPERM"}
    assert found["control"] == ["ok", "ok"]  # FS_IOC_GETFLAGS, TIOCGWINSZ


HIDDEN = ("kcore", "kpagecount", "kpageflags", "kpagecgroup", "kallsyms", "keys", "key-users",
          "kmsg", "timer_list", "sched_debug", "latency_stats")  # fmt: skip


@BOTH
async def test_files_of_proc_that_show_the_host_are_closed(box: Sandbox, user: str) -> None:
    present = [name for name in HIDDEN if Path("/proc", name).exists()]
    assert len(present) > 4
    found = await attack(
        box,
        f"""
report(read={{n: peek("/proc/" + n) for n in {present}}},
       write={{n: writable("/proc/" + n) for n in {present}}},
       control=peek("/proc/uptime") != "")
""",
        user,
    )
    # a mask, or a mode that gives nothing to others: host root does not exist inside
    assert set(found["read"].values()) <= {"", "EACCES"}
    assert found["read"]["keys"] == ""
    assert set(found["write"].values()) <= {"EACCES", "EROFS"}
    assert found["control"]


@BOTH
async def test_nothing_of_proc_is_writable_but_ones_own(box: Sandbox, user: str) -> None:
    found = await attack(
        box,
        """
opened, seen = [], 0
for folder, below, files in os.walk("/proc"):
    if folder == "/proc":
        below[:] = [n for n in below if not n.isdigit() and n not in ("self", "thread-self")]
    for name in files:
        seen += 1
        if os.path.islink(os.path.join(folder, name)):
            continue
        if writable(os.path.join(folder, name)) == "ok":
            opened.append(os.path.join(folder, name))
report(opened=opened, seen=seen, own=writable("/proc/self/comm"))
""",
        user,
    )
    # A trigger of pressure stalls belongs to who sets it, and tells what `cat` tells.
    assert [name for name in found["opened"] if not name.startswith("/proc/pressure/")] == []
    assert found["seen"] > 500
    assert found["own"] == "ok"  # control


@BOTH
async def test_kernel_parameters_stay(box: Sandbox, user: str) -> None:
    names = ("kernel/core_pattern", "kernel/hostname", "vm/drop_caches", "kernel/sysrq",
             "net/ipv4/ip_forward", "fs/suid_dumpable", "user/max_user_namespaces")  # fmt: skip
    present = [n for n in names if Path("/proc/sys", n).exists()]
    before = {n: Path("/proc/sys", n).read_bytes() for n in present if n != "vm/drop_caches"}
    assert len(present) > 4
    found = await attack(
        box,
        f"""
report(write={{n: writable("/proc/sys/" + n) for n in {present}}},
       sysrq=writable("/proc/sysrq-trigger"),
       mode=tried(os.chmod, "/proc/sys/kernel/core_pattern", 0o666),
       read=peek("/proc/sys/kernel/ostype"))
""",
        user,
    )
    assert set(found["write"].values()) <= {"EACCES", "EROFS"}
    assert found["sysrq"] in ("EACCES", "EROFS", "ENOENT")
    assert found["mode"] in ("EPERM", "EROFS")
    assert found["read"] == "Linux\n"
    assert before == {n: Path("/proc/sys", n).read_bytes() for n in before}


async def test_a_core_dump_starts_no_program_of_the_host(box: Sandbox) -> None:
    """kernel.core_pattern may name a program, which the host would start as root."""
    done = await box.run_shell("ulimit -Hc; ulimit -c unlimited || echo refused; kill -SEGV $$")
    assert done.stdout == "0\nrefused\n"
    assert done.signal == 11


@pytest.mark.slow
@BOTH
async def test_grep_over_proc_survives(target: Target, user: str) -> None:
    box = target.sandbox
    done = await box.run_shell("grep -r '' /proc >/dev/null 2>&1", user=user, timeout=20)
    assert done.timed_out or done.exit_code in (1, 2)
    assert (await box.run("echo", "alive")).stdout == "alive\n"
    assert target.daemon.process is not None
    assert target.daemon.process.poll() is None


async def test_host_paths_and_names_are_not_shown(target: Target) -> None:
    box = target.sandbox
    found = await attack(
        box,
        """
shown = {}
for name in ("mounts", "self/mountinfo", "self/mountstats", "self/cgroup", "self/maps", "net/unix",
             "self/environ", "locks", "swaps", "self/sched"):
    shown[name] = peek("/proc/" + name)
shown["hostname"] = os.uname().nodename
shown["resolv"] = peek("/etc/resolv.conf") + peek("/etc/hosts") + peek("/etc/hostname")
for name in filter(str.isdigit, os.listdir("/proc")):
    for file in ("environ", "cmdline", "cgroup", "mountinfo"):
        shown[f"{name} {file}"] = peek(f"/proc/{name}/{file}")
    try:
        numbers = os.listdir(f"/proc/{name}/fd")
    except OSError:  # it has just ended
        continue
    for number in numbers:
        try:
            shown[f"{name} {number}"] = os.readlink(f"/proc/{name}/fd/{number}")
        except OSError:
            pass
report(shown=shown)
""",
    )
    shown = found["shown"]
    checkout = str(Path(__file__).parents[2])
    host = [str(target.daemon.root), target.daemon.name, "/var/tmp/", "/run/", "/var/lib/dsec",
            "/sys/fs/cgroup", checkout, ".erofs", platform.node() or "?"]  # fmt: skip
    for name, text in shown.items():
        for word in host:
            assert word not in text, (name, word)
    assert {line.rsplit(":", 1)[1] for line in shown["self/cgroup"].split()} <= {
        "/", "/0", "/1", "/2", "/3", "/4", "/5", "/6", "/7", "/8", "/9"
    }  # fmt: skip
    assert shown["hostname"] != platform.node()
    assert "overlay" in shown["mounts"]  # control


async def test_a_command_floods_its_output_within_the_cap(target: Target) -> None:
    box = await target.sibling(output_limit_mb=2, spool_limit_mb=4)
    before = target.daemon.memory_bytes()
    init = target.init(box)
    spooled, ended = 0, list[CommandResult]()
    # control: until a busy machine has let all of them flood
    while spooled <= 1 << 20 or min(done.stdout_total for done in ended) <= 8 << 20:
        flood = [asyncio.create_task(box.run_shell("yes", timeout=2)) for _ in range(3)]
        while not all(task.done() for task in flood):
            spooled = max(spooled, _spooled(init))
            await asyncio.sleep(0.1)
        ended = [await task for task in flood]
        assert all(done.timed_out for done in ended)
        assert all(len(done.stdout_bytes) <= 2 << 20 for done in ended)
        assert spooled <= (4 << 20) + 65536
        for done in ended:  # or what is kept of them gives way while it is added up
            await box.commands.forget(done.cid)
    assert all(done.output_truncated for done in ended)
    assert target.daemon.memory_bytes() - before < 50 << 20
    await box.stop()


def _spooled(init: int) -> int:
    """Bytes of the files without a name that dsec-init holds, but for the platform's shell."""
    total = 0
    for entry in Path(f"/proc/{init}/fd").iterdir():
        with contextlib.suppress(OSError):
            state = entry.stat()
            shell = str(entry.readlink()).startswith("/memfd:")
            if stat.S_ISREG(state.st_mode) and state.st_nlink == 0 and not shell:
                total += state.st_blocks * 512
    return total
