"""One worker of a pool: a sandbox of the engine's own, and the stream to its keeper of calls.

What goes over the stream is laid out in src/_fastpath/init/fncall.h and fncall_call.c; both ends
are of one build, and on one host.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import secrets
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import msgspec

from dsecd.engine.manager import Manager
from dsecd.engine.sandbox import Sandbox
from dsecd.host import fncall_zygote
from dsecd.policy.seccomp import unix_only_filter
from libdsec.errors import DSecError, Internal, from_wire
from libdsec.model import DSecContainerRunArgs
from libdsec.wire import pack

SPARE_S = 5.0  # beyond a call's own time, before its worker is held to be stuck
_ASK = struct.Struct("=6I")
_CALL, _KILL = 1, 2
_READY, _READY_KIND = struct.Struct("=3xI"), 16
_DONE, _DONE_KIND = struct.Struct("=???iIIIIIII"), 17
_FILE = struct.Struct("=II")
_REPORT, _REPORT_KIND = struct.Struct("=BBB224s"), 1  # `struct report` of init/child.h
_CODES = (  # `code_names` of init/child.c
    "invalid_argument", "not_found", "already_exists", "wrong_state", "permission_denied",
    "unsupported", "exhausted", "internal",
)  # fmt: skip
_program = inspect.getsource(fncall_zygote)


class Environment(msgspec.Struct, frozen=True):
    """What a pool is for: its workers are made alike, and serve nobody else."""

    owner: str
    name: str
    worker: DSecContainerRunArgs
    imports: list[str]
    files_bytes: int


class Lost(Exception):
    """The worker cannot be used any more, and why."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One call, as the worker is told of it. `body` is for the call itself: see `body_of`."""

    body: bytes
    paths: list[str]
    wall_s: float
    output_bytes: int
    answer_bytes: int


@dataclass(frozen=True, slots=True)
class Answer:
    """How it ended: `status` as wait(2) has it, times in seconds each since the one before."""

    status: int
    timed_out: bool
    truncated: bool
    dirty: bool  # its network namespace cannot be used again
    started_s: float
    run_s: float
    emptied_s: float
    value: bytes
    stdout: bytes
    stderr: bytes
    files: dict[str, bytes]


def body_of(head: dict[str, Any], parts: list[bytes]) -> bytes:
    """Return what the call reads: sizes, head, parts (`host.fncall_zygote`)."""
    text = json.dumps({**head, "parts": [len(part) for part in parts]}).encode()
    size = len(text) + sum(map(len, parts))
    return b"".join((struct.pack("=II", size, len(text)), text, *parts))


class Worker:
    """Made by `start`; used by one call at a time, `restored` before the next; ended by `end`."""

    def __init__(self, manager: Manager, sandbox: Sandbox) -> None:
        self.sandbox, self.idle_since = sandbox, 0.0
        self._manager = manager
        self._entered = False
        self._reader: asyncio.StreamReader
        self._writer: asyncio.StreamWriter | None = None
        self._answering: asyncio.Task[Answer] | None = None

    @classmethod
    async def start(cls, manager: Manager, wanted: Environment) -> Worker:
        """Return a worker that is ready for a call.

        Raises what making a sandbox raises, and `Unsupported` with what Python says.
        """
        key, owner, args = f"fncall-{secrets.token_hex(16)}", wanted.owner, wanted.worker
        await manager.policies.ready(args, args.strict)
        sandbox = manager.request(owner, key, args)
        sandbox.own = True
        worker = cls(manager, sandbox)
        try:
            await manager.create(owner, key, args)
            manager.use(sandbox)
            worker._entered = True
            await worker._connect(wanted)
        except Lost as error:
            worker.end("its start failed")
            raise Internal(str(error)) from error
        except BaseException:
            worker.end("its start failed")
            raise
        return worker

    async def _connect(self, environment: Environment) -> None:
        assert self.sandbox.handle is not None
        network = bool(self.sandbox.address)
        imports = json.dumps(environment.imports).encode()
        wanted = {
            "argv": [b"python3", b"-I", b"-c", _program.encode(), imports],
            "filter": b"" if network else unix_only_filter(),
            "files_bytes": environment.files_bytes,
            "network": network,
        }
        stream = await self._manager.backend.open_stream(
            self.sandbox.handle, "fncall.serve", pack(wanted)
        )
        self._reader, self._writer = await asyncio.open_unix_connection(sock=stream)
        await self.restored()

    async def call(self, asked: Asked) -> Answer:
        """Make a call. Cancelling it kills the call. Raises `Lost`."""
        assert self._writer is not None
        paths = b"".join(path.encode() + b"\0" for path in asked.paths)
        head = _ASK.pack(
            _CALL, int(asked.wall_s * 1000), asked.output_bytes, asked.answer_bytes,
            len(paths), len(asked.body),
        )  # fmt: skip
        self._writer.write(head + paths + asked.body)
        self._answering = asyncio.ensure_future(self._answer(asked))
        try:
            return await asyncio.shield(self._answering)
        except asyncio.CancelledError:
            self._writer.write(_ASK.pack(_KILL, 0, 0, 0, 0, 0))
            raise

    async def restored(self) -> float:
        """Wait until the next call's room is ready; the seconds it took. Raises `Lost`."""
        if self._answering is not None:
            await self._answering
        (micros,) = _READY.unpack(await self._read(_READY_KIND, _READY.size))
        return float(micros) / 1e6

    async def _answer(self, asked: Asked) -> Answer:
        async with _no_longer(asked.wall_s + SPARE_S):
            found = _DONE.unpack(await self._read(_DONE_KIND, _DONE.size))
            timed_out, truncated, dirty, status, started, run, emptied, *sizes = found
            if sum(sizes) > asked.answer_bytes + 3 * asked.output_bytes:
                raise Lost("the keeper of calls broke its protocol")
            value, stdout, stderr, files = [await self._reader.readexactly(n) for n in sizes]
        return Answer(
            status, timed_out, truncated, dirty, started / 1e6, run / 1e6, emptied / 1e6,
            value, stdout, stderr, _files(files, asked.paths),
        )  # fmt: skip

    async def _read(self, kind: int, size: int) -> bytes:
        """Return the rest of the message, which is of `kind`; a failure is raised."""
        try:
            first = (await self._reader.readexactly(1))[0]
            if first == _REPORT_KIND:
                raise _failure(await self._reader.readexactly(_REPORT.size))
            if first != kind:
                raise Lost("the keeper of calls broke its protocol")
            return await self._reader.readexactly(size)
        except (EOFError, OSError) as error:
            raise Lost("the keeper of calls ended") from error

    def end(self, reason: str) -> None:
        """Begin to end the sandbox, and with it whatever is left."""
        if self._answering is not None:
            self._answering.cancel()
        if self._writer is not None:
            self._writer.close()
        if self._entered:
            self._entered = False
            self._manager.leave(self.sandbox)
        self._manager.begin_stop(self.sandbox, f"fncall: {reason}")


@contextlib.asynccontextmanager
async def _no_longer(seconds: float) -> AsyncIterator[None]:
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise Lost(f"the call was not over after {seconds:g} s") from error


def _failure(report: bytes) -> DSecError:
    code, _, length, message = _REPORT.unpack(report)
    name = _CODES[code] if code < len(_CODES) else "internal"
    return from_wire({"code": name, "message": message[:length].decode(errors="replace")})


def _files(data: bytes, paths: list[str]) -> dict[str, bytes]:
    found, at = {}, 0
    while at < len(data):
        index, size = _FILE.unpack_from(data, at)
        at += _FILE.size
        found[paths[index]] = data[at : at + size]
        at += size
    return found
