"""The relay over real sockets, with OpenSSL on both sides of it."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from pathlib import Path

import pytest

from dsecd.doors.gate import Limits
from dsecd.doors.reach import Reach
from dsecd.relay.tls import UNRECOGNIZED
from tests.unit.relay_lab import ALLOWED, BIG, GET, HOST, SAME_LENGTH, hello, lab, policy, shake
from tests.unit.secrets_proxy_lab import head_and_body, on_uvloop

# --- what passes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("port", [443, 80])
@on_uvloop
async def test_an_allowed_name_is_reached_as_it_is(tmp_path: Path, port: int) -> None:
    async with lab(tmp_path) as it:
        assert await it.get(port) == b"yes"
        assert await it.get(port, "big") == bytes(BIG)
        assert it.named == [HOST, HOST] * (port == 443)
        assert it.asked == [HOST, HOST]
        assert it.refusals == []
        await it.settled()


@on_uvloop
async def test_names_below_a_wildcard_and_of_any_case(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        assert await it.get(80, host="A.b.Wild.Example") == b"yes"
        assert it.asked == ["a.b.wild.example"]
        assert b"\r\nHost: a.b.wild.example\r\n" in it.heads[0]
        assert b"Accept-Encoding" not in it.heads[0]
        await it.settled()


@on_uvloop
async def test_a_body_goes_up_and_each_end_is_passed_on(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        for port in (443, 80):
            reader, writer = await it.connect(port)
            head = f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: {BIG}\r\n\r\n"
            writer.write(head.encode())
            writer.write(bytes(BIG))
            assert (await head_and_body(reader))[1] == b"yes"
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()
        await it.settled()


@on_uvloop
async def test_a_hello_in_pieces_passes(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        data, client, incoming, outgoing = hello(HOST)
        reader, writer = await it.bare()
        for at in range(5, len(data), 97):  # records of 97 bytes, in two segments each
            piece = data[at : at + 97]
            writer.write(data[:3] + len(piece).to_bytes(2, "big") + piece[:9])
            await writer.drain()
            await asyncio.sleep(0.001)
            writer.write(piece[9:])
        await shake(client, incoming, outgoing, reader, writer)
        assert it.named == [HOST]
        writer.close()
        await it.settled()


# --- a second hello -------------------------------------------------------------------------------


@on_uvloop
async def test_a_server_may_ask_for_a_second_hello(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.context.set_ecdh_curve("secp384r1")  # no client guesses that one
        assert await it.get(443) == b"yes"
        assert it.refusals == []


@pytest.mark.parametrize("waits", [True, False])
@on_uvloop
async def test_a_second_hello_names_the_same_host(tmp_path: Path, waits: bool) -> None:
    async with lab(tmp_path) as it:
        it.context.set_ecdh_curve("secp384r1")
        first, client, incoming, outgoing = hello(HOST)
        reader, writer = await it.bare()
        writer.write(first)
        if waits:
            incoming.write(await reader.read(65536))
            with contextlib.suppress(ssl.SSLWantReadError):
                client.do_handshake()
            second = outgoing.read()
        else:  # as who knows what the server will say
            second = first
        assert HOST.encode() in second
        writer.write(second.replace(HOST.encode(), SAME_LENGTH.encode()))
        assert (await reader.read()).endswith(UNRECOGNIZED)
        assert "names another host" in it.refusals[0].reason
        writer.close()
        await it.settled()
        assert SAME_LENGTH not in it.named


# --- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (hello(SAME_LENGTH)[0], "does not allow bad.example.org at tcp port 443"),
        (hello("wild.example")[0], "does not allow wild.example"),
        (hello(None)[0], "names no host"),
        (b"GET / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", "no TLS"),
        (b"SSH-2.0-x\r\n", "no TLS"),
        (b"\x16\3\1\0\0" * 3, "no TLS"),
    ],
    ids=["name", "apex", "nameless", "http", "ssh", "empty"],
)
@on_uvloop
async def test_other_hellos_reach_nobody(tmp_path: Path, data: bytes, why: str) -> None:
    async with lab(tmp_path) as it:
        reader, writer = await it.bare()
        writer.write(data)
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == UNRECOGNIZED
        writer.close()
        assert why in it.refusals[0].reason
        assert (it.asked, it.named, it.heads) == ([], [], [])
        await it.settled()


@on_uvloop
async def test_each_request_of_a_kept_connection_is_judged(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        reader, writer = await it.connect(80)
        for host in (HOST, "x.wild.example", HOST):
            writer.write(GET.format("ok", host).encode())
            assert (await head_and_body(reader))[1] == b"yes"
        writer.write(GET.format("ok", SAME_LENGTH).encode())
        head, text = await head_and_body(reader)
        assert head.startswith(b"HTTP/1.1 403 ")
        assert b"the policy does not allow bad.example.org at tcp port 80" in text
        assert await reader.read() == b""
        writer.close()
        assert [refusal.host for refusal in it.refusals] == [SAME_LENGTH]
        assert it.asked == [HOST, "x.wild.example", HOST]
        await it.settled()


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (f"GET http://{SAME_LENGTH}/ HTTP/1.1\r\nHost: {HOST}\r\n\r\n", b"421"),
        (f"GET / HTTP/1.1\r\nHost: {HOST}\r\nHost: {SAME_LENGTH}\r\n\r\n", b"400"),
        (f"GET / HTTP/1.1\r\nHost: {HOST}:8080\r\n\r\n", b"421"),
        ("GET / HTTP/1.1\r\nHost: [::1]\r\n\r\n", b"403"),
        ("GET / HTTP/1.1\r\nHost: tls.example.com\r\n\r\n", b"403"),  # allowed at 443 only
        ("GET / HTTP/1.0\r\n\r\n", b"400"),
        (f"CONNECT {HOST}:443 HTTP/1.1\r\nHost: {HOST}\r\n\r\n", b"405"),
    ],
)
@on_uvloop
async def test_other_requests_reach_nobody(tmp_path: Path, request_: str, status: bytes) -> None:
    async with lab(tmp_path) as it:
        reader, writer = await it.connect(80)
        writer.write(request_.encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 " + status)
        writer.close()
        assert it.heads == []
        assert len(it.refusals) == 1
        await it.settled()


@on_uvloop
async def test_a_denied_address_of_an_allowed_name_is_not_connected_to(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        it.relay.replace(Reach(policy({"allow": HOST}, {"deny": "127.0.0.0/8"})))
        with pytest.raises(OSError):  # noqa: PT011
            await it.get(443)
        reader, writer = await it.connect(80)
        writer.write(GET.format("ok", HOST).encode())
        assert (await reader.read()).startswith(b"HTTP/1.1 502 ")
        writer.close()
        assert "no address of it was found" in it.refusals[0].reason


# --- bounds and ends ------------------------------------------------------------------------------


@on_uvloop
async def test_another_policy_cuts_what_it_does_not_open(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        for port in (443, 80):
            it.relay.replace(Reach(ALLOWED))
            reader, writer = await it.connect(port)
            writer.write(GET.format("hang", HOST).encode())
            while not it.heads:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            it.heads.clear()
            it.relay.replace(Reach(policy({"allow": HOST}, {"allow": "more.example.com"})))
            await asyncio.sleep(0.05)
            assert it.relay.connections == 1
            it.relay.replace(Reach(policy({"allow": "more.example.com"})))
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
            await it.settled()


@on_uvloop
async def test_many_at_once_and_clients_that_vanish(tmp_path: Path) -> None:
    limits = Limits(connections=16, requests_burst=10_000)
    async with lab(tmp_path, limits) as it:
        got = await asyncio.gather(*(it.get(port) for port in (443, 80) for _ in range(60)))
        assert got == [b"yes"] * 120
        for data in (b"", b"\x16\3\1", hello(HOST)[0][:100], hello(HOST)[0]):
            _, writer = await it.bare()
            writer.write(data)
            await asyncio.sleep(0.02)
            writer.transport.abort()
        reader, writer = await it.connect(443)
        writer.write(GET.format("big", HOST).encode())
        await reader.read(10)
        writer.transport.abort()
        await it.settled()


@on_uvloop
async def test_who_does_not_read_is_not_read_for(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        reader, writer = await it.connect(443)
        writer.write(GET.format("big", HOST).encode() * 8)
        await asyncio.sleep(0.5)
        assert len(it.heads) < 8  # the server is held back by what nobody takes
        writer.transport.abort()
        del reader
        await it.settled()
