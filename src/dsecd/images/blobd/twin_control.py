"""Twin: the control socket and its operations (control.c, control_ops.c)."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import trio

from dsecd.images.blobd.channel import FRAME_MAX, VERSION
from dsecd.images.blobd.model import Settings
from dsecd.images.blobd.twin_blob import CHUNK, Blob
from dsecd.images.blobd.twin_cache import Cache
from libdsec.errors import (
    AlreadyExists,
    DSecError,
    Exhausted,
    InvalidArgument,
    NotFound,
    Unsupported,
    to_wire,
)

_CLIENTS_MAX = 16
_AT_ONCE = 900
_TRACES_MAX, _TRACE_BLOBS_MAX = 64, 256
_QUEUE_MAX = 65536
_COUNTERS = (
    "reads", "hits", "waits", "read_errors", "deadline_errors", "interrupted", "fetches",
    "fetched_bytes", "fetch_faults", "damaged_chunks", "verified_chunks", "prefetched_chunks",
    "evicted_bytes", "no_room",
)  # fmt: skip
_Request = tuple[int, str, Any]
_CREDENTIALS = struct.Struct("3i")  # struct ucred
# no take_over, interrupt, splice: pyfuse3 has none of them; no sigv4, no pre_access
CAPABILITIES = ("http", "hold")


def _argument(arguments: dict[str, Any], key: str, kind: type, otherwise: Any = None) -> Any:
    value = arguments.get(key, otherwise)
    if not isinstance(value, kind) or isinstance(value, bool):
        raise InvalidArgument(f"{key}: not of the right type", field=key)
    if isinstance(value, int) and value < 0:
        raise InvalidArgument(f"{key}: negative", field=key)
    return value


def _id(value: Any) -> str:
    if not isinstance(value, str) or len(value) != 64 or set(value) - set("0123456789abcdef"):
        raise InvalidArgument("id: not 64 hexadecimal digits", field="id")
    return value


class Control:
    """Serves the requests of `serve`; `stop` is called for a shutdown."""

    def __init__(self, cache: Cache, fuse: int, stop: Callable[[], None]) -> None:
        self._cache, self._fuse, self._stop = cache, fuse, stop
        self._clients = 0

    async def serve(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        listener = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        before = os.umask(0o177)
        await listener.bind(str(path))
        os.umask(before)
        listener.listen(_CLIENTS_MAX)
        async with trio.open_nursery() as nursery:
            while True:
                client, _ = await listener.accept()
                nursery.start_soon(self._serve_client, client)

    async def _serve_client(self, client: trio.socket.SocketType) -> None:
        raw = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        allowed = _CREDENTIALS.unpack(raw)[1] == os.geteuid() and self._clients < _CLIENTS_MAX
        self._clients += 1
        try:
            while allowed and await self._serve_one(client):
                pass
        except OSError:
            pass  # a client that left
        finally:
            self._clients -= 1
            client.close()

    async def _serve_one(self, client: trio.socket.SocketType) -> bool:
        frame = await client.recv(FRAME_MAX + 1)
        if not frame or len(frame) > FRAME_MAX:
            return False
        try:
            number, operation, arguments = msgspec.msgpack.decode(frame, type=_Request)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return False
        rights: list[tuple[int, int, bytes]] = []
        try:
            result, error = self._run(operation, arguments), None
            if operation == "descriptor":
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", self._fuse))]
        except DSecError as failure:
            result, error = None, to_wire(failure)
        await client.sendmsg([msgspec.msgpack.encode((number, error, result))], rights)
        if operation == "shutdown":
            self._stop()
        return True

    def _run(self, operation: str, arguments: Any) -> Any:
        run = getattr(self, f"do_{operation}", None) if operation.isascii() else None
        if not isinstance(arguments, dict):
            raise InvalidArgument("the arguments are not a map")
        if run is None:
            raise InvalidArgument(f"no operation {operation!r}")
        return run(arguments)

    def do_hello(self, arguments: dict[str, Any]) -> Any:
        if arguments.get("version") != VERSION:
            raise Unsupported(f"this dsec-blobd speaks version {VERSION}", reason="version")
        return {
            "version": VERSION,
            "pid": os.getpid(),
            "keeper": 0,
            "blobs": len(self._cache.blobs),
            "resend": False,
            "capabilities": CAPABILITIES,
        }

    def do_configure(self, arguments: dict[str, Any]) -> Any:
        try:
            settings = msgspec.convert(
                msgspec.to_builtins(self._cache.settings) | arguments, Settings
            )
        except msgspec.ValidationError as error:
            raise InvalidArgument(f"configure: {error}") from error
        values = msgspec.structs.astuple(settings)
        if min(values) < 0 or not all(values[1:]) or settings.fetch_min < CHUNK:
            raise InvalidArgument("times and threads must not be 0, fetches not below 65536 bytes")
        if not settings.fetch_min <= settings.fetch_max <= 8 << 20:
            raise InvalidArgument("fetch_max: below fetch_min, or above 8 MiB", field="fetch_max")
        self._cache.settings = settings
        return {}

    def do_add(self, arguments: dict[str, Any]) -> Any:
        source = _argument(arguments, "source", dict)
        return self._describe(self._cache.add(_id(arguments.get("id")), source))

    def do_remove(self, arguments: dict[str, Any]) -> Any:
        self._cache.remove(_id(arguments.get("id")))
        return {}

    def do_pin(self, arguments: dict[str, Any]) -> Any:
        return self._pin(arguments, True)

    def do_unpin(self, arguments: dict[str, Any]) -> Any:
        return self._pin(arguments, False)

    def _pin(self, arguments: dict[str, Any], pinned: bool) -> Any:
        blob = self._cache.find(_id(arguments.get("id")))
        blob.pinned = pinned
        return self._describe(blob)

    def do_hold(self, arguments: dict[str, Any]) -> Any:
        layer, names = _id(arguments.get("layer")), _argument(arguments, "blobs", list)
        if not 0 < len(names) <= _TRACE_BLOBS_MAX:
            raise InvalidArgument(f"blobs: not a list of 1 to {_TRACE_BLOBS_MAX} ids")
        self._cache.hold(layer, tuple(_id(name) for name in names))
        return {}

    def do_release(self, arguments: dict[str, Any]) -> Any:
        self._cache.holds.pop(_id(arguments.get("layer")), None)
        return {}

    def do_holds(self, arguments: dict[str, Any]) -> Any:
        layers, start = list(self._cache.holds), _argument(arguments, "from", int, 0)
        return {"total": len(layers), "layers": layers[start : start + _AT_ONCE]}

    def do_stat(self, arguments: dict[str, Any]) -> Any:
        return self._describe(self._cache.find(_id(arguments.get("id"))))

    def _describe(self, blob: Blob) -> Any:
        fields = blob.describe()
        return fields | {"pinned": blob.pinned or self._cache.held(blob.id)}

    def do_list(self, arguments: dict[str, Any]) -> Any:
        ids, start = list(self._cache.blobs), _argument(arguments, "from", int, 0)
        return {"total": len(ids), "ids": ids[start : start + _AT_ONCE]}

    def do_stats(self, _arguments: dict[str, Any]) -> Any:
        cache = self._cache
        return {name: cache.counters[name] for name in _COUNTERS} | {
            "blobs": len(cache.blobs),
            "used_bytes": cache.used(),
            "limit_bytes": cache.settings.cache_bytes,
            "waiting": 0,
            "prefetch_pending": cache.pending,
            "latency_us": int(cache.latency_s * 1e6),
        }

    def do_prefetch(self, arguments: dict[str, Any]) -> Any:
        blobs = self._blobs(arguments)
        priority = _argument(arguments, "priority", int, 0)
        queued = 0
        for number, item in enumerate(_argument(arguments, "ranges", list, [])):
            try:
                at, first, count = item
                within = 0 <= first < first + count <= len(blobs[at].chunks) and at >= 0
            except (TypeError, ValueError, IndexError):
                within = False
            if not within:
                raise InvalidArgument(f"ranges: number {number} is not within its blob")
            if self._cache.pending >= _QUEUE_MAX:
                break
            self._cache.prefetch(blobs[at], first, count, priority)
            queued += 1
        return {"queued": queued}

    def _blobs(self, arguments: dict[str, Any]) -> list[Any]:
        names = _argument(arguments, "blobs", list)
        if not 0 < len(names) <= _TRACE_BLOBS_MAX:
            raise InvalidArgument(f"blobs: not a list of 1 to {_TRACE_BLOBS_MAX} ids")
        return [self._cache.find(_id(name)) for name in names]

    def do_trace_start(self, arguments: dict[str, Any]) -> Any:
        number, traces = _argument(arguments, "trace", int, 0), self._cache.traces
        blobs = self._blobs(arguments)
        if number in traces:
            raise AlreadyExists(f"trace {number} is under way")
        if len(traces) >= _TRACES_MAX:
            raise Exhausted("too many traces at once")
        traces[number] = (blobs, set(), [])
        return {}

    def _trace(self, arguments: dict[str, Any]) -> int:
        number: int = _argument(arguments, "trace", int, 0)
        if number not in self._cache.traces:
            raise NotFound(f"there is no trace {number}")
        return number

    def do_trace_read(self, arguments: dict[str, Any]) -> Any:
        ranges = self._cache.traces[self._trace(arguments)][2]
        start = _argument(arguments, "from", int, 0)
        return {"total": len(ranges), "ranges": ranges[start : start + _AT_ONCE]}

    def do_trace_stop(self, arguments: dict[str, Any]) -> Any:
        del self._cache.traces[self._trace(arguments)]
        return {}

    def do_descriptor(self, _arguments: dict[str, Any]) -> Any:
        return {}

    def do_shutdown(self, _arguments: dict[str, Any]) -> Any:
        return {}
