"""`AgentChannel` against an agent that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest

from dsecd.backends.agent import AgentChannel
from libdsec import wire
from libdsec.errors import NotFound, Unavailable


class Agent:
    """The other end: frames it received, and whatever the test lets it send."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[wire.Frame] = asyncio.Queue()
        self.writer: asyncio.StreamWriter | None = None

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        splitter = wire.Splitter()
        while data := await reader.read(65536):
            for frame in splitter.feed(data):
                self.frames.put_nowait(frame)
        writer.close()

    def send(self, *frames: wire.Frame) -> None:
        assert self.writer is not None
        self.writer.write(b"".join(wire.encode(frame) for frame in frames))

    async def next(self) -> wire.Frame:
        return await asyncio.wait_for(self.frames.get(), 5)


class Recorder:
    def __init__(self) -> None:
        self.heard: list[tuple[str, object]] = []
        self.ended = asyncio.Event()

    def on_item(self, data: msgspec.Raw) -> None:
        self.heard.append(("item", msgspec.msgpack.decode(data)))

    def on_credit(self, n: int) -> None:
        self.heard.append(("credit", n))

    def on_reply(self, result: msgspec.Raw) -> None:
        self.heard.append(("reply", msgspec.msgpack.decode(result)))
        self.ended.set()

    def on_failure(self, error: dict[str, object]) -> None:
        self.heard.append(("failure", error["code"]))
        self.ended.set()


@pytest.fixture
async def agent(tmp_path: Path) -> AsyncIterator[Agent]:
    played = Agent()
    server = await asyncio.start_unix_server(played.serve, tmp_path / "agent.sock")
    yield played
    server.close()
    await server.wait_closed()


@pytest.fixture
async def channel(agent: Agent, tmp_path: Path) -> AsyncIterator[AgentChannel]:
    opened = await AgentChannel.connect(str(tmp_path / "agent.sock"))
    yield opened
    opened.close()
    await asyncio.sleep(0)


async def test_calls_are_told_apart_by_their_ids(agent: Agent, channel: AgentChannel) -> None:
    first = asyncio.create_task(channel.call("a", wire.pack({})))
    second = asyncio.create_task(channel.call("b", wire.pack({"x": 1})))
    one, two = await agent.next(), await agent.next()
    assert isinstance(one, wire.Request)
    assert isinstance(two, wire.Request)
    assert (one.op, two.op, bytes(two.args)) == ("a", "b", bytes(wire.pack({"x": 1})))
    agent.send(
        wire.Reply(two.id, wire.pack(2)),
        wire.Failure(one.id, {"code": "not_found", "message": "m"}),
    )
    assert msgspec.msgpack.decode(await second) == 2
    with pytest.raises(NotFound):
        await first


async def test_a_relayed_call_carries_everything_both_ways(
    agent: Agent, channel: AgentChannel
) -> None:
    heard = Recorder()
    call = channel.open("op", wire.pack(None), heard)
    request = await agent.next()
    call.send_item(wire.pack(b"x"))
    call.grant(3)
    call.end()
    call.cancel()
    sent = [await agent.next() for _ in range(4)]
    assert [type(f) for f in sent] == [wire.Item, wire.Credit, wire.End, wire.Cancel]
    agent.send(
        wire.Item(request.id, wire.pack("i")),
        wire.Credit(request.id, 7),
        wire.Reply(request.id, wire.pack("r")),
    )
    await asyncio.wait_for(heard.ended.wait(), 5)
    assert heard.heard == [("item", "i"), ("credit", 7), ("reply", "r")]
    call.cancel()  # after the answer: nothing is sent any more
    await channel_is_quiet(agent)


async def channel_is_quiet(agent: Agent) -> None:
    await asyncio.sleep(0.02)
    assert agent.frames.empty()


async def test_items_of_a_call_are_granted_as_they_are_taken(
    agent: Agent, channel: AgentChannel
) -> None:
    items: list[object] = []
    task = asyncio.create_task(
        channel.call("op", wire.pack({}), lambda raw: items.append(msgspec.msgpack.decode(raw)))
    )
    request = await agent.next()
    agent.send(*(wire.Item(request.id, wire.pack(n)) for n in range(16)))
    credit = await agent.next()
    assert isinstance(credit, wire.Credit)
    agent.send(wire.Reply(request.id, wire.pack(None)))
    await task
    assert items == list(range(16))


async def test_a_cancelled_task_cancels_its_call(agent: Agent, channel: AgentChannel) -> None:
    task = asyncio.create_task(channel.call("op", wire.pack({})))
    request = await agent.next()
    task.cancel()
    cancel = await agent.next()
    assert isinstance(cancel, wire.Cancel)
    assert cancel.id == request.id
    agent.send(wire.Reply(request.id, wire.pack(None)))  # the late answer disturbs nobody
    await asyncio.sleep(0.02)


@pytest.mark.parametrize("how", ["closed", "junk"])
async def test_loss_fails_open_calls_and_is_told_once(
    agent: Agent, tmp_path: Path, how: str
) -> None:
    told: list[int] = []
    channel = await AgentChannel.connect(str(tmp_path / "agent.sock"), lambda: told.append(1))
    heard = Recorder()
    channel.open("op", wire.pack({}), heard)
    await agent.next()
    assert agent.writer is not None
    if how == "junk":
        agent.writer.write(b"\0\0\0\1\xc1")
    else:
        agent.writer.close()
    await asyncio.wait_for(heard.ended.wait(), 5)
    await asyncio.sleep(0.02)
    assert heard.heard == [("failure", "unavailable")]
    assert told == [1]
    with pytest.raises(Unavailable):
        channel.open("op", wire.pack({}), heard)


async def test_a_deliberate_close_is_not_a_loss(agent: Agent, tmp_path: Path) -> None:
    told: list[int] = []
    channel = await AgentChannel.connect(str(tmp_path / "agent.sock"), lambda: told.append(1))
    heard = Recorder()
    channel.open("op", wire.pack({}), heard)
    channel.close()
    await asyncio.sleep(0.02)
    assert heard.heard == [("failure", "unavailable")]
    assert told == []
