"""``sandbox.commands``: run, list, connect to and kill commands. Names as in E2B's SDK."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, overload

from libdsec import execution, model
from libdsec.errors import InvalidArgument, NotFound, WrongState
from libdsec.execution import OutputStream, Sink, TextCallback, text_sink
from libdsec.link import Link
from libdsec.result import CommandResult

Word: TypeAlias = str | bytes | os.PathLike[str] | os.PathLike[bytes]
CommandInfos: TypeAlias = list[model.CommandInfo]


def encode_word(word: Word) -> bytes:
    """Return `word` as the kernel takes it; ``surrogateescape`` text keeps its bytes."""
    return os.fsencode(word)


def exec_args(
    command: str | bytes | Sequence[Word],
    *,
    timeout: float | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Word | None = None,
    user: str | None = None,
    session: str | None = None,
    interpreter: str | None = None,
) -> model.ExecArgs:
    """Describe a command: a str or bytes is for the shell, a sequence is an argv."""
    shell = isinstance(command, (str, bytes))
    return model.ExecArgs(
        cid=execution.new_cid(),
        shell=encode_word(command) if isinstance(command, (str, bytes)) else None,
        argv=None if shell else [encode_word(word) for word in command],  # type: ignore[arg-type]
        interpreter=interpreter,
        session=session,
        env=dict(env or {}),
        cwd=None if cwd is None else encode_word(cwd),
        user=user,
        timeout_s=timeout,
    )


class CommandHandle:
    """A command that runs in the background of its sandbox, until it ends or is killed.

    Iterating yields `Output` (``stream`` 1 stdout, 2 stderr; ``data`` bytes) from the command's
    first byte on. The handle survives lost connections; dropping it does not end the command.
    """

    def __init__(
        self,
        link: Link,
        sandbox_id: str,
        info: model.CommandInfo,
        *,
        stdout: Sink | None = None,
        stderr: Sink | None = None,
    ) -> None:
        self._link = link
        self._sandbox_id = sandbox_id
        self._info = info
        self._reading = asyncio.Lock()
        self._stream = OutputStream(link, sandbox_id, info.cid, stdout=stdout, stderr=stderr)
        self._reader: asyncio.Task[CommandResult] | None = None
        if stdout is not None or stderr is not None:
            self._reader = link.spawn(self._drain(), f"libdsec-output-{info.cid}")

    @property
    def cid(self) -> str:
        """The command's id, unique in its sandbox."""
        return self._info.cid

    @property
    def pid(self) -> int:
        """The process id of its main process, as seen inside the sandbox."""
        return self._info.pid

    @property
    def result(self) -> CommandResult | None:
        """The result, once `wait` or an iteration has reached the end."""
        return self._stream.result

    async def wait(self, *, check: bool = False) -> CommandResult:
        """Return the result when the command has ended. With `check` raises `CommandFailed`."""
        if self._reader is not None:
            result = await asyncio.shield(self._reader)
        else:
            result = await self._drain()
        return result.check() if check else result

    async def kill(self) -> bool:
        """Kill the command and every process it started. False when it is not known any more."""
        return await kill(self._link, self._sandbox_id, self.cid)

    async def send_signal(self, signal: int) -> None:
        """Send `signal` to the command's main process."""
        args = model.SignalArgs(cid=self.cid, signal=signal)
        await self._link.call("exec.signal", args, type(None), target=self._sandbox_id)

    async def send_stdin(self, data: str | bytes) -> None:
        """Write to the command's stdin (it must have been run with ``stdin=True``)."""
        raw = data.encode() if isinstance(data, str) else data
        await execution.send_stdin(self._link, self._sandbox_id, self.cid, raw, eof=False)

    async def close_stdin(self) -> None:
        """Close the command's stdin: it reads end of file."""
        await execution.send_stdin(self._link, self._sandbox_id, self.cid, b"", eof=True)

    async def disconnect(self) -> None:
        """Stop receiving output; the command goes on. `Commands.connect` takes it up again."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)
        self._stream.release()

    def __aiter__(self) -> CommandHandle:
        return self

    async def __anext__(self) -> model.Output:
        if self._reader is not None:
            raise WrongState("the output goes to the callbacks of this handle")
        async with self._reading:
            output = await self._stream.next()
        if output is None:
            raise StopAsyncIteration
        return output

    async def _drain(self) -> CommandResult:
        async with self._reading:
            return await self._stream.drain()


async def kill(link: Link, sandbox_id: str, cid: str) -> bool:
    args = model.SignalArgs(cid=cid)
    call = link.call("exec.kill", args, type(None), target=sandbox_id, retry=True)
    return await execution.quietly(call)


async def start(
    link: Link,
    sandbox_id: str,
    args: model.ExecArgs,
    *,
    stdout: Sink | None = None,
    stderr: Sink | None = None,
) -> CommandHandle:
    """Start `args` and return its handle. A cancelled start leaves no command behind."""
    try:
        info = await link.call("exec.start", args, model.CommandInfo, target=sandbox_id, retry=True)
    except BaseException as error:
        if not isinstance(error, Exception):
            link.post("exec.kill", model.SignalArgs(cid=args.cid), sandbox_id)
        raise
    return CommandHandle(link, sandbox_id, info, stdout=stdout, stderr=stderr)


class Commands:
    """The commands of one sandbox."""

    def __init__(self, link: Link, sandbox_id: str) -> None:
        self._link = link
        self._sandbox_id = sandbox_id

    @overload
    async def run(
        self,
        cmd: str | bytes | Sequence[Word],
        background: Literal[False] = False,
        *,
        envs: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Word | None = None,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
        timeout: float | None = None,
        stdin: bool = False,
        input: str | bytes | None = None,
        check: bool = False,
    ) -> CommandResult: ...

    @overload
    async def run(
        self,
        cmd: str | bytes | Sequence[Word],
        background: Literal[True],
        *,
        envs: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Word | None = None,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
        timeout: float | None = None,
        stdin: bool = False,
    ) -> CommandHandle: ...

    async def run(
        self,
        cmd: str | bytes | Sequence[Word],
        background: bool = False,
        *,
        envs: Mapping[str, str] | None = None,
        env: Mapping[str, str] | None = None,
        user: str | None = None,
        cwd: Word | None = None,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
        timeout: float | None = None,
        stdin: bool = False,
        input: str | bytes | None = None,
        check: bool = False,
    ) -> CommandResult | CommandHandle:
        """Run `cmd` (a shell string, or an argv) and return its result, or its handle at once.

        `timeout` (seconds) kills the whole process tree; None never does. Output goes to the
        callbacks as text while it comes, and into the result. `stdin` keeps the command's stdin
        open for `send_stdin` (background only); `input` is given to it whole. Non-zero exit
        raises `CommandFailed` only with `check`.
        """
        merged = {**(envs or {}), **(env or {})}
        args = exec_args(cmd, timeout=timeout, env=merged, cwd=cwd, user=user)
        out, err = text_sink(on_stdout), text_sink(on_stderr)
        if background:
            if input is not None or check:
                raise InvalidArgument("input= and check= need background=False")
            args.background, args.stdin = True, stdin
            return await start(self._link, self._sandbox_id, args, stdout=out, stderr=err)
        if stdin:
            raise InvalidArgument("stdin=True needs background=True; otherwise give input=")
        raw = input.encode() if isinstance(input, str) else input
        result = await execution.run(
            self._link, self._sandbox_id, args, stdout=out, stderr=err, stdin=raw
        )
        return result.check() if check else result

    async def list(self) -> CommandInfos:
        """Return the commands that the sandbox knows: running ones and ended ones it remembers."""
        return await self._link.call(
            "exec.list", {}, list[model.CommandInfo], target=self._sandbox_id, retry=True
        )

    async def connect(
        self,
        cid: str,
        *,
        on_stdout: TextCallback | None = None,
        on_stderr: TextCallback | None = None,
    ) -> CommandHandle:
        """Return a handle on the command `cid`, its output from the start. Raises `NotFound`."""
        info = await self._find(cid)
        return CommandHandle(
            self._link,
            self._sandbox_id,
            info,
            stdout=text_sink(on_stdout),
            stderr=text_sink(on_stderr),
        )

    async def kill(self, cid: str) -> bool:
        """Kill the command and every process it started. False when there is no such command."""
        return await kill(self._link, self._sandbox_id, cid)

    async def send_signal(self, cid: str, signal: int) -> None:
        """Send `signal` to the command's main process."""
        await self._call("exec.signal", model.SignalArgs(cid=cid, signal=signal), type(None))

    async def send_stdin(self, cid: str, data: str | bytes) -> None:
        """Write to the command's stdin; returns once the pipe took it all."""
        raw = data.encode() if isinstance(data, str) else data
        await execution.send_stdin(self._link, self._sandbox_id, cid, raw, eof=False)

    async def close_stdin(self, cid: str) -> None:
        """Close the command's stdin: it reads end of file."""
        await execution.send_stdin(self._link, self._sandbox_id, cid, b"", eof=True)

    async def forget(self, cid: str) -> bool:
        """Drop the record and output of a finished command. False when there is none."""
        return await execution.quietly(
            self._call("exec.forget", model.SignalArgs(cid=cid), type(None))
        )

    async def _find(self, cid: str) -> model.CommandInfo:
        for info in await self.list():
            if info.cid == cid:
                return info
        raise NotFound(f"sandbox {self._sandbox_id} knows no command {cid}", cid=cid)

    async def _call(self, op: str, args: Any, kind: type[Any]) -> Any:
        return await self._link.call(op, args, kind, target=self._sandbox_id)
