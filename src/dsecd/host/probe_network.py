"""Trials of networking and BPF, in a network namespace that dies with the trial."""

from __future__ import annotations

import os
import socket
import struct
from pathlib import Path

from dsecd.host import bpf, lsmpolicy, sockdiag, syscalls
from dsecd.host.cgroup import detect
from dsecd.host.netpins import Programs
from dsecd.host.netpolicy import sandbox_level
from dsecd.host.probe import Trial
from dsecd.host.probe_process import security_modules
from libdsec.errors import Unsupported

_CLONE_NEWNET = 0x40000000
_NLM_REQUEST, _NLM_ACK, _NLM_CREATE, _NLM_EXCL = 0x1, 0x4, 0x400, 0x200
_NLMSG_ERROR = 2


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
    """Load our programs: some kernels list `bpf` and refuse all the same."""
    if "bpf" not in security_modules(scratch):
        raise Unsupported("BPF LSM", reason="bpf is not among the active security modules (lsm=)")
    maps, programs = lsmpolicy.load(level=2)
    for fd in (*maps.values(), *programs):
        os.close(fd)
    return ""


TRIALS = (
    Trial("nftables", "network=nat: masquerading", _nftables),
    Trial("veth", "network=nat: the sandbox's interface", _veth),
    Trial("bpf_cgroup", "network allowlists", _bpf_cgroup),
    Trial("bpf_fs", "network allowlists that outlive the daemon", _bpf_fs),
    Trial("socket_destroy", "connections closed at once by an update", _socket_destroy),
    Trial("bpf_lsm", "file policy that root inside cannot get around", _bpf_lsm, timeout_s=120),
)
