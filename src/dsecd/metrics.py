"""Prometheus text exposition of the daemon's counters.

A few dozen numbers do not justify a client library: an increment here is one dictionary update,
and the text is built only when it is scraped. The registry belongs to one daemon object.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from dsecd.config import split_address
from libdsec.errors import DSecError

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
Sample = Mapping[str, float]


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    """Whole up to 2^53: a counter that is rounded seems to stand still."""
    return f"{value:.16g}"


class Counter:
    """A count that only grows, split by the values of one label ("" → no label)."""

    def __init__(self, name: str, text: str, label: str = "") -> None:
        self.name, self.text, self.label = name, text, label
        self.values: dict[str, float] = {} if label else {"": 0.0}

    def add(self, value: str = "", amount: float = 1.0) -> None:
        self.values[value] = self.values.get(value, 0.0) + amount

    def lines(self) -> list[str]:
        out = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} counter"]
        for value, count in sorted(self.values.items()):
            tag = f'{{{self.label}="{_escape(value)}"}}' if self.label else ""
            out.append(f"{self.name}{tag} {_number(count)}")
        return out


class Histogram:
    """Durations in seconds, in fixed buckets."""

    def __init__(self, name: str, text: str, buckets: tuple[float, ...] = BUCKETS_S) -> None:
        self.name, self.text, self.buckets = name, text, buckets
        self.counts = [0] * (len(buckets) + 1)
        self.total = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect.bisect_left(self.buckets, seconds)] += 1
        self.total += seconds

    def lines(self) -> list[str]:
        out = [f"# HELP {self.name} {self.text}", f"# TYPE {self.name} histogram"]
        seen = 0
        for bound, count in zip((*self.buckets, "+Inf"), self.counts, strict=True):
            seen += count
            out.append(f'{self.name}_bucket{{le="{bound}"}} {seen}')
        return [*out, f"{self.name}_sum {self.total:.6f}", f"{self.name}_count {seen}"]


class Foreign(NamedTuple):
    """A number that another process counts, found under `key` in what it answers."""

    key: str
    name: str
    kind: Literal["counter", "gauge"]
    text: str


# Counters begin at 0 when dsec-blobd is started anew, as Prometheus expects of a restart.
BLOBD = (
    Foreign("reads", "dsec_blobd_reads_total", "counter", "Reads of served blobs."),
    Foreign("hits", "dsec_blobd_hits_total", "counter", "Reads answered from the cache."),
    Foreign("waits", "dsec_blobd_misses_total", "counter", "Reads that waited for the store."),
    Foreign("read_errors", "dsec_blobd_read_errors_total", "counter", "Reads that failed."),
    Foreign("fetches", "dsec_blobd_fetches_total", "counter", "Requests to the store."),
    Foreign("fetched_bytes", "dsec_blobd_fetched_bytes_total", "counter", "Bytes the store sent."),
    Foreign("fetch_faults", "dsec_blobd_fetch_faults_total", "counter", "Fetches tried again."),
    Foreign(
        "damaged_chunks", "dsec_blobd_damaged_chunks_total", "counter",
        "Chunks of the store that were not those of the index.",
    ),
    Foreign(
        "prefetched_chunks", "dsec_blobd_prefetched_chunks_total", "counter",
        "Chunks fetched before they were read.",
    ),
    Foreign("evicted_bytes", "dsec_blobd_evicted_bytes_total", "counter", "Bytes evicted."),
    Foreign(
        "no_room", "dsec_blobd_no_room_total", "counter",
        "Fetches that failed because nothing could be evicted.",
    ),
    Foreign("restarts", "dsec_blobd_restarts_total", "counter", "Deaths seen by this dsecd."),
    Foreign("used_bytes", "dsec_blobd_cache_bytes", "gauge", "Bytes of blobs in the cache."),
    Foreign("limit_bytes", "dsec_blobd_cache_limit_bytes", "gauge", "Their bound, 0: none."),
    Foreign("blobs", "dsec_blobd_blobs", "gauge", "Registered blobs."),
    Foreign("holds", "dsec_blobd_held_layers", "gauge", "Layers mounted on the cache's files."),
    Foreign("waiting", "dsec_blobd_waiting_reads", "gauge", "Reads that wait for the store now."),
    Foreign(
        "latency_us", "dsec_blobd_store_latency_us", "gauge",
        "Moving average of the store's time to the first byte.",
    ),
)  # fmt: skip
FOREIGN_S = 2.0  # a process that does not answer in time is left out of the text


class _Process:
    """Another process that counts."""

    def __init__(self, rows: Sequence[Foreign], read: Callable[[], Awaitable[Sample]]) -> None:
        self._rows, self._read = rows, read
        self._asking: asyncio.Future[Sample] | None = None

    async def lines(self) -> list[str]:
        """Return [] when it does not answer in time. The question stands: to cancel it costs the
        connection, which others use, too."""
        asking = self._asking = self._asking or asyncio.ensure_future(self._read())
        done, _ = await asyncio.wait({asking}, timeout=FOREIGN_S)
        if not done:
            return []
        self._asking = None
        if asking.cancelled() or isinstance(asking.exception(), DSecError):
            return []
        sample, out = asking.result(), []
        for row in self._rows:
            if row.key in sample:
                out += [f"# HELP {row.name} {row.text}", f"# TYPE {row.name} {row.kind}"]
                out.append(f"{row.name} {_number(sample[row.key])}")
        return out


class Registry:
    """Everything `dsecd` counts. Gauges are read when scraped."""

    def __init__(self) -> None:
        self.creates = Counter("dsec_creates_total", "Sandboxes created.")
        self.failures = Counter(
            "dsec_create_failures_total", "Creates that failed, by error code.", "code"
        )
        self.create_s = Histogram("dsec_create_seconds", "Request to running sandbox.")
        self.stops = Counter("dsec_ended_total", "Sandboxes that ended, by cause.", "cause")
        self.oom = Counter("dsec_oom_kills_total", "Processes killed by a sandbox's memory limit.")
        self.calls = Counter("dsec_calls_total", "Calls received, by operation.", "op")
        self.commands = Counter("dsec_commands_total", "Commands started in sandboxes.")
        self.errors = Counter("dsec_call_errors_total", "Calls that failed, by code.", "code")
        self.reclaims = Counter("dsec_reclaims_total", "Sandboxes asked for memory.", "action")
        self.reclaim_asked = Counter("dsec_reclaim_asked_bytes_total", "What they were asked for.")
        self.reclaim_freed = Counter("dsec_reclaim_freed_bytes_total", "What they gave.")
        self.pauses = Counter("dsec_pauses_total", "Sandboxes paused: caller, or idle.", "by")
        self.resumes = Counter("dsec_resumes_total", "Paused sandboxes resumed.")
        self.resume_s = Histogram("dsec_resume_seconds", "Resume to answering agent.")
        self.fncalls = Counter("dsec_fncalls_total", "Function calls, by their end.", "outcome")
        self.fncall_queued_s = Histogram("dsec_fncall_queued_seconds", "Waits for a worker.")
        self.fncall_run_s = Histogram("dsec_fncall_run_seconds", "Function calls, as they ran.")
        self.fncall_dropped = Counter("dsec_fncall_dropped_total", "Workers not used again.")
        self.events_dropped = Counter(
            "dsec_events_dropped_total", "Events not delivered to slow subscribers."
        )
        self._gauges: list[tuple[str, str, str, Callable[[], Sample]]] = []
        self._foreign: list[_Process] = []

    def gauge(self, name: str, text: str, label: str, read: Callable[[], Sample]) -> None:
        """Register `read`, which returns ``{label value: number}``; label "" → key ""."""
        self._gauges.append((name, text, label, read))

    def foreign(self, rows: Sequence[Foreign], read: Callable[[], Awaitable[Sample]]) -> None:
        """Register `read`, which asks another process; what it leaves out is not shown."""
        self._foreign.append(_Process(rows, read))

    async def scrape(self) -> str:
        """Return all of the text, other processes' numbers included."""
        lines = [line for process in self._foreign for line in await process.lines()]
        return self.render() + "".join(f"{line}\n" for line in lines)

    def render(self) -> str:
        lines: list[str] = []
        for family in vars(self).values():
            if isinstance(family, Counter | Histogram):
                lines += family.lines()
        for name, text, label, read in self._gauges:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
            for value, number in sorted(read().items()):
                tag = f'{{{label}="{_escape(value)}"}}' if label else ""
                lines.append(f"{name}{tag} {_number(number)}")
        return "\n".join(lines) + "\n"


class Exposition:
    """A minimal HTTP/1.1 server that answers any GET with the registry's text."""

    def __init__(self, registry: Registry, endpoint: str) -> None:
        self._registry, self._endpoint = registry, endpoint
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen on the endpoint ("unix:/path" or "host:port")."""
        if self._endpoint.startswith("unix:"):
            path = Path(self._endpoint.removeprefix("unix:"))
            path.unlink(missing_ok=True)
            self._server = await asyncio.start_unix_server(self._serve, path)
            path.chmod(0o600)
        else:
            host, port = split_address(self._endpoint)
            self._server = await asyncio.start_server(self._serve, host, port)

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()
            if self._endpoint.startswith("unix:"):
                Path(self._endpoint.removeprefix("unix:")).unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            async with asyncio.timeout(10):
                await reader.readuntil(b"\r\n\r\n")
                body = (await self._registry.scrape()).encode()
                head = (
                    "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
        writer.close()
