"""The QMP client against a monitor that the test plays, with lines as QEMU 7.2 sends them."""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Mapping
from typing import Any

import pytest

from dsecd.host.qmp import LINE_MOST, Qmp
from libdsec.errors import DSecError, Internal, Timeout, Unavailable, Unsupported, WrongState

GREETING = (
    b'{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, '
    b'"package": "Debian 1:7.2+dfsg-7+deb12u18"}, "capabilities": ["oob"]}}\r\n'
)


class Monitor:
    """QEMU's end of the connection."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self.reader: asyncio.StreamReader
        self.writer: asyncio.StreamWriter

    async def open(self) -> None:
        self.reader, self.writer = await asyncio.open_unix_connection(sock=self._end)

    async def command(self) -> dict[str, Any]:
        line = await asyncio.wait_for(self.reader.readline(), 5)
        parsed: dict[str, Any] = json.loads(line)
        return parsed

    async def negotiate(self) -> None:
        self.writer.write(GREETING)
        asked = await self.command()
        assert asked["execute"] == "qmp_capabilities"
        self.answer(asked, {})

    def answer(self, asked: Mapping[str, Any], result: Any) -> None:
        self.send({"return": result, "id": asked["id"]})

    def refuse(self, asked: Mapping[str, Any], kind: str, words: str) -> None:
        self.send({"id": asked["id"], "error": {"class": kind, "desc": words}})

    def send(self, message: Mapping[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\r\n")


class Ears:
    """Events, and how often the connection was lost."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.losses = 0

    def heard(self, name: str, data: Mapping[str, Any]) -> None:
        self.events.append((name, dict(data)))

    def lost(self) -> None:
        self.losses += 1


class Pair:
    """A negotiated connection."""

    def __init__(self, monitor: Monitor, qmp: Qmp, ears: Ears) -> None:
        self.monitor, self.qmp, self.ears = monitor, qmp, ears


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    ours, theirs = socket.socketpair()
    monitor, ears = Monitor(theirs), Ears()
    await monitor.open()
    qmp, _ = await asyncio.gather(Qmp.connect(ours, ears.heard, ears.lost), monitor.negotiate())
    yield Pair(monitor, qmp, ears)
    qmp.close()
    monitor.writer.close()


async def test_answers_find_their_commands(pair: Pair) -> None:
    first = asyncio.create_task(pair.qmp.ask("query-status", dict[str, Any]))
    second = asyncio.create_task(pair.qmp.ask("query-name", str))
    asked = [await pair.monitor.command(), await pair.monitor.command()]
    assert [one["execute"] for one in asked] == ["query-status", "query-name"]
    assert asked[0]["id"] != asked[1]["id"]
    pair.monitor.answer(asked[1], "name")
    pair.monitor.answer(asked[0], {"status": "running"})
    assert (await first, await second) == ({"status": "running"}, "name")


async def test_arguments_are_sent(pair: Pair) -> None:
    call = asyncio.create_task(pair.qmp.execute("balloon", {"value": 7}))
    asked = await pair.monitor.command()
    assert (asked["execute"], asked["arguments"]) == ("balloon", {"value": 7})
    pair.monitor.answer(asked, {})
    assert bytes(await call) == b"{}"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("CommandNotFound", Unsupported),
        ("DeviceNotActive", WrongState),
        ("GenericError", Internal),
        ("SomethingNew", Internal),
    ],
)
async def test_a_refusal_keeps_qemus_words(pair: Pair, kind: str, error: type[DSecError]) -> None:
    call = asyncio.create_task(pair.qmp.execute("cont"))
    pair.monitor.refuse(await pair.monitor.command(), kind, "Resetting is required")
    with pytest.raises(error, match="cont: Resetting is required") as caught:
        await call
    assert caught.value.detail["qmp_class"] == kind


async def test_events_come_in_between(pair: Pair) -> None:
    call = asyncio.create_task(pair.qmp.execute("stop"))
    asked = await pair.monitor.command()
    stamp = {"seconds": 1, "microseconds": 2}
    pair.monitor.send({"timestamp": stamp, "event": "STOP"})
    pair.monitor.send({"timestamp": stamp, "event": "GUEST_PANICKED", "data": {"action": "pause"}})
    pair.monitor.answer(asked, {})
    await call
    assert pair.ears.events == [("STOP", {}), ("GUEST_PANICKED", {"action": "pause"})]


async def test_lines_may_come_in_pieces(pair: Pair) -> None:
    call = asyncio.create_task(pair.qmp.ask("query-name", str))
    asked = await pair.monitor.command()
    for byte in json.dumps({"return": "whole", "id": asked["id"]}).encode() + b"\r\n":
        pair.monitor.writer.write(bytes([byte]))
        await pair.monitor.writer.drain()
        await asyncio.sleep(0)
    assert await call == "whole"


async def test_an_answer_that_comes_too_late_disturbs_nobody(pair: Pair) -> None:
    with pytest.raises(Timeout, match="query-status"):
        await pair.qmp.execute("query-status", timeout_s=0.01)
    late = await pair.monitor.command()
    call = asyncio.create_task(pair.qmp.ask("query-name", str))
    pair.monitor.answer(late, {})
    pair.monitor.answer(await pair.monitor.command(), "name")
    assert await call == "name"
    assert pair.ears.losses == 0


async def test_an_answer_of_another_shape_is_an_error(pair: Pair) -> None:
    call = asyncio.create_task(pair.qmp.ask("query-name", str))
    pair.monitor.answer(await pair.monitor.command(), {"name": 1})
    with pytest.raises(Internal, match="query-name"):
        await call


async def test_the_end_fails_what_is_pending_and_is_told_once(pair: Pair) -> None:
    calls = [asyncio.create_task(pair.qmp.execute("quit")) for _ in range(2)]
    await pair.monitor.command()
    pair.monitor.writer.close()
    for call in calls:
        with pytest.raises(Unavailable, match="quit"):
            await call
    assert pair.ears.losses == 1
    with pytest.raises(Unavailable):
        await pair.qmp.execute("query-status")
    pair.qmp.close()
    assert pair.ears.losses == 1


async def test_closing_is_no_loss(pair: Pair) -> None:
    call = asyncio.create_task(pair.qmp.execute("query-status"))
    await pair.monitor.command()
    pair.qmp.close()
    with pytest.raises(Unavailable):
        await call
    assert await asyncio.wait_for(pair.monitor.reader.read(), 5) == b""
    assert pair.ears.losses == 0


@pytest.mark.parametrize(
    "line",
    [
        b"no json\n",
        b"[1]\n",
        b'{"return": {}}\n',  # to nothing
        b'{"return": {}, "id": 4711}\n',
        b'{"return": {}, "id": "x"}\n',
        b'{"event": 7}\n',
        b'{"event": "STOP", "data": ' + b"[" * 100_000 + b"\n",
        b'{"event": "' + b"x" * (LINE_MOST + 1),
    ],
    ids=["text", "array", "unasked", "id-of-none", "no-id", "event", "deep", "long"],
)
async def test_what_is_no_qmp_ends_the_connection(pair: Pair, line: bytes) -> None:
    call = asyncio.create_task(pair.qmp.execute("query-status"))
    await pair.monitor.command()
    pair.monitor.writer.write(line)
    with pytest.raises(Unavailable, match="QEMU"):
        await call
    assert pair.ears.losses == 1
    assert pair.ears.events == []


async def test_a_descriptor_goes_beside_its_command(pair: Pair) -> None:
    reader, writer = os.pipe()
    sock = pair.monitor.writer.get_extra_info("socket")
    copy = socket.socket(fileno=os.dup(sock.fileno()))
    pair.monitor.writer.transport.pause_reading()  # type: ignore[attr-defined]
    try:
        call = asyncio.create_task(
            pair.qmp.execute("getfd", {"fdname": "state"}, descriptor=writer)
        )
        await asyncio.sleep(0.01)
        line, descriptors, _, _ = socket.recv_fds(copy, 4096, 4)
        asked = json.loads(line)
        assert (asked["execute"], asked["arguments"]) == ("getfd", {"fdname": "state"})
        os.write(descriptors[0], b"through")
        assert os.read(reader, 16) == b"through"
        pair.monitor.answer(asked, {})
        await call
    finally:
        for fd in (reader, writer, *descriptors):
            os.close(fd)
        copy.close()


async def test_a_monitor_that_is_taken_does_not_greet() -> None:
    ours, theirs = socket.socketpair()
    ears = Ears()
    with theirs, pytest.raises(Timeout, match="another process"):
        await Qmp.connect(ours, ears.heard, ears.lost, timeout_s=0.02)
    assert ears.losses == 0


async def test_a_monitor_that_ends_at_once_is_unavailable() -> None:
    ours, theirs = socket.socketpair()
    ears = Ears()
    theirs.close()
    with pytest.raises(Unavailable):
        await Qmp.connect(ours, ears.heard, ears.lost)
    assert ears.losses == 0
