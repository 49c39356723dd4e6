"""One control connection to dsec-blobd: a request, its answer, one at a time.

Frames are msgpack arrays in SOCK_SEQPACKET messages: [number, operation, arguments] and
[number, error or nil, result]. A descriptor may lie beside an answer.
"""

from __future__ import annotations

import array
import asyncio
import socket
from pathlib import Path
from typing import Any

import msgspec

from libdsec.errors import DSecError, Internal, InvalidArgument, Unavailable, from_wire

VERSION = 1
FRAME_MAX = 64 << 10  # bytes
_ANSWER_MAX = FRAME_MAX + 1024
_Answer = tuple[int, dict[str, Any] | None, Any]
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_Answer)


class Channel:
    """Use `connect`. After any `Unavailable` the channel is closed and `lost` is set."""

    def __init__(self, sock: socket.socket) -> None:
        self._loop = asyncio.get_running_loop()
        self._socket = sock
        self._turn = asyncio.Lock()
        self._number = 0
        self._answer: asyncio.Future[tuple[Any, list[int]]] | None = None
        self.lost = asyncio.Event()
        self._loop.add_reader(sock.fileno(), self._on_readable)

    @classmethod
    def connect(cls, path: Path) -> Channel:
        """Raises `Unavailable` when nobody listens at `path`. Never blocks."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        try:
            sock.connect(str(path))
        except OSError as error:
            sock.close()
            raise Unavailable(f"dsec-blobd does not listen at {path}: {error.strerror}") from error
        return cls(sock)

    async def call(self, operation: str, arguments: dict[str, Any]) -> tuple[Any, list[int]]:
        """Return the result and the descriptors beside it. Raises what the answer says."""
        async with self._turn:
            self._number += 1
            frame = _encoder.encode((self._number, operation, arguments))
            if len(frame) > FRAME_MAX:
                raise InvalidArgument(f"a request of {len(frame)} bytes exceeds {FRAME_MAX}")
            self._answer = self._loop.create_future()
            try:
                if self.lost.is_set():
                    raise OSError(0, "the connection is closed")
                self._socket.send(frame)  # one is under way at most: it has room
                return await self._answer
            except OSError as error:
                self.close()
                raise Unavailable(f"dsec-blobd is gone: {error.strerror}") from error
            except asyncio.CancelledError:
                self.close()  # its answer must not be taken for the next one's
                raise
            finally:
                self._answer = None

    def _on_readable(self) -> None:
        room = socket.CMSG_SPACE(4)
        try:
            data, ancillary, _, _ = self._socket.recvmsg(_ANSWER_MAX, room, socket.MSG_CMSG_CLOEXEC)
        except BlockingIOError:
            return
        except OSError:
            data, ancillary = b"", []
        fds = array.array("i")
        for level, kind, rights in ancillary:
            if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                fds.frombytes(rights)
        if data:
            self._settle(data, list(fds))
        else:
            self.close()

    def _settle(self, data: bytes, fds: list[int]) -> None:
        answer = self._answer
        if answer is None or answer.done():
            return
        try:
            number, failure, result = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            answer.set_exception(Internal(f"dsec-blobd sent a malformed answer: {error}"))
            return
        error_: DSecError | None = from_wire(failure) if failure is not None else None
        if number != self._number:
            error_ = Internal("dsec-blobd answered another request")
        if error_ is not None:
            answer.set_exception(error_)
        else:
            answer.set_result((result, fds))

    def close(self) -> None:
        if self.lost.is_set():
            return
        self.lost.set()
        self._loop.remove_reader(self._socket.fileno())
        self._socket.close()
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(Unavailable("dsec-blobd is gone"))
