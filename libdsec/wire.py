"""The envelope that libdsec, dsecd, dsec-coordinator and dsec-init speak.

A frame is a big-endian u32 body length followed by one msgpack array (docs/protocol.md). One
connection multiplexes many calls; the caller chooses ids, unique among its open calls. Streams
run in either direction inside a call and are credit-limited: a sender may have at most
`INITIAL_CREDIT` items in flight and gains one per `Credit` it receives, so a slow reader
costs the sender's memory nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

PROTOCOL = 1
MAX_FRAME = 4 << 20  # bytes of one frame's body
MAX_ITEM = 256 << 10  # bytes of data in one stream item
INLINE = 64 << 10  # results up to this size travel inside the reply
INITIAL_CREDIT = 16  # items

_LENGTH = struct.Struct(">I")


class Request(msgspec.Struct, array_like=True, tag=0, gc=False):
    """A call. `target` is a sandbox id for calls into a sandbox, else empty."""

    id: int
    op: str
    args: msgspec.Raw
    target: str = ""


class Reply(msgspec.Struct, array_like=True, tag=1, gc=False):
    """The call `id` succeeded; it is closed."""

    id: int
    result: msgspec.Raw


class Failure(msgspec.Struct, array_like=True, tag=2, gc=False):
    """The call `id` failed with ``{code, message, detail}``; it is closed."""

    id: int
    error: dict[str, Any]


class Item(msgspec.Struct, array_like=True, tag=3, gc=False):
    """One element of the stream of call `id`, in the direction it travels."""

    id: int
    data: msgspec.Raw


class Cancel(msgspec.Struct, array_like=True, tag=4, gc=False):
    """The caller gives the call up; what it started is undone. The callee still answers."""

    id: int


class Credit(msgspec.Struct, array_like=True, tag=5, gc=False):
    """`n` more items may be sent on the peer's stream of call `id`."""

    id: int
    n: int


class End(msgspec.Struct, array_like=True, tag=6, gc=False):
    """The caller's stream of call `id` is complete (an upload's end, a stdin's close)."""

    id: int


Frame: TypeAlias = Request | Reply | Failure | Item | Cancel | Credit | End

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[Frame] = msgspec.msgpack.Decoder(Frame)


class FrameError(Exception):
    """The peer broke the framing; the connection cannot go on."""


def pack(value: Any) -> msgspec.Raw:
    """Encode `value` for a frame's `args`, `result` or `data`."""
    return msgspec.Raw(_encoder.encode(value))


def encode(frame: Frame) -> bytes:
    """Return `frame` with its length prefix. Raises `FrameError` above `MAX_FRAME`."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME:
        raise FrameError(f"frame of {len(body)} bytes exceeds the limit of {MAX_FRAME}")
    return _LENGTH.pack(len(body)) + body


class Splitter:
    """Turns a byte stream into frames; holds at most one incomplete frame."""

    def __init__(self, limit: int = MAX_FRAME) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yield every frame that `data` completes. Raises `FrameError` on a broken stream."""
        buffer = self._buffer
        if buffer:
            buffer += data
        whole = not buffer  # as good as always: nothing is left over from the last time
        source: bytes | bytearray = data if whole else buffer
        start, size = 0, len(source)
        try:
            while size - start >= 4:
                (length,) = _LENGTH.unpack_from(source, start)
                if length > self._limit:
                    raise FrameError(f"peer sent a frame of {length} bytes, limit {self._limit}")
                if size - start - 4 < length:
                    break
                end = start + 4 + length
                # bytes(): the decoded Raw fields would otherwise pin, and block, the buffer
                body = (
                    data[start + 4 : end] if whole else bytes(memoryview(buffer)[start + 4 : end])
                )
                start = end
                try:
                    yield _decoder.decode(body)
                except (msgspec.DecodeError, RecursionError) as error:
                    raise FrameError(f"peer sent a malformed frame: {error}") from error
        finally:
            if not whole:
                del buffer[:start]
            elif start < size:
                buffer += data[start:]
