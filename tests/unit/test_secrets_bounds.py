"""Bounds of the proxy, and how its connections end."""

from __future__ import annotations

import asyncio
import contextlib
import time
from pathlib import Path

import pytest

from dsecd.doors.gate import Limits, bind
from dsecd.doors.upstream import client_context
from dsecd.secrets.exchange import Timing
from libdsec.errors import InvalidArgument, Unavailable
from tests.unit.secrets_proxy_lab import (
    GET,
    OTHER,
    lab,
    on_uvloop,
)
from tests.unit.secrets_upstream import HOST


@on_uvloop
async def test_clients_that_vanish_leave_nothing_upstream(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        for path in ("/hang", "/big", "/events"):
            async with it.connection() as (reader, writer):
                writer.write(GET.format(path).encode())
                if path != "/hang":
                    await reader.read(10)
                else:
                    while not it.api.open:  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                writer.transport.abort()
            if path == "/events":
                it.api.release.set()
            await it.settled()


@on_uvloop
async def test_a_head_that_does_not_come_is_not_waited_for(tmp_path: Path) -> None:
    timing = Timing(head_s=0.2, idle_s=0.4)
    async with lab(tmp_path, timing=timing) as it:
        for opening in (b"", b"GET / HT"):
            begun = time.monotonic()
            with contextlib.suppress(ConnectionError):
                await it.raw(opening, plain=True)
            assert time.monotonic() - begun < 2
        await it.settled()


@on_uvloop
async def test_an_upstream_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async with lab(tmp_path, timing=Timing(silence_s=0.3)) as it:
        answer = await it.raw(GET.format("/hang"))
        assert answer.startswith(b"HTTP/1.1 502 ")
        assert b"it fell silent" in answer


@on_uvloop
async def test_connections_and_rate_are_bounded(tmp_path: Path) -> None:
    limits = Limits(connections=4, requests_burst=12, requests_per_s=50)
    async with lab(tmp_path, limits=limits) as it, contextlib.AsyncExitStack() as held:
        for _ in range(4):
            await held.enter_async_context(it.connection(plain=True))
        reader, writer = await held.enter_async_context(it.connection(plain=True))
        writer.write(GET.format("/ok").encode())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3):
                await reader.read(1)
        await asyncio.sleep(0.2)
        assert it.proxy.connections == 4
    async with lab(tmp_path, limits=limits) as it:
        begun = time.monotonic()
        for _ in range(20):  # each costs two
            assert b"yes" in await it.raw(GET.format("/ok").replace("1.1", "1.0"), plain=True)
        assert time.monotonic() - begun > 0.3


@on_uvloop
async def test_silent_handshakes_and_open_answers_end_with_the_sandbox(tmp_path: Path) -> None:
    async with lab(tmp_path) as it, contextlib.AsyncExitStack() as held:
        port = it.doors[0].tls.getsockname()[1]
        for _ in range(5):  # TCP only
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            held.callback(writer.transport.abort)
        for path in ("/hang", "/events", "/big"):
            _, writer = await held.enter_async_context(it.connection())
            writer.write(GET.format(path).encode())
        while it.api.open < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await it.proxy.close()
        assert it.proxy.connections == 0
        it.api.release.set()


@on_uvloop
async def test_a_name_that_is_no_longer_allowed_is_cut_off(tmp_path: Path) -> None:
    async with lab(tmp_path) as it:
        async with it.connection() as (reader, writer):
            writer.write(GET.format("/events").encode())
            await reader.readuntil(b"data: 1\n\n")
            it.proxy.replace([OTHER.host])
            with contextlib.suppress(ConnectionError):
                assert await reader.read() in (b"", b"\r\n")
        it.api.release.set()
        with contextlib.suppress(ConnectionError):
            assert await it.raw(GET.format("/ok"), plain=True) == b""
        assert len(it.api.seen) == 1
        it.proxy.replace([HOST, OTHER.host])
        assert b"yes" in await it.raw(GET.format("/ok").replace("1.1", "1.0"))


@on_uvloop
async def test_refusals_are_reported_up_to_a_rate(tmp_path: Path) -> None:
    async with lab(tmp_path, limits=Limits(events_burst=3, events_per_s=0.0)) as it:
        for _ in range(5):
            await it.raw("TRACE / HTTP/1.1\r\nHost: api.example.com\r\n\r\n", plain=True)
        assert len(it.refusals) == 3
        assert "TRACE" in it.refusals[0].reason


def test_an_address_that_is_taken_is_named() -> None:
    doors = bind("127.0.0.1", 0, 0)
    try:
        with pytest.raises(Unavailable, match=r"127\.0\.0\.1 port"):
            bind("127.0.0.1", 0, doors.plain.getsockname()[1])
    finally:
        doors.close()


def test_authorities_that_are_none_are_refused(tmp_path: Path) -> None:
    for text in (None, "no certificate"):
        if text:
            (tmp_path / "x.pem").write_text(text)
        with pytest.raises(InvalidArgument, match=r"secrets\.authorities"):
            client_context(str(tmp_path / "x.pem"))
