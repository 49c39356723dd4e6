"""Where the secrets of running sandboxes are kept over a restart: a file each, for root alone.

They are in no other place on disk: not in the journal, whose rows outlive their sandbox.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from dsecd.secrets.secret import Secret
from libdsec.errors import Unavailable

_SUFFIX = ".secrets"
_decode = msgspec.msgpack.Decoder(tuple[Secret, ...]).decode


class Vault:
    """The files below `directory`, which is made with mode 0700."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def keep(self, sandbox: str, secrets: tuple[Secret, ...]) -> None:
        """Write the secrets of a sandbox that is being made. Raises `Unavailable`.

        Not synced: what loses it, a crash of the host, loses the sandbox as well.
        """
        path = self._path(sandbox)
        try:
            self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
            path.unlink(missing_ok=True)
            fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(fd, "wb") as file:
                file.write(msgspec.msgpack.encode(secrets))
        except OSError as error:
            raise Unavailable(f"cannot keep the secrets in {path}: {error.strerror}") from error

    def recall(self, sandbox: str) -> tuple[Secret, ...]:
        """Return the secrets of a sandbox; () when it has none. Raises `Unavailable`."""
        path = self._path(sandbox)
        try:
            return _decode(path.read_bytes())
        except FileNotFoundError:
            return ()
        except (OSError, msgspec.DecodeError) as error:
            raise Unavailable(f"{path} cannot be read: {error}") from error

    def holds(self, sandbox: str) -> bool:
        return self._path(sandbox).exists()

    def forget(self, sandbox: str) -> None:
        """Remove the secrets of a sandbox; one without any is fine."""
        self._path(sandbox).unlink(missing_ok=True)

    def sweep(self, known: Collection[str]) -> list[str]:
        """Remove what belongs to no sandbox of `known`; return the paths, for the log."""
        stale = [path for path in self._directory.glob(f"*{_SUFFIX}") if path.stem not in known]
        for path in stale:
            path.unlink(missing_ok=True)
        return [str(path) for path in stale]

    def _path(self, sandbox: str) -> Path:
        return self._directory / f"{sandbox}{_SUFFIX}"
