"""Waiting that leaves what it waits for alone."""

from __future__ import annotations

import asyncio

import pytest

from dsecd.engine.waiter import completed
from dsecd.host.settle import settle
from tests.waiting import let_pass


async def test_it_returns_when_the_future_is_done_whatever_the_outcome() -> None:
    loop = asyncio.get_running_loop()
    for finish in (
        lambda future: future.set_result(None),
        lambda future: future.set_exception(ValueError()),
        lambda future: future.cancel(),
    ):
        future = loop.create_future()
        loop.call_soon(finish, future)
        assert await completed(future, 5.0)
        assert await completed(future)
        if not future.cancelled():
            future.exception()


async def test_time_and_cancellation_leave_the_future_alone() -> None:
    future = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(completed(future, 60))
    await asyncio.sleep(0.02)
    assert not waiting.done()
    let_pass(90)
    assert not await waiting
    waiting = asyncio.create_task(completed(future))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not future.done()
    future.set_result(1)
    assert await completed(future)


async def test_settle_outlasts_cancellations_and_reports_them() -> None:
    future = asyncio.get_running_loop().create_future()
    waiting = asyncio.create_task(settle(future))
    for _ in range(3):
        await asyncio.sleep(0)
        waiting.cancel()
    await asyncio.sleep(0)
    assert not waiting.done()
    future.set_result(None)
    assert await waiting
    assert not await settle(future)
