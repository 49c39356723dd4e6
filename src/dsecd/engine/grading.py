"""A command in a sandbox of the engine's own: its output piece by piece, then how it ended."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator
from typing import Literal

import msgspec

from dsecd.backends.abc import Call
from dsecd.engine.manager import Manager
from dsecd.engine.sandbox import Sandbox
from libdsec.errors import DSecError, Internal, WrongState, from_wire
from libdsec.model import CommandResult, ExecArgs, Output
from libdsec.wire import INITIAL_CREDIT, pack

_output = msgspec.msgpack.Decoder(Output)
_result = msgspec.msgpack.Decoder(CommandResult)


class Digest:
    """SHA-256 and length of one stream."""

    def __init__(self) -> None:
        self._digest, self.size = hashlib.sha256(), 0

    def add(self, data: bytes) -> None:
        self._digest.update(data)
        self.size += len(data)

    def text(self) -> str:
        return self._digest.hexdigest()


class Running:
    """One command. Read `outputs` to their end, then `result` is set."""

    def __init__(self, manager: Manager, sandbox: Sandbox, args: ExecArgs) -> None:
        self.result: CommandResult | None = None
        self.streams: dict[int, Digest] = {1: Digest(), 2: Digest()}
        self._manager, self._sandbox, self._args = manager, sandbox, args
        self._events: asyncio.Queue[msgspec.Raw | CommandResult | DSecError] = asyncio.Queue()

    async def outputs(self) -> AsyncGenerator[Output, None]:
        """Start the command and yield what it writes. Giving up kills it.

        Raises the `DSecError` that it could not be run for, `WrongState` when its sandbox died.
        """
        channel = self._sandbox.channel
        if channel is None:
            raise WrongState(f"sandbox {self._sandbox.id} is {self._sandbox.state}")
        killed = self._manager.refresh_oom(self._sandbox)
        call = channel.open("exec.run", pack(self._args), self)
        try:
            while not isinstance(event := await self._events.get(), CommandResult):
                if isinstance(event, DSecError):
                    raise self._explained(event)
                yield self._noted(_decoded(event))
                call.grant(1)
            for output in self._rest(event):
                yield self._noted(output)
            if event.exit_code != 0:
                event.oom_killed |= self._manager.refresh_oom(self._sandbox) > killed
            self.result = msgspec.structs.replace(event, stdout=b"", stderr=b"")
        finally:
            self._end(call)

    def _end(self, call: Call) -> None:
        if self.result is None:
            call.cancel()

    def _noted(self, output: Output) -> Output:
        self.streams[output.stream].add(output.data)
        return output

    def _rest(self, end: CommandResult) -> list[Output]:
        """Return the output that came with the reply."""
        parts: tuple[tuple[Literal[1, 2], bytes], ...] = ((1, end.stdout), (2, end.stderr))
        return [
            Output(stream=stream, offset=self.streams[stream].size, data=data)
            for stream, data in parts
            if data
        ]

    def _explained(self, error: DSecError) -> DSecError:
        if self._sandbox.state == "running":
            return error
        return WrongState(
            f"the grader's sandbox is {self._sandbox.state}: {self._sandbox.reason}",
            state=self._sandbox.state,
        )

    # --- Receiver

    def on_item(self, data: msgspec.Raw) -> None:
        # the agent inside is not trusted: what it sends without credit must not fill our memory
        if self._events.qsize() < INITIAL_CREDIT:
            self._events.put_nowait(data)
        elif self._events.qsize() == INITIAL_CREDIT:
            self._events.put_nowait(Internal("the agent sent without credit"))

    def on_credit(self, n: int) -> None:
        """The call sends no items."""

    def on_reply(self, result: msgspec.Raw) -> None:
        try:
            self._events.put_nowait(_result.decode(result))
        except msgspec.DecodeError as error:
            self._events.put_nowait(Internal(f"the agent's answer is not understood: {error}"))

    def on_failure(self, error: dict[str, object]) -> None:
        self._events.put_nowait(from_wire(error))


def _decoded(item: msgspec.Raw) -> Output:
    try:
        return _output.decode(item)
    except msgspec.DecodeError as error:
        raise Internal(f"the agent's output is not understood: {error}") from error
