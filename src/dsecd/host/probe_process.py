"""Trials of what confines a process: privileges, namespaces, filters, security modules."""

from __future__ import annotations

import ctypes
import errno
import os
import struct
from pathlib import Path

from dsecd import fastpath
from dsecd.host import apparmor, kvm, syscalls, vmm_tree
from dsecd.host.probe import Trial
from libdsec.errors import Unsupported

_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWNS = 0x10000000, 0x40000000, 0x00020000
_NEEDED_CAPS = {
    "chown": 0, "dac_override": 1, "fowner": 3, "kill": 5, "setgid": 6, "setuid": 7, "setpcap": 8,
    "net_admin": 12, "sys_chroot": 18, "sys_ptrace": 19, "sys_admin": 21, "mknod": 27,
}  # fmt: skip
_SYS_RESOURCE = 24
LANDLOCK_ABI = 3  # all accesses that `dsecd.policy.landlock` closes


def effective_caps() -> int:
    """Return the mask of this process's effective capabilities."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _root(scratch: Path) -> str:
    caps = effective_caps()
    lacking = [name for name, bit in _NEEDED_CAPS.items() if not caps >> bit & 1]
    if os.geteuid() != 0:
        raise Unsupported("not root", reason=f"running as uid {os.geteuid()}; start dsecd as root")
    if lacking:
        raise Unsupported("capabilities", reason=f"capabilities missing: {', '.join(lacking)}")
    return ""


def _sys_resource(scratch: Path) -> str:
    if not effective_caps() >> _SYS_RESOURCE & 1:
        raise Unsupported("CAP_SYS_RESOURCE", reason="CAP_SYS_RESOURCE is missing")
    return ""


def _user_namespaces(scratch: Path) -> str:
    fd = fastpath.make_userns(0x7FFF0000, 0x7FFFFFFF)
    os.close(fd)
    limit = Path("/proc/sys/user/max_user_namespaces").read_text().strip()
    return f"at most {limit}"


def _network_namespaces(scratch: Path) -> str:
    os.close(fastpath.make_netns())
    limit = Path("/proc/sys/user/max_net_namespaces").read_text().strip()
    return f"at most {limit}"


class _Fprog(ctypes.Structure):
    _fields_ = (("len", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def _seccomp(scratch: Path) -> str:
    """Install a filter of one rule with an errno that the call itself never gives."""
    nr = syscalls.number("keyctl", syscalls.host_arch())
    program = b"".join(
        struct.pack("=HBBI", *instruction)
        for instruction in (
            (0x20, 0, 0, 0),
            (0x15, 0, 1, nr),
            (0x06, 0, 0, 0x00050000 | errno.EXDEV),
            (0x06, 0, 0, 0x7FFF0000),
        )
    )
    code = ctypes.create_string_buffer(program, len(program))
    fprog = _Fprog(len(program) // 8, ctypes.addressof(code))
    # SECCOMP_SET_MODE_FILTER without no_new_privs: needs CAP_SYS_ADMIN, as dsec-init has it
    pointer = ctypes.string_at(ctypes.addressof(fprog), ctypes.sizeof(fprog))
    syscalls.call("seccomp", 1, 0, pointer)
    try:
        syscalls.call("keyctl", 0, 0, 0)
    except OSError as error:
        if error.errno == errno.EXDEV:
            return ""
    raise Unsupported("seccomp", reason="the filter was installed and did not filter")


def _landlock(scratch: Path) -> str:
    abi = syscalls.call("landlock_create_ruleset", None, 0, 1)
    if abi < LANDLOCK_ABI:
        raise Unsupported("landlock", reason=f"ABI {abi} does not know truncate(2); Linux 6.2 does")
    return f"ABI {abi}"


def _pidfd(scratch: Path) -> str:
    os.close(os.pidfd_open(os.getpid()))
    return ""


def _openat2(scratch: Path) -> str:
    how = struct.pack("=QQQ", os.O_PATH | os.O_CLOEXEC, 0, 0x10)  # RESOLVE_IN_ROOT
    root = os.open(scratch, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    (scratch / "up").symlink_to("/../../..")
    fd = syscalls.call("openat2", root, b"up", how, len(how))
    same = os.path.sameopenfile(fd, root)
    (scratch / "up").unlink()
    if not same:
        raise Unsupported("openat2", reason="RESOLVE_IN_ROOT left the root")
    return ""


def _core_scheduling(scratch: Path) -> str:
    fastpath.make_sched_cookie(os.getpid())
    return ""


def security_modules(scratch: Path) -> list[str]:
    """Return the active security modules, through a securityfs mounted for the moment."""
    point = scratch / "securityfs"
    point.mkdir(exist_ok=True)
    syscalls.mount("securityfs", str(point), "securityfs")
    try:
        return (point / "lsm").read_text().strip().split(",")
    finally:
        syscalls.umount(str(point))


def _apparmor(scratch: Path) -> str:
    enabled = Path("/sys/module/apparmor/parameters/enabled")
    if not enabled.exists():
        raise Unsupported("AppArmor", reason="the kernel is built without AppArmor")
    if enabled.read_text().strip() != "Y":
        raise Unsupported("AppArmor", reason="AppArmor is off (kernel parameter lsm= or apparmor=)")
    if not apparmor.INTERFACE.exists():
        raise Unsupported("AppArmor", reason="securityfs is not mounted at /sys/kernel/security")
    if not (apparmor.INTERFACE / "features/mount/move_mount").exists():
        # a clone of a mount could then be put anywhere, and files have names that no rule knows
        raise Unsupported("AppArmor", reason="AppArmor does not see move_mount(2); Linux 6.8 does")
    name = f"dsec-probe-{os.getpid()}"
    apparmor.load(apparmor.compile_text(f"abi <abi/3.0>,\nprofile {name} {{}}\n"))
    apparmor.remove(name)
    return "a profile loads"


def _vm(scratch: Path) -> str:
    if syscalls.host_arch() != "x86_64":
        raise Unsupported("VMs", reason="microVMs are x86_64 machines (q35) only")
    accel, _ = kvm.accelerator()
    speed = "with KVM" if accel == "kvm" else kvm.EMULATED
    return f"QEMU {vmm_tree.version()}; {speed}"


def _kvm(scratch: Path) -> str:
    return kvm.check()


def _vsock(scratch: Path) -> str:
    os.close(os.open("/dev/vhost-vsock", os.O_RDWR | os.O_CLOEXEC))
    return ""


def _fanotify_pre_access(scratch: Path) -> str:
    """FAN_PRE_ACCESS (6.14): content can be filled in when a file is first read."""
    group = syscalls.call("fanotify_init", 0x08 | 0x01, os.O_RDONLY | os.O_CLOEXEC)
    target = scratch / "pre-access"
    target.touch()
    mask = 0x00100000
    syscalls.call("fanotify_mark", group, 0x01, mask, -100, os.fsencode(target))
    os.close(group)
    return ""


TRIALS = (
    Trial("root", "everything: namespaces, mounts and cgroups are made as root", _root),
    Trial("sys_resource", "pressure windows below 2 s, raising hard limits", _sys_resource),
    Trial("user_namespaces", "root inside a sandbox without rights outside", _user_namespaces),
    Trial("network_namespaces", "sealed networks", _network_namespaces),
    Trial("seccomp", "the system call filter of every command", _seccomp),
    Trial("landlock", "file policy where neither AppArmor nor BPF LSM is there", _landlock),
    Trial("apparmor", "file and socket policy that binds root inside", _apparmor),
    Trial("pidfd", "re-adoption of sandboxes after a restart", _pidfd),
    Trial("openat2", "file access that cannot leave the sandbox's root", _openat2),
    Trial("core_scheduling", "isolation of latency-sensitive sandboxes on SMT", _core_scheduling),
    Trial("vm", "microVM sandboxes", _vm),
    Trial("kvm", "microVM and full VM backends at native speed", _kvm),
    Trial("vsock", "the channel to VM guests (virtio-serial otherwise)", _vsock),
    Trial("fanotify_pre_access", "on-demand layers without FUSE", _fanotify_pre_access),
)
