"""The framing: round trips, splits at any byte, limits, hostile input."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from libdsec import wire

FRAMES = [
    wire.Request(1, "exec.run", wire.pack({"cid": "x"}), "n1-1"),
    wire.Request(2, "hello", wire.pack({}), ""),
    wire.Reply(1, wire.pack(None)),
    wire.Failure(2, {"code": "not_found", "message": "no", "detail": {}}),
    wire.Item(3, wire.pack(b"\x00\xff" * 1000)),
    wire.Cancel(4),
    wire.Credit(5, 8),
    wire.End(6),
]


def plain(frame):
    return type(frame).__name__, msgspec.to_builtins(frame, builtin_types=(msgspec.Raw, bytes))


@given(st.lists(st.sampled_from(FRAMES)), st.lists(st.integers(1, 5000)))
def test_frames_survive_any_split(frames, cuts):
    stream = b"".join(map(wire.encode, frames))
    splitter, received = wire.Splitter(), []
    for cut in [*cuts, len(stream)]:
        received += splitter.feed(stream[:cut])
        stream = stream[cut:]
    received += splitter.feed(stream)
    assert list(map(plain, received)) == list(map(plain, frames))


@given(st.binary(max_size=200))
def test_garbage_is_a_frame_error_or_nothing(data):
    try:
        for frame in wire.Splitter().feed(data):
            assert isinstance(frame, wire.Frame)
    except wire.FrameError:
        pass


def test_a_frame_nested_too_deeply_is_a_frame_error():
    body = b"\x91" * 100_000 + b"\xc0"
    with pytest.raises(wire.FrameError, match="malformed"):
        list(wire.Splitter().feed(len(body).to_bytes(4, "big") + body))


def test_oversized_frames_are_refused_on_both_sides():
    with pytest.raises(wire.FrameError, match="exceeds"):
        wire.encode(wire.Item(1, wire.pack(bytes(wire.MAX_FRAME))))
    with pytest.raises(wire.FrameError, match="limit"):
        list(wire.Splitter().feed((wire.MAX_FRAME + 1).to_bytes(4, "big")))


def test_the_largest_item_fits_a_frame():
    frame = wire.encode(wire.Item(1, wire.pack(bytes(wire.MAX_ITEM))))
    assert len(frame) < wire.MAX_FRAME


def test_decoded_data_does_not_pin_the_buffer():
    splitter = wire.Splitter()
    (item,) = splitter.feed(wire.encode(wire.Item(1, wire.pack(b"abc"))))
    list(splitter.feed(wire.encode(wire.End(2))))
    assert msgspec.msgpack.decode(item.data) == b"abc"
