"""Following one command to its end, across lost connections.

A command belongs to its sandbox, not to a connection. When the connection is lost the stream
attaches again by command id at the offsets it has received, so that a restart of the daemon is
not seen by the caller and no byte is lost or doubled.
"""

from __future__ import annotations

import asyncio
import codecs
import inspect
import os
from collections.abc import Awaitable, Callable
from typing import Any, Literal, TypeAlias

import msgspec

from libdsec import model, wire
from libdsec.connection import Call, ConnectionLost
from libdsec.errors import DSecError, NotFound, Timeout, Unavailable, WrongState
from libdsec.link import Link, pack, unpack
from libdsec.result import CommandResult, from_model

TextCallback: TypeAlias = Callable[[str], Awaitable[None] | None]
DataCallback: TypeAlias = Callable[[bytes], Awaitable[None] | None]
Sink: TypeAlias = Callable[[bytes, bool], Awaitable[None] | None]  # data, whether it is the last

_GRACE_S = 30.0  # beyond a command's own timeout, before its daemon is held to be stuck


def new_cid() -> str:
    """Return a fresh command id."""
    return os.urandom(16).hex()


def text_sink(callback: TextCallback | None) -> Sink | None:
    """Decode a byte stream for `callback`; a character split between chunks stays whole."""
    if callback is None:
        return None
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def sink(data: bytes, last: bool) -> Awaitable[None] | None:
        text = decoder.decode(data, last)
        return callback(text) if text else None

    return sink


def data_sink(callback: DataCallback | None) -> Sink | None:
    """Pass bytes on as they come."""
    if callback is None:
        return None
    return lambda data, last: callback(data) if data else None


async def give(sink: Sink, data: bytes, last: bool = False) -> None:
    answer = sink(data, last)
    if inspect.isawaitable(answer):
        await answer


class OutputStream:
    """The output of one command, then its result. One reader at a time.

    `first` is the request that opens the stream: `exec.run`, or None to attach to a command that
    was started before. With `keep` the output is also collected for the result.
    """

    def __init__(
        self,
        link: Link,
        target: str,
        cid: str,
        *,
        first: model.ExecArgs | None = None,
        stdout: Sink | None = None,
        stderr: Sink | None = None,
        keep: bool = True,
    ) -> None:
        self.cid = cid
        self.result: CommandResult | None = None
        self._link = link
        self._target = target
        self._first = pack(first) if first is not None else None
        self._sinks = {1: stdout, 2: stderr}
        self._kept = {1: bytearray(), 2: bytearray()} if keep else {}
        self._offsets = {1: 0, 2: 0}
        self._tail: list[model.Output] = []
        self._end: model.CommandResult | None = None
        self._call: Call | None = None
        self._attached = first is None
        self._sent = False

    async def next(self) -> model.Output | None:
        """Return the next output, or None when the command ended and `result` is set."""
        while self.result is None:
            if self._tail:
                return await self._pass_on(self._tail.pop(0))
            if self._end is not None:
                await self._finish(self._end)
                break
            try:
                if self._call is None:
                    self._call = await self._open()
                raw = await self._call.next_item()
                if raw is None:
                    self._ended(unpack(await self._call.result(), model.CommandResult))
                    continue
                output = self._fresh(unpack(raw, model.Output))
            except ConnectionLost:
                self._call, self._attached = None, True
                continue
            except NotFound as error:
                self._call = None
                self._run_again_or_raise(error)
                continue
            if output is not None:
                return await self._pass_on(output)
        return None

    async def drain(self) -> CommandResult:
        """Read to the end and return the result."""
        while await self.next() is not None:
            pass
        if self.result is None:
            raise WrongState("the stream was released before its command ended")
        return self.result

    def kill(self) -> None:
        """Have the command's whole tree killed; does not wait. For a caller being cancelled."""
        call, self._call = self._call, None
        if call is not None and not self._attached:
            call.cancel()
            return
        if call is not None:
            call.cancel()
        if self._sent:
            self._link.post("exec.kill", model.SignalArgs(cid=self.cid), self._target)

    def release(self) -> None:
        """Stop following; the command goes on."""
        call, self._call = self._call, None
        if call is not None:
            call.cancel()

    def begin(self) -> None:
        """The command of this stream was started by the caller: kill() has something to kill."""
        self._sent = True

    async def _open(self) -> Call:
        if not self._attached and self._first is not None:
            call = await self._link.start("exec.run", self._first, self._target)
        else:
            args = model.AttachArgs(
                cid=self.cid, stdout_offset=self._offsets[1], stderr_offset=self._offsets[2]
            )
            call = await self._link.start("exec.attach", pack(args), self._target)
        self._sent = True
        return call

    def _run_again_or_raise(self, error: NotFound) -> None:
        """An attach found nothing: the request itself was lost, so ask again by the same id."""
        if self._first is None or not self._attached:
            raise error
        if self._offsets[1] or self._offsets[2]:
            raise Unavailable(
                f"command {self.cid} was lost with the connection: {error.message}", cid=self.cid
            ) from error
        self._attached = False

    def _fresh(self, output: model.Output) -> model.Output | None:
        """Account for `output`; drop what was received before a re-attach."""
        known = self._offsets[output.stream]
        end = output.offset + len(output.data)
        if end <= known:
            return None
        if output.offset < known:
            output = msgspec.structs.replace(
                output, data=output.data[known - output.offset :], offset=known
            )
        self._offsets[output.stream] = end
        return output

    async def _pass_on(self, output: model.Output) -> model.Output:
        if self._kept:
            self._kept[output.stream] += output.data
        sink = self._sinks[output.stream]
        if sink is not None:
            await give(sink, output.data)
        return output

    def _ended(self, end: model.CommandResult) -> None:
        """Note the reply; what it carries of the output is passed on like streamed items."""
        self._call, self._end = None, end
        tail: tuple[tuple[Literal[1, 2], bytes], ...] = ((1, end.stdout), (2, end.stderr))
        for number, data in tail:
            if data:
                self._tail.append(
                    model.Output(stream=number, offset=self._offsets[number], data=data)
                )
                self._offsets[number] += len(data)

    async def _finish(self, end: model.CommandResult) -> None:
        for sink in self._sinks.values():
            if sink is not None:
                await give(sink, b"", True)
        kept = self._kept
        out, err = (bytes(kept[1]), bytes(kept[2])) if kept else (b"", b"")
        self.result = from_model(end, out, err)


async def run(
    link: Link,
    target: str,
    args: model.ExecArgs,
    *,
    stdout: Sink | None = None,
    stderr: Sink | None = None,
    stdin: bytes | None = None,
) -> CommandResult:
    """Run one command to its end. A cancelled call kills the command's whole tree."""
    guard = None if args.timeout_s is None else args.timeout_s + _GRACE_S
    args.stream = stdout is not None or stderr is not None
    feed = stdin if stdin is not None and len(stdin) > wire.INLINE else None
    if stdin is not None and feed is None:
        args.input = stdin
    args.stdin = feed is not None
    first = None if feed is not None else args
    stream = OutputStream(link, target, args.cid, first=first, stdout=stdout, stderr=stderr)
    try:
        if guard is None and feed is None:  # the usual case, and the one whose cost is promised
            return await stream.drain()
        async with asyncio.timeout(guard):
            if feed is None:
                return await stream.drain()
            return await _run_fed(link, target, args, stream, feed)
    except TimeoutError as error:
        stream.kill()
        raise Timeout(f"the command's timeout passed {_GRACE_S:g} s ago unanswered") from error
    except BaseException:
        stream.kill()
        raise


async def _run_fed(
    link: Link, target: str, args: model.ExecArgs, stream: OutputStream, data: bytes
) -> CommandResult:
    """Start, then feed stdin while reading the output: neither pipe may stall the other."""
    try:
        await link.call("exec.start", args, model.CommandInfo, target=target, retry=True)
    except BaseException:
        link.post("exec.kill", model.SignalArgs(cid=args.cid), target)
        raise
    stream.begin()
    feeder = asyncio.create_task(_feed(link, target, args.cid, data), name="libdsec-stdin")
    try:
        result = await stream.drain()
    finally:
        feeder.cancel()
        (broken,) = await asyncio.gather(feeder, return_exceptions=True)
    if isinstance(broken, ConnectionLost):
        raise Unavailable(f"the command's stdin was lost: {broken.message}", cid=args.cid)
    return result


async def _feed(link: Link, target: str, cid: str, data: bytes) -> None:
    """Write all of `data` and close; a command that reads no further is its own business."""
    try:
        await send_stdin(link, target, cid, data, eof=True)
    except ConnectionLost:
        # how much of the last chunk arrived is unknown, and the command may wait for more
        link.post("exec.kill", model.SignalArgs(cid=cid), target)
        raise
    except DSecError:
        return


async def send_stdin(link: Link, target: str, cid: str, data: bytes, *, eof: bool) -> None:
    """Write to a command's stdin; returns once the pipe took it all."""
    for start in range(0, max(len(data), 1), wire.MAX_ITEM):
        chunk = data[start : start + wire.MAX_ITEM]
        last = start + wire.MAX_ITEM >= len(data)
        args = model.StdinArgs(cid=cid, data=chunk, eof=eof and last)
        await link.call("exec.stdin", args, type(None), target=target, timeout_s=0)


async def quietly(work: Awaitable[Any]) -> bool:
    """Await `work`; False instead of `NotFound`."""
    try:
        await work
    except NotFound:
        return False
    return True
