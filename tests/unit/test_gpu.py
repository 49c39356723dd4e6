"""Scheduling of GPUs, on devices that only exist here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsecd.resources.gpu import Demand, Device, Scheduler, Unplaceable

GIB = 1 << 30


def device(index: int, gib: int = 16, places: int = 2) -> Device:
    nodes = ("/dev/nvidiactl", f"/dev/nvidia{index}")
    return Device(index=index, memory_bytes=gib * GIB, nodes=nodes, places=places)


def shared(gib: int = 1) -> Demand:
    return Demand(memory_bytes=gib * GIB)


def exclusive(devices: int = 1) -> Demand:
    return Demand(mode="exclusive", devices=devices)


def placed(scheduler: Scheduler) -> dict[str, list[int]]:
    return {grant.task: [each.index for each in grant.devices] for grant in scheduler.grants()}


def test_shared_tasks_fill_a_device_before_the_next() -> None:
    scheduler = Scheduler([device(0), device(1)], compilers=1)
    for name in "abc":
        scheduler.add(name, shared(), compiled=True)
    found = placed(scheduler)
    assert found["a"] == found["b"] != found["c"]


def test_memory_bounds_who_lies_together() -> None:
    scheduler = Scheduler([device(0)], compilers=1)
    scheduler.add("a", shared(10), compiled=True)
    scheduler.add("b", shared(10), compiled=True)
    assert placed(scheduler) == {"a": [0]}
    scheduler.end("a")
    assert placed(scheduler) == {"b": [0]}


def test_exclusive_waits_for_an_empty_device_and_is_not_passed_there() -> None:
    scheduler = Scheduler([device(0)], compilers=1)
    scheduler.add("small", shared(), compiled=True)
    assert placed(scheduler) == {"small": [0]}
    scheduler.add("whole", exclusive(), compiled=True)
    scheduler.add("later", shared(), compiled=True)
    assert placed(scheduler) == {}  # `later` would fit, and keep `whole` out
    scheduler.end("small")
    assert placed(scheduler) == {"whole": [0]}
    scheduler.end("whole")
    assert placed(scheduler) == {"later": [0]}


def test_a_later_task_passes_on_other_devices() -> None:
    scheduler = Scheduler([device(0), device(1)], compilers=1)
    scheduler.add("one", exclusive(), compiled=True)
    assert list(placed(scheduler)) == ["one"]
    scheduler.add("both", exclusive(2), compiled=True)
    scheduler.add("two", exclusive(), compiled=True)
    assert placed(scheduler) == {}
    scheduler.end("both")
    assert list(placed(scheduler)) == ["two"]


def test_no_device_is_held_while_a_task_is_compiled() -> None:
    scheduler = Scheduler([device(0)], compilers=1)
    scheduler.add("a", exclusive())
    scheduler.add("b", exclusive())
    scheduler.add("ready", exclusive(), compiled=True)
    assert scheduler.compilations() == ["a"]
    assert placed(scheduler) == {"ready": [0]}
    scheduler.compiled("a")
    assert scheduler.compilations() == ["b"]
    scheduler.end("b")
    assert scheduler.compilations() == []
    assert placed(scheduler) == {}
    scheduler.end("ready")
    assert placed(scheduler) == {"a": [0]}


def test_what_can_never_run_is_refused_at_once() -> None:
    scheduler = Scheduler([device(0, gib=8)], compilers=1)
    with pytest.raises(Unplaceable, match="the host has 1"):
        scheduler.add("a", exclusive(2))
    with pytest.raises(Unplaceable, match="the host has 0"):
        scheduler.add("b", shared(9))
    with pytest.raises(Unplaceable, match="the host has 0"):
        Scheduler([], compilers=1).add("c", shared())


def test_a_grant_names_each_node_once() -> None:
    scheduler = Scheduler([device(0), device(1)], compilers=1)
    scheduler.add("a", exclusive(2), compiled=True)
    (grant,) = scheduler.grants()
    assert grant.nodes == ("/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia1")


demands = st.one_of(
    st.builds(shared, st.integers(1, 16)), st.builds(exclusive, st.integers(1, 3))
)  # fmt: skip


@given(st.lists(st.tuples(demands, st.integers(0, 3)), max_size=30))
def test_nobody_is_overcommitted_and_everybody_runs(steps: list[tuple[Demand, int]]) -> None:
    scheduler = Scheduler([device(0), device(1), device(2)], compilers=1)
    running: dict[str, tuple[Demand, list[int]]] = {}
    left = [(str(number), *step) for number, step in enumerate(steps)]
    waiting = {name: demand for name, demand, _ in left}
    for name, demand, ends in left:
        scheduler.add(name, demand, compiled=True)
        _note(scheduler, waiting, running)
        for ended in list(running)[:ends]:
            scheduler.end(ended)
            del running[ended]
    for _ in range(len(steps) + 1):
        _note(scheduler, waiting, running)
        for ended in list(running):
            scheduler.end(ended)
            del running[ended]
    assert not waiting


def _note(
    scheduler: Scheduler, waiting: dict[str, Demand], running: dict[str, tuple[Demand, list[int]]]
) -> None:
    for name, devices in placed(scheduler).items():
        running[name] = (waiting.pop(name), devices)
    for index in range(3):
        here = [demand for demand, devices in running.values() if index in devices]
        if any(demand.mode == "exclusive" for demand in here):
            assert len(here) == 1
        assert len(here) <= 2
        assert sum(demand.memory_bytes for demand in here) <= 16 * GIB
