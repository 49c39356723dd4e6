"""Whom a ClientHello names: hellos of OpenSSL, cut and changed in every way."""

from __future__ import annotations

import contextlib
import itertools
import ssl
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.relay.hello import HANDSHAKE, HELLO_MOST, RECORDS_MOST, BadHello, Hello, server_name

HOST = "api.example.com"


def openssl(host: str | None = HOST) -> bytes:
    """Return the record that a client of this machine's OpenSSL sends first."""
    context = ssl.create_default_context()
    context.check_hostname = False
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname=host)
    with contextlib.suppress(ssl.SSLWantReadError):
        client.do_handshake()
    return outgoing.read()


MESSAGE = openssl()[5:]
BODY = MESSAGE[4:]


def fed(*pieces: bytes) -> str | None:
    hello, found = Hello(), None
    for piece in pieces:
        found = hello.feed(HANDSHAKE, piece)
    return found


def sni(name: bytes, kind: int = 0) -> bytes:
    entry = struct.pack("!BH", kind, len(name)) + name
    return extension(0, struct.pack("!H", len(entry)) + entry)


def extension(kind: int, data: bytes) -> bytes:
    return struct.pack("!HH", kind, len(data)) + data


def body(*extensions: bytes, version: bytes = b"\3\3", ciphers: bytes = b"\x13\1") -> bytes:
    data = b"".join(extensions)
    return (
        version + bytes(32) + b"\0" + struct.pack("!H", len(ciphers)) + ciphers + b"\1\0"
        + struct.pack("!H", len(data)) + data
    )  # fmt: skip


def test_the_hello_of_a_real_client_names_its_host() -> None:
    assert fed(MESSAGE) == HOST
    assert server_name(openssl("API.Example.com")[9:]) == HOST
    with pytest.raises(BadHello, match="names no host"):
        fed(openssl(None)[5:])


@given(st.lists(st.integers(1, len(MESSAGE) - 1), max_size=RECORDS_MOST - 1, unique=True))
def test_however_it_is_cut_into_records_it_is_the_same(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(MESSAGE)]
    pieces = [MESSAGE[a:b] for a, b in itertools.pairwise(edges)]
    hello = Hello()
    assert [hello.feed(HANDSHAKE, piece) for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    assert hello.feed(HANDSHAKE, pieces[-1]) == HOST


@given(st.binary(max_size=300))
def test_bytes_of_any_kind_give_a_name_or_a_refusal(data: bytes) -> None:
    with contextlib.suppress(BadHello):
        found = server_name(data)
        assert found == found.lower()
    with contextlib.suppress(BadHello):
        fed(data)


@given(st.integers(0, len(BODY) - 1), st.integers(0, 255))
def test_a_changed_byte_never_makes_a_name_that_is_not_there(at: int, value: int) -> None:
    data = BODY[:at] + bytes([value]) + BODY[at + 1 :]
    with contextlib.suppress(BadHello):
        assert server_name(data).encode() in data.lower()


@given(st.integers(0, len(BODY) - 1))
def test_a_hello_that_ends_early_is_refused(length: int) -> None:
    with pytest.raises(BadHello):
        server_name(BODY[:length])


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (body(), "names no host"),
        (body()[:-2], "names no host"),  # without extensions
        (body(sni(HOST.encode()), sni(b"evil.example.org")), "an extension twice"),
        (body(extension(0, b"\0\0")), "malformed"),
        (body(extension(0, b"\0\x0c\0\0\1a\0\0\5b.com")), "malformed"),
        (body(sni(HOST.encode(), kind=1)), "no name of a host"),
        (body(sni(b"")), "no name of a host"),
        (body(sni(HOST.encode() + b".")), "no name of a host"),
        (body(sni(b"203.0.113.20")), "no name of a host"),
        (body(sni(b"2001:db8::1")), "no name of a host"),
        (body(sni(b"api.example.com\0.evil.org")), "no name of a host"),
        (body(sni(b".".join([b"a" * 60] * 5))), "no name of a host"),
        (body(sni("bücher.example".encode())), "no name of a host"),
        (body(sni(HOST.encode()), extension(0xFE0D, b"\0" * 9)), "ECH"),
        (body(sni(HOST.encode()), extension(0xFFCE, b"")), "ESNI"),
        (body(sni(HOST.encode()), ciphers=b""), "malformed"),
        (body(sni(HOST.encode()), ciphers=b"\x13"), "malformed"),
        (body(sni(HOST.encode()), version=b"\2\0"), "malformed"),
        (body(sni(HOST.encode())) + b"\0", "malformed"),
    ],
)  # fmt: skip
def test_what_servers_might_read_differently_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(BadHello, match=why):
        server_name(data)
    assert server_name(body(sni(HOST.encode()))) == HOST


@pytest.mark.parametrize(
    ("pieces", "why"),
    [
        ([b""], "no TLS"),
        ([b"\2" + MESSAGE[1:]], "no TLS"),
        ([MESSAGE + b"\1"], "something follows"),
        ([MESSAGE + MESSAGE], "something follows"),
        ([b"\1\xff\xff\xff"], "too long"),
        ([b"\1" + (HELLO_MOST + 1).to_bytes(3, "big")], "too long"),
        ([bytes([each]) for each in MESSAGE], "too many records"),
        ([b"\1\0\0\0"], "malformed"),
        ([b"\1\0\0\0\0"], "something follows"),
    ],
)
def test_records_that_are_no_one_hello(pieces: list[bytes], why: str) -> None:
    with pytest.raises(BadHello, match=why):
        fed(*pieces)


def test_only_records_of_a_handshake_count() -> None:
    for kind in (20, 21, 23, 24):
        with pytest.raises(BadHello, match="no TLS"):
            Hello().feed(kind, MESSAGE)
