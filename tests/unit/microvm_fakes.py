"""A monitor and a guest's agent for tests of what is between them: real sockets, no machine."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from dsecd.backends.fake import FakeCall, FakeSandbox
from dsecd.host.vm_plan import (
    Accel,
    Devices,
    Lack,
    Launch,
    OnEvent,
    Status,
    VmEvent,
    VmMemory,
    VmPlan,
)
from libdsec.errors import DSecError, Unavailable, to_wire
from libdsec.wire import Failure, Item, Reply, Request, Splitter, encode, pack

Answer = Callable[[str, Any], Any]


class Agent:
    """Answers on one stream; `asked` has what came, and a `Hold` as the answer never comes."""

    def __init__(self, stream: socket.socket, answer: Answer) -> None:
        stream.setblocking(False)
        self._stream, self._answer = stream, answer
        self.asked: list[tuple[str, Any]] = []
        self._watch: int | None = None
        self._task = asyncio.ensure_future(self._serve())

    async def _serve(self) -> None:
        loop, splitter = asyncio.get_running_loop(), Splitter()
        while data := await loop.sock_recv(self._stream, 65536):
            for frame in splitter.feed(data):
                if isinstance(frame, Request):
                    await self._take(frame)

    async def _take(self, request: Request) -> None:
        args = msgspec.msgpack.decode(request.args)
        self.asked.append((request.op, args))
        if request.op == "vm.watch":
            self._watch = request.id
            return
        try:
            result = self._answer(request.op, args)
        except DSecError as error:
            await self._send(Failure(request.id, to_wire(error)))
            return
        if result is not Silence:
            await self._send(Reply(request.id, pack(result)))

    async def killed(self, count: int) -> None:
        """Say how many the guest's kernel has killed."""
        assert self._watch is not None
        await self._send(Item(self._watch, pack({"oom_kills": count})))

    async def _send(self, frame: Any) -> None:
        await asyncio.get_running_loop().sock_sendall(self._stream, encode(frame))

    def end(self) -> None:
        self._task.cancel()
        self._stream.close()


class Silence:
    """As an answer: none."""


class FakeMachine:
    pid = 4711

    def __init__(self, on_event: OnEvent, root: Path | None = None) -> None:
        self._on_event, self._root = on_event, root
        self.did: list[str] = []
        self.state: Status = "running"
        self.text = ""

    def happen(self, kind: Any, detail: str = "") -> None:
        self._on_event(VmEvent(kind, detail))

    async def boot(self, plan: VmPlan) -> None:
        self.did.append("boot")

    async def status(self) -> Status:
        return self.state

    async def stop(self) -> None:
        self.did.append("stop")
        self.state = "paused"

    async def cont(self) -> None:
        self.did.append("cont")
        self.state = "running"

    async def balloon(self, limit_bytes: int) -> None:
        self.did.append("balloon")

    async def memory(self) -> VmMemory:
        raise Unavailable("not asked for")

    async def console(self) -> str:
        return self.text

    def vcpu_threads(self) -> tuple[int, ...]:
        return ()

    async def save(self, state: str) -> None:
        self.did.append("save")
        if self._root is not None:
            with (self._root / state.lstrip("/")).open("xb") as file:
                file.write(b"devices")

    async def load(self, state: str) -> None:
        self.did.append("load")

    async def quit(self) -> None:
        self.did.append("quit")

    def close(self) -> None:
        self.did.append("close")


class FakeVmm:
    """A `Vmm` whose guest answers with `answer`; `deaf` connections get no answer first."""

    name = "fake-vmm"
    lacks: Mapping[Lack, str] = {}

    def __init__(self, answer: Answer = lambda op, args: None, deaf: int = 0) -> None:
        self._answer, self._deaf = answer, deaf
        self.machines: list[FakeMachine] = []
        self.agents: list[Agent] = []
        self.plans: list[VmPlan] = []
        self.state: Status = "running"  # of the next machines

    def compile(self, plan: VmPlan) -> Launch:
        self.plans.append(plan)
        layers = tuple(f"/dev/pmem{number}" for number in range(len(plan.layers)))
        return Launch(argv=("true",), devices=Devices(layers=layers, upper="/dev/vda"))

    def overhead_bytes(self, accel: Accel, vcpus: int) -> int:
        return (80 + 10 * vcpus) << 20

    async def connect(
        self, root: Path, plan: VmPlan, on_event: OnEvent, timeout_s: float = 10.0
    ) -> FakeMachine:
        self.machines.append(FakeMachine(on_event, root if root.exists() else None))
        self.machine.state = self.state
        return self.machines[-1]

    async def open_agent(self, root: Path, plan: VmPlan) -> socket.socket:
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        answer = self._answer
        if self._deaf:
            self._deaf -= 1
            answer = lambda op, args: Silence  # noqa: E731
        self.agents.append(Agent(theirs, answer))
        return ours

    @property
    def machine(self) -> FakeMachine:
        return self.machines[-1]

    @property
    def agent(self) -> Agent:
        return self.agents[-1]

    def end(self) -> None:
        for agent in self.agents:
            agent.end()

    def runs_in(self, jail: FakeSandbox) -> None:
        """Have the guest end with the command that is the monitor."""
        kill = jail._op_exec_kill

        async def killed(raw: msgspec.Raw, call: FakeCall) -> None:
            self.end()
            await kill(raw, call)

        jail._op_exec_kill = killed  # type: ignore[method-assign]
