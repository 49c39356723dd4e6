"""Structured logs: one record a line, with the sandbox id in every record that concerns one.

`sandbox` is a context variable; code that works for one sandbox sets it once (`about`), and every
record below carries it, whichever module writes it. Extra fields go through `extra={"fields": {}}`
or the `event` function.

Two records a sandbox are a visible part of its cost. Lines below a warning are therefore written
together, at most `DELAY_S` late; and an `event` that goes to JSON is encoded at once, without the
`LogRecord` that nobody would look at.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from dsecd.config import Log

DELAY_S = 0.05
MAX_HELD = 64 << 10  # characters, before they are written without delay
_encode = msgspec.json.Encoder(enc_hook=str).encode
_LEVELS = {level: logging.getLevelName(level).lower() for level in range(10, 60, 10)}
sandbox: contextvars.ContextVar[str] = contextvars.ContextVar("sandbox", default="")


@contextlib.contextmanager
def about(sandbox_id: str) -> Iterator[None]:
    """Every record written inside the block is about `sandbox_id`."""
    token = sandbox.set(sandbox_id)
    try:
        yield
    finally:
        sandbox.reset(token)


def event(logger: logging.Logger, level: int, message: str, **fields: Any) -> None:
    """Write a record with `fields`; `sandbox=` overrides the context's."""
    if not logger.isEnabledFor(level):
        return
    root = logging.getLogger()
    output = root.handlers[0] if len(root.handlers) == 1 else None
    if isinstance(output, Output) and output.takes_events:
        output.event(logger.name, level, message, fields)
    else:
        logger.log(level, message, extra={"fields": fields})


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields = dict(getattr(record, "fields", {}))
    current = sandbox.get()
    if current and "sandbox" not in fields:
        fields["sandbox"] = current
    return fields


class JsonFormatter(logging.Formatter):
    """``{"time", "level", "logger", "message", ...}`` on one line."""

    def format(self, record: logging.LogRecord) -> str:
        body: dict[str, Any] = {
            "time": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            body["exception"] = self.formatException(record.exc_info)
        return _encode(body).decode()


class TextFormatter(logging.Formatter):
    """For people: ``12:00:01.234 info  dsecd.engine: created sandbox=s0-n0-1-1 ms=3``."""

    def format(self, record: logging.LogRecord) -> str:
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        pairs = "".join(f" {key}={value}" for key, value in _fields(record).items())
        line = (
            f"{clock}.{int(record.msecs):03d} {record.levelname.lower():7} "
            f"{record.name}: {record.getMessage()}{pairs}"
        )
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        # a value may hold what a sandbox chose: no control characters reach the terminal
        return "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in line)


class Output(logging.Handler):
    """Writes lines to `stream`: warnings and what precedes them at once, others a little later."""

    def __init__(self, stream: TextIO, formatter: logging.Formatter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self.takes_events = isinstance(formatter, JsonFormatter)
        self._stream = stream
        self._held: list[str] = []
        self._size = 0
        self._flusher: asyncio.AbstractEventLoop | None = None  # which has a flush before it

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._put(self.format(record), record.levelno)
        except Exception:
            self.handleError(record)

    def event(self, logger: str, level: int, message: str, fields: dict[str, Any]) -> None:
        """Write what `JsonFormatter` would make of the same record."""
        body = {
            "time": round(time.time(), 6),
            "level": _LEVELS[level],
            "logger": logger,
            "message": message,
            **fields,
        }
        current = sandbox.get()
        if current and "sandbox" not in fields:
            body["sandbox"] = current
        line = _encode(body).decode()
        self.acquire()
        try:
            self._put(line, level)
        finally:
            self.release()

    def _put(self, line: str, level: int) -> None:
        self._held.append(line)
        self._size += len(line)
        if level >= logging.WARNING or self._size >= MAX_HELD or not self._flush_later():
            self.flush()

    def _flush_later(self) -> bool:
        """Arrange a flush; False where no event loop runs (start, end, other threads)."""
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return False
        if self._flusher is not loop:
            self._flusher = loop
            loop.call_later(DELAY_S, self._on_time)
        return True

    def _on_time(self) -> None:
        self._flusher = None
        self.flush()

    def flush(self) -> None:
        self.acquire()
        try:
            held, self._held, self._size = self._held, [], 0
            if held:
                self._stream.write("\n".join(held) + "\n")
                self._stream.flush()
        except (OSError, ValueError):  # nobody reads any more: no reason to end the daemon
            return
        finally:
            self.release()


def configure(config: Log, stream: TextIO = sys.stderr) -> None:
    """Send every record of this process to `stream` in the configured format."""
    style = config.format
    if style == "auto":
        style = "text" if stream.isatty() else "json"
    handler = Output(stream, JsonFormatter() if style == "json" else TextFormatter())
    atexit.register(handler.flush)
    # leave out what no formatter here prints
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # documented: no walk up the stack
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
