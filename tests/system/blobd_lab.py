"""A store, a cache and EROFS images over blobs for the tests of dsec-blobd."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.server
import os
import random
import shutil
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dsecd.host import syscalls
from dsecd.images.stores.abc import Source

BLOCK, CHUNK = 4096, 65536


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@dataclass
class Blob:
    """A blob in the store: its id, its bytes, the offset and size of each chunk."""

    id: str
    data: bytes
    index: bytes
    chunks: list[tuple[int, int]]
    source: Path

    def heal(self) -> None:
        self.source.write_bytes(self.data)

    def spoil(self, chunk: int) -> None:
        """Flip one bit of a chunk in the store."""
        at = self.chunks[chunk][0] + self.chunks[chunk][1] // 2
        with self.source.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ 1]))


def make_blob(store: Path, cache: Path, contents: list[bytes]) -> Blob:
    """Write a blob of these chunks (at most 64 KiB each) to `store`, its index to `cache`."""
    data, entries, chunks = bytearray(), [], []
    for content in contents:
        chunks.append((len(data), len(content)))
        entries.append(
            hashlib.sha256(content).digest() + struct.pack("<II", len(data) // BLOCK, len(content))
        )
        data += content + bytes(-len(content) % BLOCK)
    index = b"DSECIDX1" + struct.pack("<II", len(entries), 0) + b"".join(entries)
    name = hashlib.sha256(index).hexdigest()
    for folder in ("blobs", "maps", "indexes"):
        (cache / folder).mkdir(parents=True, exist_ok=True)
    store.mkdir(parents=True, exist_ok=True)
    (cache / "indexes" / name).write_bytes(index)
    (store / name).write_bytes(data)
    return Blob(name, bytes(data), index, chunks, store / name)


def random_blob(store: Path, cache: Path, chunks: int, seed: int = 1, odd: bool = False) -> Blob:
    """Full chunks of random bytes; `odd`: of random sizes."""
    rng = random.Random(seed)
    sizes = [rng.randrange(1, CHUNK + 1) if odd else CHUNK for _ in range(chunks)]
    return make_blob(store, cache, [rng.randbytes(size) for size in sizes])


def file_source(blob: Blob) -> Source:
    return Source(kind="file", path=str(blob.source))


def read(path: Path, offset: int, size: int) -> bytes:
    """Read through the page cache of nobody: a descriptor of its own, whole or an error."""
    fd = os.open(path, os.O_RDONLY)
    try:
        data = b""
        while len(data) < size and (part := os.pread(fd, size - len(data), offset + len(data))):
            data += part
        return data
    finally:
        os.close(fd)


def error_of(action: Callable[[], object]) -> str:
    """Return the name of the errno that `action` raises, "" when it raises none."""
    try:
        action()
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return ""


@dataclass
class Image:
    """A mounted EROFS image whose file contents lie in `blob`."""

    blob: Blob
    mount: Path
    digests: dict[str, str]


def build_image(
    folder: Path, store: Path, cache: Path, files: dict[str, bytes]
) -> tuple[Path, Blob]:
    """Make an image of `files` with mkfs.erofs; its blob device becomes a blob of the store."""
    tree, blobdev, image = folder / "tree", folder / "blobdev", folder / "image.erofs"
    tree.mkdir(parents=True)
    for name, content in files.items():
        (tree / name).write_bytes(content)
    blobdev.touch()
    subprocess.run(
        ["mkfs.erofs", "--chunksize=65536", f"--blobdev={blobdev}", str(image), str(tree)],
        check=True, capture_output=True,
    )  # fmt: skip
    data = blobdev.read_bytes()
    data += bytes(-len(data) % BLOCK)
    blob = make_blob(store, cache, [data[i : i + CHUNK] for i in range(0, len(data), CHUNK)])
    shutil.rmtree(tree)
    blobdev.unlink()
    return image, blob


@contextlib.contextmanager
def mounted(image: Path, device: Path, target: Path, options: str = "directio") -> Iterator[Path]:
    target.mkdir(exist_ok=True)
    flags = syscalls.MS_RDONLY | syscalls.MS_NODEV
    data = ",".join(filter(None, (f"device={device}", options)))
    syscalls.mount(str(image), str(target), "erofs", flags, data)
    try:
        yield target
    finally:
        syscalls.umount(str(target))


def drop_cache(mount: Path) -> None:
    """Let the kernel forget the pages of the files below `mount`, so that they are read again."""
    for path in mount.iterdir():
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@dataclass
class HttpStore:
    """A small server with byte ranges, and faults that a test switches on."""

    files: Path
    latency_s: float = 0.0
    status: int = 0  # answer with this instead
    stall: threading.Event = field(default_factory=threading.Event)  # set: no answer at all
    pause: threading.Event = field(default_factory=threading.Event)  # set: no more than a quarter
    truncate: bool = False  # send half of what the header promises
    short: bool = False  # answer with half of the range, consistently
    requests: list[tuple[str, int, int]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    def source(self, blob: Blob, **more: Any) -> Source:
        port = self.server.server_address[1]
        return Source(kind="http", url=f"http://127.0.0.1:{port}/{blob.id}", **more)

    def __enter__(self) -> HttpStore:
        store = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_GET(self) -> None:
                store.answer(self)

            def log_message(self, *args: object) -> None:
                pass

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True
            block_on_close = False

            def handle_error(self, request: object, client_address: object) -> None:
                pass  # readers that hang up are part of the tests

        self.open: set[Any] = set()
        self.server = Server(("127.0.0.1", 0), Handler)
        self.server.timeout = 0.05
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.02,))
        self.thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stall.clear()
        self.pause.clear()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.shutdown(2)
        for _ in range(200):
            if not self.open:
                break
            time.sleep(0.01)

    def answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        self.open.add(handler.connection)
        try:
            self._answer(handler)
        finally:
            if handler.close_connection:
                self.open.discard(handler.connection)

    def _answer(self, handler: http.server.BaseHTTPRequestHandler) -> None:
        first, last = map(int, handler.headers["Range"].removeprefix("bytes=").split("-"))
        self.requests.append((handler.path[1:], first, last))
        self.headers.append(dict(handler.headers.items()))
        while self.stall.is_set():
            time.sleep(0.01)
        time.sleep(self.latency_s)
        if self.status:
            handler.send_response(self.status)
            handler.send_header("Content-Length", "0")
            handler.end_headers()
            return
        with (self.files / handler.path[1:]).open("rb") as file:
            data = os.pread(file.fileno(), last + 1 - first, first)
        if self.short:
            data = data[: len(data) // 2]
        handler.send_response(206)
        handler.send_header("Content-Length", str(len(data)))
        handler.end_headers()
        if self.truncate:
            data = data[: len(data) // 2]
            handler.close_connection = True
        handler.wfile.write(data[: len(data) // 4])
        while self.pause.is_set():
            time.sleep(0.01)
        handler.wfile.write(data[len(data) // 4 :])
