"""An open connection, and the bounds of what is held of it."""

from __future__ import annotations

import asyncio
import contextlib

import msgspec

BUFFER_BYTES = 64 << 10  # of each direction
PIECE_BYTES = 64 << 10  # read at a time
GOODBYE_S = 5.0  # for the other side to take the end of an answer


class Link(msgspec.Struct, frozen=True):
    """An open connection. Who has it aborts it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def abort(self) -> None:
        self.writer.transport.abort()

    async def send(self, data: bytes) -> None:
        """Write `data`, and wait while too much is unsent. Raises OSError."""
        self.writer.write(data)
        await self.writer.drain()

    async def finish(self, wait_s: float) -> None:
        """Close once what was written is taken, which may last `wait_s`. May raise OSError."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                self.writer.close()
                await self.writer.wait_closed()
        self.abort()
