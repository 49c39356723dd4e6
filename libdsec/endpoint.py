"""Where a daemon listens, and how to reach it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar
from urllib.parse import urlsplit

from libdsec.errors import InvalidArgument, Unavailable

DEFAULT_SOCKET = "/run/dsec/dsecd.sock"
DEFAULT_PORT = 7411
CONNECT_TIMEOUT_S = 10.0

P = TypeVar("P", bound=asyncio.BaseProtocol)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed endpoint: ``unix:/path``, ``/path``, ``tcp://host:port`` or ``tls://host:port``."""

    kind: Literal["unix", "tcp", "tls"]
    path: str = ""
    host: str = ""
    port: int = 0
    context: ssl.SSLContext | None = field(default=None, compare=False)
    server_name: str | None = None

    def __str__(self) -> str:
        if self.kind == "unix":
            return f"unix:{self.path}"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.kind}://{host}:{self.port}"


def parse(text: str, *, ca_file: str | None = None, server_name: str | None = None) -> Endpoint:
    """Return the endpoint `text` names. Raises `InvalidArgument` when it names none.

    `ca_file` is a PEM file of the authorities to trust for ``tls://`` (default: the system's);
    `server_name` is the name to expect in the certificate when it is not the endpoint's host.
    """
    if text.startswith("/"):
        return Endpoint("unix", path=text)
    if text.startswith("unix:"):
        path = text.removeprefix("unix:")
        path = "/" + path.lstrip("/") if path.startswith("//") else path
        if not path:
            raise InvalidArgument("endpoint 'unix:' lacks a path", field="endpoint")
        return Endpoint("unix", path=path)
    host, port = _host_and_port(text)
    if text.startswith("tcp://"):
        return Endpoint("tcp", host=host, port=port)
    context = _tls_context(ca_file)
    return Endpoint("tls", host=host, port=port, context=context, server_name=server_name or host)


def _host_and_port(text: str) -> tuple[str, int]:
    form = "use unix:/path, /path, tcp://host:port or tls://host:port"
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port or DEFAULT_PORT
    except ValueError as error:
        raise InvalidArgument(f"endpoint {text!r}: {error}; {form}", field="endpoint") from error
    if parts.scheme not in ("tcp", "tls") or not host or parts.path.strip("/"):
        raise InvalidArgument(f"endpoint {text!r} is not understood; {form}", field="endpoint")
    return host, port


def _tls_context(ca_file: str | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=ca_file)
    except (OSError, ssl.SSLError) as error:
        raise InvalidArgument(f"CA file {ca_file}: {error}", field="ca_file") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def from_environment(
    endpoint: str | None, ca_file: str | None, server_name: str | None
) -> Endpoint:
    """Return the endpoint given, or that of DSEC_ENDPOINT, or the local daemon's socket."""
    text = endpoint or os.environ.get("DSEC_ENDPOINT") or DEFAULT_SOCKET
    return parse(
        text, ca_file=ca_file or os.environ.get("DSEC_CA_FILE") or None, server_name=server_name
    )


async def dial(endpoint: Endpoint, factory: Callable[[], P]) -> P:
    """Connect to `endpoint` and return its protocol. Raises `Unavailable` saying what to do."""
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            if endpoint.kind == "unix":
                _, protocol = await loop.create_unix_connection(factory, endpoint.path)
                return protocol
            transport, protocol = await loop.create_connection(
                factory,
                endpoint.host,
                endpoint.port,
                ssl=endpoint.context,
                server_hostname=endpoint.server_name if endpoint.context else None,
            )
    except ssl.SSLError as error:
        raise Unavailable(f"TLS with {endpoint} failed: {_tls_hint(error)}") from error
    except TimeoutError as error:
        raise Unavailable(f"{endpoint} did not answer within {CONNECT_TIMEOUT_S:g} s") from error
    except OSError as error:
        raise Unavailable(_hint(endpoint, error)) from error
    _keep_alive(transport.get_extra_info("socket"))
    return protocol


def _tls_hint(error: ssl.SSLError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"{error.verify_message}; set DSEC_CA_FILE to the CA that signed the daemon's key"
    return str(error.reason or error)


def _hint(endpoint: Endpoint, error: OSError) -> str:
    if endpoint.kind != "unix":
        return f"no daemon at {endpoint}: {error.strerror or error}; check the address and dsecd"
    if isinstance(error, PermissionError):
        return f"no right to use {endpoint.path}: run as root or join the socket's group"
    state = "refused the connection" if Path(endpoint.path).exists() else "does not exist"
    return (
        f"no daemon: {endpoint.path} {state}; start it with `systemctl start dsecd` or `dsecd` as "
        "root, or set DSEC_ENDPOINT to where it listens"
    )


def _keep_alive(sock: socket.socket | None) -> None:
    """Let the kernel notice a peer that vanished without a FIN: a call must not hang for ever."""
    if sock is None:
        return
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)
