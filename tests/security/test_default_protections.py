"""What every sandbox is protected from, whatever its profile: the list, item by item.

Each row says what root inside tries, what must come of it, and what it is that protects; that claim
is checked, too.
"""

from __future__ import annotations

import errno
import stat
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from dsecd.host.syscalls import host_arch, number
from dsecd.policy import masks, seccomp
from dsecd.policy.ioctls import REQUESTS
from dsecd.policy.presets import PRESETS
from tests.system.confine_lab import Box, Lab, open_lab

pytestmark = [pytest.mark.root, pytest.mark.asyncio(loop_scope="module")]
PROFILES = (None, *PRESETS)
NEWUSER = 0x10000000

CALLS = {
    "bpf": errno.EPERM,
    "userfaultfd": errno.EPERM,
    "keyctl": errno.EPERM,
    "add_key": errno.EPERM,
    "request_key": errno.EPERM,
    "kexec_load": errno.EPERM,
    "kexec_file_load": errno.EPERM,
    "init_module": errno.EPERM,
    "finit_module": errno.EPERM,
    "delete_module": errno.EPERM,
    "perf_event_open": errno.EPERM,
    "open_by_handle_at": errno.EPERM,
    "io_uring_setup": errno.ENOSYS,
    "quotactl": errno.EPERM,
    "reboot": errno.EPERM,
    "swapon": errno.EPERM,
    "syslog": errno.EPERM,
}
IOCTLS = (
    "XFS_IOC_SWAPEXT", "FS_IOC_SETFLAGS", "FS_IOC_FSSETXATTR", "FS_IOC_ENABLE_VERITY",
    "EXT4_IOC_MOVE_EXT", "EXT4_IOC_SWAP_BOOT", "BTRFS_IOC_SNAP_CREATE", "BTRFS_IOC_SNAP_CREATE_V2",
    "BTRFS_IOC_SUBVOL_CREATE", "BTRFS_IOC_SNAP_DESTROY", "BTRFS_IOC_SNAP_DESTROY_V2",
    "BTRFS_IOC_SUBVOL_SETFLAGS", "FIFREEZE", "FITHAW", "FITRIM", "TIOCSTI", "TIOCLINUX",
)  # fmt: skip
SECRETS = (
    "/proc/kcore", "/proc/kpagecount", "/proc/kpageflags", "/proc/kpagecgroup", "/proc/keys",
    "/proc/key-users", "/proc/kallsyms", "/proc/kmsg", "/proc/sched_debug", "/proc/timer_list",
)  # fmt: skip
SWITCHES = (
    "/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches",
    "/proc/sys/kernel/modprobe",
)  # fmt: skip
# of PID 1: its channel is a descriptor, its logs are files that it holds
INIT = ("fd", "mem", "environ", "maps", "cwd", "root", "exe", "ns/mnt", "map_files")
DEVICES = {
    "the disk": "b 8 0", "a loop device": "b 7 0", "a device mapper": "b 253 0",
    "memory": "c 1 1", "ports": "c 1 4", "the kernel's log": "c 1 11", "fuse": "c 10 229",
    "KVM": "c 10 232", "a tun": "c 10 200",
}  # fmt: skip


@dataclass(frozen=True)
class Attempt:
    """`shell` must fail or write nothing; `by`: what protects."""

    shell: str
    by: str


ATTEMPTS = {
    **{f"read {path}": Attempt(f"head -c 64 {path}", "proc") for path in SECRETS},
    **{f"write {path}": Attempt(f"echo b > {path} && echo done", "proc") for path in SWITCHES},
    **{
        f"init's {what}": Attempt(
            f"ls -L /proc/1/{what}/ 2>/dev/null || head -c 64 /proc/1/{what}", "user namespace"
        )
        for what in INIT
    },
    "signal init": Attempt("kill -KILL 1 && test ! -d /proc/1 && echo dead", "user namespace"),
    **{
        f"make {name}": Attempt(f"mknod /tmp/node {node} && head -c 1 /tmp/node", "devices")
        for name, node in DEVICES.items()
    },
    "make a device in memory": Attempt("mknod /dev/shm/n b 8 0 && cat /dev/shm/n", "devices"),
    "init's socket": Attempt("find / -xdev -name agent.sock", "not there"),
    "the daemon's files": Attempt("ls -d /var/lib/dsec /run/dsec 2>/dev/null", "not there"),
    "cgroups": Attempt("mkdir -p /tmp/c && mount -t cgroup2 c /tmp/c && ls /tmp/c", "not there"),
}


@pytest.fixture(autouse=True)
def nothing_left_behind() -> None:
    """The module's lab looks after itself."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def lab() -> AsyncIterator[Lab]:
    async with open_lab() as made:
        yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=PROFILES, ids=str)
async def box(lab: Lab, request: pytest.FixtureRequest) -> AsyncIterator[Box]:
    async with lab.box(request.param) as made:
        yield made


def probe(box: Box, *asked: str) -> list[int]:
    code, said = box.run(argv=["/probe"], input="".join(f"{line}\n" for line in asked).encode())
    assert code == 0, said
    return [int(line) for line in said.split()]


async def test_calls_into_the_kernel_are_refused(box: Box) -> None:
    answers = probe(box, *(f"S\t{number(name, host_arch())}\t0" for name in CALLS))
    assert dict(zip(CALLS, answers, strict=True)) == CALLS
    assert CALLS.items() <= seccomp.DENIED.items()  # which is what does it


async def test_user_namespaces_are_refused_unless_asked_for(box: Box) -> None:
    asked = [("unshare", NEWUSER), ("clone", NEWUSER), ("clone3", 0)]
    answers = probe(box, *(f"S\t{number(name, host_arch())}\t{first}" for name, first in asked))
    assert answers == [errno.EPERM, errno.EPERM, errno.ENOSYS]


async def test_ioctls_that_go_round_a_file_policy_are_refused(box: Box) -> None:
    answers = probe(box, *(f"i\t0\t{REQUESTS[name]:#x}" for name in IOCTLS))
    assert dict(zip(IOCTLS, answers, strict=True)) == dict.fromkeys(IOCTLS, errno.EPERM)
    assert all(seccomp.denies_ioctl(REQUESTS[name]) for name in IOCTLS)  # which is what does it


@pytest.mark.parametrize("name", ATTEMPTS)
async def test_an_attempt_gets_nothing(box: Box, name: str) -> None:
    attempt = ATTEMPTS[name]
    assert box.run(f"exec 2>/dev/null; {attempt.shell}")[1] == ""
    box.run("rm -f /tmp/node /dev/shm/n")


async def test_init_and_its_channel_live_on(box: Box) -> None:
    box.client.call("sys.ping")
    assert box.sh("cat /proc/self/comm").strip() == "cat"


async def test_what_hides_files_of_proc_is_a_mask_or_a_mode(box: Box) -> None:
    mounted = {line.split()[4] for line in box.sh("cat /proc/self/mountinfo").splitlines()}
    chosen = masks.for_host()
    for path in (*SECRETS, *SWITCHES):
        above = path if not path.startswith("/proc/sys/") else "/proc/sys"
        assert above in masks.MASKED or above in masks.READ_ONLY, path
        needed = above in chosen.masked or above in chosen.read_only
        assert needed == (above in mounted), path  # else the host's mode closes it


async def test_no_device_can_be_made_and_none_of_a_disk_is_there(box: Box) -> None:
    for line in box.sh("cat /proc/self/mountinfo").splitlines():
        place, options = line.split()[4], line.split()[5].split(",")
        # what can be written to takes no devices; /dev and masks, which are of one tree, are fixed
        if place != "/dev/pts":
            assert "nodev" in options or "ro" in options, line
    modes = box.sh("stat -c '%f %n' $(find /dev -type b -o -type c)").splitlines()
    assert modes
    names = {line.split()[1] for line in modes}
    assert not any(stat.S_ISBLK(int(line.split()[0], 16)) for line in modes)
    assert {name for name in names if not name.startswith("/dev/pts/")} <= {
        "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom", "/dev/tty",
    }  # fmt: skip
