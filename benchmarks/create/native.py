"""The native path: the daemon's container backend driven directly, in this process.

The same pools, spawners and agent as in the daemon, the same isolation and limits; no socket to
a client, no engine, no journal. What the SDK path costs beyond this is the price of the daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import uvloop
from dsec_bench import interrupts
from dsec_bench.create.daemon import Daemon
from dsec_bench.create.image import Root, place
from dsec_bench.create.sdk import COMMAND, STEPS, Wrong, arguments
from dsec_bench.stats import Operation, Round

from dsecd.__main__ import make_backend
from dsecd.backends.abc import Backend, Channel
from dsecd.backends.spec import Spec
from dsecd.config import load
from dsecd.engine.request import compile_spec
from dsecd.model import Death, make_id
from libdsec import wire
from libdsec.errors import DSecError, from_wire
from libdsec.model import CommandResult, ExecArgs

SERIAL = 2  # of the paths, cgroups and id ranges; daemons of the bench have smaller ones
EPOCH = 1


class _Deaf:
    """A listener for a bench: a sandbox that dies fails its operation anyway."""

    def died(self, sandbox: str, death: Death) -> None: ...
    def oom(self, sandbox: str, kills: int) -> None: ...
    def denied(self, sandbox: str, detail: dict[str, str]) -> None: ...


class _Answer:
    """Receives one call's answer into a future."""

    def __init__(self) -> None:
        self.future: asyncio.Future[msgspec.Raw] = asyncio.get_running_loop().create_future()

    def on_item(self, data: msgspec.Raw) -> None: ...
    def on_credit(self, n: int) -> None: ...

    def on_reply(self, result: msgspec.Raw) -> None:
        if not self.future.done():
            self.future.set_result(result)

    def on_failure(self, error: dict[str, Any]) -> None:
        if not self.future.done():
            self.future.set_exception(from_wire(error))


async def _true(channel: Channel, cid: str) -> None:
    """Run the command through the agent's channel. Raises Wrong, DSecError."""
    args = ExecArgs(cid=cid, argv=[word.encode() for word in COMMAND])
    answer = _Answer()
    channel.open("exec.run", wire.pack(args), answer)
    result = msgspec.msgpack.decode(await answer.future, type=CommandResult)
    if result.exit_code != 0:
        raise Wrong(f"true ended with {result}")


class Native:
    """The contender "dsec-native"."""

    name = "dsec-native"

    def __init__(self, root: Root, image: str) -> None:
        self._root = root
        self._image = image
        self._paths = Daemon(SERIAL)  # never started: its paths, its configuration, its clean-up
        self._runner: asyncio.Runner | None = None
        self._backend: Backend | None = None
        self._serial = itertools.count(1)
        self._live: dict[str, Any] = {}

    def open(self) -> None:
        """Start pools and spawners. Raises DSecError."""
        self._paths.prepare()
        place(self._root, self._paths.kept, self._image)
        self._runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        backend = make_backend(load(self._paths.config_file))
        self._backend = backend

        async def start() -> None:
            await backend.start(_Deaf())
            await backend.sweep(())  # the engine's order: no `prepare` before it

        interrupts.run(self._runner, start())

    def round(self, concurrency: int, seconds: float) -> Round:
        """Create → `true` → destroy, `concurrency` at a time, for `seconds`."""
        assert self._runner is not None
        operations: list[Operation] = []
        steps: dict[str, list[float]] = {name: [] for name in STEPS}
        errors: list[str] = []
        origin = time.perf_counter()

        async def work(worker: int) -> None:
            while True:
                begin = time.perf_counter()
                try:
                    marks, spawner_us = await self._once(begin)
                    for name, a, b in zip(STEPS, marks, marks[1:], strict=False):
                        steps[name].append((b - a) * 1e3)
                    for name, us in spawner_us.items():
                        steps.setdefault(f"create: {name}", []).append(us / 1e3)
                    good = True
                except (DSecError, Wrong, OSError) as error:
                    errors.append(str(error))
                    good = False
                end = time.perf_counter()
                operations.append(
                    Operation(worker, (begin - origin) * 1e6, (end - origin) * 1e6, good)
                )
                if end - origin >= seconds:
                    return

        async def go() -> None:
            await asyncio.gather(*(work(number) for number in range(concurrency)))

        interrupts.run(self._runner, go())
        return Round.of(operations, errors[0] if errors else "", steps)

    async def _once(self, begin: float) -> tuple[list[float], Mapping[str, int]]:
        """Return when each step began and ended, and the µs of the steps inside the creation."""
        assert self._backend is not None
        serial = next(self._serial)
        name = make_id("s0", f"bench{SERIAL}", EPOCH, serial)
        spec: Spec = compile_spec(name, arguments(self._image))
        marks = [begin]
        if not self._backend.located(spec):
            await self._backend.locate(spec)
        handle = self._backend.prepare(name, spec)
        self._live[name] = handle
        try:
            instance = await self._backend.create(handle, spec)
            handle = self._live[name] = instance.handle
            marks.append(time.perf_counter())
            await _true(instance.channel, f"c{serial}")
            marks.append(time.perf_counter())
        finally:
            await self._backend.destroy(handle)
            del self._live[name]
        marks.append(time.perf_counter())
        return marks, instance.steps_us

    def close(self) -> None:
        """Destroy what an interruption left, stop the spawners, clean up."""
        runner, self._runner = self._runner, None
        if runner is not None:
            with contextlib.suppress(DSecError, OSError):
                interrupts.run(runner, self._end())
            runner.close()
        self._paths.close()

    async def _end(self) -> None:
        if self._backend is None:
            return
        for handle in list(self._live.values()):
            with contextlib.suppress(DSecError, OSError):
                await self._backend.destroy(handle)
        await self._backend.close()
