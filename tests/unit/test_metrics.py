"""The exposition is valid Prometheus text and costs no library."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

import pytest

from dsecd.metrics import Exposition, Histogram, Registry
from tests.unit.engine_fixtures import bench

LINE = re.compile(r'[a-z_]+(\{[a-z]+="(\\.|[^"\\])*"\})? -?[0-9.e+-]+')


def test_every_line_is_well_formed() -> None:
    registry = Registry()
    registry.failures.add('we"ird\nlabel\\')
    registry.create_s.observe(0.004)
    registry.gauge("dsec_x", "Text.", "pool", lambda: {"a": 1.5, "b": 2})
    registry.gauge("dsec_y", "Text.", "", lambda: {"": 7})
    for line in registry.render().splitlines():
        assert line.startswith("# ") or LINE.fullmatch(line), line
    assert "dsec_y 7" in registry.render()


def test_histogram_buckets_are_cumulative() -> None:
    histogram = Histogram("h", "t", (0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 9.0):
        histogram.observe(value)
    assert [line for line in histogram.lines() if "bucket" in line] == [
        'h_bucket{le="0.1"} 2', 'h_bucket{le="1.0"} 3', 'h_bucket{le="+Inf"} 4',
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["unix", "tcp"])
async def test_scrape(kind: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        endpoint = f"unix:{directory}/m.sock" if kind == "unix" else "127.0.0.1:0"
        exposition = Exposition(Registry(), endpoint)
        await exposition.start()
        assert exposition._server is not None
        if kind == "unix":
            reader, writer = await asyncio.open_unix_connection(f"{directory}/m.sock")
        else:
            port = exposition._server.sockets[0].getsockname()[1]
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        head, _, body = (await reader.read()).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200 OK")
        assert b"dsec_creates_total 0" in body
        writer.close()
        await exposition.close()
        assert not (Path(directory) / "m.sock").exists()


async def test_the_daemon_counts_what_it_does() -> None:
    async with bench() as b:
        client = await b.client()
        info = await client.create("k")
        with pytest.raises(Exception, match="no space"):
            await client.create("x", image="broken")
        text = b.service.registry.render()
        assert "dsec_creates_total 1" in text
        assert 'dsec_create_failures_total{code="exhausted"} 1' in text
        assert 'dsec_sandboxes{state="running"} 1' in text
        await client.stop(info.id)
        assert 'dsec_ended_total{cause="stopped"} 1' in b.service.registry.render()
