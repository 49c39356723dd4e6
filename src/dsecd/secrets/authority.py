"""The certificate authority of one daemon, which only its sandboxes trust.

Its key stays on the host: whoever has it could read what sandboxes send, so it is readable by root
alone. It is kept over restarts, because sandboxes live on with its certificate.
"""

from __future__ import annotations

import datetime
import os
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from libdsec.errors import Unavailable

KEY_FILE, CERTIFICATE_FILE = "ca.key", "ca.pem"
AUTHORITY_DAYS = 3650
LEAF_DAYS = 90
RENEW_S = 30 * 86400.0  # a certificate is made anew when it is asked for after this
BACKDATED = datetime.timedelta(days=1)  # clocks of checkpoints and guests
_PEM = serialization.Encoding.PEM


class Authority:
    """Issues certificates of names. Belongs to one event loop."""

    def __init__(
        self, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate, directory: Path
    ) -> None:
        self.certificate = certificate
        self._key, self._directory = key, directory
        self._contexts: dict[str, tuple[float, ssl.SSLContext]] = {}  # made when

    @classmethod
    def load(cls, directory: Path) -> Authority:
        """Return the authority kept in `directory`, made at the first use. Raises `Unavailable`."""
        key_file, certificate_file = directory / KEY_FILE, directory / CERTIFICATE_FILE
        try:
            directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            directory.chmod(0o700)
            if not certificate_file.exists():  # the last of the two that is written
                _make(key_file, certificate_file)
            key = serialization.load_pem_private_key(key_file.read_bytes(), None)
            certificate = x509.load_pem_x509_certificate(certificate_file.read_bytes())
        except (OSError, ValueError) as error:
            raise Unavailable(
                f"the authority for sandboxes' secrets cannot be read: {error}; remove "
                f"{certificate_file} to have a new one made"
            ) from error
        assert isinstance(key, ec.EllipticCurvePrivateKey)
        return cls(key, certificate, directory)

    @property
    def pem(self) -> bytes:
        """The certificate that sandboxes trust."""
        return self.certificate.public_bytes(_PEM)

    def context(self, host: str) -> ssl.SSLContext:
        """Return what a server needs to be `host`, and no other, for the next weeks."""
        made, context = self._contexts.get(host, (0.0, None))
        if context is None or time.monotonic() - made > RENEW_S:
            context = self._make_context(host)
            self._contexts[host] = (time.monotonic(), context)
        return context

    def _make_context(self, host: str) -> ssl.SSLContext:
        key = ec.generate_private_key(ec.SECP256R1())
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.sni_callback = _only(host)
        with tempfile.NamedTemporaryFile(dir=self._directory) as file:  # 0600
            file.write(_private(key) + self._issue(host, key).public_bytes(_PEM))
            file.flush()
            context.load_cert_chain(file.name)
        return context

    def _issue(self, host: str, key: ec.EllipticCurvePrivateKey) -> x509.Certificate:
        """Return a certificate for `host`, as OpenSSL's X509_V_FLAG_X509_STRICT wants it."""
        issuer = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
        return (
            _builder(host[:64], key, LEAF_DAYS)
            .issuer_name(self.certificate.subject)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
            .add_extension(_usage(signs=False), critical=True)
            .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
            .add_extension(own, critical=False)
            .add_extension(
                x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer),
                critical=False,
            )
            .sign(self._key, hashes.SHA256())
        )


def _make(key_file: Path, certificate_file: Path) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    name = "DSec sandboxes of this host"
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        _builder(name, key, AUTHORITY_DAYS)
        .issuer_name(_name(name))
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(own, critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(key_file, _private(key))
    _write(certificate_file, certificate.public_bytes(_PEM))


def _builder(name: str, key: ec.EllipticCurvePrivateKey, days: int) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(name))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs, key_cert_sign=signs, crl_sign=signs,
        content_commitment=False, key_encipherment=False, data_encipherment=False,
        key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _private(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(_PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _write(path: Path, content: bytes) -> None:
    """Put a file in place that is whole, and was never readable by others."""
    new = path.with_suffix(".new")
    new.unlink(missing_ok=True)
    fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(fd)
    new.rename(path)


def _only(host: str) -> Callable[[ssl.SSLObject, str, ssl.SSLContext], int | None]:
    """Return a callback that ends the handshake of a client that asks for another name."""

    def check(_connection: object, name: str | None, _context: object) -> int | None:
        if name is not None and name.lower().removesuffix(".") != host:
            return ssl.ALERT_DESCRIPTION_UNRECOGNIZED_NAME
        return None

    return check
