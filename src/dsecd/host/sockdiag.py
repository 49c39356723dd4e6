"""Closing connections that a policy no longer allows: sock_diag(7), SOCK_DESTROY.

The programs already drop the packets of such a connection; closing it tells the process at once
(ECONNABORTED) instead of after the timeouts of TCP. What the peer is told is dropped too.
"""

from __future__ import annotations

import errno
import ipaddress
import socket
import struct
from collections.abc import Callable, Iterable

import msgspec

from dsecd.host.nettable import IpAddress
from dsecd.host.rtnetlink import Message, Netlink, NetlinkError
from libdsec.errors import Unsupported

NETLINK_SOCK_DIAG = 4
TCPDIAG_GETSOCK, SOCK_DIAG_BY_FAMILY, SOCK_DESTROY = 18, 20, 21
_ESTABLISHED = 1  # also what a connected UDP socket is
# include/net/tcp_states.h without TIME_WAIT, CLOSE, LISTEN and what is only bound
_CONNECTED = sum(1 << state for state in (_ESTABLISHED, 2, 3, 4, 5, 8, 9, 11, 12))
_HEAD = struct.Struct("=BBBxI")
_ID_BYTES = 48
_GONE = (errno.ENOENT, errno.ESTALE)

# (protocol, address, port) of the remote end
Allowed = Callable[[int, IpAddress, int], bool]


class Connected(msgspec.Struct, frozen=True, gc=False):
    """A socket with a remote end; `id` is its inet_diag_sockid, whose cookie means no other."""

    family: int
    protocol: int
    id: bytes

    def remote(self) -> tuple[IpAddress, int]:
        """Return the address and the port of the remote end."""
        (port,) = struct.unpack_from("!H", self.id, 2)
        raw = self.id[20:36]
        if self.family == socket.AF_INET:
            return ipaddress.IPv4Address(raw[:4]), port
        address = ipaddress.IPv6Address(raw)
        return address.ipv4_mapped or address, port


def open_diag() -> Netlink:
    """Return a socket that diagnoses the calling thread's network namespace, from anywhere."""
    return Netlink(NETLINK_SOCK_DIAG)


def connected(diag: Netlink) -> list[Connected]:
    """Return the connected TCP and UDP sockets. Raises `OSError`."""
    # of TCP both families in one walk, since each walks the namespace's whole table, which only
    # the older request does
    old = struct.pack("=4x48sII", b"", _CONNECTED, 0)  # struct inet_diag_req
    found = _listed(diag, TCPDIAG_GETSOCK, old, socket.IPPROTO_TCP)
    for family in (socket.AF_INET, socket.AF_INET6):
        body = _HEAD.pack(family, socket.IPPROTO_UDP, 0, 1 << _ESTABLISHED) + bytes(_ID_BYTES)
        found += _listed(diag, SOCK_DIAG_BY_FAMILY, body, socket.IPPROTO_UDP)
    return found


def cut(diag: Netlink, found: Iterable[Connected], allowed: Allowed) -> int:
    """Close those of `found` whose remote end is not `allowed`; return how many.

    A kernel without CONFIG_INET_DIAG_DESTROY closes none: then only their packets are dropped.
    Raises `OSError`.
    """
    doomed = [one for one in found if not allowed(one.protocol, *one.remote())]
    outcome = diag.request([_destroy(one) for one in doomed])
    for error in outcome:
        if error is not None and error.errno not in (*_GONE, errno.EOPNOTSUPP):
            raise error
    return sum(error is None for error in outcome)


def peers(diag: Netlink) -> set[IpAddress]:
    """Return the remote ends of the connected TCP and UDP sockets. Raises `OSError`."""
    return {one.remote()[0] for one in connected(diag)}


def require() -> None:
    """Raise `Unsupported` when the kernel cannot close a socket."""
    nobody = Connected(socket.AF_INET, socket.IPPROTO_TCP, bytes(_ID_BYTES))
    diag = open_diag()
    try:
        (error,) = diag.request([_destroy(nobody)])
    finally:
        diag.close()
    if error is not None and error.errno not in _GONE:
        raise Unsupported(
            f"closing connections: {error}", reason="the kernel has no CONFIG_INET_DIAG_DESTROY"
        )


def _listed(diag: Netlink, kind: int, body: bytes, protocol: int) -> list[Connected]:
    try:
        answers = list(diag.dump(Message(kind, 0, body, "list sockets")))
    except NetlinkError as error:
        if error.errno == errno.ENOENT:  # no diagnosis of this protocol in the kernel
            return []
        raise
    return [Connected(data[0], protocol, data[4 : 4 + _ID_BYTES]) for data in answers]


def _destroy(sock: Connected) -> Message:
    body = _HEAD.pack(sock.family, sock.protocol, 0, 0) + sock.id
    return Message(SOCK_DESTROY, 0, body, "close a connection")
