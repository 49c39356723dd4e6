"""Calls of functions, as far as they are pure: arguments, messages, keys, how pools grow."""

from __future__ import annotations

import asyncio
import json
import struct

import msgspec
import pytest

from dsecd.backends.fncall_stream import Answer, body_of
from dsecd.engine.fncall_calls import asked_of, check, environment_of, outcome_of, result_of
from dsecd.engine.fncall_known import KEPT_BYTES, KnownCalls
from libdsec.errors import AlreadyExists, InvalidArgument, Unavailable
from libdsec.model import DSecFnCallArgs, FnCallResult

CALL = DSecFnCallArgs(container_image="base", code="def main(): pass")


def with_(**changes: object) -> DSecFnCallArgs:
    return msgspec.structs.replace(CALL, **changes)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"entry": "os.system"}, "entry"),
        ({"code": ""}, "code"),
        ({"argv": ["id"]}, "code"),
        ({"entry": "os:getpid"}, "code"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"timeout_s": float("inf")}, "timeout_s"),
        ({"cpu_limit_s": float("nan")}, "cpu_limit_s"),
        ({"output_limit_kb": 2000}, "output_limit_kb"),
        ({"files_limit_mb": 0}, "files_limit_mb"),
        ({"files": {"/etc/passwd": b""}}, "files"),
        ({"files": {"a/../../b": b""}}, "files"),
        ({"outputs": ["a\0b"]}, "outputs"),
        ({"outputs": ["a/"]}, "outputs"),
        ({"imports": ["os; import sys"]}, "imports"),
        ({"outputs": ["a" * 5000]}, "outputs"),
        ({"argv": ["a\0"], "code": ""}, "argv"),
        ({"env": {"A": "b\0"}}, "env"),
        ({"env": {"A=B": "c"}}, "env"),
        ({"env": {"": "c"}}, "env"),
        ({"key": ""}, "key"),
        ({"pool": "p" * 129}, "pool"),
    ],
)
def test_what_no_pool_could_do_is_refused(changes: dict[str, object], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        check(with_(**changes))
    assert caught.value.detail["field"] == field


def test_a_pool_is_of_one_owner_and_environment() -> None:
    base = environment_of("a", CALL)
    assert environment_of("a", with_(input=1, code="x", timeout_s=1, key="k")) == base
    assert environment_of("b", CALL) != base
    for changes in (
        {"imports": ["json"]}, {"memory_limit_mb": 64}, {"cpu_cores_limit": 2.0}, {"pool": "b"},
        {"cpu_class": "best_effort"},
        {"pids_limit": 3}, {"files_limit_mb": 3}, {"network": "nat"}, {"policy": "sealed"},
    ):  # fmt: skip
        assert environment_of("a", with_(**changes)) != base


def test_a_call_finds_its_parts_by_the_sizes_in_front() -> None:
    body = body_of({"a": 1}, [b"one", b"", b"three"])
    size, head_size = struct.unpack_from("=II", body)
    text = body[8:]
    assert len(text) == size
    assert json.loads(text[:head_size]) == {"a": 1, "parts": [3, 0, 5]}
    assert text[head_size:] == b"onethree"


def test_input_that_is_none_is_not_given() -> None:
    def given(args: DSecFnCallArgs) -> int:
        body = asked_of(args).body
        _, head_size = struct.unpack_from("=II", body)
        return int(json.loads(body[8 : 8 + head_size])["parts"][1])

    assert given(CALL) == 0
    assert given(with_(input=0)) == 1


def answered(status: int, timed_out: bool = False) -> FnCallResult:
    answer = Answer(status, timed_out, False, 0.0, 0.1, 0.2, b"1", b"", b"", {})
    return result_of(answer, 0.5)


def test_how_it_ended_in_one_word() -> None:
    assert (answered(0).exit_code, outcome_of(answered(0))) == (0, "ok")
    assert (answered(256).exit_code, outcome_of(answered(256))) == (1, "failed")
    killed = answered(9, timed_out=True)
    assert (killed.exit_code, killed.signal, outcome_of(killed)) == (None, 9, "timed_out")
    killed = answered(9)
    killed.oom_killed = True
    assert outcome_of(killed) == "oom_killed"


class Calls:
    """Counts what is made; each call ends when it is told to."""

    def __init__(self) -> None:
        self.made = 0
        self.go = asyncio.Event()
        self.result = FnCallResult(exit_code=0)

    async def make(self) -> FnCallResult:
        self.made += 1
        await self.go.wait()
        return self.result


async def test_a_key_is_made_once_while_it_runs_and_after() -> None:
    known, calls = KnownCalls(), Calls()
    waits = [asyncio.create_task(known.once("a", "k", CALL, calls.make)) for _ in range(3)]
    await asyncio.sleep(0)
    calls.go.set()
    assert await asyncio.gather(*waits) == [calls.result] * 3
    assert await known.once("a", "k", CALL, calls.make) is calls.result
    assert calls.made == 1
    await known.once("b", "k", CALL, calls.make)  # another owner's
    assert calls.made == 2
    with pytest.raises(AlreadyExists):
        await known.once("a", "k", with_(input=1), calls.make)


async def test_a_lost_wait_leaves_the_call_and_given_up_it_ends() -> None:
    known, calls = KnownCalls(), Calls()
    waits = [asyncio.create_task(known.once("a", "k", CALL, calls.make)) for _ in range(2)]
    await asyncio.sleep(0)
    for wait in waits:
        wait.cancel()
        await asyncio.gather(wait, return_exceptions=True)
        known.give_up("a", "k")
    calls.go.set()
    await known.once("a", "k", CALL, calls.make)
    assert calls.made == 2  # the first one was killed when nobody was left


async def test_a_failure_is_not_kept() -> None:
    known, calls = KnownCalls(), Calls()
    calls.go.set()

    async def fail() -> FnCallResult:
        raise Unavailable("lost")

    with pytest.raises(Unavailable):
        await known.once("a", "k", CALL, fail)
    await asyncio.sleep(0)
    assert await known.once("a", "k", CALL, calls.make) is calls.result


async def test_results_are_kept_within_bounds() -> None:
    known, calls = KnownCalls(), Calls()
    calls.go.set()
    calls.result = FnCallResult(exit_code=0, stdout=b"x" * (KEPT_BYTES // 3))
    for key in "abcd":
        await known.once("a", key, CALL, calls.make)
        await asyncio.sleep(0)
    assert calls.made == 4
    await known.once("a", "d", CALL, calls.make)
    assert calls.made == 4
    await known.once("a", "a", CALL, calls.make)  # the oldest had to go
    assert calls.made == 5
