"""Content of any size in and out of a sandbox, block by block, under the peer's credit.

Local files are read and written in threads. A lost connection fails a transfer with
`Unavailable`: a file appears in the sandbox only when it is complete.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, TypeVar, cast

from libdsec import archive, model, wire
from libdsec.connection import Call
from libdsec.errors import InvalidArgument, WrongState
from libdsec.link import Link, pack, unpack

T = TypeVar("T")
Progress: TypeAlias = Callable[[int], None]
BLOCK = wire.MAX_ITEM


# --- what callers hand in


def whole(data: object) -> bytes | None:
    """Return `data` as bytes when it is already in memory, else None."""
    if isinstance(data, str):
        return data.encode()
    if isinstance(data, (bytes, bytearray, memoryview)):
        return bytes(data)
    return None


async def blocks(data: object) -> AsyncIterator[bytes]:
    """Yield `data` in blocks of at most `BLOCK` bytes. Raises `InvalidArgument` for other types."""
    if isinstance(data, bytes):
        for start in range(0, len(data), BLOCK):
            yield data[start : start + BLOCK]
    elif hasattr(data, "read"):
        while block := await asyncio.to_thread(cast(BinaryIO, data).read, BLOCK):
            yield _binary(block)
    elif hasattr(data, "__aiter__"):
        async for piece in cast(AsyncIterator[bytes], data):
            for start in range(0, len(piece), BLOCK):
                yield _binary(piece[start : start + BLOCK])
    elif hasattr(data, "__iter__"):
        for piece in cast(Iterable[bytes], data):
            for start in range(0, len(piece), BLOCK):
                yield _binary(piece[start : start + BLOCK])
    else:
        raise InvalidArgument(f"content cannot be a {type(data).__name__}", field="data")


def _binary(piece: object) -> bytes:
    if isinstance(piece, (bytes, bytearray, memoryview)):
        return bytes(piece)
    raise InvalidArgument(
        f"content must be bytes, not {type(piece).__name__}: open the file in binary mode",
        field="data",
    )


async def file_blocks(path: Path, on_progress: Progress | None) -> AsyncIterator[bytes]:
    """Yield the content of a local file."""
    file = await asyncio.to_thread(path.open, "rb")
    try:
        while block := await asyncio.to_thread(file.read, BLOCK):
            yield block
            if on_progress is not None:
                on_progress(len(block))
    finally:
        file.close()


# --- streams on the wire


async def receive(link: Link, target: str, op: str, args: Any) -> AsyncIterator[bytes]:
    """Yield what the call `op` streams. Leaving early cancels it."""
    call = await link.start(op, pack(args), target)
    try:
        while (raw := await call.next_item()) is not None:
            yield unpack(raw, bytes)
        done = unpack(await call.result(), model.Transferred)
        if done.data:
            yield done.data
    finally:
        if not call.closed:
            call.cancel()


async def primed(stream: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Return `stream` with its first block already fetched, so that its errors raise here."""
    try:
        first: bytes | None = await anext(stream)
    except StopAsyncIteration:
        first = None

    async def rest() -> AsyncIterator[bytes]:
        try:
            if first is not None:
                yield first
            async for block in stream:
                yield block
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    return rest()


async def deliver(
    link: Link, target: str, op: str, args: Any, content: AsyncIterator[bytes]
) -> model.Transferred:
    """Stream `content` into the call `op` and return its answer. A failure leaves no file."""
    call = await link.start(op, pack(args), target)
    try:
        async with contextlib.aclosing(cast(Any, content)):
            async for block in content:
                await call.send(block)
        call.end()
        return unpack(await call.result(), model.Transferred)
    except BaseException:
        if not call.closed:
            call.cancel()
        raise


# --- directory trees; tarfile blocks, so it works in a thread


async def _in_thread(work: Callable[[], T], stop: Callable[[], None]) -> T:
    """Run `work` in a thread; when cancelled, `stop` it and wait until it is out of the way."""
    task = asyncio.create_task(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        stop()
        await asyncio.gather(task, return_exceptions=True)
        raise


def _from_thread(loop: asyncio.AbstractEventLoop, work: Awaitable[T]) -> T:
    async def awaited() -> T:
        return await work

    return asyncio.run_coroutine_threadsafe(awaited(), loop).result()


async def upload_tree(
    link: Link, target: str, args: model.TarArgs, root: Path, on_progress: Progress | None
) -> int:
    """Stream a tar of `root` into `files.upload`. Returns the bytes sent."""
    return await upload_archive(
        link, target, args, lambda push: archive.pack(root, push), on_progress
    )


async def upload_archive(
    link: Link,
    target: str,
    args: model.TarArgs,
    fill: Callable[[Callable[[bytes], None]], None],
    on_progress: Progress | None = None,
) -> int:
    """Stream the tar that `fill`, in a thread, hands on. Returns the bytes sent."""
    loop = asyncio.get_running_loop()
    call = await link.start("files.upload", pack(args), target)
    sent = 0

    def push(block: bytes) -> None:
        nonlocal sent
        _from_thread(loop, call.send(block))
        sent += len(block)
        if on_progress is not None:
            loop.call_soon_threadsafe(on_progress, len(block))

    try:
        await _in_thread(lambda: fill(push), lambda: _stop(call))
        call.end()
        await call.result()
    except BaseException:
        if not call.closed:
            call.cancel()
        raise
    return sent


async def download_tree(
    link: Link, target: str, args: model.TarArgs, root: Path, on_progress: Progress | None
) -> int:
    """Unpack the tar that `files.download` streams below `root`. Returns bytes of content."""
    loop = asyncio.get_running_loop()
    call = await link.start("files.download", pack(args), target)
    received = 0
    tail: list[bytes] = []

    async def following() -> bytes:
        raw = await call.next_item()
        if raw is not None:
            return unpack(raw, bytes)
        if not tail:
            tail.append(unpack(await call.result(), model.Transferred).data or b"")
            return tail[0]
        return b""

    def count(size: int) -> None:
        nonlocal received
        received += size
        if on_progress is not None:
            loop.call_soon_threadsafe(on_progress, size)

    def pull() -> bytes:
        return _from_thread(loop, following())

    try:
        await _in_thread(lambda: archive.unpack(pull, root, count), lambda: _stop(call))
    finally:
        if not call.closed:
            call.cancel()
    return received


def _stop(call: Call) -> None:
    """Fail a call whose thread waits for it, so that the thread ends."""
    if not call.closed:
        call.cancel()
        call.finish(None, WrongState("the transfer was cancelled"))


async def save(
    stream: AsyncIterator[bytes], path: Path, mode: int, on_progress: Progress | None
) -> int:
    """Write `stream` to the local file `path`, which appears when it is complete."""
    size = 0
    handle, name = await asyncio.to_thread(
        tempfile.mkstemp, dir=path.parent, prefix=f".{path.name}."
    )
    try:
        with os.fdopen(handle, "wb") as file:
            async for block in stream:
                await asyncio.to_thread(file.write, block)
                size += len(block)
                if on_progress is not None:
                    on_progress(len(block))
        os.chmod(name, mode & 0o755 | 0o600)  # noqa: PTH101 - a temporary name
        os.replace(name, path)  # noqa: PTH105
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)  # noqa: PTH108
        raise
    finally:
        await stream.aclose()  # type: ignore[attr-defined]
    return size
