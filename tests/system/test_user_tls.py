"""libdsec over TCP with TLS and a token, and its synchronous twin, against a real daemon."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from libdsec import (
    DSecClient,
    DSecContainerRunArgs,
    NotFound,
    PermissionDenied,
    Unavailable,
)
from libdsec.sync import DSecClientSync
from tests.system.daemon import IMAGE, Daemon, daemon

pytestmark = pytest.mark.root

TOKEN = "correct-horse-battery-staple"
ARGS = DSecContainerRunArgs(container_image=IMAGE, memory_limit_mb=64)


def certify(directory: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate for 127.0.0.1 and its key; returns their files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "dsecd of a test")])
    now = datetime.datetime.now(datetime.UTC)
    address = x509.IPAddress(ipaddress.ip_address("127.0.0.1"))
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([address]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / "cert.pem", directory / "key.pem"
    files[0].write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    files[1].write_bytes(secret)
    files[1].chmod(0o600)
    return files


@asynccontextmanager
async def listening(tmp_path: Path) -> AsyncIterator[tuple[Daemon, str, str]]:
    """A daemon with TLS; yields it, its endpoint and the file of its certificate."""
    certificate, key = certify(tmp_path)
    token = tmp_path / "tokens"
    token.write_text(f"{TOKEN}\n")
    token.chmod(0o600)
    with socket.socket() as held:  # to the end: nobody else is given the port, the daemon takes it
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        listen: dict[str, object] = {
            "tcp": f"127.0.0.1:{port}", "tls_cert": str(certificate), "tls_key": str(key),
            "token_file": str(token),
        }  # fmt: skip
        async with daemon(listen=listen) as d:
            yield d, f"tls://127.0.0.1:{port}", str(certificate)


async def test_tls_and_token_carry_everything(tmp_path: Path) -> None:
    async with (
        listening(tmp_path) as (d, endpoint, authority),
        DSecClient(endpoint, token=TOKEN, ca_file=authority) as client,
    ):
        sandbox = await client.run_container(ARGS)
        data = os.urandom(5_000_000)
        await sandbox.files.write("/data", data)
        assert await sandbox.files.read("/data", format="bytes") == data
        assert (await sandbox.run("cat", input=data)).stdout_bytes == data
        call = asyncio.ensure_future(sandbox.run_shell("sleep 1.5; echo through"))
        await asyncio.sleep(0.3)
        await d.restart()
        assert (await call).stdout == "through\n"  # made again over TLS, with the token
        await sandbox.stop()
        assert d.remains() == []


@pytest.mark.parametrize("token", ["", "wrong-horse-battery-staple", TOKEN[:-1], TOKEN + "x"])
async def test_a_wrong_token_is_refused(tmp_path: Path, token: str) -> None:
    async with listening(tmp_path) as (d, endpoint, authority):
        client = DSecClient(endpoint, token=token, ca_file=authority)
        with pytest.raises(PermissionDenied):
            await client.open()
        await client.close()
        assert TOKEN not in d.log()
        assert not token or token not in d.log()


async def test_a_certificate_nobody_signed_and_plain_text_are_refused(tmp_path: Path) -> None:
    async with listening(tmp_path) as (_, endpoint, _authority):
        plain = endpoint.replace("tls://", "tcp://")
        for where in (endpoint, plain):
            client = DSecClient(where, token=TOKEN, reconnect_timeout=1)
            with pytest.raises(Unavailable):
                await client.open()
            await client.close()


async def test_the_synchronous_twin(tmp_path: Path) -> None:
    def session(endpoint: str, authority: str) -> None:
        with DSecClientSync(endpoint, token=TOKEN, ca_file=authority) as client:
            sandbox = client.run_container(ARGS)
            assert sandbox.run_shell("echo hello world").stdout == "hello world\n"
            sandbox.files.write("/f", b"\0\xff")
            assert sandbox.files.read("/f", format="bytes") == b"\0\xff"
            handle = sandbox.commands.run("seq 3", background=True)
            assert b"".join(output.data for output in handle) == b"1\n2\n3\n"
            assert handle.wait().exit_code == 0
            batch = list(client.run_containers(ARGS, 3))
            assert len({made.id for made in batch}) == 3
            with pytest.raises(NotFound):
                sandbox.files.read("/absent")
            for made in (*batch, sandbox):
                assert made.stop().state == "stopped"

    async with listening(tmp_path) as (d, endpoint, authority):
        await asyncio.to_thread(session, endpoint, authority)
        assert d.remains() == []
