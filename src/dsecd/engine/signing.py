"""The key that this host signs its records of grading with (Ed25519, RFC 8032)."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from libdsec.errors import Internal

_SEED_BYTES = 32


class Signer:
    """Signs with the key in the file `path`, which is made at the first use, readable by root."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._key: Ed25519PrivateKey | None = None

    def sign(self, data: bytes) -> bytes:
        """Return the signature of `data`, 64 bytes. Raises `Internal` for a damaged key file."""
        return self._private().sign(data)

    def public(self) -> bytes:
        """Return the public key, 32 bytes."""
        return self._private().public_key().public_bytes_raw()

    def _private(self) -> Ed25519PrivateKey:
        if self._key is None:
            self._key = Ed25519PrivateKey.from_private_bytes(self._seed())
        return self._key

    def _seed(self) -> bytes:
        try:
            seed = self._path.read_bytes()
        except FileNotFoundError:
            seed = self._make()
        if len(seed) != _SEED_BYTES:
            raise Internal(
                f"{self._path} is no key of {_SEED_BYTES} bytes: restore it, or remove it for a "
                "new one, whose records old public keys do not check"
            )
        return seed

    def _make(self) -> bytes:
        """Write a new key; a crash leaves none or a whole one."""
        seed = Ed25519PrivateKey.generate().private_bytes_raw()
        part = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        with contextlib.suppress(FileNotFoundError):
            part.unlink()
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(seed)
            file.flush()
            os.fsync(fd)
        part.rename(self._path)
        return seed
