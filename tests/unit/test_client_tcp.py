"""The client over TCP: TLS, tokens, a connection made anew."""

from __future__ import annotations

import datetime
import ipaddress
import ssl

import pytest

from libdsec import DSecClient, DSecContainerRunArgs, PermissionDenied, Unavailable
from tests.unit.wire_server import WireServer

ARGS = DSecContainerRunArgs(container_image="base/debian:12")


def certificate(directory):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "dsecd")])
    now = datetime.datetime.now(datetime.UTC)
    cert = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]),
            critical=False,
        )
        .sign(key, hashes.SHA256())
    )
    pem = serialization.Encoding.PEM
    (directory / "ca.pem").write_bytes(cert.public_bytes(pem))
    private = key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (directory / "key.pem").write_bytes(private)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "ca.pem", directory / "key.pem")
    return context


@pytest.fixture
async def tls_server(tmp_path):
    server = WireServer(tmp_path, token="secret", ssl=certificate(tmp_path))
    await server.start(tcp=True)
    yield server
    await server.close()


async def test_tls_and_token(tls_server, tmp_path, monkeypatch):
    endpoint = f"tls://127.0.0.1:{tls_server.port}"
    async with DSecClient(endpoint, token="secret", ca_file=str(tmp_path / "ca.pem")) as client:
        sandbox = await client.run_container(ARGS)
        await sandbox.files.write("f", b"x" * 3_000_000)
        assert len(await sandbox.files.read("f", format="bytes")) == 3_000_000
    monkeypatch.setenv("DSEC_ENDPOINT", endpoint)
    monkeypatch.setenv("DSEC_TOKEN", "secret")
    monkeypatch.setenv("DSEC_CA_FILE", str(tmp_path / "ca.pem"))
    async with DSecClient() as client:
        assert client.welcome.node == "n1"


async def test_wrong_token_and_unknown_authority(tls_server, tmp_path):
    endpoint = f"tls://127.0.0.1:{tls_server.port}"
    wrong = DSecClient(endpoint, token="guess", ca_file=str(tmp_path / "ca.pem"))
    with pytest.raises(PermissionDenied, match="DSEC_TOKEN"):
        await wrong.open()
    with pytest.raises(Unavailable, match="DSEC_CA_FILE"):
        await DSecClient(endpoint, token="secret").open()


async def test_lost_tcp_connection_is_made_anew(tmp_path):
    server = WireServer(tmp_path)
    await server.start(tcp=True)
    async with DSecClient(f"tcp://127.0.0.1:{server.port}") as client:
        await server.drop()
        await client.host_stats()
    await server.close()
