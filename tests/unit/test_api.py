"""The daemon's front: protocol rules, authorisation, back-pressure."""

from __future__ import annotations

import asyncio
import datetime
import os
import socket
import ssl
import struct
from pathlib import Path

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from dsecd.api import connection as connections
from dsecd.api.auth import Gatekeeper
from dsecd.config import Listen
from libdsec import model, wire
from libdsec.errors import (
    AlreadyExists,
    Exhausted,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    Unavailable,
    Unsupported,
)
from tests.unit.engine_fixtures import bench
from tests.waiting import until
from tests.wire_client import WireClient


async def test_hello_comes_first() -> None:
    async with bench() as b:
        client = await WireClient.connect(b.config.socket, hello=False)
        with pytest.raises(InvalidArgument, match="hello"):
            await client.call("sandbox.list", model.ListArgs())
        await asyncio.wait_for(client.lost.wait(), 5)


async def test_another_protocol_version_is_refused() -> None:
    async with bench() as b:
        client = await WireClient.connect(b.config.socket, hello=False)
        with pytest.raises(Unsupported, match="protocol"):
            await client.call("hello", model.Hello(protocol=99))


async def test_a_misspelt_argument_is_an_error_that_names_it() -> None:
    async with bench() as b:
        client = await b.client()
        body = {"key": "k", "args": {"container_image": "x", "memory_limit_mib": 5}}
        with pytest.raises(InvalidArgument, match="memory_limit_mib"):
            await client.call("sandbox.create", body)
        with pytest.raises(InvalidArgument) as caught:
            await client.call("sandbox.create", {"key": "k", "args": {"container_image": 5}})
        assert caught.value.detail["field"] == "args.container_image"
        with pytest.raises(InvalidArgument) as caught:
            await client.create("k", pids_limit=1)
        assert caught.value.detail["field"] == "pids_limit"


async def test_unknown_operations_and_sandboxes() -> None:
    async with bench() as b:
        client = await b.client()
        with pytest.raises(Unsupported, match=r"sandbox\.fly"):
            await client.call("sandbox.fly", {})
        with pytest.raises(NotFound):
            await client.call("sandbox.get", model.SandboxRef(id="s0-n0-1-0abcd"))
        with pytest.raises(NotFound):
            await client.run("s0-n0-1-0abcd", "true")


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", wire.MAX_FRAME + 1),
        struct.pack(">I", 3) + b"\xc1\xc1\xc1",
        wire.encode(wire.Reply(1, wire.pack(None))),
        wire.encode(wire.Credit(1, -5)),
    ],
)
async def test_broken_frames_close_the_connection_only(data: bytes) -> None:
    async with bench() as b:
        other = await b.client()
        info = await other.create("k")
        client = await b.client()
        client.open("events.subscribe", model.EventFilter())
        # ids 1 and 2 are taken: a credit for an open call is checked too
        client.writer.write(data.replace(b"\x93\x05\x01", b"\x93\x05\x02"))
        await asyncio.wait_for(client.lost.wait(), 5)
        assert (await other.run(info.id, "true")).exit_code == 0


async def test_an_id_that_is_open_cannot_be_used_again() -> None:
    async with bench() as b:
        client = await b.client()
        call = client.open("events.subscribe", model.EventFilter())
        client.send(wire.Request(call.id, "sandbox.list", wire.pack(model.ListArgs())))
        await asyncio.wait_for(client.lost.wait(), 5)


async def test_open_calls_of_a_connection_are_bounded() -> None:
    async with bench() as b:
        b.service.server.calls_per_connection = 3
        client = await b.client()
        for _ in range(3):
            client.open("events.subscribe", model.EventFilter())
        with pytest.raises(Exhausted):
            await client.call("events.subscribe", model.EventFilter())


async def test_a_silent_connection_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HELLO_TIMEOUT_S", 0.05)
    async with bench() as b:
        client = await WireClient.connect(b.config.socket, hello=False)
        await asyncio.wait_for(client.lost.wait(), 5)


async def test_uploads_and_downloads_pass_with_credits_both_ways() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        content = os.urandom(3 << 20)
        call = client.open("files.write", model.WriteArgs(path=b"/f"), info.id)
        for offset in range(0, len(content), 64 << 10):
            await asyncio.wait_for(call.push(content[offset : offset + (64 << 10)]), 5)
        call.end()
        assert (await call.answer(model.Transferred)).size == len(content)
        call = client.open("files.read", model.ReadArgs(path=b"/f"), info.id)
        got = b""
        while len(got) < len(content):
            got += await call.item(bytes)
            call.grant(1)
        assert got == content
        assert (await call.answer(model.Transferred)).size == len(content)


async def test_items_without_credit_close_the_connection() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        call = client.open("files.write", model.WriteArgs(path=b"/f"), info.id)
        for _ in range(200):
            client.send(wire.Item(call.id, wire.pack(b"x")))
        await asyncio.wait_for(client.lost.wait(), 5)


async def test_a_reader_without_credit_stops_the_stream_at_sixteen_items() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        args = model.ExecArgs(cid="y", argv=[b"yes", b"2000000"], stream=True)
        call = client.open("exec.run", args, info.id)
        await until(lambda: call.items.qsize() >= wire.INITIAL_CREDIT)
        await asyncio.sleep(0.2)
        assert call.items.qsize() == wire.INITIAL_CREDIT
        call.grant(1_000_000_000)
        got = 0
        while got < 4_000_000:
            got += len((await call.item(model.Output)).data)
        assert (await call.answer(model.CommandResult)).stdout_total == 4_000_000


async def test_a_client_that_grants_everything_and_reads_nothing_costs_little() -> None:
    async with bench() as b:
        info = await (await b.client()).create("k")
        sock = socket.socket(socket.AF_UNIX)
        sock.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(sock, str(b.config.socket))
        args = model.ExecArgs(cid="y", argv=[b"yes", b"20000000"], stream=True)
        for frame in (
            wire.Request(1, "hello", wire.pack(model.Hello(protocol=wire.PROTOCOL))),
            wire.Request(2, "exec.run", wire.pack(args), info.id),
            wire.Credit(2, 1 << 30),
        ):
            await loop.sock_sendall(sock, wire.encode(frame))
        await until(lambda: any(c.paused for c in b.service.server.connections))
        (stuck,) = [c for c in b.service.server.connections if c.paused]
        await asyncio.sleep(0.4)
        assert stuck.paused
        most = connections.HIGH_WATER + wire.INITIAL_CREDIT * (64 << 10) + (128 << 10)
        size = stuck._transport.get_write_buffer_size()
        sock.close()
        assert size <= most


async def test_a_lost_client_does_not_end_its_command() -> None:
    async with bench() as b:
        first = await b.client()
        info = await first.create("k", ttl_running_stop=30)
        args = model.ExecArgs(cid="c1", argv=[b"yes", b"3000000"], stream=True)
        call = first.open("exec.run", args, info.id)
        await call.item()
        first.abort()
        second = await b.client()
        result = await second.call(
            "exec.wait", model.AttachArgs(cid="c1"), info.id, kind=model.CommandResult
        )
        assert result.exit_code == 0
        sandbox = b.service.manager.live[info.id]
        await until(lambda: sandbox.calls == 0)
        # the abandoned stream is drained
        await until(lambda: not b.backend.sandboxes[info.id].calls)


async def test_a_lost_client_cancels_its_uploads() -> None:
    async with bench() as b:
        first = await b.client()
        info = await first.create("k")
        call = first.open("files.write", model.WriteArgs(path=b"/f"), info.id)
        await call.push(b"half")
        await until(lambda: b.backend.sandboxes[info.id].calls)
        first.abort()
        await until(lambda: not b.backend.sandboxes[info.id].calls)
        assert b.backend.sandboxes[info.id].files == {}


async def test_layers_pass_through() -> None:
    async with bench() as b:
        client = await b.client()
        made = await client.call(
            "layer.import", model.LayerImport(name="base/x", source="/x"), kind=model.LayerInfo
        )
        assert made.name == "base/x"
        found = await client.call("layer.list", {}, kind=list[model.LayerInfo])
        assert [layer.name for layer in found] == ["base/x"]
        flat = model.LayerCollapse(name="base/x", to="base/flat", progress=True)
        collapsed = await client.call("layer.collapse", flat, kind=model.LayerInfo)
        assert (collapsed.name, collapsed.digest) == ("base/flat", "fake:base/x")
        with pytest.raises(AlreadyExists):
            await client.call("layer.collapse", flat)
        await client.call("layer.remove", model.LayerRef(name="base/flat"))
        await client.call("layer.remove", model.LayerRef(name="base/x"))
        stats = await client.call("host.stats", {}, kind=model.HostStats)
        assert stats.cpus == 8


def test_other_users_are_refused_on_the_unix_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    keeper = Gatekeeper(Listen())
    here, there = socket.socketpair()
    with here, there:
        assert keeper.peer(here).uid == os.getuid()

        class Stranger:
            def getsockopt(self, level: int, name: int, size: int) -> bytes:
                return struct.pack("iII", 1, 54321, 54321)

        with pytest.raises(PermissionDenied, match=r"listen\.group"):
            keeper.peer(Stranger())  # type: ignore[arg-type]


def test_tokens_are_read_and_compared(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("trainer:0123456789abcdef\nfedcba9876543210\n")
    file.chmod(0o600)
    keeper = Gatekeeper(Listen(token_file=str(file)))
    assert keeper.token("0123456789abcdef").name == "token:trainer"
    assert keeper.token("fedcba9876543210").kind == "token"
    for wrong in ("", "0123456789abcde", "trainer:0123456789abcdef"):
        with pytest.raises(PermissionDenied):
            keeper.token(wrong)
    file.chmod(0o644)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        Gatekeeper(Listen(token_file=str(file)))


async def test_a_reply_too_large_for_a_frame_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    async with bench() as b:
        client = await b.client()
        monkeypatch.setattr(wire, "MAX_FRAME", 300)
        await client.create("k1")
        await client.create("k2")
        await client.create("k3")
        with pytest.raises(Exhausted, match="too large"):
            await client.call("sandbox.list", model.ListArgs())


async def test_the_connection_dies_with_the_daemon() -> None:
    async with bench() as b:
        client = await b.client()
        call = client.open("events.subscribe", model.EventFilter())
        await client.call("sandbox.list", model.ListArgs())
        await b.close()
        with pytest.raises((Unavailable, Exception)):
            await call.answer()


def test_error_bodies_are_plain_data() -> None:
    assert msgspec.msgpack.decode(wire.pack({"code": "x"})) == {"code": "x"}


def certificate(directory: Path) -> None:
    """Write cert.pem and key.pem for localhost."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(1).not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    (directory / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )


async def test_tcp_takes_tls_and_a_token(tmp_path: Path) -> None:
    certificate(tmp_path)
    (tmp_path / "tokens").write_text("me:0123456789abcdef\n")
    (tmp_path / "tokens").chmod(0o600)
    listen = Listen(
        tcp="127.0.0.1:0", tls_cert=str(tmp_path / "cert.pem"), tls_key=str(tmp_path / "key.pem"),
        token_file=str(tmp_path / "tokens"),
    )  # fmt: skip
    async with bench(listen=listen) as b:
        (port,) = b.service.server.ports
        context = ssl.create_default_context(cafile=str(tmp_path / "cert.pem"))
        for token, accepted in (("0123456789abcdef", True), ("0123456789abcdeX", False)):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, ssl=context, server_hostname="localhost"
            )
            client = WireClient.over(reader, writer)
            hello = client.call("hello", model.Hello(protocol=wire.PROTOCOL, token=token))
            if accepted:
                assert (await hello)["protocol"] == wire.PROTOCOL
                assert (await client.create("k")).state == "running"
            else:
                with pytest.raises(PermissionDenied):
                    await hello
            await client.close()
        plain_reader, plain_writer = await asyncio.open_connection("127.0.0.1", port)
        plain_writer.write(wire.encode(wire.Request(1, "hello", wire.pack({"protocol": 1}))))
        assert not (await plain_reader.read(1 << 16)).startswith(b"\0\0")
        plain_writer.close()
        assert not b.service.server.connections  # a failed handshake once stayed for ever
