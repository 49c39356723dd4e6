"""What a sandbox tries at its relay: to be read as two things, to stay, to leave half-way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import struct
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from dsecd.doors.gate import Arrival
from dsecd.relay import relay, tls
from dsecd.relay.hello import asks_again
from dsecd.relay.tls import UNRECOGNIZED
from tests.unit.relay_lab import BIG, GET, HOST, SAME_LENGTH, Lab, hello, lab, shake
from tests.unit.secrets_proxy_lab import head_and_body, on_uvloop

Stream = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Silent:
    """A server that says nothing by itself, and does not mind what its clients do."""

    def __init__(self, it: Lab) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        it.ports[443] = self._listening.getsockname()[1]
        self.sockets: list[socket.socket] = []

    def __enter__(self) -> Silent:
        return self

    def __exit__(self, *_: object) -> None:
        for each in (self._listening, *self.sockets):
            each.close()

    async def accept(self) -> socket.socket:
        """Return the next connection, once something came of it."""
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(5):
            found, _ = await loop.sock_accept(self._listening)
            self.sockets.append(found)
            assert await loop.sock_recv(found, 6) == hello(HOST)[0][:6]
        return found


async def through(it: Lab, name: str = HOST) -> tuple[ssl.SSLObject, Stream]:
    """Return a client after a handshake through the relay, and its bytes."""
    data, client, incoming, outgoing = hello(name)
    stream = await it.bare()
    stream[1].write(data)
    await shake(client, incoming, outgoing, *stream)
    return client, stream


def reset(sock: socket.socket) -> None:
    """Close so that the other side sees a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()


# --- read as two things ---------------------------------------------------------------------------


@on_uvloop
async def test_a_hello_comes_byte_by_byte(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        data, client, incoming, outgoing = hello(HOST)
        reader, writer = await it.bare()
        for at in range(len(data)):
            writer.write(data[at : at + 1])
            await asyncio.sleep(0)
        await shake(client, incoming, outgoing, reader, writer)
        assert it.named == [HOST]
        writer.close()
        await it.settled()


@on_uvloop
async def test_letter_case_of_a_name_is_none(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        _, (_, writer) = await through(it, "API.Example.COM")
        assert it.asked == [HOST]
        writer.close()
        await it.settled()


@pytest.mark.parametrize("version", [0, 2, 4, 0x80])
@on_uvloop
async def test_records_of_another_protocol_are_no_tls(tmp_path: Path, version: int) -> None:
    async with lab(tmp_path) as it:
        data = hello(HOST)[0]
        reader, writer = await it.bare()
        writer.write(data[:1] + bytes([version]) + data[2:])
        with contextlib.suppress(ConnectionError):
            assert await reader.read() == UNRECOGNIZED
        writer.close()
        assert "no TLS" in it.refusals[0].reason
        assert it.named == []
        await it.settled()


@on_uvloop
async def test_what_follows_a_hello_is_held_until_the_server_answered(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        with Silent(it) as silent:
            reader, writer = await it.bare()
            writer.write(hello(HOST)[0] + hello(SAME_LENGTH)[0])
            server = await silent.accept()
            await asyncio.sleep(0.1)
            got = server.recv(1 << 16)
            assert HOST.encode() in got
            assert SAME_LENGTH.encode() not in got
            server.sendall(b"\x16\3\3\0\4\0\0\0\0")  # a HelloRequest
            assert (await reader.read()).endswith(UNRECOGNIZED)
            assert "names another host" in it.refusals[0].reason
            assert await asyncio.get_running_loop().sock_recv(server, 1) == b""
            writer.close()
        await it.settled()


def test_only_a_whole_server_hello_is_content_with_the_first_hello() -> None:
    content = b"\2\0\0\x46\3\3" + bytes(range(32)) + bytes(36)
    assert not asks_again(content)
    for data in (b"", content[:37], b"\0\0\0\0", b"\1" + content[1:]):
        assert asks_again(data)


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        ("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400),
        (f"PRI * HTTP/2.0\r\nHost: {HOST}\r\n\r\nSM\r\n\r\n", 505),
        (f"GET http://x@{SAME_LENGTH}/ HTTP/1.1\r\nHost: {HOST}\r\n\r\n", 421),
        (f"GET http://{HOST}@{SAME_LENGTH}/ HTTP/1.1\r\nHost: {HOST}\r\n\r\n", 421),
        (f"GET http://{HOST}\\@{SAME_LENGTH}/ HTTP/1.1\r\nHost: {HOST}\r\n\r\n", 421),
        (f"GET ftp://{HOST}/ HTTP/1.1\r\nHost: {HOST}\r\n\r\n", 400),
        (f"GET {SAME_LENGTH}:80 HTTP/1.1\r\nHost: {HOST}\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\nHost: {HOST}@{SAME_LENGTH}\r\n\r\n", 403),
        (f"GET / HTTP/1.1\r\nHost: {HOST}, {SAME_LENGTH}\r\n\r\n", 403),
        (f"GET / HTTP/1.1\r\nHost: {HOST}\0.{SAME_LENGTH}\r\n\r\n", 400),
        ("GET / HTTP/1.1\r\nHost: 203.0.113.20\r\n\r\n", 403),
        ("GET / HTTP/1.1\r\nHost:\r\n\r\n", 403),
        (f"GET / HTTP/1.1\nHost: {HOST}\nHost: {SAME_LENGTH}\n\n", 400),
        (f"GET / HTTP/1.1\r\nHost : {SAME_LENGTH}\r\nHost: {HOST}\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\n Host: {SAME_LENGTH}\r\nHost: {HOST}\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\nHost: {HOST}\r\n\tx.{SAME_LENGTH}\r\n\r\n", 403),
        (f"GET / HTTP/1.1\r\nHost: {HOST}\r\nX: a\rHost: {SAME_LENGTH}\r\n\r\n", 400),
        (
            f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 4\r\n"
            "Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            400,
        ),
        (f"POST / HTTP/1.1\r\nHost: {HOST}\r\nTransfer-Encoding: x, chunked\r\n\r\n", 501),
        (f"POST / HTTP/1.1\r\nHost: {HOST}\r\nContent-Length: 1, 2\r\n\r\n", 400),
        (f"GET / HTTP/1.1\r\nHost: {HOST}\r\nX: {'a' * 200_000}\r\n\r\n", 431),
    ],
)  # fmt: skip
@on_uvloop
async def test_requests_of_two_minds_reach_nobody(
    tmp_path: Path, request_: str, status: int
) -> None:
    async with lab(tmp_path) as it:
        reader, writer = await it.connect(80)
        writer.write(request_.encode("latin-1"))
        said = await reader.read()
        assert said.startswith(b"HTTP/1.1 %d " % status)
        writer.close()
        assert it.heads == []
        assert len(it.refusals) == 1
        await it.settled()


@on_uvloop
async def test_each_of_many_requests_in_one_segment_is_judged(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        reader, writer = await it.connect(80)
        body = GET.format("hidden", SAME_LENGTH)
        head = f"PUT /a HTTP/1.1\nHost: {HOST}\nContent-Length: {len(body)}\n\n"  # bare LF
        target = f"GET http://{HOST.upper()}./b?c HTTP/1.1\r\nHost: {HOST}.:80\r\n\r\n"
        writer.write((head + body + target + GET.format("d", SAME_LENGTH)).encode())
        statuses = []
        for _ in range(3):
            statuses.append((await head_and_body(reader))[0].split()[1])
        assert statuses == [b"200", b"200", b"403"]
        writer.close()
        first, hidden, second = it.heads  # the lab's server takes the body for another request
        assert first.startswith(b"PUT /a HTTP/1.1\r\nHost: api.example.com\r\n")
        assert hidden == body.encode()
        assert second.startswith(b"GET /b?c HTTP/1.1\r\nHost: api.example.com\r\n")
        await it.settled()


@on_uvloop
async def test_nothing_else_is_switched_to(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        for path, status in (("ok", b"200"), ("switch", b"502")):
            reader, writer = await it.connect(80)
            fields = "Connection: Upgrade, HTTP2-Settings\r\nUpgrade: websocket, h2c\r\n"
            request = GET.format(path, HOST).replace("\r\n\r\n", f"\r\n{fields}\r\n")
            writer.write(request.encode())
            assert (await head_and_body(reader))[0].split()[1] == status
            writer.close()
            await it.settled()
        assert not any(b"pgrade" in head or b"HTTP2" in head for head in it.heads)


# --- staying, and leaving half-way ----------------------------------------------------------------


@on_uvloop
async def test_who_leaves_before_asking_is_no_refusal(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        for data in (b"", b"\x16\3\1", hello(HOST)[0][:100]):
            reader, writer = await it.bare()
            writer.write(data)
            writer.write_eof()
            assert await reader.read() == b""
            writer.close()
        _, writer = await it.connect(80)
        writer.close()
        await it.settled()
        assert (it.refusals, it.asked) == ([], [])


@on_uvloop
async def test_a_hello_has_to_come_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HELLO_S", 0.3)
    async with lab(tmp_path) as it:
        started = time.monotonic()
        reader, writer = await it.bare()
        sent = 0
        for byte in hello(HOST)[0]:
            # reset, when a byte of ours came too late to be read
            if reader.at_eof() or reader.exception():
                break
            with contextlib.suppress(OSError, RuntimeError):  # uvloop's, once it is closed
                writer.write(bytes([byte]))
                await writer.drain()
            sent += 1
            await asyncio.sleep(0.02)
        assert reader.at_eof() or reader.exception()
        assert time.monotonic() - started >= 0.3
        assert sent < 100  # a machine that stands still sends none meanwhile
        writer.close()
        await it.settled()
        assert it.asked == []


@on_uvloop
async def test_a_silent_connection_ends_and_a_used_one_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[tls.Crossing] = []
    serve = tls.Crossing.serve

    def noted(crossing: tls.Crossing) -> Coroutine[Any, Any, None]:
        served.append(crossing)
        return serve(crossing)

    monkeypatch.setattr(tls.Crossing, "serve", noted)
    async with lab(tmp_path) as it:
        reader, writer = await it.connect(443)
        for _ in range(6):
            before = served[0]._idle.when() or 0.0
            await asyncio.sleep(0.01)
            writer.write(GET.format("ok", HOST).encode())
            assert (await head_and_body(reader))[1] == b"yes"
            assert (served[0]._idle.when() or 0.0) > before
        assert before - asyncio.get_running_loop().time() > tls.IDLE_S / 2
        started = time.monotonic()
        served[0]._idle_s = 0.5
        served[0]._moved()
        with contextlib.suppress(OSError):
            assert await reader.read() == b""
        assert time.monotonic() - started >= 0.4
        assert served[0]._idle.expired()
        writer.close()
        await it.settled()
        assert it.refusals == []


@on_uvloop
async def test_half_of_a_connection_is_held_for_a_shorter_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tls, "HALF_S", 0.3)
    async with lab(tmp_path) as it:
        with Silent(it) as silent:
            _, writer = await it.bare()
            writer.write(hello(HOST)[0])
            await silent.accept()
            started = time.monotonic()
            writer.transport.abort()  # its process was killed
            await it.settled()
            assert 0.2 <= time.monotonic() - started < 3


@on_uvloop
async def test_the_end_of_one_direction_leaves_the_other(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        _, (reader, writer) = await through(it)
        writer.write_eof()
        await asyncio.wait_for(reader.read(), 5)  # what the server still says, then its end
        writer.close()
        await it.settled()
        assert it.refusals == []


@pytest.mark.parametrize("whose", ["server", "client"])
@on_uvloop
async def test_resets_of_either_side_are_no_failures(tmp_path: Path, whose: str) -> None:
    data = b"\x17\3\3\x40\0" + bytes(1 << 14)
    async with lab(tmp_path) as it:
        with Silent(it) as silent:
            for _ in range(20):
                client = socket.create_connection(it.doors.tls.getsockname())
                client.sendall(hello(HOST)[0])
                server = await silent.accept()
                one, other = (server, client) if whose == "server" else (client, server)
                other.sendall(data)
                reset(one)
                with contextlib.suppress(OSError):
                    other.sendall(data)
                await it.settled()
                other.close()
        assert it.refusals == []


@on_uvloop
async def test_a_link_that_was_lost_raises_errors_of_the_system() -> None:
    accepted = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(accepted.getsockname())
    link = await Arrival(accepted.accept()[0], "", 443).link()
    peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    peer.close()
    with pytest.raises(ConnectionResetError):
        await link.reader.read()
    await asyncio.sleep(0.02)  # until uvloop has forgotten its handle
    with pytest.raises(ConnectionResetError):
        await link.send(b"more")
    with pytest.raises(ConnectionResetError):
        link.end()
    link.abort()
    accepted.close()


@on_uvloop
async def test_a_body_that_nobody_takes_is_not_held(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        with Silent(it) as silent:
            _, writer = await it.bare()
            writer.write(hello(HOST)[0])
            await silent.accept()
            writer.write((b"\x17\3\3\x40\0" + bytes(1 << 14)) * (4 * BIG >> 14))
            await asyncio.sleep(0.3)
            assert writer.transport.get_write_buffer_size() > 2 * BIG
            writer.transport.abort()
        await it.settled()
