"""What the parts of the bench share: the environment, the stores, how a task is run and timed."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from dsec_bench.bench import Context
from dsec_bench.images import disk, hosts
from dsec_bench.images.environment import NAME, Environment, environment, facts_of
from dsec_bench.images.hosts import PLAIN, TRACED, Buckets, Host
from dsec_bench.images.server import Client, serving
from dsec_bench.images.workload import TASK
from dsec_bench.stats import Round, Summary

from libdsec import DSecContainerRunArgs
from libdsec.sandbox import Sandbox

TASK_S = 300.0
TRACE_S = 120.0  # until the daemon has written down what the first sandbox read
MIB = 1 << 20


class TaskError(Exception):
    """A task failed in its sandbox; the message holds the end of what it said."""


@dataclass(slots=True)
class Bed:
    """`names`: the layers of the environment's store, name → digest."""

    context: Context
    environment: Environment
    names: dict[str, str]
    server: Client
    buckets: Buckets
    folder: Path

    @property
    def quick(self) -> bool:
        return self.context.options.quick

    @property
    def rounds(self) -> int:
        return 5

    @contextmanager
    def remote(self, bucket: str, latency_ms: float, serial: int = 0) -> Iterator[Host]:
        """Yield a host that has nothing of the store yet, which answers with this latency."""
        self.server.set_latency(0)
        with hosts.host(serial, NAME, self.buckets.section(bucket)) as made:
            self.server.set_latency(latency_ms)
            yield made

    @contextmanager
    def local(self, serial: int = 1) -> Iterator[Host]:
        """Yield a host that has all layers on its own disk."""
        with hosts.local_host(serial, self.environment, self.names, NAME) as made:
            yield made


@dataclass(frozen=True, slots=True)
class Timed:
    """One sandbox and one task in it. `written` and `fetched` are bytes, None: not known."""

    ready_s: float
    total_s: float
    written: int = 0
    fetched: int = 0
    device: int | None = None

    @property
    def work_s(self) -> float:
        return self.total_s - self.ready_s

    def facts(self) -> dict[str, object]:
        """Return it as a run of the report."""
        return {
            "ready_ms": self.ready_s * 1e3,
            "work_s": self.work_s,
            "total_s": self.total_s,
            "written_mib": self.written / MIB,
            "device_mib": None if self.device is None else self.device / MIB,
            "fetched_mib": self.fetched / MIB,
        }


def summary(runs: Sequence[Timed]) -> Summary:
    """Return the row of a table: totals as latencies, ready and work as steps."""
    totals = [run.total_s for run in runs]
    steps = {
        "ready": [run.ready_s * 1e3 for run in runs],
        "work": [run.work_s * 1e3 for run in runs],
    }
    rate = 1 / statistics.median(totals)
    return Summary.of([Round(rate, [total * 1e3 for total in totals], steps_ms=steps)])


def note(runs: Sequence[Timed]) -> str:
    """Return what the table has no column for, as medians."""
    written = statistics.median(run.written for run in runs) / MIB
    fetched = statistics.median(run.fetched for run in runs) / MIB
    return f"MiB: {written:,.0f} written, {fetched:,.0f} fetched"


async def first(host: Host, args: DSecContainerRunArgs) -> tuple[Sandbox, float]:
    """Return a new sandbox that has answered, and the seconds until then."""
    begin = time.perf_counter()
    sandbox = await host.sdk.client.run_container(args, timeout=TASK_S)
    done = await sandbox.run("/bin/true")
    seconds = time.perf_counter() - begin
    if done.exit_code != 0:
        raise TaskError(f"true ended with {done.exit_code}: {done.stderr[-300:]}")
    return sandbox, seconds


async def work(sandbox: Sandbox, command: str) -> None:
    """Run a shell command that must succeed. Raises TaskError."""
    done = await sandbox.run_shell(command, timeout=TASK_S)
    if done.exit_code != 0:
        raise TaskError(f"{command[:80]}: {done.exit_code}: {(done.stderr or done.stdout)[-300:]}")


async def _task(host: Host) -> tuple[Sandbox, float, float]:
    begin = time.perf_counter()
    sandbox, ready = await first(host, host.arguments())
    await work(sandbox, f"sh {TASK.path}")
    return sandbox, ready, time.perf_counter() - begin


def task(bed: Bed, host: Host) -> Timed:
    """Make a sandbox of the environment and run the task in it; the sandbox is stopped."""
    written, sent = host.written(), bed.server.counters()
    device = disk.device_written(host.state)
    sandbox, ready, total = host.sdk.run(_task(host))
    grown = disk.growth(written, host.written())
    fetched = bed.server.sent_since(sent)
    host.sdk.run(sandbox.stop())
    disk.settle()
    return Timed(ready, total, grown, fetched, _since(device, host.state))


def _since(before: int | None, directory: Path) -> int | None:
    now = disk.device_written(directory)
    return None if before is None or now is None else now - before


def record(bed: Bed) -> None:
    """Have a daemon record what the task reads, once per environment.

    It writes the trace down by itself, a while after the first sandbox began.
    """
    digest = bed.environment.facts.digest
    kept = bed.environment.store / "traces" / digest
    made = bed.buckets.trace(TRACED, digest)
    if made.exists():
        return
    bed.context.steps.now("recording what the task reads (once)")
    with bed.remote(TRACED, 0) as host:
        task(bed, host)
        deadline = time.monotonic() + TRACE_S
        while not made.exists():
            if time.monotonic() > deadline:
                raise TaskError("the daemon wrote no trace of what the first sandbox read")
            time.sleep(0.5)
    hosts.link(made, kept)


@contextmanager
def bed(context: Context) -> Iterator[Bed]:
    """Yield what the parts need. Raises EnvironmentError, ServerError, DSecError."""
    with ExitStack() as stack:
        found = stack.enter_context(environment(context.steps))
        context.report.run("environment", **facts_of(found))
        folder = stack.enter_context(hosts.scratch())
        (folder / "buckets").mkdir()
        server = stack.enter_context(serving(folder / "buckets"))
        buckets = Buckets(server, folder)
        names = asyncio.run(hosts.names_of(found))
        buckets.fill(found, names)
        yield Bed(context, found, names, server, buckets, folder)


__all__ = [
    "PLAIN", "TRACED", "Bed", "TaskError", "Timed", "bed", "first", "note", "record", "summary",
    "task", "work",
]  # fmt: skip
