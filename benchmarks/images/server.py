"""A small S3 server with a latency of its own: the shared store of the bench.

As much of S3 as the daemon's store and dsec-blobd ask for: ranges, conditional puts, listings. A
bucket is a directory below the root. Every request waits for the latency before its answer begins;
bandwidth is not limited. One thread per connection: timers of event loops are too coarse for 1 ms.

Runs as a process of its own, so that it does not share an interpreter with the client under test;
it ends when its standard input does. ``/-/`` is the bench's own: latency and counters.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO
from xml.sax.saxutils import escape

REASONS = {
    200: "OK", 204: "No Content", 206: "Partial Content", 400: "Bad Request", 404: "Not Found",
    412: "Precondition Failed", 416: "Range Not Satisfiable", 501: "Not Implemented",
}  # fmt: skip
START_S = 20.0
TRANSFER_S = 30.0


class ServerError(Exception):
    """The server did not start."""


@dataclass(frozen=True, slots=True)
class Request:
    """`path`: decoded, without the first slash."""

    method: str
    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]
    body: bytes


@dataclass(slots=True)
class Answer:
    """`file`: a descriptor to send `length` bytes of from `start` on, instead of `body`."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)
    file: int = -1
    start: int = 0
    length: int = 0


def read_range(text: str, size: int) -> tuple[int, int] | None:
    """Return start and end (exclusive) of a Range header, None when it begins after the end."""
    unit, _, spec = text.partition("=")
    first, _, last = spec.partition("-")
    if unit != "bytes" or not (first or last):
        raise ValueError(text)
    if not first:  # the last so many bytes
        return (max(0, size - int(last)), size) if size else None
    start = int(first)
    end = min(int(last) + 1, size) if last else size
    return (start, end) if start < size else None


def read_request(stream: BinaryIO) -> Request | None:
    """Return the next request of a connection, None at its end."""
    words = stream.readline(65536).split()
    if len(words) != 3:
        return None
    headers: dict[str, str] = {}
    while (line := stream.readline(65536)) not in (b"\r\n", b"\n", b""):
        name, _, value = line.decode("latin-1").partition(":")
        headers[name.strip().lower()] = value.strip()
    body = stream.read(int(headers.get("content-length", 0)))
    path, _, query = words[1].decode("latin-1").partition("?")
    return Request(
        words[0].decode(),
        urllib.parse.unquote(path).removeprefix("/"),
        dict(urllib.parse.parse_qsl(query, keep_blank_values=True)),
        headers,
        body,
    )


def tag_of(status: os.stat_result) -> str:
    """Return the ETag of a file: every put makes a new inode."""
    return f'"{status.st_ino:x}-{status.st_mtime_ns:x}-{status.st_size:x}"'


def failure(status: int, code: str) -> Answer:
    return Answer(status, f"<Error><Code>{code}</Code></Error>".encode())


class Objects:
    """The buckets, and what was sent from them. Usable from many threads."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._writes = threading.Lock()
        self._counts = threading.Lock()
        self._sent: dict[str, int] = {}
        self._requests = 0
        self.latency_s = 0.0

    def counters(self) -> dict[str, int]:
        """Return the requests, and the bytes sent of each kind of object."""
        with self._counts:
            return {"requests": self._requests, **self._sent}

    def count(self, request: Request, answer: Answer) -> None:
        kind = Path(request.path).parent.name or "others"
        sent = 0 if request.method == "HEAD" else max(answer.length, len(answer.body))
        with self._counts:
            self._requests += 1
            self._sent[kind] = self._sent.get(kind, 0) + sent

    def answer(self, request: Request) -> Answer:
        """Return what S3 would say."""
        path = self._root / request.path
        if ".." in path.parts or not path.is_relative_to(self._root):
            return failure(400, "InvalidURI")
        if request.method == "GET" and "list-type" in request.query:
            return self._list(path, request.query)
        if request.method in ("GET", "HEAD"):
            return self._get(path, request)
        if request.method == "PUT" and "partNumber" not in request.query:
            return self._put(path, request)
        if request.method == "DELETE":
            path.unlink(missing_ok=True)
            return Answer(204)
        return failure(501, "NotImplemented")

    def _get(self, path: Path, request: Request) -> Answer:
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return failure(404, "NoSuchKey")
        status = os.fstat(fd)
        headers = {
            "ETag": tag_of(status),
            "Last-Modified": email.utils.formatdate(status.st_mtime, usegmt=True),
        }
        wanted = request.headers.get("range")
        found = read_range(wanted, status.st_size) if wanted else (0, status.st_size)
        if found is None:
            os.close(fd)
            return failure(416, "InvalidRange")
        start, end = found
        if wanted:
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{status.st_size}"
        return Answer(206 if wanted else 200, b"", headers, fd, start, end - start)

    def _put(self, path: Path, request: Request) -> Answer:
        with self._writes:
            tag = ""
            with contextlib.suppress(FileNotFoundError):
                tag = tag_of(path.stat())
            expected = request.headers.get("if-match")
            if (request.headers.get("if-none-match") == "*" and tag) or (
                expected is not None and expected != tag
            ):
                return failure(412, "PreconditionFailed")
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_name(".part")
            part.write_bytes(request.body)
            part.rename(path)
            return Answer(200, headers={"ETag": tag_of(path.stat())})

    def _list(self, bucket: Path, query: Mapping[str, str]) -> Answer:
        after = query.get("start-after", "")
        rows = []
        for path in sorted(bucket.rglob("*")):
            key = path.relative_to(bucket).as_posix()
            if not key.startswith(query.get("prefix", "")) or key <= after:
                continue
            if path.name.startswith(".") or not path.is_file():
                continue
            status = path.stat()
            when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(status.st_mtime))
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><LastModified>{when}</LastModified>"
                f"<ETag>{escape(tag_of(status))}</ETag><Size>{status.st_size}</Size></Contents>"
            )
        text = f"<ListBucketResult><IsTruncated>false</IsTruncated>{''.join(rows)}"
        return Answer(200, f"{text}</ListBucketResult>".encode())


def control(objects: Objects, request: Request) -> Answer:
    """Answer the bench itself, without latency."""
    if "latency_ms" in request.query:
        objects.latency_s = float(request.query["latency_ms"]) / 1e3
    return Answer(200, json.dumps(objects.counters()).encode())


def send(connection: socket.socket, answer: Answer, head: bool) -> None:
    """Write an answer; a file goes from the page cache to the socket."""
    length = answer.length if answer.file >= 0 else len(answer.body)
    lines = [f"HTTP/1.1 {answer.status} {REASONS[answer.status]}"]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    if answer.status != 204:
        lines.append(f"Content-Length: {length}")
    body = b"" if head else answer.body
    more = socket.MSG_MORE if answer.file >= 0 and not head and length else 0
    message = "\r\n".join(lines).encode() + b"\r\n\r\n" + body
    connection.sendall(message, more)
    done = 0
    while answer.file >= 0 and not head and done < length:
        done += os.sendfile(connection.fileno(), answer.file, answer.start + done, length - done)


def converse(connection: socket.socket, objects: Objects) -> None:
    """Serve one connection until the client closes it."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with connection, connection.makefile("rb") as stream, contextlib.suppress(OSError):
        while (request := read_request(stream)) is not None:
            if request.path.startswith("-/"):
                send(connection, control(objects, request), False)
                continue
            if objects.latency_s:
                time.sleep(objects.latency_s)
            answer = objects.answer(request)
            objects.count(request, answer)
            try:
                send(connection, answer, request.method == "HEAD")
            finally:
                if answer.file >= 0:
                    os.close(answer.file)


def main() -> None:
    """Serve the directory named by the argument; print the port first."""
    objects = Objects(Path(sys.argv[1]).resolve())
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    print(listener.getsockname()[1], flush=True)

    def accept() -> None:
        while True:
            connection, _ = listener.accept()
            threading.Thread(target=converse, args=(connection, objects), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.buffer.read()


class Client:
    """The bench's side: where the server is, and its controls."""

    def __init__(self, root: Path, port: int) -> None:
        self.root = root
        self.endpoint = f"http://127.0.0.1:{port}"

    def set_latency(self, milliseconds: float) -> None:
        self._ask(f"latency_ms={milliseconds}")

    def counters(self) -> dict[str, int]:
        """Return the requests so far, and the bytes sent of each kind of object."""
        return self._ask("")

    def sent_since(self, before: Mapping[str, int]) -> int:
        """Return how many bytes of objects went out since `before` (earlier counters)."""
        now = self.counters()
        return sum(now[kind] - before.get(kind, 0) for kind in now if kind != "requests")

    def _ask(self, query: str) -> dict[str, int]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(f"{self.endpoint}/-/?{query}", timeout=TRANSFER_S) as answer:
            counters: dict[str, int] = json.load(answer)
        return counters


@contextlib.contextmanager
def serving(root: Path) -> Iterator[Client]:
    """Yield a server of the buckets in `root`. Raises ServerError."""
    process = subprocess.Popen(
        [sys.executable, "-P", __file__, str(root)],  # it needs nothing else of ours
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # Ctrl-C is for the bench, which ends it after its clients
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        line = process.stdout.readline()
        if not line.strip().isdigit():
            raise ServerError("the bench's store server did not start")
        yield Client(root, int(line))
    finally:
        process.stdin.close()
        try:
            process.wait(START_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


if __name__ == "__main__":
    main()
