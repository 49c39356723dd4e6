"""An open connection, and the bounds of what is held of it."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

BUFFER_BYTES = 64 << 10  # of each direction
PIECE_BYTES = 64 << 10  # read at a time
GOODBYE_S = 5.0  # for the other side to take the end of an answer


class Link(msgspec.Struct, frozen=True):
    """An open connection. Who has it aborts it.

    What writes goes through here: of a transport that was lost uvloop raises RuntimeError.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def abort(self) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Write `data`, and wait while too much is unsent. Raises OSError."""
        self._check()
        self.writer.write(data)
        await self.writer.drain()

    def end(self) -> None:
        """Say that nothing more is sent. Raises OSError."""
        self._check()
        self.writer.write_eof()

    async def finish(self, wait_s: float) -> None:
        """Close once what was written is taken, which may last `wait_s`. May raise OSError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                self.writer.close()
                await self.writer.wait_closed()
        self.abort()

    def _check(self) -> None:
        if self.writer.transport.is_closing():
            raise ConnectionResetError("the other side has closed the connection")
