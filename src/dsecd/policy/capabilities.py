"""The capabilities that root inside keeps: a mask for `dsec-init`, each bit with its reason.

They count only in the sandbox's user namespace, which owns its mount, IPC, UTS and cgroup
namespaces; the PID and network namespaces belong to the host. So `CAP_NET_ADMIN` inside gives
nothing — but a file capability outside the bounding set makes execve(2) fail with EPERM
(security/commoncap.c), and Debian ships ping, mtr and dumpcap with such. Those stay as *inert*.
"""

from __future__ import annotations

_BIT: dict[str, int] = {
    "chown": 0, "dac_override": 1, "dac_read_search": 2, "fowner": 3, "fsetid": 4, "kill": 5,
    "setgid": 6, "setuid": 7, "setpcap": 8, "linux_immutable": 9, "net_bind_service": 10,
    "net_broadcast": 11, "net_admin": 12, "net_raw": 13, "ipc_lock": 14, "ipc_owner": 15,
    "sys_module": 16, "sys_rawio": 17, "sys_chroot": 18, "sys_ptrace": 19, "sys_pacct": 20,
    "sys_admin": 21, "sys_boot": 22, "sys_nice": 23, "sys_resource": 24, "sys_time": 25,
    "sys_tty_config": 26, "mknod": 27, "lease": 28, "audit_write": 29, "audit_control": 30,
    "setfcap": 31, "mac_override": 32, "mac_admin": 33, "syslog": 34, "wake_alarm": 35,
    "block_suspend": 36, "audit_read": 37, "perfmon": 38, "bpf": 39, "checkpoint_restore": 40,
}  # fmt: skip

KEPT: dict[str, str] = {
    "chown": "apt, dpkg, tar as root",
    "dac_override": "root opens files of other users inside",
    "dac_read_search": "root reads directories of other users inside",
    "fowner": "chmod of other users' files",
    "fsetid": "set-id bits survive a write",
    "kill": "root signals other users' processes inside",
    "setgid": "su, sudo, database servers",
    "setuid": "su, sudo, database servers",
    "setpcap": "programs that drop their own capabilities",
    "setfcap": "dpkg runs setcap after unpacking",
    "sys_chroot": "chroot, sshd",
    "sys_ptrace": "gdb and strace on other users' processes inside",
    "sys_admin": "mount of tmpfs and bind mounts, hostname, unshare of mount namespaces",
    "sys_nice": "renice of other users' processes inside",
    "ipc_owner": "ipcrm and ipcs as root",
}

INERT: dict[str, str] = {
    "audit_write": "PAM and dbus probe for it",
    "ipc_lock": "file capability of key agents",
    "net_admin": "file capability of dumpcap",
    "net_bind_service": "file capability of web servers",
    "net_raw": "file capability of ping, mtr, fping",
}


def mask(names: tuple[str, ...] = (*KEPT, *INERT)) -> int:
    """Return the bit mask of `names`, as in `docs/protocol.md` (`caps`)."""
    bits = 0
    for name in names:
        bits |= 1 << _BIT[name]
    return bits


def names(bits: int) -> tuple[str, ...]:
    """Return the names of the capabilities in `bits`, in the kernel's order."""
    return tuple(name for name, bit in _BIT.items() if bits >> bit & 1)
