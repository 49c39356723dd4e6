"""A TLS server that plays the real name: it notes what arrives, byte for byte, and misbehaves."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Awaitable, Callable

HOST = "api.example.com"
VALUE = "Bearer tok-0123456789abcdef"
BIG_BYTES = 48 << 20

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter, bytes], Awaitable[None]]


class Api:
    """Answers each path by the method of its name. `seen` are heads, `bodies` what followed."""

    def __init__(self, context: ssl.SSLContext) -> None:
        context.sni_callback = None  # it answers whatever it is asked for
        self._context = context
        self._server: asyncio.Server
        self.port = 0
        self.seen: list[bytes] = []
        self.bodies: list[bytes] = []
        self.sent = 0  # bytes of /big that the client side took
        self.open = 0
        self.release = asyncio.Event()

    async def start(self, sock: socket.socket | None = None) -> None:
        """Listen at a free port of loopback, or serve a socket that listens already."""
        where = {"host": "127.0.0.1", "port": 0} if sock is None else {"sock": sock}
        self._server = await asyncio.start_server(self._serve, ssl=self._context, **where)  # type: ignore[arg-type]
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        self.release.set()
        self._server.close()
        async with asyncio.timeout(5):
            while self.open:  # noqa: ASYNC110
                await asyncio.sleep(0.01)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            self.seen.append(head)
            path = head.split(b" ", 2)[1].decode().partition("?")[0]
            await getattr(self, f"_{path.strip('/') or 'ok'}")(reader, writer, head)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            self.open -= 1
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _body(self, reader: asyncio.StreamReader, head: bytes) -> bytes:
        lower = head.lower()
        if b"transfer-encoding: chunked" in lower:
            raw = await reader.readuntil(b"0\r\n\r\n")
        elif b"content-length: " in lower:
            length = int(lower.split(b"content-length: ")[1].split(b"\r\n")[0])
            raw = await reader.readexactly(length)
        else:
            raw = b""
        self.bodies.append(raw)
        return raw

    async def _ok(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        await self._body(reader, head)
        writer.write(b'HTTP/1.1 200 OK\r\nContent-Length: 3\r\nAlt-Svc: h3=":443"\r\n\r\nyes')

    async def _echo(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        """Repeat the head in header and body, the secret cut over two writes."""
        await self._body(reader, head)
        cut = head.index(VALUE.encode()) + 12
        writer.write(
            b"HTTP/1.1 200 OK\r\nX-Echo: %s\r\nContent-Length: %d\r\n\r\n"
            % (VALUE.encode(), len(head))
        )
        writer.write(head[:cut])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.write(head[cut:])

    async def _redirect(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        writer.write(
            b"HTTP/1.1 302 Found\r\nLocation: https://evil.example.org/?%s\r\n"
            b"Content-Length: 0\r\n\r\n" % VALUE.split()[1].encode()
        )

    async def _big(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        piece = bytes(64 << 10)
        for _ in range(BIG_BYTES // len(piece)):
            writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            await writer.drain()
            self.sent += len(piece)
        writer.write(b"0\r\n\r\n")

    async def _plain(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        """A body that ends with the connection."""
        writer.write(b"HTTP/1.1 200 OK\r\n\r\nuntil the end")

    async def _events(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        await self.release.wait()
        writer.write(b"0\r\n\r\n")

    async def _early(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        """Refuse the body before it was read."""
        writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig")

    async def _hang(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        await reader.read()  # until the other side is gone

    async def _cut(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nonly this")

    async def _rubbish(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        writer.write(b"SSH-2.0-OpenSSH_9\r\n\r\n")

    async def _silent(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        """End without a word."""

    async def _switch(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes
    ) -> None:
        writer.write(b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\n\r\n")
