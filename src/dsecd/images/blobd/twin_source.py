"""Twin: the bytes of a blob from a file or from HTTP, in threads; blocking calls."""

from __future__ import annotations

import http.client
import os
import threading
import time
import urllib.parse

from dsecd.images.stores.abc import Source


class PassingFault(Exception):
    """No answer, a broken connection, 5xx: worth trying until the deadline."""


class LastingFault(Exception):
    """No such object, refused, damaged content: worth a few tries."""


_connections = threading.local()  # each thread's own, kept alive


def read(source: Source, offset: int, size: int, timeout_s: float) -> tuple[bytes, float]:
    """Return the bytes and the seconds until the first of them. Raises one of the faults."""
    start = time.monotonic()
    if source.kind == "file":
        data = _read_file(source.path, offset, size)
        return data, time.monotonic() - start
    try:
        return _read_http(source.url, offset, size, timeout_s)
    except (OSError, http.client.HTTPException) as error:
        _connections.__dict__.pop(_host(source.url), None)
        raise PassingFault(str(error) or type(error).__name__) from error


def _read_file(path: str, offset: int, size: int) -> bytes:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError as error:
        raise LastingFault(str(error)) from error
    except OSError as error:
        raise PassingFault(str(error)) from error
    try:
        data = os.pread(fd, size, offset)
    except OSError as error:
        raise PassingFault(str(error)) from error
    finally:
        os.close(fd)
    if len(data) != size:
        raise LastingFault("the file is shorter than the blob")
    return data


def _host(url: str) -> str:
    parts = urllib.parse.urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _read_http(url: str, offset: int, size: int, timeout_s: float) -> tuple[bytes, float]:
    parts, host = urllib.parse.urlsplit(url), _host(url)
    connection = _connections.__dict__.get(host)
    if connection is None:
        kind = (
            http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        )
        connection = _connections.__dict__[host] = kind(parts.netloc)
    connection.timeout = timeout_s
    if connection.sock is not None:
        connection.sock.settimeout(timeout_s)
    target = parts.path + (f"?{parts.query}" if parts.query else "")
    start = time.monotonic()
    connection.request("GET", target, headers={"Range": f"bytes={offset}-{offset + size - 1}"})
    answer = connection.getresponse()
    latency = time.monotonic() - start
    if answer.status >= 300:
        answer.read()
        fault = PassingFault if answer.status >= 500 or answer.status == 429 else LastingFault
        raise fault(f"the store answered with status {answer.status}")
    data = answer.read(size + 1)
    if len(data) != size:
        connection.close()
        raise LastingFault(f"the store sent {len(data)} bytes, not {size}")
    return data, latency
