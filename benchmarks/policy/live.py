"""`sandbox.update_network` of a running sandbox, through client and daemon, cutting connections."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from dsec_bench.bench import Context
from dsec_bench.create.daemon import Daemon
from dsec_bench.create.image import chosen_root, place
from dsec_bench.create.sdk import Sdk
from dsec_bench.policy import rules
from dsec_bench.policy.world import Wire, WorldError, in_namespace
from dsec_bench.report import Row
from dsec_bench.stats import Round, Summary
from dsec_bench.toolchain import compile_c

from libdsec import DSecContainerRunArgs
from libdsec.sandbox import Sandbox

SERIES = "update of a policy"
CONNECTIONS = (0, 1, 100)
_PROGRAM = "/tmp/hold"
_PATIENCE_S = 20.0
_QUIET_S = 0.005  # an update comes now and then, not right after another


def policy(number: int, *, open_: bool) -> dict[str, Any]:
    """Return policy `number` in the language: eight rules, one of which allows the server or not.

    Every update brings one that the daemon has not seen.
    """
    entries = [{"allow": text, "ports": [443]} for text in rules.hosts(number)]
    entries.append({"allow": f"198.51.{number >> 8}.{number & 255}"})
    last = rules.REACHED if open_ else "203.0.113.0/24"
    return {"network": {"rules": [*entries, {"allow": last, "ports": [rules.PORT]}]}}


class Housed(Daemon):
    """A daemon that takes a network namespace of ours for its host's."""

    def __init__(self, namespace: int) -> None:
        super().__init__()
        self._namespace = namespace

    def _command(self) -> list[str]:
        inside = ["nsenter", f"--net=/proc/{os.getpid()}/fd/{self._namespace}"]
        return [*inside, *super()._command()]


@dataclass(frozen=True, slots=True)
class Far:
    """What is not the sandbox: the server it connects to, and the daemon's pid."""

    server: socket.socket
    daemon: int

    def drop_all(self) -> None:
        """Forget the connections, of whose end their peers could say nothing."""
        with contextlib.suppress(BlockingIOError):
            while True:
                self.server.accept()[0].close()


@dataclass(slots=True)
class Holder:
    """A program in the sandbox that makes connections and says when they are gone."""

    command: Any
    said: AsyncIterator[Any]

    @classmethod
    async def start(cls, sandbox: Sandbox, count: int) -> Holder:
        argv = [_PROGRAM, rules.SERVER, str(rules.PORT), str(count)]
        command = await sandbox.commands.run(argv, background=True, stdin=True)
        return cls(command, aiter(command))

    async def expect(self, word: str) -> None:
        """Wait for a line. Raises WorldError when it is another."""
        chunk = await asyncio.wait_for(anext(self.said), _PATIENCE_S)
        if chunk.data.decode().strip() != word:
            raise WorldError(f"the program in the sandbox said {chunk.data!r} instead of {word}")


def measure(context: Context) -> None:
    """Record how long the call takes with some numbers of connections to cut."""
    rounds = 20 if context.options.quick else 100
    with contextlib.ExitStack() as stack:
        context.steps.now("a daemon in a namespace of its own")
        wire = stack.enter_context(contextlib.closing(Wire()))
        server = stack.enter_context(in_namespace(wire.world, _listen))
        root = chosen_root(context.options, stack)
        daemon = stack.enter_context(Housed(wire.box))
        place(root, daemon.kept, context.options.image)
        daemon.start()
        sdk = Sdk(daemon.endpoint, context.options.image)
        stack.callback(sdk.close)
        sdk.open()
        taken = sdk.run(_updates(context, sdk, Far(server, daemon.pid), rounds))
    for count, found in taken.items():
        summary = Summary.of(found)
        name = f"dsec, {count} connections cut"
        context.report.row(Row(SERIES, name, summary, note="end to end", unit="µs"))
    context.report.figure("update_ms", Summary.of(taken[1]).p50_ms)


def _listen() -> socket.socket:
    server = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    server.bind(("0.0.0.0", rules.PORT))
    server.listen(2 * CONNECTIONS[-1])
    server.setblocking(False)
    return server


def _cpu_ms(pid: int) -> float:
    """Return the CPU time of a process: clock_getcpuclockid(3) for CPUCLOCK_SCHED."""
    return time.clock_gettime(~pid << 3 | 2) * 1e3


async def _updates(context: Context, sdk: Sdk, far: Far, rounds: int) -> dict[int, list[Round]]:
    """Return the updates that close, by the number of connections."""
    first = policy(0, open_=True)
    args = DSecContainerRunArgs(container_image=context.options.image, policy=first, network="nat")
    sandbox = await sdk.client.run_container(args)
    taken: dict[int, list[Round]] = {}
    try:
        program = compile_c("hold.c", "-static").read_bytes()
        await sandbox.files.write(_PROGRAM, program, mode=0o755)
        context.steps.expect(rounds * len(CONNECTIONS))
        numbers = itertools.count(1)
        for count in CONNECTIONS:
            holder = await Holder.start(sandbox, count) if count else None
            taken[count] = []
            for number in range(rounds):
                context.steps.now(f"update {number + 1} of {rounds}, {count} connections")
                taken[count].append(await _update(sandbox, holder, far.daemon, next(numbers)))
                far.drop_all()
                context.steps.done()
            if holder is not None:
                await holder.command.kill()
    finally:
        await sandbox.stop()
    return taken


async def _update(sandbox: Sandbox, holder: Holder | None, daemon: int, number: int) -> Round:
    """Open the network, have connections, close it and see that they are cut; time the last."""
    await sandbox.update_network(policy=policy(2 * number, open_=True))
    if holder is not None:
        await holder.command.send_stdin(b"again\n")
        await holder.expect("held")
    await asyncio.sleep(_QUIET_S)
    start, before = time.perf_counter(), _cpu_ms(daemon)
    await sandbox.update_network(policy=policy(2 * number + 1, open_=False))
    found, cpu = (time.perf_counter() - start) * 1e3, _cpu_ms(daemon) - before
    if holder is not None:
        await holder.expect("103")  # ECONNABORTED
    return Round(1e3 / found, [found], steps_ms={"CPU of the daemon": [cpu]})
