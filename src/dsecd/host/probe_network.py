"""Trials of networking and BPF, in a network namespace that dies with the trial."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from pathlib import Path

from dsecd.host import bpf, sockdiag, syscalls
from dsecd.host.cgroup import detect
from dsecd.host.netpins import Programs
from dsecd.host.netpolicy import sandbox_level
from dsecd.host.probe import Trial
from dsecd.host.probe_process import security_modules
from libdsec.errors import Unsupported

_CLONE_NEWNET = 0x40000000
_NLM_REQUEST, _NLM_ACK, _NLM_CREATE, _NLM_EXCL = 0x1, 0x4, 0x400, 0x200
_NLMSG_ERROR = 2
_PROG_LOAD = 5
_BPF_LSM_PROG, _BPF_LSM_MAC = 29, 27


def _netlink(protocol: int, kind: int, flags: int, body: bytes) -> int:
    """Send one message; return the type of the answer. Raises `OSError` as the kernel answers."""
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as peer:
        peer.settimeout(5)
        peer.bind((0, 0))
        peer.send(struct.pack("=IHHII", 16 + len(body), kind, flags, 1, 0) + body)
        answer = peer.recv(65536)
    kind = struct.unpack_from("=H", answer, 4)[0]
    code = -struct.unpack_from("=i", answer, 16)[0] if kind == _NLMSG_ERROR else 0
    if code:
        raise OSError(code, os.strerror(code))
    return int(kind)


def _attribute(kind: int, data: bytes) -> bytes:
    padding = b"\0" * (-len(data) % 4)
    return struct.pack("=HH", 4 + len(data), kind) + data + padding


def _nftables(scratch: Path) -> str:
    """Ask for the generation, then make and lose a table with the namespace."""
    syscalls.call("unshare", _CLONE_NEWNET)
    _netlink(12, 10 << 8 | 16, _NLM_REQUEST, struct.pack("=BBH", 0, 0, 0))  # NFT_MSG_GETGEN
    header = struct.pack("=BBH", 1, 0, 0)  # NFPROTO_INET
    batch = b"".join(
        struct.pack("=IHHII", 16 + len(body), kind, flags, number, 0) + body
        for number, (kind, flags, body) in enumerate(
            (
                (16, _NLM_REQUEST, struct.pack(">BBH", 0, 0, 10)),  # NFNL_MSG_BATCH_BEGIN
                (10 << 8, _NLM_REQUEST | _NLM_ACK | _NLM_CREATE, header + _attribute(1, b"dsec\0")),
                (17, _NLM_REQUEST, struct.pack(">BBH", 0, 0, 10)),  # NFNL_MSG_BATCH_END
            ),
            start=1,
        )
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 12) as peer:
        peer.settimeout(5)
        peer.bind((0, 0))
        peer.send(batch)
        answer = peer.recv(65536)
    code = -struct.unpack_from("=i", answer, 16)[0]
    if code:
        raise OSError(code, os.strerror(code))
    return ""


def _veth(scratch: Path) -> str:
    syscalls.call("unshare", _CLONE_NEWNET)
    link = struct.pack("=BxHiII", 0, 0, 0, 0, 0)
    info = _attribute(1, b"veth")
    body = link + _attribute(3, b"probe0\0") + _attribute(18 | 0x8000, info)
    flags = _NLM_REQUEST | _NLM_ACK | _NLM_CREATE | _NLM_EXCL
    _netlink(0, 16, flags, body)  # RTM_NEWLINK
    return ""


class _LoadAttr(ctypes.Structure):
    """union bpf_attr of BPF_PROG_LOAD, up to attach_btf_id."""

    _fields_ = (
        ("prog_type", ctypes.c_uint32), ("insn_cnt", ctypes.c_uint32),
        ("insns", ctypes.c_uint64), ("license", ctypes.c_uint64),
        ("log_level", ctypes.c_uint32), ("log_size", ctypes.c_uint32),
        ("log_buf", ctypes.c_uint64), ("kern_version", ctypes.c_uint32),
        ("prog_flags", ctypes.c_uint32), ("prog_name", ctypes.c_char * 16),
        ("prog_ifindex", ctypes.c_uint32), ("expected_attach_type", ctypes.c_uint32),
        ("prog_btf_fd", ctypes.c_uint32), ("func_info_rec_size", ctypes.c_uint32),
        ("func_info", ctypes.c_uint64), ("func_info_cnt", ctypes.c_uint32),
        ("line_info_rec_size", ctypes.c_uint32), ("line_info", ctypes.c_uint64),
        ("line_info_cnt", ctypes.c_uint32), ("attach_btf_id", ctypes.c_uint32),
    )  # fmt: skip


def _load(kind: int, attach_type: int, result: int, btf_id: int = 0) -> int:
    """Load the program ``return result``; its descriptor."""
    code = struct.pack("=BBhi", 0xB7, 0, 0, result) + struct.pack("=BBhi", 0x95, 0, 0, 0)
    instructions = ctypes.create_string_buffer(code, len(code))
    licence = ctypes.create_string_buffer(b"GPL")
    attr = _LoadAttr(
        prog_type=kind, insn_cnt=2, insns=ctypes.addressof(instructions),
        license=ctypes.addressof(licence), prog_name=b"dsec_probe",
        expected_attach_type=attach_type, attach_btf_id=btf_id,
    )  # fmt: skip
    return syscalls.call("bpf", _PROG_LOAD, bytes(attr), ctypes.sizeof(attr))


def _bpf_cgroup(scratch: Path) -> str:
    """Load our programs, attach them to a cgroup of our own, and detach them."""
    driver = detect(name=f"dsec-probe-{os.getpid()}", slots=0)
    cgroup = driver.make("bpf", 0)
    try:
        sandbox_level(Path(driver.tree.parent))
        programs = Programs(cgroup.fd, level=2, deny_unbound=True, events_per_s=1, pins=None)
        try:
            programs.attach()
        finally:
            programs.close()
    finally:
        cgroup.close()
        driver.files.rmdir(cgroup.path)
        driver.discard()
    return ""


def _bpf_fs(scratch: Path) -> str:
    """Mount a file system for pins in the trial's own mount namespace."""
    place = scratch / "bpf"
    bpf.ensure_bpf_fs(place)
    syscalls.umount(str(place))
    return ""


def _socket_destroy(scratch: Path) -> str:
    syscalls.call("unshare", _CLONE_NEWNET)
    sockdiag.require()
    return ""


def _bpf_lsm(scratch: Path) -> str:
    """Load a program for a hook: some kernels list `bpf` and refuse all the same."""
    if "bpf" not in security_modules(scratch):
        raise Unsupported("BPF LSM", reason="bpf is not among the active security modules (lsm=)")
    btf = Path("/sys/kernel/btf/vmlinux").read_bytes()
    os.close(_load(_BPF_LSM_PROG, _BPF_LSM_MAC, 0, btf_function(btf, b"bpf_lsm_file_open")))
    return ""


# Extra words behind a BTF type's three (btf.rst): fixed by kind, or counted
_BTF_FIXED = {1: 1, 3: 3, 14: 1, 17: 1}
_BTF_PER_MEMBER = {4: 3, 5: 3, 6: 2, 13: 2, 15: 3, 19: 3}
_BTF_FUNC = 12


def btf_function(btf: bytes, name: bytes) -> int:
    """Return the type id of function `name`. Raises `Unsupported` when BTF has none."""
    header, types, type_length, strings, string_length = struct.unpack_from("<IIIII", btf, 4)
    text = btf[header + strings : header + strings + string_length]
    wanted = text.find(b"\0" + name + b"\0") + 1
    offset, end, number = header + types, header + types + type_length, 1
    while offset < end and wanted:
        name_at, info = struct.unpack_from("<II", btf, offset)
        kind, members = info >> 24 & 0x1F, info & 0xFFFF
        if kind == _BTF_FUNC and name_at == wanted:
            return number
        offset += 12 + 4 * (_BTF_FIXED.get(kind, 0) + members * _BTF_PER_MEMBER.get(kind, 0))
        number += 1
    raise Unsupported("BTF", reason=f"BTF does not describe {name.decode()}")


TRIALS = (
    Trial("nftables", "network=nat: masquerading", _nftables),
    Trial("veth", "network=nat: the sandbox's interface", _veth),
    Trial("bpf_cgroup", "network allowlists", _bpf_cgroup),
    Trial("bpf_fs", "network allowlists that outlive the daemon", _bpf_fs),
    Trial("socket_destroy", "connections closed at once by an update", _socket_destroy),
    Trial("bpf_lsm", "file policy keyed by inode", _bpf_lsm),
)
