"""Bytes of an archive, whatever it is packed with: gzip, xz, bzip2, zstd or nothing.

A decoder never hands out more than a piece at a time and never more than a limit in total, so that
a small file that unpacks to terabytes costs neither memory nor a day.
"""

from __future__ import annotations

import bz2
import contextlib
import lzma
import subprocess
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from typing import Protocol

from libdsec.errors import Exhausted, Unsupported

PIECE = 256 << 10  # bytes in one step, packed and unpacked
MAX_DECODER = 256 << 20  # bytes of memory xz may use; xz -9 needs 65 MiB
_MAGIC = {b"\x28\xb5\x2f\xfd": "zstd", b"\x1f\x8b": "gz", b"\xfd7zXZ\x00": "xz", b"BZh": "bz2"}
_HEAD = max(map(len, _MAGIC))


class Damage(ValueError):
    """The bytes are not what they claim to be, or end early."""


class Readable(Protocol):
    """All that is asked of a file: up to `size` bytes, none at its end."""

    def read(self, size: int, /) -> bytes: ...


class Digest(Protocol):
    """What of hashlib's objects is used."""

    def update(self, data: bytes, /) -> None: ...


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def needs_input(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, max_length: int) -> bytes: ...


class Stream:
    """The unpacked bytes. `offset` is how many were read."""

    def __init__(
        self, pieces: Iterator[bytes], limit_bytes: int, digest: Digest | None = None
    ) -> None:
        self._pieces, self._limit, self._digest = pieces, limit_bytes, digest
        self._piece, self._start = b"", 0
        self._total = 0
        self.offset = 0

    def read(self, size: int) -> bytes:
        """Return `size` bytes, fewer only at the end."""
        end = self._start + size
        if end <= len(self._piece):
            data = self._piece[self._start : end]
            self._start = end
        else:
            data = self._gather(size)
        self.offset += len(data)
        return data

    def skip(self, size: int) -> bool:
        """Read over `size` bytes; return whether there were as many."""
        while size:
            count = len(self.read(min(size, PIECE)))
            if count == 0:
                return False
            size -= count
        return True

    def _gather(self, size: int) -> bytes:
        parts = [self._piece[self._start :]]
        missing = size - len(parts[0])
        self._piece, self._start = b"", 0
        while missing:
            piece = next(self._pieces, b"")
            if not piece:
                break
            self._total += len(piece)
            if self._total > self._limit:
                raise Exhausted(
                    f"the archive unpacks to more than {self._limit} bytes; raise the limit if it "
                    "may be that large",
                    limit_bytes=self._limit,
                )
            if self._digest is not None:
                self._digest.update(piece)
            parts.append(piece[:missing])
            if len(piece) > missing:
                self._piece, self._start = piece, missing
            missing -= len(parts[-1])
        return b"".join(parts)


@contextlib.contextmanager
def unpacked(raw: Readable, limit_bytes: int, digest: Digest | None = None) -> Iterator[Stream]:
    """Yield the unpacked bytes of `raw`, told by its first bytes; reading may raise `Damage`.

    `raw` is read to its end when the stream is, and `digest` is told all that was unpacked. Raises
    `Unsupported` without a program for zstd, `Exhausted` beyond `limit_bytes`.
    """
    head = b""
    while len(head) < _HEAD and (more := raw.read(_HEAD - len(head))):
        head += more
    kind = next((kind for magic, kind in _MAGIC.items() if head.startswith(magic)), "")
    with contextlib.ExitStack() as stack:
        if kind == "zstd":
            pieces = stack.enter_context(_zstd(raw, head))
        elif kind:
            pieces = _decode(_packed(raw, head), _DECODERS[kind])
        else:
            pieces = _packed(raw, head)
        yield Stream(pieces, limit_bytes, digest)


def _packed(raw: Readable, head: bytes) -> Iterator[bytes]:
    if head:
        yield head
    while data := raw.read(PIECE):
        yield data


class _Gzip:
    """zlib in the shape of the other decoders."""

    def __init__(self) -> None:
        self._zlib = zlib.decompressobj(zlib.MAX_WBITS | 16)

    def decompress(self, data: bytes, max_length: int) -> bytes:
        return self._zlib.decompress(self._zlib.unconsumed_tail + data, max_length)

    @property
    def needs_input(self) -> bool:
        return not self._zlib.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._zlib.eof

    @property
    def unused_data(self) -> bytes:
        return self._zlib.unused_data


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "gz": _Gzip,
    "bz2": bz2.BZ2Decompressor,
    "xz": lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, memlimit=MAX_DECODER),
}


def _decode(packed: Iterator[bytes], make: Callable[[], _Decoder]) -> Iterator[bytes]:
    """Yield pieces of one packed stream after the other; zeros between and after are padding."""
    data = next(packed, b"")
    while data:
        decoder = make()
        while True:
            piece = _step(decoder, data)
            data = b""
            if piece:
                yield piece
            if decoder.eof:
                break
            if decoder.needs_input:
                data = next(packed, b"")
                if not data and not piece:
                    raise Damage("the compressed data end early")
        data = decoder.unused_data.lstrip(b"\0")
        while not data and (more := next(packed, b"")):
            data = more.lstrip(b"\0")


def _step(decoder: _Decoder, data: bytes) -> bytes:
    try:
        return decoder.decompress(data, PIECE)
    except (zlib.error, lzma.LZMAError, OSError) as error:  # OSError: what bz2 says
        raise Damage(str(error)) from error


class _Feed(threading.Thread):
    """Writes what is packed into a program; its failure is kept for the reader."""

    def __init__(self, process: subprocess.Popen[bytes], raw: Readable, head: bytes) -> None:
        super().__init__(name="zstd-feed", daemon=True)
        self._process, self._packed = process, _packed(raw, head)
        self.failure: BaseException | None = None

    def run(self) -> None:
        assert self._process.stdin is not None
        try:
            with contextlib.suppress(BrokenPipeError), self._process.stdin as pipe:
                for data in self._packed:
                    pipe.write(data)
        except BaseException as error:
            self.failure = error


@contextlib.contextmanager
def _zstd(raw: Readable, head: bytes) -> Iterator[Iterator[bytes]]:
    """Python 3.11 has no decoder, so the program decodes; it refuses windows above 128 MiB."""
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(
                ["zstd", "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors
            )
        except FileNotFoundError as error:
            raise Unsupported(
                "reading .tar.zst needs the program zstd: install the package zstd, or give a "
                ".tar.gz",
                reason="zstd is not installed",
            ) from error
        feed = _Feed(process, raw, head)

        def pieces() -> Iterator[bytes]:
            assert process.stdout is not None
            while data := process.stdout.read(PIECE):
                yield data
            feed.join()
            if feed.failure is not None:
                raise feed.failure
            if process.wait() != 0:
                errors.seek(0)
                raise Damage(errors.read().decode("utf-8", "replace").strip())

        try:
            feed.start()
            yield pieces()
        finally:
            process.kill()
            feed.join()
            assert process.stdout is not None
            process.stdout.close()
            process.wait()
