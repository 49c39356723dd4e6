"""Connections from the host to the real name, over TLS that is verified, or as bare TCP."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from dsecd.doors.link import BUFFER_BYTES, Link
from libdsec.errors import InvalidArgument, Unavailable

PORT = 443
TRY_S = 10.0  # of one address: connection and handshake
ADDRESSES_MOST = 4  # that are tried


class Dialer:
    """Connects to a port of hosts; without `context` whoever answers there is the host."""

    def __init__(self, context: ssl.SSLContext | None, *, port: int = PORT) -> None:
        self._context, self._port = context, port

    async def open(self, host: str, addresses: Sequence[str]) -> Link:
        """Return a connection to the first of `addresses` that proves to be `host`.

        Raises `Unavailable` with the reason of the last one.
        """
        reason = "no address of it was found that the policy allows"
        for address in addresses[:ADDRESSES_MOST]:
            try:
                async with asyncio.timeout(TRY_S):
                    return await self._connect(host, address)
            except ssl.SSLCertVerificationError as error:
                reason = f"its certificate is not trusted here: {error.verify_message}"
            except TimeoutError:
                reason = f"{address} does not answer"
            except OSError as error:  # with SSLError
                reason = f"{address}: {error.strerror or repr(error)}"
        raise Unavailable(f"{host} cannot be reached: {reason}")

    async def _connect(self, host: str, address: str) -> Link:
        name = host if self._context is not None else None
        reader, writer = await asyncio.open_connection(
            address, self._port, ssl=self._context, server_hostname=name, limit=BUFFER_BYTES
        )
        if self._context is None:  # nothing bounds its silence
            writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        writer.transport.set_write_buffer_limits(high=BUFFER_BYTES)
        return Link(reader, writer)


def client_context(authorities: str = "") -> ssl.SSLContext:
    """Return what verifies real names: the host's authorities and those of a PEM file.

    Raises `InvalidArgument` when the file is none.
    """
    context = ssl.create_default_context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if authorities:
        try:
            context.load_verify_locations(Path(authorities))
        except OSError as error:
            raise InvalidArgument(
                f"secrets.authorities: {authorities} holds no certificates in PEM: {error}",
                field="secrets.authorities",
            ) from error
    return context
