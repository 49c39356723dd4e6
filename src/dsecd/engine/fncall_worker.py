"""One worker of a pool: a sandbox of the engine's own, its zygote, and the stream to that."""

from __future__ import annotations

import asyncio
import inspect
import json
import secrets
import struct
from typing import Any

import msgspec

from dsecd.backends.abc import Call, Channel
from dsecd.engine.manager import Manager
from dsecd.engine.sandbox import Sandbox
from dsecd.host import fncall_zygote
from libdsec.errors import DSecError, Internal, Unavailable, Unsupported, from_wire
from libdsec.model import CommandResult, DSecContainerRunArgs, ExecArgs, ForwardArgs
from libdsec.wire import INITIAL_CREDIT, MAX_ITEM, pack

PORT = 47193  # of the worker's own loopback, where nothing else is
_HEAD = 1 << 20  # bytes, of an answer's description
_POLL_S = 0.01
_program = inspect.getsource(fncall_zygote)
_item = msgspec.msgpack.Decoder(bytes)
_result = msgspec.msgpack.Decoder(CommandResult)


class Lost(Exception):
    """The worker cannot be used any more, and why."""


class _Zygote:
    """The receiver of the command: it tells how the zygote ended."""

    def __init__(self) -> None:
        self.ended: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def on_item(self, data: msgspec.Raw) -> None:
        """Its output is asked for as a whole."""

    def on_credit(self, n: int) -> None:
        """It is given no stdin."""

    def on_reply(self, result: msgspec.Raw) -> None:
        try:
            end = _result.decode(result)
            text = end.stderr.decode(errors="replace").strip()
            self._end(text[-2000:] or f"it ended: exit {end.exit_code}, signal {end.signal}")
        except msgspec.DecodeError as error:
            self._end(str(error))

    def on_failure(self, error: dict[str, object]) -> None:
        self._end(str(error.get("message")))

    def _end(self, why: str) -> None:
        if not self.ended.done():
            self.ended.set_result(why)


class _Stream:
    """A duplex byte stream to a port of the sandbox's loopback, read by one caller at a time."""

    def __init__(self, channel: Channel, port: int) -> None:
        self._credit, self._unread = INITIAL_CREDIT, bytearray()
        self._failure: DSecError | None = None
        self._change = asyncio.Event()
        self._call: Call = channel.open("net.forward", pack(ForwardArgs(port=port)), self)

    async def write(self, data: bytes) -> None:
        for start in range(0, len(data), MAX_ITEM):
            while not self._credit:
                await self._changed()
            self._credit -= 1
            self._call.send_item(pack(data[start : start + MAX_ITEM]))

    async def read(self, size: int) -> bytes:
        while len(self._unread) < size:
            await self._changed()
        found = bytes(self._unread[:size])
        del self._unread[:size]
        return found

    async def _changed(self) -> None:
        if self._failure is not None:
            raise self._failure
        self._change.clear()
        await self._change.wait()

    def close(self) -> None:
        self._call.cancel()

    # --- Receiver

    def on_item(self, data: msgspec.Raw) -> None:
        try:
            self._unread += _item.decode(data)
        except msgspec.DecodeError as error:
            self._fail(Internal(f"the agent's data is not understood: {error}"))
            return
        self._call.grant(1)
        self._change.set()

    def on_credit(self, n: int) -> None:
        self._credit += n
        self._change.set()

    def on_reply(self, result: msgspec.Raw) -> None:
        self._fail(Unavailable("the zygote closed its connection"))

    def on_failure(self, error: dict[str, object]) -> None:
        self._fail(from_wire(error))

    def _fail(self, error: DSecError) -> None:
        self._failure = error
        self._change.set()


class Worker:
    """Made by `start`; used by one call at a time; ended by `end`."""

    def __init__(self, manager: Manager, sandbox: Sandbox) -> None:
        self.sandbox, self.idle_since, self.ready = sandbox, 0.0, False
        self._manager = manager
        self._zygote = _Zygote()
        self._stream: _Stream | None = None

    @classmethod
    async def start(
        cls, manager: Manager, owner: str, args: DSecContainerRunArgs, imports: list[str]
    ) -> Worker:
        """Return a worker whose zygote waits.

        Raises what making a sandbox raises, and `Unsupported` with what Python says.
        """
        key = f"fncall-{secrets.token_hex(16)}"
        await manager.policies.ready(args, args.strict)
        sandbox = manager.request(owner, key, args)
        sandbox.own = True
        worker = cls(manager, sandbox)
        try:
            await manager.create(owner, key, args)
            manager.enter(sandbox.id)
            worker.ready = True
            await worker._connect(imports)
        except BaseException:
            worker.end("its start failed")
            raise
        return worker

    async def _connect(self, imports: list[str]) -> None:
        channel = self.sandbox.channel
        assert channel is not None
        given = json.dumps({"port": PORT, "imports": imports})
        argv = [b"python3", b"-I", b"-c", _program.encode(), given.encode()]
        command = ExecArgs(cid=secrets.token_hex(16), argv=argv, user="root")
        channel.open("exec.run", pack(command), self._zygote)
        while True:
            stream = _Stream(channel, PORT)
            try:  # an open forward answers nothing: a short question tells
                await stream.write(_message({"ping": True}, []))
                await self._answer(stream, 1 << 10)
            except DSecError as error:
                if self._zygote.ended.done():
                    why = self._zygote.ended.result()
                    text = f"the pool's Python did not start: {why}"
                    raise Unsupported(text, reason=why) from error
                await asyncio.sleep(_POLL_S)
                continue
            self._stream = stream
            return

    async def call(
        self, head: dict[str, Any], blobs: list[bytes], limit: int
    ) -> tuple[dict[str, Any], list[bytes], float]:
        """Return the answer's description, its byte strings, and the seconds until all was clean.

        Raises `Lost` when the worker has to be replaced.
        """
        stream = self._stream
        assert stream is not None
        try:
            await stream.write(_message(head, blobs))
            return await self._answer(stream, limit)
        except (DSecError, ValueError, KeyError, TypeError, struct.error) as error:
            raise Lost(f"the worker was lost: {error}") from error

    async def _answer(
        self, stream: _Stream, limit: int
    ) -> tuple[dict[str, Any], list[bytes], float]:
        (size,) = struct.unpack(">I", await stream.read(4))
        if size > _HEAD:
            raise Internal("the zygote's answer is too long")
        head: dict[str, Any] = json.loads(await stream.read(size))
        sizes = [int(each) for each in head["blobs"]]
        if min(sizes, default=0) < 0 or sum(sizes) > limit:
            raise Internal("the zygote's answer is too long")
        blobs = [await stream.read(each) for each in sizes]
        (total,) = struct.unpack(">d", await stream.read(8))
        return head, blobs, total

    def end(self, reason: str) -> None:
        """Begin to end the sandbox, and with it whatever is left."""
        if self._stream is not None:
            self._stream.close()
        if self.ready:
            self.ready = False
            self._manager.leave(self.sandbox)
        self._manager.begin_stop(self.sandbox, f"fncall: {reason}")


def _message(head: dict[str, Any], blobs: list[bytes]) -> bytes:
    text = json.dumps({**head, "blobs": [len(blob) for blob in blobs]}).encode()
    return b"".join((struct.pack(">I", len(text)), text, *blobs))
