"""A sandbox's query and the reply to it, as bytes (RFC 1035 section 4, RFC 6891).

Of a query only name, type and EDNS size are read; an upstream is asked anew from them, so nothing
else that a sandbox writes (letter case, id, flags, options) leaves the host. This side is read and
written by hand: a query is a header, one name without compression and at most an OPT record, and
going through objects for every record costs a twentyfold. Upstreams' responses, where the
difficulties are, are dnspython's (`messages`).

Which types make sense: A and AAAA are looked up. For every other type (HTTPS and SVCB with their
address hints, CNAME, TXT, MX, ANY, ...) an allowed name exists and has no such record. Address
hints would have to be admitted like addresses, and no program depends on HTTPS records.
"""

from __future__ import annotations

import struct

import dns.name
import dns.rcode
import dns.rdatatype
import msgspec

from dsecd.resolver.messages import PAYLOAD, Answer
from dsecd.resolver.names import plain

ADDRESS_TYPES = (dns.rdatatype.A, dns.rdatatype.AAAA)
QUERY_MOST = 4096  # bytes of a query over TCP
NAME_MOST = 255  # bytes of a name on the wire

_HEADER = struct.Struct("!HHHHHH")
_QUESTION = struct.Struct("!HH")  # type, class
_RECORD = struct.Struct("!HHHIH")  # pointer to the owner, type, class, TTL, length of the data
_OPT = struct.Struct("!BHHIH")  # empty name, type, size, flags, length of the options
_QR, _TC, _RD, _RA, _OPCODE = 0x8000, 0x0200, 0x0100, 0x0080, 0x7800
_POINTER = 0xC000
_IN, _CNAME, _OPT_TYPE = 1, 5, 41


class BadQuery(Exception):
    """Not a query that can be answered; `reply` says so to the sandbox, None: say nothing."""

    def __init__(self, reply: bytes | None) -> None:
        super().__init__("malformed query")
        self.reply = reply


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A question of a sandbox. `name` is "" when it is no name of a host.

    `question` are its bytes, `payload` the size of datagrams that EDNS promised, None without.
    """

    name: str
    rdtype: int
    identity: int
    recursion: bool
    question: bytes
    payload: int | None

    def text(self) -> str:
        """Return the name as asked, in master file form: printable ASCII."""
        return dns.name.from_wire(bytes(_HEADER.size) + self.question, _HEADER.size)[0].to_text()


def parse_query(wire: bytes) -> Query:
    """Return the question of `wire`. Raises `BadQuery`."""
    if len(wire) < _HEADER.size:
        raise BadQuery(None)
    identity, flags, questions, answers, authority, additional = _HEADER.unpack_from(wire)
    if flags & _QR:
        raise BadQuery(None)  # answering responses makes loops
    if flags & _OPCODE:
        raise BadQuery(_bare(wire, dns.rcode.NOTIMP))
    if (questions, answers, authority) != (1, 0, 0) or additional > 1:
        raise BadQuery(_bare(wire, dns.rcode.FORMERR))
    try:
        labels, end = _read_name(wire, _HEADER.size)
        rdtype, rdclass = _QUESTION.unpack_from(wire, end)
        end += _QUESTION.size
        payload = _read_opt(wire, end, present=bool(additional))
    except (ValueError, IndexError, struct.error) as error:
        raise BadQuery(_bare(wire, dns.rcode.FORMERR)) from error
    if rdclass != _IN:
        raise BadQuery(_bare(wire, dns.rcode.REFUSED))
    return Query(
        name=plain(labels),
        rdtype=rdtype,
        identity=identity,
        recursion=bool(flags & _RD),
        question=wire[_HEADER.size : end],
        payload=payload,
    )


def _bare(wire: bytes, rcode: int) -> bytes:
    """Return a reply of a header only, to a query that cannot be repeated in it."""
    identity, flags = _QUESTION.unpack_from(wire)
    kept = flags & (_OPCODE | _RD)
    return _HEADER.pack(identity, kept | _QR | _RA | rcode, 0, 0, 0, 0)


def _read_name(wire: bytes, at: int) -> tuple[list[bytes], int]:
    """Return the labels of the name at `at`, and where it ends. Raises ValueError, IndexError."""
    labels = []
    start = at
    while length := wire[at]:
        if length > 63 or at + 1 + length - start >= NAME_MOST:
            raise ValueError("a label that is compressed or too long")
        labels.append(wire[at + 1 : at + 1 + length])
        at += 1 + length
    return labels, at + 1


def _read_opt(wire: bytes, at: int, *, present: bool) -> int | None:
    """Return the size in the OPT record that is all of `wire` from `at`. Raises ValueError."""
    if not present:
        if len(wire) != at:
            raise ValueError("bytes after the question")
        return None
    name, rdtype, payload, _, length = _OPT.unpack_from(wire, at)
    if name or rdtype != _OPT_TYPE or len(wire) != at + _OPT.size + length:
        raise ValueError("something else than an OPT record")
    return int(payload)


def reply(query: Query, answer: Answer, ttl_s: int, *, stream: bool) -> bytes:
    """Return the reply that gives `answer`; a datagram that would be too large says so (TC).

    RA is always set: libc takes an empty answer without RA and AA for a referral and asks the next
    server. Negative answers have no SOA; nothing that asks through libc caches them.
    """
    flags = _QR | _RA | (_RD if query.recursion else 0) | answer.rcode
    opt = b"" if query.payload is None else _OPT.pack(0, _OPT_TYPE, PAYLOAD, 0, 0)
    records, count = _records(query, answer, ttl_s)
    size = 65535 if stream else max(512, min(query.payload or 512, PAYLOAD))
    if _HEADER.size + len(query.question) + len(records) + len(opt) > size:
        flags, records, count = flags | _TC, b"", 0
    header = _HEADER.pack(query.identity, flags, 1, count, 0, 1 if opt else 0)
    return header + query.question + records + opt


def _records(query: Query, answer: Answer, ttl_s: int) -> tuple[bytes, int]:
    """Return the records of the answer section, and how many they are.

    Each owner is a pointer: to the question, later to the target of the alias before.
    """
    owner = _POINTER | _HEADER.size
    at = _HEADER.size + len(query.question)
    parts: list[bytes] = []
    for target in answer.chain:
        data = target.to_wire() or b""
        parts += (_RECORD.pack(owner, _CNAME, _IN, ttl_s, len(data)), data)
        owner = _POINTER | (at + _RECORD.size)
        at += _RECORD.size + len(data)
    for address in answer.addresses:
        data = address.packed
        parts += (_RECORD.pack(owner, query.rdtype, _IN, ttl_s, len(data)), data)
    return b"".join(parts), len(parts) // 2
