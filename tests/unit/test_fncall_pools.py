"""How pools of workers grow, rest and shrink; the workers are stand-ins that end when told to."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dsecd.backends.fncall_stream import Answer, Asked, Lost
from dsecd.config import FnCall
from dsecd.engine import fncall
from dsecd.engine.fncall_worker import Environment
from dsecd.engine.manager import Manager
from dsecd.metrics import Registry
from libdsec.errors import Exhausted, Internal, Unavailable
from libdsec.model import DSecFnCallArgs, FnCallResult
from tests.waiting import let_pass, until

CPUS = 2
CALL = DSecFnCallArgs(container_image="base", code="def main(): pass")


class Stand:
    """A worker whose calls last until `finish`."""

    made: list[Stand]
    start_with: Callable[[], Awaitable[None]]

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.sandbox = SimpleNamespace(id=f"w{len(Stand.made)}", gone=asyncio.Future[None]())
        self.idle_since = 0.0
        self.on_ready: Callable[[], None] = lambda: None
        self.on_lost: Callable[[str], None] = lambda why: None
        self.busy: asyncio.Future[Answer] | None = None
        self.ended = ""

    @classmethod
    async def start(cls, manager: Manager, environment: Environment) -> Stand:
        await Stand.start_with()
        made = cls(environment)
        Stand.made.append(made)
        return made

    def tell(self, on_ready: Callable[[], None], on_lost: Callable[[str], None]) -> None:
        self.on_ready, self.on_lost = on_ready, on_lost

    async def call(self, asked: Asked) -> Answer:
        self.busy = asyncio.Future()
        return await self.busy

    def finish(self) -> None:
        assert self.busy is not None
        self.busy.set_result(Answer(0, False, False, 0.0, 0.0, 0.0, b"1", b"", b"", {}))
        self.on_ready()

    def end(self, reason: str) -> None:
        assert not self.ended
        self.ended = reason
        self.sandbox.gone.set_result(None)


class Hosts:
    """What pools ask of the engine."""

    def __init__(self) -> None:
        self.registry = Registry()
        self.above = 0
        self.admission = SimpleNamespace(
            host=SimpleNamespace(cpus=CPUS), above_target_bytes=lambda: self.above
        )

    def refresh_oom(self, sandbox: object) -> int:
        return 0


async def at_once() -> None:
    """A start that takes no time."""


async def full() -> None:
    raise Exhausted("the host is full")


@pytest.fixture(autouse=True)
def stands(monkeypatch: pytest.MonkeyPatch) -> None:
    Stand.made, Stand.start_with = [], at_once
    monkeypatch.setattr(fncall, "Worker", Stand)
    monkeypatch.setattr(fncall, "_PATIENCE_S", 60.0)
    monkeypatch.setattr(fncall, "_REST_S", 600.0)
    monkeypatch.setattr(fncall, "_SWEEP_S", 0.02)
    monkeypatch.setattr(fncall, "_SHORT_IDLE_S", 0.03)


def pools(host: Hosts | None = None, **config: Any) -> fncall.Pools:
    return fncall.Pools(cast(Manager, host or Hosts()), FnCall(**config))


def ask(made: fncall.Pools, **args: Any) -> asyncio.Task[FnCallResult]:
    call = DSecFnCallArgs(container_image="base", code="def main(): pass", **args)
    return asyncio.create_task(made.run("", call))


async def give_up(*asked: asyncio.Task[FnCallResult]) -> None:
    for task in asked:
        task.cancel()
    await asyncio.gather(*asked, return_exceptions=True)


async def turns(n: int = 10) -> None:
    for _ in range(n):
        await asyncio.sleep(0)


async def test_two_workers_for_each_processor_at_once_more_for_who_waits() -> None:
    made = pools(workers_each=6)
    asked = [ask(made) for _ in range(10)]
    await turns()
    assert len(Stand.made) == 2 * CPUS
    let_pass(90)
    await until(lambda: len(Stand.made) == 6)
    while not all(task.done() for task in asked):
        for worker in Stand.made:
            if worker.busy is not None and not worker.busy.done():
                worker.finish()
        await turns()
    assert all(task.result().ok for task in asked)
    assert len(Stand.made) == 6
    await made.close()
    assert all(worker.ended for worker in Stand.made)


async def test_calls_are_served_in_their_order() -> None:
    made = pools(workers=1)
    asked = [ask(made) for _ in range(3)]
    await turns()
    for task in asked:
        assert not task.done()
        Stand.made[0].finish()
        await turns()
        assert task.done()
    assert len(Stand.made) == 1
    await made.close()


async def test_a_host_that_is_full_fails_no_call_that_a_worker_will_serve() -> None:
    made = pools(workers_each=4)
    first = ask(made)
    await turns()
    Stand.start_with = full
    others = [ask(made) for _ in range(5)]
    let_pass(90)
    await asyncio.sleep(0.03)
    assert not any(task.done() for task in others)
    for task in [first, *others]:
        Stand.made[0].finish()
        await turns()
        assert task.result().ok
    await made.close()


async def test_a_pool_tries_again_to_grow_after_a_rest() -> None:
    made = pools(workers_each=4)
    ask(made)
    await turns()
    Stand.start_with = full
    ask(made)
    await turns()
    Stand.start_with = at_once
    await turns()
    assert len(Stand.made) == 1
    let_pass(900)
    await until(lambda: len(Stand.made) == 2)
    await made.close()


@pytest.mark.parametrize("error", [Exhausted("full"), Lost("gone"), KeyError("sandbox")])
async def test_without_any_worker_all_who_wait_learn_why(error: Exception) -> None:
    async def fail() -> None:
        raise error

    Stand.start_with = fail
    made = pools()
    asked = [ask(made) for _ in range(9)]
    await until(lambda: all(task.done() for task in asked))
    kinds = {Exhausted: Exhausted, Lost: Unavailable, KeyError: Internal}
    for task in asked:
        assert type(task.exception()) is kinds[type(error)]
    await made.close()


async def test_the_place_of_an_idle_worker_goes_to_another_pool() -> None:
    made = pools(workers=1)
    first = ask(made)
    await turns()
    Stand.made[0].finish()
    await first
    second = ask(made, pool="b")
    await turns()
    assert Stand.made[0].ended
    Stand.made[1].finish()
    assert (await second).ok
    await made.close()


async def test_idle_workers_end_and_sooner_when_the_host_is_short() -> None:
    host = Hosts()
    made = pools(host, idle_s=30.0)
    first = ask(made)
    await turns()
    Stand.made[0].finish()
    await first
    await asyncio.sleep(0.08)
    assert not Stand.made[0].ended
    host.above = 1
    await until(lambda: not made.numbers()["pools"])
    assert Stand.made[0].ended == "idle"
    assert made.numbers() == {"pools": 0, "workers": 0, "idle": 0, "waiting": 0}
    await made.close()


async def test_calls_that_wait_are_bounded_in_number() -> None:
    made = pools(workers=1, queued=2)
    running = ask(made)
    await turns()
    waiting = [ask(made), ask(made)]
    await turns()
    other = ask(made, pool="b")  # has a queue of its own
    with pytest.raises(Exhausted, match="2 calls of this pool wait"):
        await ask(made)
    assert not any(task.done() for task in (running, *waiting, other))
    await give_up(running, *waiting, other)
    await made.close()


async def test_calls_that_wait_are_bounded_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fncall, "_QUEUED_BYTES", 5 << 20)
    made = pools(workers=1)
    large = {"a": bytes(2 << 20)}
    first = ask(made, files=large)
    await turns()
    waiting = [ask(made, files=large), ask(made, pool="b", files=large)]
    refused = ask(made, pool="b", files=large)
    with pytest.raises(Exhausted, match="hold 4 MiB"):
        await refused
    Stand.made[0].finish()  # one that waited has the worker now
    await turns()
    assert first.done()
    waiting.append(ask(made, files=large))
    await turns()
    assert not any(task.done() for task in waiting)
    await give_up(*waiting)
    await made.close()


async def test_a_call_given_up_while_it_waits_takes_no_worker() -> None:
    made = pools(workers=1)
    first, second, third = (ask(made) for _ in range(3))
    await turns()
    second.cancel()
    await turns()
    for task in (first, third):
        Stand.made[0].finish()
        await turns()
        assert task.result().ok
    assert made.numbers()["idle"] == 1
    await made.close()


async def test_a_lost_worker_is_replaced_for_those_who_wait() -> None:
    made = pools(workers=1)
    first, second = ask(made), ask(made)
    await turns()
    lost = Stand.made[0]
    assert lost.busy is not None
    lost.busy.set_exception(Lost("it died"))
    lost.on_lost("it died")
    await turns()
    with pytest.raises(Unavailable, match="again"):
        await first
    Stand.made[1].finish()
    assert (await second).ok
    await made.close()
