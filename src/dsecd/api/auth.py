"""Who may connect. The one place that IAM will replace: it turns a connection into a `Principal`.

Unix socket: the kernel says who is there (SO_PEERCRED, unix(7)). root, the daemon's own uid and
members of `listen.group` may use it. TCP: a token, compared in constant time, under TLS.
"""

from __future__ import annotations

import grp
import hmac
import os
import pwd
import socket
import struct
from pathlib import Path

from dsecd.config import Listen
from dsecd.model import Principal
from libdsec.errors import InvalidArgument, PermissionDenied

_CREDENTIALS = struct.Struct("iII")  # pid, uid, gid: struct ucred
MIN_TOKEN = 16


class Gatekeeper:
    """Decides about connections by the `[listen]` section of the configuration."""

    def __init__(self, listen: Listen) -> None:
        self._gid: int | None = None
        if listen.group:
            try:
                self._gid = grp.getgrnam(listen.group).gr_gid
            except KeyError as error:
                raise InvalidArgument(
                    f"listen.group {listen.group!r} does not exist on this host",
                    field="listen.group",
                ) from error
        self._tokens = _read_tokens(Path(listen.token_file)) if listen.token_file else []

    @property
    def gid(self) -> int | None:
        return self._gid

    def peer(self, sock: socket.socket) -> Principal:
        """Return the principal at the other end of a unix socket. Raises `PermissionDenied`."""
        raw = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        _, uid, gid = _CREDENTIALS.unpack(raw)
        if uid in (0, os.geteuid()) or self._in_group(uid, gid):
            return Principal(name=f"uid:{uid}", kind="peer", uid=uid)
        raise PermissionDenied(
            f"uid {uid} may not use this daemon: be root, or join the group of listen.group"
        )

    def token(self, token: str) -> Principal:
        """Return the principal of a TCP connection's `token`. Raises `PermissionDenied`."""
        if not self._tokens:  # only reachable on loopback with insecure = true
            return Principal(name="loopback", kind="loopback")
        given = token.encode()
        found = ""
        for name, secret in self._tokens:  # every one is compared: time tells nothing
            if hmac.compare_digest(given, secret):
                found = name
        if not found:
            raise PermissionDenied("the token is missing or wrong")
        return Principal(name=found, kind="token")

    def _in_group(self, uid: int, gid: int) -> bool:
        if self._gid is None:
            return False
        if gid == self._gid:
            return True
        try:
            user = pwd.getpwuid(uid)
        except KeyError:
            return False
        return self._gid in os.getgrouplist(user.pw_name, user.pw_gid)


def _read_tokens(path: Path) -> list[tuple[str, bytes]]:
    """Read "name:token" or "token" lines; a file that others can read is refused."""
    try:
        mode = path.stat().st_mode
        lines = path.read_text().split()
    except OSError as error:
        raise InvalidArgument(
            f"listen.token_file {path}: {error.strerror}", field="listen.token_file"
        ) from error
    if mode & 0o077:
        raise InvalidArgument(
            f"listen.token_file {path} can be read by others: chmod 600", field="listen.token_file"
        )
    tokens = []
    for number, line in enumerate(lines):
        name, colon, secret = line.rpartition(":")
        if len(secret) < MIN_TOKEN:
            raise InvalidArgument(
                f"listen.token_file {path}: tokens have at least {MIN_TOKEN} characters",
                field="listen.token_file",
            )
        tokens.append((f"token:{name}" if colon else f"token:{number}", secret.encode()))
    if not tokens:
        raise InvalidArgument(f"listen.token_file {path} is empty", field="listen.token_file")
    return tokens
