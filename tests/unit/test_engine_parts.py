"""Timer, events and the request's check on their own."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from dsecd.backends.abc import Capabilities
from dsecd.config import Limits
from dsecd.engine.admission import Admission
from dsecd.engine.events import Bus
from dsecd.engine.request import check_key, compile_spec
from dsecd.engine.timer import Timer
from dsecd.model import make_id, parse_id
from dsecd.policy.compile import compile_policy
from dsecd.policy.language import Policy
from libdsec.errors import Exhausted, InvalidArgument
from libdsec.model import DSecContainerRunArgs
from tests.unit.engine_fixtures import QuietHost


async def test_the_timer_asks_again_when_the_deadline_moved() -> None:
    loop = asyncio.get_running_loop()
    deadlines = {"a": loop.time() + 0.05}
    fired = []

    def look(name: str) -> float | None:
        if loop.time() + 0.001 < deadlines[name]:
            return deadlines[name]
        fired.append((name, loop.time()))
        return None

    timer = Timer(look)
    timer.watch("a", deadlines["a"])
    deadlines["a"] += 0.1
    await asyncio.sleep(0.3)
    ((name, when),) = fired
    assert name == "a"
    assert when >= deadlines["a"] - 0.002
    assert len(timer) == 0


async def test_an_earlier_deadline_replaces_a_later_one() -> None:
    now, fired = asyncio.get_running_loop().time(), []
    timer = Timer(lambda name: fired.append(name))
    timer.watch("a", now + 60)
    timer.watch("a", now + 0.02)
    timer.watch("b", now + 0.01)
    timer.watch("c", now + 0.03)
    timer.forget("c")
    await asyncio.sleep(0.1)
    assert fired == ["b", "a"]
    timer.close()


async def test_the_timer_does_not_keep_an_entry_of_every_sandbox_that_ever_was() -> None:
    loop, fired = asyncio.get_running_loop(), []
    timer = Timer(lambda name: fired.append(name))
    timer.watch("stays", loop.time() + 0.05)
    for number in range(10_000):
        timer.watch(f"s{number}", loop.time() + 86_400)
        timer.forget(f"s{number}")
    assert len(timer._heap) < 2_000
    assert len(timer) == 1
    await asyncio.sleep(0.1)
    assert fired == ["stays"]
    timer.close()


async def test_a_slow_subscriber_loses_events_and_is_told() -> None:
    dropped: list[None] = []
    bus = Bus(limit=4, on_drop=lambda: dropped.append(None))
    slow, other = bus.subscribe(), bus.subscribe("x")
    for i in range(10):
        bus.emit(f"s{i}", "created")
    got = [await anext(slow) for _ in range(4)]
    assert [event.sandbox for event in got] == ["s0", "s1", "s2", "s3"]
    bus.emit("s10", "stopped")
    marker, after = await anext(slow), await anext(slow)
    assert (marker.kind, marker.detail) == ("dropped", {"count": "6"})
    assert after.sandbox == "s10"
    assert other.dropped == 0
    assert len(dropped) == 6
    bus.close()
    with pytest.raises(StopAsyncIteration):
        await anext(slow)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("container_image", ""), ("memory_limit_mb", 1), ("cpu_cores_limit", 0),
        ("cpu_cores_limit", float("nan")), ("pids_limit", 0), ("disk_limit_mb", 0),
        ("ttl_running_stop", -1), ("max_lifetime_s", 0), ("hostname", "a b"),
        ("hostname", "x" * 64), ("workdir", "relative"), ("env", {"A=B": "c"}),
        ("env", {"A": "\0"}), ("init_user", "a\nb"), ("output_limit_mb", 0),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_are_refused_by_field(field: str, value: object) -> None:
    args = DSecContainerRunArgs(**{"container_image": "x", field: value})
    with pytest.raises(InvalidArgument) as caught:
        compile_spec("s0-n0-1-1", args)
    assert caught.value.detail["field"] == field


def test_units() -> None:
    args = DSecContainerRunArgs(container_image="x", memory_limit_mb=64, network="nat")
    spec = compile_spec("s0-n0-1-1", args)
    assert (spec.memory_bytes, spec.network, spec.policy) == (64 << 20, "nat", None)
    assert spec.hostname == "1"


def test_keys_are_bounded() -> None:
    for key in ("", "x" * 201):
        with pytest.raises(InvalidArgument):
            check_key(key)


def test_ids_carry_shard_node_and_epoch() -> None:
    name = make_id("s12", "node7", 1295, 123456789)
    parts = parse_id(name)
    assert parts is not None
    assert (parts.shard, parts.node, parts.epoch) == ("s12", "node7", 1295)
    assert len(make_id("a" * 12, "b" * 12, 36**6 - 1, 36**7)) <= 48
    for wrong in ("", "a-b-c", "../x", "a-b-c-d-e", "A-b-1-1"):
        assert parse_id(wrong) is None


def test_the_open_file_limit_bounds_the_number_of_sandboxes() -> None:
    host = QuietHost()
    host.files_max = 768 + 5 * 3
    admission = Admission(Limits(), host, {"container": Capabilities(files_each=5)})
    spec = compile_spec("s0-n0-1-1", DSecContainerRunArgs(container_image="x"))
    for _ in range(3):
        admission.take(spec, 0)
    with pytest.raises(Exhausted, match="open file limit"):
        admission.take(spec, 0)
    admission.give_back(spec)
    admission.take(spec, 0)


def test_rules_for_the_network_cost_files_of_their_own() -> None:
    host = QuietHost()
    host.files_max = 768 + 25
    able = Capabilities(files_each=5, files_ruled=5)
    admission = Admission(Limits(), host, {"container": able})
    plain = compile_spec("s-n-1-a", DSecContainerRunArgs(container_image="x"))
    ruled = msgspec.structs.replace(plain, network="nat", policy=compile_policy(Policy()))
    admission.take(ruled, 0)
    admission.take(ruled, 0)
    with pytest.raises(Exhausted, match="open file limit"):
        admission.take(ruled, 0)
    admission.take(plain, 0)
    admission.give_back(ruled)
    admission.take(ruled, 0)
