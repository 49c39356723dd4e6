"""Netlink messages as bytes: what attaching a sandbox to the network sends thousands of times.

Sources: netlink(7), rtnetlink(7), linux/rtnetlink.h, linux/if_link.h. With pyroute2 a veth with
address and route cost 2.5–6.4 ms of Python, and held the interpreter for that time, against 0.1 ms
for the whole batch packed by this module; its import alone was a third of the daemon's start.
All sockets are for one thread and belong to the network namespace in which they were opened.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from collections.abc import Iterator, Sequence

import msgspec

SOL_NETLINK = 270
NETLINK_CAP_ACK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK = 10, 11, 12
NLM_F_REQUEST, NLM_F_ACK, NLM_F_DUMP = 0x1, 0x4, 0x300
NLM_F_REPLACE, NLM_F_EXCL, NLM_F_CREATE = 0x100, 0x200, 0x400
NLM_F_CAPPED, NLM_F_ACK_TLVS = 0x100, 0x200
NLMSG_ERROR, NLMSG_DONE = 2, 3
NLMSGERR_ATTR_MSG = 1
NLA_F_NESTED = 0x8000
NLA_TYPE_MASK = 0x3FFF

# An acknowledgement takes about 1 KiB of the receive buffer (212,992 bytes by default); more
# requests at once than fit would be executed and their answers lost (ENOBUFS).
BATCH = 64

_HEADER = struct.Struct("=IHHII")
_ATTR = struct.Struct("=HH")
_U32 = struct.Struct("=I")
_ERRNO = struct.Struct("=i")


class Message(msgspec.Struct, frozen=True, gc=False):
    """A request: `kind` (nlmsg_type), `flags` beyond REQUEST, the bytes after the header, and
    the words that name it in an error."""

    kind: int
    flags: int
    payload: bytes
    what: str = ""


class NetlinkError(OSError):
    """The kernel refused a request; `what` names the request."""

    def __init__(self, number: int, detail: str, what: str) -> None:
        text = os.strerror(number) + (f" ({detail})" if detail else "")
        super().__init__(number, f"{what}: {text}" if what else text)
        self.what = what


def attr(kind: int, data: bytes) -> bytes:
    """Return one attribute: length, type, data, padded to 4 bytes."""
    size = 4 + len(data)
    return _ATTR.pack(size, kind) + data + bytes(-size % 4)


def attr_u32(kind: int, value: int) -> bytes:
    """Return an attribute that holds a u32 in host order."""
    return attr(kind, _U32.pack(value))


def attr_text(kind: int, text: str) -> bytes:
    """Return an attribute that holds a NUL-terminated string."""
    return attr(kind, text.encode() + b"\0")


def nest(kind: int, *attributes: bytes) -> bytes:
    """Return an attribute made of attributes."""
    return attr(kind | NLA_F_NESTED, b"".join(attributes))


def attributes(data: bytes, start: int = 0) -> dict[int, bytes]:
    """Return the attributes in `data` from `start` on, by type; the last of a kind wins."""
    found: dict[int, bytes] = {}
    end = len(data)
    while end - start >= 4:
        size, kind = _ATTR.unpack_from(data, start)
        if size < 4:
            break
        found[kind & NLA_TYPE_MASK] = data[start + 4 : start + size]
        start += (size + 3) & ~3
    return found


class Netlink:
    """One netlink socket in the caller's network namespace; blocking, for one thread."""

    def __init__(self, protocol: int = socket.NETLINK_ROUTE) -> None:
        kind = socket.SOCK_RAW | socket.SOCK_CLOEXEC
        self._socket = socket.socket(socket.AF_NETLINK, kind, protocol)
        try:
            for option in (NETLINK_CAP_ACK, NETLINK_EXT_ACK, NETLINK_GET_STRICT_CHK):
                self._socket.setsockopt(SOL_NETLINK, option, 1)
            self._socket.bind((0, 0))
        except OSError:
            self._socket.close()
            raise
        self._sequence = 0

    def close(self) -> None:
        self._socket.close()

    def fileno(self) -> int:
        return self._socket.fileno()

    def request(self, messages: Sequence[Message]) -> list[NetlinkError | None]:
        """Send `messages` in order; return for each None or why the kernel refused it.

        The kernel executes a whole send before it returns, in order, and goes on after a failure.
        """
        outcome: list[NetlinkError | None] = []
        for start in range(0, len(messages), BATCH):
            chunk = messages[start : start + BATCH]
            first = self._send(chunk, NLM_F_ACK)
            errors = self._acks(first, chunk)
            outcome += [errors.get(first + i) for i in range(len(chunk))]
        return outcome

    def transact(
        self, begin: Message, messages: Sequence[Message], end: Message
    ) -> NetlinkError | None:
        """Send one nfnetlink batch: all of `messages` happen or none; return the first error.

        `messages` must carry NLM_F_ACK themselves and number at most `BATCH`.
        """
        first = self._send((begin, *messages, end), 0)
        errors = self._acks(first, (begin, *messages, end))
        return errors[min(errors)] if errors else None

    def dump(self, message: Message) -> Iterator[bytes]:
        """Yield the payload of every object that answers `message`. Raises `NetlinkError`."""
        sequence = self._send((message,), NLM_F_DUMP)
        while True:
            for kind, _flags, number, payload in split(self._socket.recv(1 << 18)):
                if number != sequence:
                    continue
                if kind in (NLMSG_DONE, NLMSG_ERROR):
                    code = _ERRNO.unpack_from(payload)[0] if len(payload) >= 4 else 0
                    if code:
                        raise NetlinkError(-code, "", message.what)
                    return
                yield payload

    def get(self, message: Message) -> bytes:
        """Return the payload of the one object that answers `message`. Raises `NetlinkError`."""
        sequence = self._send((message,), 0)
        while True:
            for kind, flags, number, payload in split(self._socket.recv(1 << 18)):
                if number != sequence:
                    continue
                if kind == NLMSG_ERROR:
                    raise _error(flags, payload, message.what) or NetlinkError(
                        errno.EPROTO, "acknowledged without an answer", message.what
                    )
                return payload

    def _send(self, messages: Sequence[Message], flags: int) -> int:
        first = self._sequence + 1
        parts: list[bytes] = []
        for number, message in enumerate(messages, first):
            size = 16 + len(message.payload)
            header_flags = NLM_F_REQUEST | message.flags | flags
            parts.append(_HEADER.pack(size, message.kind, header_flags, number, 0))
            parts.append(message.payload + bytes(-size % 4))
        self._sequence = (first + len(messages)) & 0x7FFFFFFF
        self._socket.send(b"".join(parts))
        return first

    def _acks(self, first: int, messages: Sequence[Message]) -> dict[int, NetlinkError]:
        """Read the answers that the send left behind; return errors by sequence number."""
        errors: dict[int, NetlinkError] = {}
        while True:
            try:
                data = self._socket.recv(1 << 16, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return errors
            for kind, flags, number, payload in split(data):
                index = number - first
                if kind != NLMSG_ERROR or not 0 <= index < len(messages):
                    continue  # a leftover of an interrupted dump
                error = _error(flags, payload, messages[index].what)
                if error is not None:
                    errors.setdefault(number, error)


def split(data: bytes) -> Iterator[tuple[int, int, int, bytes]]:
    """Yield (type, flags, sequence, payload) of each message in a received buffer."""
    start, end = 0, len(data)
    while end - start >= 16:
        size, kind, flags, number, _port = _HEADER.unpack_from(data, start)
        if size < 16:
            return
        yield kind, flags, number, data[start + 16 : start + size]
        start += (size + 3) & ~3


def _error(flags: int, payload: bytes, what: str) -> NetlinkError | None:
    (code,) = _ERRNO.unpack_from(payload)
    if not code:
        return None
    detail = ""
    if flags & NLM_F_ACK_TLVS and flags & NLM_F_CAPPED:
        text = attributes(payload, 20).get(NLMSGERR_ATTR_MSG, b"")
        detail = text.rstrip(b"\0").decode(errors="replace")
    return NetlinkError(-code, detail, what)
