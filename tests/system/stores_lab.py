"""Servers that the tests of the store run against: moto, JuiceFS, and a proxy full of faults."""

from __future__ import annotations

import contextlib
import http.client
import http.server
import os
import shutil
import signal
import socket
import socketserver
import struct
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

JUICEFS = shutil.which("juicefs", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH')}")
BUCKET = "dsec-test"
KEYS = {"AWS_ACCESS_KEY_ID": "testing-key", "AWS_SECRET_ACCESS_KEY": "testing-secret"}
_START_S = 60.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait(ready: Callable[[], bool], process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while not ready():
        if process.poll() is not None or time.monotonic() > deadline:
            raise AssertionError(f"{process.args!r} did not start:\n{log.read_text()[-2000:]}")
        time.sleep(0.05)


def _answers(port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


@contextlib.contextmanager
def running(
    command: list[str], log: Path, ready: Callable[[], bool], **environment: str
) -> Iterator[subprocess.Popen[bytes]]:
    """Run a server until the end of the block."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, env=os.environ | environment
        )
        try:
            _wait(ready, process, log)
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def moto(directory: Path) -> Iterator[str]:
    """Yield the address of an S3 server that knows conditional puts, with `BUCKET` in it."""
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with running(command, directory / "moto.log", lambda: _answers(port)):
        endpoint = f"http://127.0.0.1:{port}"
        request = urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")
        urllib.request.urlopen(request, timeout=20).close()
        yield endpoint


def _format(directory: Path) -> str:
    """Make a JuiceFS volume in `directory` and return the address of its metadata."""
    assert JUICEFS
    meta = f"sqlite3://{directory / 'meta.db'}"
    bucket = str(directory / "data")
    subprocess.run(
        [JUICEFS, "format", "--storage", "file", "--bucket", bucket, meta, BUCKET],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    return meta


@contextlib.contextmanager
def juicefs_mount(directory: Path, target: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Mount a new JuiceFS volume on `target`; yield the process that serves it."""
    assert JUICEFS
    target.mkdir()
    command = [
        JUICEFS, "mount", "--no-usage-report", "--no-syslog", "--no-bgjob",
        "--cache-dir", str(directory / "cache"), "--log", str(directory / "juicefs.log"),
        _format(directory), str(target),
    ]  # fmt: skip
    environment = {"JFS_SUPERVISOR": "test"}  # or a second process would watch the first
    with running(command, directory / "mount.log", target.is_mount, **environment) as process:
        try:
            yield process
        finally:
            process.send_signal(signal.SIGCONT)
            subprocess.run(["umount", "--lazy", str(target)], check=True, timeout=20)
    assert not target.is_mount()


@contextlib.contextmanager
def juicefs_gateway(directory: Path) -> Iterator[str]:
    """Yield the address of JuiceFS' S3 server; the volume's name, `BUCKET`, is its only bucket."""
    assert JUICEFS
    port = free_port()
    command = [
        JUICEFS, "gateway", "--no-usage-report", "--no-bgjob", "--no-banner", "--keep-etag",
        "--cache-dir", str(directory / "cache"), _format(directory), f"127.0.0.1:{port}",
    ]  # fmt: skip
    environment = {
        "MINIO_ROOT_USER": KEYS["AWS_ACCESS_KEY_ID"],
        "MINIO_ROOT_PASSWORD": KEYS["AWS_SECRET_ACCESS_KEY"],
    }
    with running(command, directory / "gateway.log", lambda: _answers(port), **environment):
        yield f"http://127.0.0.1:{port}"


class FaultyProxy(socketserver.ThreadingMixIn, http.server.HTTPServer):
    """An HTTP proxy in front of an S3 server, which goes wrong as it is told.

    `fault(method, path)` names what happens to a request; "" passes it on. `stripped`: headers that
    are not passed on. `rate`: bytes per second that it takes of a request's body, 0 for all.
    Requests that change something go to the server one at a time, which makes moto atomic.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, upstream: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.upstream = upstream.removeprefix("http://")
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        self.fault: Callable[[str, str], str] = lambda method, path: ""
        self.stripped: set[str] = set()
        self.rate = 0
        self.seen: list[tuple[str, str]] = []
        self.taken = 0  # bytes of request bodies
        self.healed = threading.Event()
        self.writes = threading.Lock()

    def once(self, fault: str, method: str, times: int = 1) -> None:
        """Let `fault` happen to the next `times` requests with this method."""
        left = [times]

        def choose(found: str, _: str) -> str:
            if found != method or left[0] <= 0:
                return ""
            left[0] -= 1
            return fault

        self.fault = choose

    def heal(self) -> None:
        """Pass everything on again; what was stalled ends."""
        self.fault = lambda method, path: ""
        self.healed.set()
        self.healed = threading.Event()

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is nothing to talk about."""

    @classmethod
    @contextlib.contextmanager
    def before(cls, upstream: str) -> Iterator[FaultyProxy]:
        proxy = cls(upstream)
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield proxy
        finally:
            proxy.heal()
            proxy.shutdown()
            thread.join()
            proxy.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: FaultyProxy
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""

    def _serve(self) -> None:
        proxy = self.server
        self.close_connection = True
        proxy.seen.append((self.command, self.path))
        fault = proxy.fault(self.command, self.path)
        body = self._body()
        if fault == "reset":
            self._reset()
        elif fault == "stall":
            proxy.healed.wait(60)
        elif fault.isdigit():
            self._refuse(int(fault))
        else:
            self._pass(body, fault)

    do_GET = do_PUT = do_HEAD = do_POST = do_DELETE = _serve

    def _pass(self, body: bytes, fault: str) -> None:
        status, headers, data = self._forward(body)
        if fault == "lost":  # done, but nobody hears of it
            return self._reset()
        if fault == "corrupt" and data:
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return self._send(status, headers, data, fault)

    def _body(self) -> bytes:
        left = int(self.headers.get("Content-Length", 0))
        pieces = []
        while left:
            piece = self.rfile.read(min(left, 1 << 16))
            if not piece:
                raise ConnectionError
            pieces.append(piece)
            left -= len(piece)
            self.server.taken += len(piece)
            if self.server.rate:
                time.sleep(len(piece) / self.server.rate)
        return b"".join(pieces)

    def _forward(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        headers = {
            key: value
            for key, value in self.headers.items()
            if key.lower() not in self.server.stripped | {"connection"}
        }
        lock = contextlib.nullcontext() if self.command in ("GET", "HEAD") else self.server.writes
        with lock, contextlib.closing(http.client.HTTPConnection(self.server.upstream)) as upstream:
            upstream.request(self.command, self.path, body or None, headers)
            answer = upstream.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def _send(self, status: int, headers: list[tuple[str, str]], data: bytes, fault: str) -> None:
        self.send_response_only(status)
        lengths = [value for key, value in headers if key.lower() == "content-length"]
        for key, value in headers:
            if key.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(key, value)
        # that of an answer to HEAD is not of what follows
        self.send_header("Content-Length", lengths[0] if lengths else str(len(data)))
        self.send_header("Connection", "close")
        self.end_headers()
        if fault in ("truncate", "stall-body") and self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2])
            self.wfile.flush()
            if fault == "stall-body":
                self.server.healed.wait(60)
        else:
            self.wfile.write(data)

    def _refuse(self, status: int) -> None:
        code = {503: "SlowDown", 500: "InternalError", 403: "AccessDenied"}.get(status, "Other")
        body = b"" if self.command == "HEAD" else f"<Error><Code>{code}</Code></Error>".encode()
        self._send(status, [], body, "")

    def _reset(self) -> None:
        # with a linger time of 0 the peer gets RST, not FIN
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.rfile.close()
        self.connection.close()
