"""The caller's own terminal: raw mode, size, and standard input without blocking the loop."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import termios
import tty
from collections.abc import AsyncIterator, Callable, Iterator

from libdsec import PtySize

_BLOCK = 65536


def size() -> PtySize:
    """Return the size of the terminal at stdout, or the usual 24 by 80."""
    try:
        columns, rows = os.get_terminal_size(sys.stdout.fileno())
    except (OSError, ValueError):
        return PtySize()
    # a terminal that nobody told its size says 0 by 0
    return PtySize(rows=rows, cols=columns) if rows and columns else PtySize()


@contextlib.contextmanager
def raw() -> Iterator[None]:
    """Pass every key through while the block runs, if stdin is a terminal."""
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        yield
        return
    before = termios.tcgetattr(fd)
    tty.setraw(fd, termios.TCSADRAIN)  # not FLUSH: what was typed ahead is input, too
    try:
        yield
    finally:
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def keys(callback: Callable[[str], None]) -> Iterator[None]:
    """Call `callback` on the loop with what is typed, at once and without echo, if stdin is a
    terminal. Ctrl-C stays a signal, and output is as ever."""
    fd = sys.stdin.fileno()
    if not os.isatty(fd):
        yield
        return
    loop = asyncio.get_running_loop()

    def typed() -> None:
        try:
            data = os.read(fd, _BLOCK)
        except OSError:  # EIO: the terminal is gone
            data = b""
        if data:
            callback(data.decode(errors="replace"))
        else:
            loop.remove_reader(fd)

    before = termios.tcgetattr(fd)
    tty.setcbreak(fd, termios.TCSADRAIN)
    loop.add_reader(fd, typed)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)


@contextlib.contextmanager
def on_resize(callback: Callable[[], None]) -> Iterator[None]:
    """Call `callback` on the loop whenever the terminal's size changes."""
    loop = asyncio.get_running_loop()
    try:
        loop.add_signal_handler(signal.SIGWINCH, callback)
    except (ValueError, RuntimeError):  # not the main thread: there is no terminal to follow
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGWINCH)


async def stdin_blocks() -> AsyncIterator[bytes]:
    """Yield what arrives on stdin, as it arrives, until its end."""
    loop = asyncio.get_running_loop()
    fd = sys.stdin.fileno()
    while True:
        ready: asyncio.Future[None] = loop.create_future()
        try:
            loop.add_reader(fd, _set, ready)
        except PermissionError:  # epoll refuses regular files: they are always ready
            ready.set_result(None)
        try:
            await ready
        finally:
            loop.remove_reader(fd)
        data = os.read(fd, _BLOCK)
        if not data:
            return
        yield data


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def write(stream: int, data: bytes) -> None:
    """Write bytes to stdout (1) or stderr (2), unchanged and at once."""
    out = sys.stdout.buffer if stream == 1 else sys.stderr.buffer
    out.write(data)
    out.flush()
