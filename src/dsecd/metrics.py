"""Prometheus text exposition of the daemon's counters.

A few dozen numbers do not justify a client library: an increment here is one dictionary update,
and the text is built only when it is scraped. The registry belongs to one daemon object.
"""

from __future__ import annotations

import asyncio
import bisect
import contextlib
from collections.abc import Callable, Mapping
from pathlib import Path

from dsecd.config import split_address

BUCKETS_S = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
Sample = Mapping[str, float]


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


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
            out.append(f"{self.name}{tag} {count:g}")
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
        self.events_dropped = Counter(
            "dsec_events_dropped_total", "Events not delivered to slow subscribers."
        )
        self._gauges: list[tuple[str, str, str, Callable[[], Sample]]] = []

    def gauge(self, name: str, text: str, label: str, read: Callable[[], Sample]) -> None:
        """Register `read`, which returns ``{label value: number}``; label "" → key ""."""
        self._gauges.append((name, text, label, read))

    def render(self) -> str:
        lines: list[str] = []
        for family in vars(self).values():
            if isinstance(family, Counter | Histogram):
                lines += family.lines()
        for name, text, label, read in self._gauges:
            lines += [f"# HELP {name} {text}", f"# TYPE {name} gauge"]
            for value, number in sorted(read().items()):
                tag = f'{{{label}="{_escape(value)}"}}' if label else ""
                lines.append(f"{name}{tag} {number:g}")
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
                body = self._registry.render().encode()
                head = (
                    "HTTP/1.1 200 OK\r\nContent-Type: text/plain; version=0.0.4\r\n"
                    f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
                )
                writer.write(head.encode() + body)
                await writer.drain()
        writer.close()
