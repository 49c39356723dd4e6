"""The smallest client of the wire protocol, for tests that must see every frame.

Independent of `libdsec.connection` on purpose: a fault shared by both sides would go unseen.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec

from libdsec import model, wire
from libdsec.errors import DSecError, Unavailable, from_wire


class WireCall:
    """One open call: `items` as they come, `answer()` for the end."""

    def __init__(self, client: WireClient, call_id: int) -> None:
        self.client, self.id = client, call_id
        self.items: asyncio.Queue[msgspec.Raw] = asyncio.Queue()
        self.credit = wire.INITIAL_CREDIT
        self.room = asyncio.Event()
        self.done: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

    async def answer(self, kind: Any = Any, timeout_s: float = 30.0) -> Any:
        """Return the decoded result, or raise its `DSecError`."""
        raw = await asyncio.wait_for(asyncio.shield(self.done), timeout_s)
        return msgspec.msgpack.decode(raw, type=kind)

    async def item(self, kind: Any = Any, timeout_s: float = 30.0) -> Any:
        raw = await asyncio.wait_for(self.items.get(), timeout_s)
        return msgspec.msgpack.decode(raw, type=kind)

    async def stream(self, kind: Any = Any) -> AsyncIterator[Any]:
        """Yield every item until the call is answered, granting as they are read."""
        while True:
            while not self.done.done():
                getter = asyncio.ensure_future(self.items.get())
                await asyncio.wait({getter, self.done}, return_when=asyncio.FIRST_COMPLETED)
                if not getter.done():
                    getter.cancel()
                    break
                self.grant(1)
                yield msgspec.msgpack.decode(getter.result(), type=kind)
            if self.items.empty():
                return
            yield msgspec.msgpack.decode(self.items.get_nowait(), type=kind)

    def grant(self, n: int) -> None:
        self.client.send(wire.Credit(self.id, n))

    def cancel(self) -> None:
        self.client.send(wire.Cancel(self.id))

    async def push(self, value: Any) -> None:
        while self.credit <= 0:
            self.room.clear()
            await self.room.wait()
        self.credit -= 1
        self.client.send(wire.Item(self.id, wire.pack(value)))

    def end(self) -> None:
        self.client.send(wire.End(self.id))


class WireClient:
    """A connection to a daemon's unix socket."""

    def __init__(self) -> None:
        self.calls: dict[int, WireCall] = {}
        self.ids = itertools.count(1)
        self.lost = asyncio.Event()

    @classmethod
    async def connect(cls, path: Path | str, hello: bool = True) -> WireClient:
        client = cls()
        client.reader, client.writer = await asyncio.open_unix_connection(str(path))
        client.task = asyncio.ensure_future(client._read())
        if hello:
            await client.call("hello", model.Hello(protocol=wire.PROTOCOL), kind=model.Welcome)
        return client

    @classmethod
    def over(cls, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> WireClient:
        """Return a client on a connection that is there; it says no hello."""
        client = cls()
        client.reader, client.writer = reader, writer
        client.task = asyncio.ensure_future(client._read())
        return client

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    task: asyncio.Task[None]

    def send(self, frame: wire.Frame) -> None:
        self.writer.write(wire.encode(frame))

    def open(self, op: str, args: Any = None, target: str = "") -> WireCall:
        call = WireCall(self, next(self.ids))
        self.calls[call.id] = call
        self.send(wire.Request(call.id, op, wire.pack(args), target))
        return call

    async def call(
        self, op: str, args: Any = None, target: str = "", kind: Any = Any, timeout_s: float = 30.0
    ) -> Any:
        return await self.open(op, args, target).answer(kind, timeout_s)

    async def create(
        self,
        key: str,
        image: str = "base/debian:12",
        backend: str = model.CONTAINER,
        vm: model.VmArgs | None = None,
        **fields: Any,
    ) -> model.SandboxInfo:
        args = model.DSecContainerRunArgs(container_image=image, **fields)
        create = model.CreateArgs(key=key, args=args, backend=backend, vm=vm)
        info: model.SandboxInfo = await self.call("sandbox.create", create, kind=model.SandboxInfo)
        return info

    async def run(
        self, target: str, *argv: str, cid: str = "", **fields: Any
    ) -> model.CommandResult:
        args = model.ExecArgs(
            cid=cid or f"c{next(self.ids)}", argv=[word.encode() for word in argv], **fields
        )
        result: model.CommandResult = await self.call(
            "exec.run", args, target, kind=model.CommandResult
        )
        return result

    async def get(self, name: str) -> model.MicroVMInfo:
        info: model.MicroVMInfo = await self.call(
            "sandbox.get", model.SandboxRef(id=name), kind=model.MicroVMInfo
        )
        return info

    async def stop(self, name: str) -> model.SandboxInfo:
        info: model.SandboxInfo = await self.call(
            "sandbox.stop", model.SandboxRef(id=name), kind=model.SandboxInfo
        )
        return info

    async def list(self, everything: bool = False) -> list[model.SandboxInfo]:
        found: list[model.SandboxInfo] = await self.call(
            "sandbox.list", model.ListArgs(all=everything), kind=list[model.SandboxInfo]
        )
        return found

    def abort(self) -> None:
        """Drop the connection as the kernel does for a killed client."""
        self.writer.transport.abort()

    async def close(self) -> None:
        self.writer.close()
        await asyncio.wait({self.task})

    async def _read(self) -> None:
        splitter = wire.Splitter()
        try:
            while data := await self.reader.read(1 << 16):
                for frame in splitter.feed(data):
                    self._dispatch(frame)
        except OSError:
            pass
        self.lost.set()
        for call in self.calls.values():
            self._fail(call, Unavailable("connection lost"))
        self.writer.close()

    def _dispatch(self, frame: wire.Frame) -> None:
        call = self.calls.get(frame.id)
        if isinstance(frame, wire.Failure) and call is None:
            return
        assert call is not None, f"frame for a call that is not open: {frame}"
        if isinstance(frame, wire.Item):
            call.items.put_nowait(frame.data)
        elif isinstance(frame, wire.Credit):
            call.credit += frame.n
            call.room.set()
        elif isinstance(frame, wire.Reply):
            del self.calls[frame.id]
            call.done.set_result(frame.result)
        elif isinstance(frame, wire.Failure):
            del self.calls[frame.id]
            self._fail(call, from_wire(frame.error))

    def _fail(self, call: WireCall, error: DSecError) -> None:
        if not call.done.done():
            call.done.set_exception(error)
            call.done.exception()
