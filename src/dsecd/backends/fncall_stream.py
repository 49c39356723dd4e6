"""The stream to a keeper of calls in a sandbox: one call after the other, each with its answer.

What goes over it is laid out in src/_fastpath/init/fncall.h and fncall_call.c; both ends are of one
build, and on one host.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from dsecd.backends.abc import Backend, Handle
from dsecd.host import fncall_zygote
from dsecd.policy.seccomp import unix_only_filter
from libdsec.errors import DSecError, from_wire
from libdsec.wire import pack

SPARE_S = 5.0  # beyond a call's own time, before its worker is held to be stuck
_ASK = struct.Struct("=6I")
_CALL, _KILL = 1, 2
_READY_KIND, _DONE_KIND, _REPORT_KIND = 16, 17, 1
_LAYOUTS = {
    _READY_KIND: struct.Struct("=B3xI"),
    _DONE_KIND: struct.Struct("=B???iIIIIIII"),
    _REPORT_KIND: struct.Struct("=BBBB224s"),  # `struct report` of init/child.h
}
_LONGEST = 8 << 20  # bytes of an answer
_FILE = struct.Struct("=II")
_CODES = (  # `code_names` of init/child.c
    "invalid_argument", "not_found", "already_exists", "wrong_state", "permission_denied",
    "unsupported", "exhausted", "internal",
)  # fmt: skip
# Libraries of linear algebra start threads when they are imported, which no fork would have
_ENV = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_BROKEN = "the keeper of calls broke its protocol"
_program = inspect.getsource(fncall_zygote)


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


class Stream(asyncio.Protocol):
    """Made by `open`; used by one call at a time; ended by `close`.

    `on_ready` is told each time when the next call may be made, `on_lost` once, that none may.
    """

    def __init__(self) -> None:
        self.on_ready: Callable[[], None] = _nobody
        self.on_lost: Callable[[str], None] = _nobody_loses
        self._transport: asyncio.Transport | None = None
        self._unread = bytearray()
        self._asked: Asked | None = None  # and the answer: until it is ready again
        self._answer: asyncio.Future[Answer] | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._started: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @classmethod
    async def open(
        cls, backend: Backend, sandbox: Handle, imports: list[str], files_bytes: int, network: bool
    ) -> Stream:
        """Start a keeper whose Python has done `imports`; return when a call may be made.

        `files_bytes` bounds what a call may write on each writable place; without `network` its
        sockets are unix ones only. Raises `Unsupported` with what Python says, `Lost`, and what
        the sandbox's agent answers.
        """
        wanted = {
            "argv": [b"python3", b"-IB", b"-c", _program.encode(), json.dumps(imports).encode()],
            "env": _ENV,
            "filter": b"" if network else unix_only_filter(),
            "files_bytes": files_bytes,
            "network": network,
        }
        ours = await backend.open_stream(sandbox, "fncall.serve", pack(wanted))
        made = cls()
        try:
            await asyncio.get_running_loop().create_unix_connection(lambda: made, sock=ours)
        except BaseException:
            ours.close()
            raise
        try:
            await made._started
        except BaseException:
            made.close("its start failed")
            raise
        return made

    async def call(self, asked: Asked) -> Answer:
        """Make a call. Cancelling it kills the call. Raises `Lost`."""
        if self._transport is None:
            raise Lost("the keeper of calls ended")
        paths = b"".join(path.encode() + b"\0" for path in asked.paths)
        head = _ASK.pack(
            _CALL, int(asked.wall_s * 1000), asked.output_bytes, asked.answer_bytes,
            len(paths), len(asked.body),
        )  # fmt: skip
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._asked, self._answer = asked, answer
        self._expect_ready(asked.wall_s + SPARE_S)
        self._transport.write(head + paths + asked.body)
        try:
            return await answer
        except asyncio.CancelledError:
            # Not once it is ready again: a later call would be killed
            if self._asked is asked and self._transport is not None:
                self._expect_ready(SPARE_S)
                self._transport.write(_ASK.pack(_KILL, 0, 0, 0, 0, 0))
            raise

    def _expect_ready(self, seconds: float) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        late = f"it was not ready again after {seconds:g} s"
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._lose, Lost(late))

    def close(self, why: str) -> None:
        """End it, and with it the call that is made; nobody is told."""
        self.on_lost = _nobody_loses
        self._lose(Lost(why))

    def _lose(self, error: Exception) -> None:
        transport, self._transport = self._transport, None
        if transport is not None:
            transport.close()
        if self._deadline is not None:
            self._deadline.cancel()
        if self._started.done() and not isinstance(error, Lost):
            error = Lost(str(error))
        for waiting in (self._answer, self._started):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
                waiting.exception()  # nobody may be waiting
        on_lost, self.on_lost = self.on_lost, _nobody_loses
        on_lost(str(error))

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # not isinstance: uvloop has transports of its own, outside the class tree
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._unread += data
        try:
            while self._unread and self._transport is not None and self._take():
                pass
        except (Lost, DSecError) as error:
            self._lose(error)
        except (IndexError, struct.error):
            self._lose(Lost(_BROKEN))

    def connection_lost(self, exc: Exception | None) -> None:
        self._lose(Lost("the keeper of calls ended"))

    def _take(self) -> bool:
        """Handle the message at the front; False when it is not there as a whole."""
        unread, kind = self._unread, self._unread[0]
        layout = _LAYOUTS.get(kind)
        if layout is None:
            raise Lost(_BROKEN)
        if len(unread) < layout.size:
            return False
        fields, size = layout.unpack_from(unread), layout.size
        if kind == _REPORT_KIND:
            raise _failure(*fields[1:])
        if kind == _DONE_KIND:
            size += sum(fields[8:])
            if size > _LONGEST:
                raise Lost(_BROKEN)
            if len(unread) < size:
                return False
            self._answered(fields, bytes(unread[layout.size : size]))
        del unread[:size]
        if kind == _READY_KIND:
            self._ready()
        return True

    def _answered(self, fields: tuple[Any, ...], rest: bytes) -> None:
        answer, asked = self._answer, self._asked
        if answer is None or asked is None:
            raise Lost(_BROKEN)
        _kind, timed_out, truncated, dirty, *numbers = fields
        if not answer.done():  # else the call was given up
            answer.set_result(_answer_of(timed_out, truncated, numbers, rest, asked.paths))
        if dirty:  # the network namespace: no other call may come, whoever waits for this one
            raise Lost("connections of its last call live on")

    def _ready(self) -> None:
        """The next room is made: once at the start, then once behind each answer."""
        if not self._started.done():
            self._started.set_result(None)
            return
        if self._deadline is None or self._answer is None or not self._answer.done():
            raise Lost(_BROKEN)
        self._deadline.cancel()
        self._deadline = self._asked = self._answer = None
        self.on_ready()


def _nobody() -> None:
    """Nobody waits for the worker yet."""


def _nobody_loses(why: str) -> None:
    """Nobody has it, or whoever had it knows."""


def _answer_of(
    timed_out: bool, truncated: bool, numbers: list[int], rest: bytes, paths: list[str]
) -> Answer:
    status, started, run, emptied, *sizes = numbers
    parts, at = [], 0
    for size in sizes:
        parts.append(rest[at : at + size])
        at += size
    value, stdout, stderr, files = parts
    return Answer(
        status, timed_out, truncated, started / 1e6, run / 1e6, emptied / 1e6,
        value, stdout, stderr, _files(files, paths),
    )  # fmt: skip


def _failure(code: int, disk_full: int, length: int, message: bytes) -> DSecError:
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
