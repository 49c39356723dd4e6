"""Whom a TLS ClientHello names, read strictly: what two readers might differ in is refused. Pure.

RFC 8446 sections 4.1.2 and 5.1 for the message and its records, RFC 6066 section 3 for the name.
"""

from __future__ import annotations

import hashlib

from dsecd.resolver.names import plain

HANDSHAKE, ALERT = 22, 21  # types of records
RECORD_KINDS = (20, ALERT, HANDSHAKE, 23)
HEADER_BYTES = 5  # of a record
RECORD_MOST = (1 << 14) + 2048  # RFC 5246 section 6.2.3
HELLO_MOST = 16 << 10  # keys of post-quantum exchanges are some 2 KiB
RECORDS_MOST = 16  # that one hello may be cut into

_CLIENT_HELLO, _SERVER_HELLO = 1, 2
_SERVER_NAME, _HOST_NAME = 0, 0
_HIDING = {0xFE0D: "ECH", 0xFFCE: "ESNI"}
_NAME_MOST = 253
# RFC 8446 section 4.1.3: the random of a ServerHello that asks for another ClientHello
_AGAIN = hashlib.sha256(b"HelloRetryRequest").digest()


class BadHello(Exception):
    """No ClientHello that names one host in the open; the text says why."""


class Hello:
    """A ClientHello as its records come."""

    def __init__(self) -> None:
        self._message = b""
        self._records = 0

    def feed(self, kind: int, body: bytes) -> str | None:
        """Return the name once the hello is whole. Raises `BadHello`."""
        if kind != HANDSHAKE or not body:
            raise BadHello("it is no TLS ClientHello")
        self._records += 1
        self._message += body
        if self._message[0] != _CLIENT_HELLO:
            raise BadHello("it is no TLS ClientHello")
        length = int.from_bytes(self._message[1:4], "big")
        if length > HELLO_MOST or self._records > RECORDS_MOST:
            raise BadHello("its TLS ClientHello is too long, or in too many records")
        if len(self._message) < 4 or len(self._message) < 4 + length:
            return None
        if len(self._message) > 4 + length:
            raise BadHello("something follows its TLS ClientHello in the same record")
        return server_name(self._message[4:])


class _Reader:
    """Reads vectors of RFC 8446 section 3.4. Each read raises `BadHello` when it is too short."""

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        found = self._data[self._at : self._at + count]
        if len(found) < count:
            raise BadHello("its TLS ClientHello is malformed")
        self._at += count
        return found

    def number(self, width: int) -> int:
        return int.from_bytes(self.take(width), "big")

    def vector(self, width: int) -> bytes:
        return self.take(self.number(width))

    def more(self) -> bool:
        return self._at < len(self._data)

    def end(self) -> None:
        if self.more():
            raise BadHello("its TLS ClientHello is malformed")


def server_name(body: bytes) -> str:
    """Return the name in the body of a ClientHello, as `names.plain`. Raises `BadHello`."""
    reader = _Reader(body)
    version, _ = reader.take(2), reader.take(32)
    session, ciphers, compressions = reader.vector(1), reader.vector(2), reader.vector(1)
    if version[0] != 3 or len(session) > 32 or not ciphers or len(ciphers) % 2 or not compressions:
        raise BadHello("its TLS ClientHello is malformed")
    if not reader.more():  # as old clients without any extension send it
        raise BadHello("its TLS ClientHello names no host")
    extensions = _Reader(reader.vector(2))
    reader.end()
    found: dict[int, bytes] = {}
    while extensions.more():
        kind = extensions.number(2)
        if kind in found:
            raise BadHello("its TLS ClientHello has an extension twice")
        found[kind] = extensions.vector(2)
    for kind, what in _HIDING.items():
        if kind in found:
            raise BadHello(f"its TLS ClientHello may hide another name ({what})")
    if _SERVER_NAME not in found:
        raise BadHello("its TLS ClientHello names no host")
    return _name(found[_SERVER_NAME])


def _name(extension: bytes) -> str:
    outer = _Reader(extension)
    names = _Reader(outer.vector(2))
    outer.end()
    kind, name = names.number(1), names.vector(2)
    names.end()  # one name of each type, and there is one type
    host = plain(name.split(b".")) if len(name) <= _NAME_MOST else ""
    if kind != _HOST_NAME or not host or host.rpartition(".")[2].isdigit():  # an IPv4 address
        raise BadHello("the name in its TLS ClientHello is no name of a host")
    return host


def asks_again(body: bytes) -> bool:
    """Say whether a server's first handshake record may want another ClientHello.

    So does what is no whole beginning of a ServerHello: a HelloRequest, a record of a few bytes.
    """
    return body[:1] != bytes([_SERVER_HELLO]) or len(body) < 38 or body[6:38] == _AGAIN
