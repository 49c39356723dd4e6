"""One microVM between its monitor and its agent: how it starts, how its end is told, once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from dsecd.backends import microvm_machine
from dsecd.backends.agent import call
from dsecd.backends.fake import FakeSandbox
from dsecd.backends.microvm_machine import GuestMachine
from dsecd.backends.microvm_plan import Begin, clock
from dsecd.engine.request import compile_spec
from dsecd.host.vm_plan import Devices, Launch, Machine, VmPlan
from dsecd.model import Death
from libdsec.errors import Internal, InvalidArgument, Timeout, Unavailable
from libdsec.model import DSecContainerRunArgs
from libdsec.wire import pack
from tests.unit.microvm_fakes import Answer, FakeVmm, Silence
from tests.waiting import let_pass, until

PLAN = VmPlan(memory_bytes=64 << 20, kernel="/vm/kernel", upper="/vm/upper.img")
LAUNCH = Launch(argv=("true",), devices=Devices.of(PLAN))
BEGIN = Begin(
    reclaim=None,
    layers=("/dev/pmem0",), dax=True, upper="/dev/vda", files=[], hostname="h", pids=9,
    network=None, time_ns=1, entropy=b"e" * 64, config=b"",
)  # fmt: skip


class Bed:
    """A machine on fakes, and what it said."""

    def __init__(self, answer: Answer = lambda op, args: None, deaf: int = 0) -> None:
        spec = compile_spec("s0-n0-1-1", DSecContainerRunArgs(container_image="base/x"))
        self.vmm = FakeVmm(answer, deaf)
        self.jail = FakeSandbox("s0-n0-1-1", spec, self)  # type: ignore[arg-type]
        self.vmm.runs_in(self.jail)
        self.deaths: list[Death] = []
        self.kills: list[int] = []
        self.machine = GuestMachine(
            "s0-n0-1-1", self.vmm, PLAN, self.jail, Path("/nowhere"),
            self.deaths.append, self.kills.append,
        )  # fmt: skip

    async def start(self) -> None:
        await self.machine.start(LAUNCH, BEGIN)

    async def end(self) -> None:
        await self.machine.close()
        self.vmm.end()
        self.jail.end()


@pytest.fixture
async def make(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Callable[..., Bed]]:
    for name, value in {
        "BOOT_S": 20.0,
        "ANSWER_S": 10.0,
        "AGAIN_S": 0.01,
        "EXPLAIN_S": 0.05,
    }.items():
        monkeypatch.setattr(microvm_machine, name, value)
    beds: list[Bed] = []

    def bed(*args: object, **fields: object) -> Bed:
        beds.append(Bed(*args, **fields))  # type: ignore[arg-type]
        return beds[-1]

    yield bed
    for one in beds:
        await one.end()


async def test_the_guest_is_told_what_it_is(make: Callable[..., Bed]) -> None:
    bed = make()
    await bed.start()
    assert bed.jail.results["vmm"].exit_code == 0, "the monitor is the jail's command"
    assert [op for op, _ in bed.vmm.agent.asked][:2] == ["sys.ping", "vm.begin"]
    begun = bed.vmm.agent.asked[1][1]
    assert (begun["layers"], begun["upper"], begun["hostname"]) == (["/dev/pmem0"], "/dev/vda", "h")
    assert abs(begun["time_ns"] - time.time_ns()) < 60e9, "of when it was asked, not planned"


async def test_a_guest_that_refuses_says_why_and_shows_its_console(
    make: Callable[..., Bed],
) -> None:
    def answer(op: str, args: object) -> None:
        if op == "vm.begin":
            bed.vmm.machine.text = "EROFS: bad superblock"
            raise InvalidArgument("layer 0: cannot mount /dev/pmem0")

    bed = make(answer)
    with pytest.raises(Internal, match=r"cannot mount /dev/pmem0.*bad superblock"):
        await bed.start()


async def test_a_guest_that_never_answers_is_given_up(make: Callable[..., Bed]) -> None:
    bed = make(lambda op, args: Silence)
    starting = asyncio.ensure_future(bed.start())
    await until(lambda: bed.vmm.agents)
    let_pass(30)
    with pytest.raises(Timeout, match="did not start in 20 s"):
        await starting


async def test_what_is_left_of_an_earlier_connection_does_no_harm(make: Callable[..., Bed]) -> None:
    bed = make(deaf=2)
    adopting = asyncio.ensure_future(bed.machine.adopt(saved=False))
    for deaf in (1, 2):
        await until(lambda: len(bed.vmm.agents) == deaf and bed.vmm.agent.asked)  # noqa: B023
        let_pass(15)
    await adopting
    assert len(bed.vmm.agents) == 3
    assert bed.machine.channel is not None
    assert bed.deaths == []


@pytest.mark.parametrize(
    ("kind", "console", "reason"),
    [
        ("panicked", "Kernel panic - not syncing", "the guest's kernel panicked"),
        ("shutdown", "", "the guest switched itself off"),
        ("reset", "", "the guest began to reboot"),
        ("shutdown", "reboot: System halted", "the guest halted"),
    ],
)
async def test_an_end_is_told_once_as_what_it_was(
    make: Callable[..., Bed], kind: str, console: str, reason: str
) -> None:
    bed = make()
    await bed.start()
    bed.vmm.machine.text = console
    bed.vmm.machine.happen(kind)
    bed.vmm.machine.happen("lost")
    bed.vmm.agent.end()
    await until(lambda: bool(bed.deaths))
    await asyncio.sleep(0.2)
    assert [death.reason for death in bed.deaths] == [reason]
    if console:
        assert console in bed.deaths[0].detail["console"]


async def test_a_lost_agent_is_an_end_unless_the_monitor_has_a_better_reason(
    make: Callable[..., Bed],
) -> None:
    bed = make()
    await bed.start()
    bed.vmm.agent.end()
    await until(lambda: bool(bed.deaths))
    assert bed.deaths[0].reason == "its agent closed the channel"


async def test_a_guest_that_halted_is_noticed(
    make: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    halted = False
    bed = make(lambda op, args: Silence if halted else None)
    monkeypatch.setattr(microvm_machine, "HUSHED_S", 0.05)
    bed.machine.ping_s = 0.01
    await bed.start()
    await asyncio.sleep(0.1)
    assert bed.deaths == []
    halted, bed.vmm.machine.text = True, "[ 9.1] reboot: System halted"
    await until(lambda: bool(bed.deaths))
    assert bed.deaths[0].reason == "the guest halted"


async def test_a_guest_that_is_silent_for_long_is_given_up(
    make: Callable[..., Bed], monkeypatch: pytest.MonkeyPatch
) -> None:
    bed = make(lambda op, args: Silence if begun else None)
    begun = False
    for name in ("HUSHED_S", "SILENT_S"):
        monkeypatch.setattr(microvm_machine, name, 0.05)
    bed.machine.ping_s = 0.01
    await bed.start()
    begun = True
    await until(lambda: bool(bed.deaths))
    assert bed.deaths[0].reason == "its agent does not answer"


async def test_kills_in_the_guest_are_counted(make: Callable[..., Bed]) -> None:
    bed = make()
    await bed.start()
    await until(lambda: ("vm.watch", {}) in bed.vmm.agent.asked)
    for count in (0, 1, 1, 3):
        await bed.vmm.agent.killed(count)
    await until(lambda: bed.machine.oom_kills == 3)
    assert bed.kills == [1, 3]


async def load(machine: Machine) -> None:
    await machine.load("/vm/state")
    await machine.cont()


async def test_a_guest_that_is_taken_up_goes_on_with_its_calls_and_is_told_the_time(
    make: Callable[..., Bed],
) -> None:
    bed = make(lambda op, args: Silence if op == "exec.wait" else None)
    await bed.start()
    channel = bed.machine.channel
    assert channel is not None
    waiting = asyncio.ensure_future(call(channel, "exec.wait", pack({"cid": "c"})))
    await until(lambda: {"vm.watch", "exec.wait"} <= {op for op, _ in bed.vmm.agent.asked})
    async with bed.machine.standing() as monitor:
        assert monitor is bed.vmm.machine
        await bed.machine.end_monitor()
    assert bed.vmm.machine.did == ["boot", "stop", "close"]
    later = asyncio.ensure_future(call(channel, "sys.stats", pack({})))
    await asyncio.sleep(0.05)
    assert not waiting.done()
    assert not later.done()
    assert bed.deaths == []
    await bed.machine.resume(LAUNCH, load)
    assert bed.vmm.machine.did == ["load", "cont"]
    await later
    assert [op for op, _ in bed.vmm.agent.asked] == ["vm.clock", "sys.stats"]
    told = bed.vmm.agent.asked[0][1]
    assert abs(told["time_ns"] - time.time_ns()) < 60e9
    assert len(told["entropy"]) == 64
    assert bed.machine.channel is channel
    waiting.cancel()


async def test_a_guest_that_stood_still_goes_on(make: Callable[..., Bed]) -> None:
    bed = make()
    await bed.start()
    async with bed.machine.standing():
        assert bed.vmm.agent.asked[-1][0] == "sys.ping", "all that was sent has arrived"
    assert bed.vmm.machine.did == ["boot", "stop", "cont"]
    with pytest.raises(ValueError, match="disk"):
        async with bed.machine.standing():
            raise ValueError("disk full")
    assert bed.vmm.machine.did[3:] == ["stop", "cont"]


async def test_a_resumption_that_fails_can_be_tried_again(make: Callable[..., Bed]) -> None:
    bed = make()
    await bed.start()
    async with bed.machine.standing():
        await bed.machine.end_monitor()

    async def fail(machine: Machine) -> None:
        raise Internal("no memory")

    with pytest.raises(Internal):
        await bed.machine.resume(LAUNCH, fail)
    assert bed.deaths == []
    await bed.machine.resume(LAUNCH, load)
    assert bed.machine.channel is not None
    await call(bed.machine.channel, "sys.ping", pack({}))


async def test_a_guest_that_goes_back_answers_no_earlier_call(make: Callable[..., Bed]) -> None:
    bed = make(lambda op, args: Silence if op == "exec.wait" else None)
    await bed.start()
    channel = bed.machine.channel
    assert channel is not None
    waiting = asyncio.ensure_future(call(channel, "exec.wait", pack({"cid": "c"})))
    await asyncio.sleep(0.01)
    await bed.machine.leave("it went back")
    later = asyncio.ensure_future(call(channel, "sys.stats", pack({})))
    with pytest.raises(Unavailable, match="it went back"):
        await waiting
    await bed.machine.take_up(LAUNCH, load, "vm.clock", clock())
    await later
    asked = [op for op, _ in bed.vmm.agent.asked]
    assert asked[:2] == ["sys.ping", "vm.clock"]
    assert "sys.stats" in asked
    assert bed.deaths == []


async def test_one_that_an_earlier_daemon_saved_waits_to_be_taken_up(
    make: Callable[..., Bed],
) -> None:
    bed = make()
    await bed.machine.adopt(saved=True)
    assert bed.machine.channel is not None
    kept = asyncio.ensure_future(call(bed.machine.channel, "sys.stats", pack({})))
    await asyncio.sleep(0.05)
    assert bed.vmm.agents == []
    await bed.machine.resume(LAUNCH, load)
    await kept
    assert bed.vmm.agent.asked[0] == ("sys.ping", {"first": True})
    await until(lambda: ("vm.watch", {}) in bed.vmm.agent.asked)


async def test_one_that_stands_still_since_its_daemon_died_goes_on(
    make: Callable[..., Bed],
) -> None:
    bed = make()
    bed.vmm.state = "saved"
    await bed.machine.adopt(saved=False)
    assert bed.vmm.machine.did == ["boot", "cont"]
    assert "vm.clock" in [op for op, _ in bed.vmm.agent.asked]


async def test_after_closing_nothing_is_told(make: Callable[..., Bed]) -> None:
    bed = make()
    await bed.start()
    await bed.machine.close()
    bed.vmm.agent.end()
    await asyncio.sleep(0.2)
    assert bed.deaths == []
    assert "quit" not in bed.vmm.machine.did
