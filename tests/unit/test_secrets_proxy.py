"""What the proxy passes on, and what it refuses, over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import os
import ssl
from pathlib import Path

import pytest

from dsecd.doors.upstream import Dialer, client_context
from libdsec.errors import Unavailable
from tests.unit.secrets_proxy_lab import (
    GET,
    OTHER,
    head_and_body,
    lab,
    on_uvloop,
)
from tests.unit.secrets_upstream import BIG_BYTES, HOST, VALUE, Api

# --- what passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("plain", [False, True], ids=["tls", "plain"])
@on_uvloop
async def test_only_the_real_name_gets_the_secret(tmp_path: Path, plain: bool) -> None:
    async with lab(tmp_path) as it, it.connection(plain) as (reader, writer):
        for body in (b"", b"one", b"two"):  # the connection is kept
            writer.write(
                b"POST /ok HTTP/1.1\r\nHost: api.example.com\r\nAuthorization: mine\r\n"
                b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
            )
            head, answer = await head_and_body(reader)
            assert head.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer == b"yes"
            assert b"alt-svc" not in head.lower()
        assert it.api.bodies == [b"", b"one", b"two"]
        for seen in it.api.seen:
            assert f"\r\nAuthorization: {VALUE}\r\n".encode() in seen
            assert b"mine" not in seen
        assert it.proxy.overrides == {HOST: "127.0.0.1", OTHER.host: "127.0.0.1"}
        assert it.refusals == []


@on_uvloop
async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        one = "POST /ok HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 1\r\n\r\n"
        writer.write("".join(one + str(n) for n in range(5)).encode())
        for _ in range(5):
            assert (await head_and_body(reader))[1] == b"yes"
        assert it.api.bodies == [b"0", b"1", b"2", b"3", b"4"]


@on_uvloop
async def test_a_client_that_waits_for_100_is_told_to_go_on(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        writer.write(
            b"POST /ok HTTP/1.1\r\nHost: api.example.com\r\nExpect: 100-continue\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n"
        )
        assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
        writer.write(b"3;ext=1\r\nabc\r\n0\r\nX-Trailer: 1\r\n\r\n")
        assert (await head_and_body(reader))[1] == b"yes"
        assert it.api.bodies == [b"3\r\nabc\r\n0\r\n\r\n"]


@on_uvloop
async def test_an_upgrade_is_not_asked_for_and_the_connection_goes_on(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        for _ in range(2):
            writer.write(
                b"GET /ok HTTP/1.1\r\nHost: api.example.com\r\nUpgrade: websocket\r\n"
                b"Connection: Upgrade\r\nSec-WebSocket-Key: x\r\n\r\n"
            )
            assert (await head_and_body(reader))[1] == b"yes"
        assert not any(b"Upgrade" in head for head in it.api.seen)


@on_uvloop
async def test_events_arrive_when_they_are_sent(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        writer.write(GET.format("/events").encode())
        await reader.readuntil(b"data: 1\n\n")  # held back, it would not come at all
        it.api.release.set()
        await reader.readuntil(b"0\r\n\r\n")


@on_uvloop
async def test_a_body_that_ends_with_the_connection_is_framed(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        found = await it.raw(GET.format("/plain").replace("HTTP/1.1", "HTTP/1.0"))
        assert found.endswith(b"until the end")
        async with it.connection() as (reader, writer):
            writer.write(GET.format("/plain").encode())
            found = await reader.readuntil(b"0\r\n\r\n")
            assert b"until the end" in found
            writer.write(GET.format("/ok").encode())  # the client's connection goes on
            assert (await head_and_body(reader))[1] == b"yes"


@on_uvloop
async def test_head_and_redirect_are_passed_as_they_are(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        writer.write(b"HEAD /ok HTTP/1.1\r\nHost: api.example.com\r\n\r\n")
        assert b"Content-Length: 3" in await reader.readuntil(b"\r\n\r\n")
        writer.write(GET.format("/redirect").encode())
        head, _ = await head_and_body(reader)
        assert head.startswith(b"HTTP/1.1 302 Found\r\n")
        assert b"Location: https://evil.example.org/?********************\r\n" in head
        assert it.asked == [HOST, HOST]  # nobody went there


@on_uvloop
async def test_an_echo_does_not_show_the_secret(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        writer.write(GET.format("/echo").encode())
        head, body = await head_and_body(reader)
        assert b"tok-0123456789abcdef" not in head + body
        assert b"Authorization: " + b"*" * len(VALUE) in body
        assert VALUE.encode() in it.api.seen[0]


@on_uvloop
async def test_large_bodies_pass_with_bounded_memory_at_the_reader_s_pace(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        writer.transport.set_write_buffer_limits(high=1 << 16)
        writer.write(GET.format("/big").encode())
        await reader.readuntil(b"\r\n\r\n")
        seen = -1
        while it.api.sent != seen:  # until nothing moves
            seen = it.api.sent
            await asyncio.sleep(0.3)
        assert seen < BIG_BYTES * 3 // 4  # what the kernel's and our buffers hold, not all
        got, tail = 0, b""
        while not tail.endswith(b"0\r\n\r\n"):
            data = await reader.read(1 << 20)
            assert data
            got, tail = got + len(data), (tail + data)[-5:]
        assert got > BIG_BYTES
        assert it.api.sent == BIG_BYTES


@on_uvloop
async def test_a_large_upload_arrives_whole(tmp_path: Path) -> None:
    body = os.urandom(4 << 20)
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        writer.write(
            b"PUT /ok HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: %d\r\n\r\n" % len(body)
        )
        writer.write(body)
        assert (await head_and_body(reader))[1] == b"yes"
        assert it.api.bodies == [body]


@on_uvloop
async def test_a_hundred_connections_at_once(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:

        async def one(number: int) -> bytes:
            async with it.connection(plain=bool(number % 2)) as (reader, writer):
                writer.write(GET.format("/ok").encode())
                return (await head_and_body(reader))[1]

        assert set(await asyncio.gather(*map(one, range(100)))) == {b"yes"}
        assert len(it.api.seen) == 100


# --- what does not --------------------------------------------------------------------------------

_TO_EVIL = "Host: evil.example.org\r\n\r\n"
_SMUGGLED = "GET /smuggled HTTP/1.1\r\nHost: api.example.com\r\n\r\n"


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (f"GET / HTTP/1.1\r\n{_TO_EVIL}", 421),
        (f"GET http://evil.example.org/ HTTP/1.1\r\n{_TO_EVIL}", 421),
        (f"CONNECT evil.example.org:443 HTTP/1.1\r\n{_TO_EVIL}", 405),
        ("TRACE / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", 405),
        ("GET / HTTP/1.1\r\nHost: api.example.com\r\nHost: evil.example.org\r\n\r\n", 400),
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        ("\x16\x03\x01 rubbish\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\nHost: api.example.com\r\nX: {'x' * 200000}\r\n\r\n", 431),
        (
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 6\r\n"
            f"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{_SMUGGLED}",
            400,
        ),
        (
            "POST / HTTP/1.1\r\nHost: api.example.com\r\nTransfer-Encoding: chunked\r\n"
            f"Transfer-Encoding: identity\r\n\r\n0\r\n\r\n{_SMUGGLED}",
            501,
        ),
    ],
)  # fmt: skip
@pytest.mark.parametrize("plain", [False, True], ids=["tls", "plain"])
@on_uvloop
async def test_what_is_refused_never_leaves(
    tmp_path: Path, request_: str, status: int, plain: bool
) -> None:
    async with lab(tmp_path) as it:
        answer = await it.raw(request_, plain)
        assert answer.startswith(b"HTTP/1.1 %d " % status), answer
        assert answer.count(b"\r\n\r\n") == 1  # what came behind it was not read
        assert (it.api.seen, it.asked) == ([], [])
        assert [refusal.host for refusal in it.refusals] == [HOST]


@pytest.mark.parametrize(
    "body",
    [b"5\r\nabc", b"zz\r\n", b"3\r\nabcX\r\n0\r\n\r\n", b"-1\r\n", b"3 \r\nabc\r\n", b"\r\n"],
)
@on_uvloop
async def test_a_malformed_body_ends_both_connections(tmp_path: Path, body: bytes) -> None:
    async with lab(tmp_path) as it:
        with contextlib.suppress(ConnectionError):
            async with it.connection() as (_, writer):
                writer.write(
                    b"POST /ok HTTP/1.1\r\nHost: api.example.com\r\n"
                    b"Transfer-Encoding: chunked\r\n\r\n" + body
                )
                await writer.drain()
        await it.settled()
        assert it.api.bodies == []


@on_uvloop
async def test_another_name_in_the_handshake_ends_it(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        for name, door in ((OTHER.host, 0), (HOST, 1), ("evil.example.org", 0)):
            with pytest.raises((ssl.SSLError, ConnectionError)):
                async with it.connection(name=name, door=door):
                    pass
        assert it.api.seen == []


@on_uvloop
async def test_a_name_gets_its_own_secret_only(tmp_path: Path) -> None:
    """The other name's upstream proves to be api.example.com: it is not sent anything."""
    async with lab(tmp_path) as it:
        async with it.connection(name=OTHER.host, door=1) as (reader, writer):
            writer.write(b"GET /ok HTTP/1.1\r\nHost: other.example.com\r\n\r\n")
            head, body = await head_and_body(reader)
        assert head.startswith(b"HTTP/1.1 502 ")
        assert b"certificate is not trusted here: Hostname mismatch" in body
        assert it.api.seen == []


@on_uvloop
async def test_an_impostor_is_not_sent_the_secret(tmp_path: Path) -> None:
    """Somebody at the real address, with a certificate that the host does not trust."""
    async with lab(tmp_path) as it:
        impostor = Api(it.authority.context(HOST))
        await impostor.start()
        dialer = Dialer(client_context(), port=impostor.port)
        with pytest.raises(Unavailable, match="certificate is not trusted"):
            await dialer.open(HOST, ["127.0.0.1"])
        assert impostor.seen == []
        await impostor.close()


@pytest.mark.parametrize(
    ("path", "status"),
    [("/silent", 502), ("/rubbish", 502), ("/switch", 502), ("/early", 413)],
)
@on_uvloop
async def test_what_the_upstream_does_wrong_is_said(tmp_path: Path, path: str, status: int) -> None:
    async with lab(tmp_path) as it:
        answer = await it.raw(
            f"POST {path} HTTP/1.1\r\nHost: api.example.com\r\nContent-Length: 1000000\r\n\r\nabc"
        )
        assert answer.startswith(b"HTTP/1.1 %d " % status)


@on_uvloop
async def test_an_answer_that_is_cut_short_is_so_for_the_client(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, it.connection() as (reader, writer):
        writer.write(GET.format("/cut").encode())
        with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
            await head_and_body(reader)


@on_uvloop
async def test_without_an_address_there_is_no_answer(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.addresses = []
        assert b"no address of it was found" in await it.raw(GET.format("/ok"))
        it.addresses = ["127.0.0.2", "127.0.0.1"]  # nobody is at the first
        assert b"yes" in await it.raw(GET.format("/ok").replace("HTTP/1.1", "HTTP/1.0"))
