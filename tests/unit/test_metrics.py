"""The exposition is valid Prometheus text and costs no library."""

from __future__ import annotations

import asyncio
import re
import tempfile
from pathlib import Path

import pytest

from dsecd import metrics
from dsecd.metrics import Exposition, Histogram, Registry
from libdsec.errors import Unavailable
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


def test_large_counts_are_whole() -> None:
    """1,000,001 was shown as 1e+06, so that a counter seemed to stand still."""
    registry = Registry()
    registry.creates.add(amount=1_000_001)
    registry.gauge("dsec_y", "Text.", "", lambda: {"": (1 << 40) + 1})
    assert "dsec_creates_total 1000001\n" in registry.render()
    assert "dsec_y 1099511627777\n" in registry.render()


async def test_numbers_of_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "FOREIGN_S", 0.02)
    answers: list[asyncio.Future[dict[str, float]]] = []

    async def read() -> dict[str, float]:
        answers.append(asyncio.get_running_loop().create_future())
        return await answers[-1]

    registry = Registry()
    registry.foreign(metrics.BLOBD, read)
    assert "blobd" not in await registry.scrape()  # no answer, and the rest is shown
    assert "dsec_creates_total 0" in await registry.scrape()
    assert len(answers) == 1  # it was not asked again meanwhile
    answers[0].set_result({"reads": 1 << 40, "used_bytes": 5})
    text = await registry.scrape()
    assert "# TYPE dsec_blobd_reads_total counter\ndsec_blobd_reads_total 1099511627776\n" in text
    assert "# TYPE dsec_blobd_cache_bytes gauge\ndsec_blobd_cache_bytes 5\n" in text
    assert "dsec_blobd_hits_total" not in text
    for line in text.splitlines():
        assert line.startswith("# ") or LINE.fullmatch(line), line
    scrape = asyncio.create_task(registry.scrape())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    answers[1].set_exception(Unavailable("gone"))
    assert "blobd" not in await scrape


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
