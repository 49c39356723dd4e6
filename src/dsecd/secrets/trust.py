"""What makes programs in a sandbox trust the daemon's authority: two files and the variables that
point to them.

`/etc/dsec` is one directory of the host, bound read-only into every sandbox that has secrets:

    ca.pem       the authority alone, for what has a trust store of its own (update-ca-certificates,
                 keytool, browsers)
    bundle.pem   the authorities that the host trusts, and ours

A sandbox does not see its image's own bundle through the variables; an authority that only the
image trusts is added by the caller: variables in `env` win over these.
"""

from __future__ import annotations

import ssl
from pathlib import Path

INSIDE = "/etc/dsec"
AUTHORITY, BUNDLE = "ca.pem", "bundle.pem"
# where distributions keep the bundle, if OpenSSL's own default is not there
_PLACES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/etc/ssl/cert.pem",
)
# OpenSSL and Go, requests, curl, git, pip, AWS's and Google's libraries, Deno
_WHOLE = (
    "SSL_CERT_FILE", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "GIT_SSL_CAINFO", "PIP_CERT",
    "AWS_CA_BUNDLE", "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH",
)  # fmt: skip
_ADDED = ("NODE_EXTRA_CA_CERTS", "DENO_CERT")  # to what the program brings


def environment() -> dict[str, str]:
    """Return the variables of every command in a sandbox with secrets."""
    return dict.fromkeys(_WHOLE, f"{INSIDE}/{BUNDLE}") | dict.fromkeys(
        _ADDED, f"{INSIDE}/{AUTHORITY}"
    )


def host_bundle() -> bytes:
    """Return the authorities that the host trusts, in PEM; b"" when it has none."""
    default = ssl.get_default_verify_paths().cafile
    for place in (default, *_PLACES):
        if place is not None and Path(place).is_file():
            return Path(place).read_bytes()
    return b""


def write(directory: Path, authority: bytes, bundle: bytes) -> None:
    """Make or renew the directory that sandboxes see. Live ones see it change.

    The files are replaced in place of the directory's entries: the directory is what is bound.
    """
    directory.mkdir(parents=True, exist_ok=True)
    directory.chmod(0o755)
    whole = bundle.rstrip(b"\n") + b"\n" + authority if bundle else authority
    for name, content in ((AUTHORITY, authority), (BUNDLE, whole)):
        new = directory / f"{name}.new"
        new.write_bytes(content)
        new.chmod(0o444)
        new.rename(directory / name)
