"""Structured logs: one record a line, with the sandbox id in every record that concerns one.

`sandbox` is a context variable; code that works for one sandbox sets it once (`about`), and every
record below carries it, whichever module writes it. Extra fields go through `extra={"fields": {}}`
or the `event` function.
"""

from __future__ import annotations

import contextlib
import contextvars
import logging
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

import msgspec

from dsecd.config import Log

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
    if logger.isEnabledFor(level):
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
        return msgspec.json.encode(body, enc_hook=str).decode()


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


def configure(config: Log, stream: TextIO = sys.stderr) -> None:
    """Send every record of this process to `stream` in the configured format."""
    style = config.format
    if style == "auto":
        style = "text" if stream.isatty() else "json"
    handler = logging.StreamHandler(stream)
    handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    # two records a sandbox are a visible part of its cost: leave out what no formatter here prints
    logging.logThreads = logging.logProcesses = logging.logMultiprocessing = False
    logging._srcfile = None  # documented: no walk up the stack
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.getLogger("pyroute2").setLevel(logging.WARNING)
