"""Memory of the host with several guests that read the same layer: the paper's figure 12.

Each guest reads the whole layer, then all use as much memory again and free it, then all idle. What
counts is what the monitors hold, and the layer in the host's page cache, once.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from dsec_bench.create.image import DATA, data_root
from dsec_bench.create.sdk import Wrong
from dsec_bench.vm import plain
from dsec_bench.vm.bed import MIB, Bed, Host
from dsec_bench.vm.monitors import held_bytes, monitors

from libdsec.model_vm import VmLayers
from libdsec.sandbox import Sandbox

SIZE = 180 * MIB
COUNTS, QUICK_COUNTS = (1, 2, 4, 8), (4,)
OF_FIGURE = 4  # guests
LOOK_S = 0.5
IDLE_S = 12.0
MEMORY_MB = 640  # room for the layer twice
DEVICES: tuple[VmLayers, ...] = ("pmem", "block")
READ = f"cat {DATA} > /dev/null"
USE = f"cat {DATA} > /dev/shm/used && : > /dev/shm/used"
COMMAND_S = 300.0


@dataclass(slots=True)
class Run:
    """Bytes held by when (seconds), and when all had read; `before` them all is taken off."""

    before: int
    seen: list[tuple[float, int]] = field(default_factory=list)
    read_bytes: int = 0

    def look(self, begin: float, held: int) -> None:
        self.seen.append((time.perf_counter() - begin, held - self.before))

    @property
    def peak(self) -> int:
        return max(held for _, held in self.seen)

    @property
    def integral(self) -> float:
        """In byte seconds, by the trapezoidal rule."""
        pairs = itertools.pairwise(self.seen)
        return sum((end - start) * (a + b) / 2 for (start, a), (end, b) in pairs)

    @property
    def mean(self) -> float:
        """Of a run: emulated guests of the one take longer than those of the other."""
        return self.integral / (self.seen[-1][0] - self.seen[0][0])


def measure(bed: Bed) -> None:
    counts = QUICK_COUNTS if bed.quick else COUNTS
    with contextlib.ExitStack() as stack:
        root = data_root(SIZE, stack)
        for reporting in (True, False):
            vm = {"free_page_reporting": reporting, "damon_min_age_s": 0}
            with bed.host(root, **vm) as host:
                held: dict[str, list[int]] = {device: [] for device in DEVICES}
                for count, device in itertools.product(counts, DEVICES):
                    how = f"{count} guests, {device}, free page reporting {reporting}"
                    bed.context.steps.now(how)
                    run = _run(host, device, count)
                    _tell(bed, device, reporting, count, run)
                    if count == OF_FIGURE:
                        held[device].append(run.read_bytes)
                if reporting:
                    _figure(bed, host, held)
                else:
                    _plain(bed, _files(host), counts)


def _figure(bed: Bed, host: Host, held: dict[str, list[int]]) -> None:
    """Add to what was `held` when all had read, in turns, and tell the median of what is saved."""
    for _ in range(0 if bed.quick else bed.rounds - 1):
        for device in DEVICES:
            bed.context.steps.now(f"{OF_FIGURE} guests read a layer, {device}")
            held[device].append(_run(host, device, OF_FIGURE, read_only=True).read_bytes)
    pairs = list(zip(held["pmem"], held["block"], strict=True))
    bed.tell("layer read", guests=OF_FIGURE, mib=[[a / MIB, b / MIB] for a, b in pairs])
    bed.report.figure("pmem_saving_4_guests", statistics.median(1 - a / b for a, b in pairs))


def _tell(bed: Bed, device: str, reporting: bool | None, count: int, run: Run) -> None:
    bed.tell(
        "layers", device=device, free_page_reporting=reporting, guests=count,
        read_mib=run.read_bytes / MIB, peak_mib=run.peak / MIB,
        gib_s=run.integral / (MIB << 10), mean_mib=run.mean / MIB,
        t_s=[at for at, _ in run.seen], held_mib=[held / MIB for _, held in run.seen],
    )  # fmt: skip


def _files(host: Host) -> list[Path]:
    """Return the files that guests have as layers."""
    return [path for path in host.daemon.kept.glob("vm/layers/*") if path.is_file()]


def _run(host: Host, device: VmLayers, count: int, read_only: bool = False) -> Run:
    try:
        return host.sdk.run(_guests(host, device, count, read_only))
    finally:
        host.sdk.stop_all()


def forget(files: list[Path]) -> None:
    """Drop what the page cache has of them: it was there since they were made."""
    for path in files:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


async def _guests(host: Host, device: VmLayers, count: int, read_only: bool) -> Run:
    if not _files(host):  # made at the first use
        await (await host.create(layers=device, memory_limit_mb=MEMORY_MB)).stop()
    forget(_files(host))
    run, begin = Run(_held(host)), time.perf_counter()
    watching = asyncio.create_task(_watch(run, begin, lambda: _held(host)))
    try:
        boxes = []
        for _ in range(count):
            boxes.append(await host.create(layers=device, memory_limit_mb=MEMORY_MB))
            await _do(boxes[-1], READ)
        run.look(begin, _held(host))
        run.read_bytes = run.seen[-1][1]
        if not read_only:
            for box in boxes:
                await _do(box, USE)
            await asyncio.sleep(IDLE_S)
        run.look(begin, _held(host))
    finally:
        watching.cancel()
    return run


def _held(host: Host) -> int:
    return held_bytes(monitors(host.daemon.name), _files(host))


async def _watch(run: Run, begin: float, look: Callable[[], int]) -> None:
    while True:
        run.look(begin, await asyncio.to_thread(look))
        await asyncio.sleep(LOOK_S)


async def _do(box: Sandbox, command: str) -> None:
    done = await box.run_shell(command, timeout=COMMAND_S)
    if done.exit_code != 0:
        raise Wrong(f"{command} ended with {done}")


def _plain(bed: Bed, files: list[Path], counts: tuple[int, ...]) -> None:
    """QEMU as one starts it by hand: the same kernel, and the layer as a disk."""
    for count in counts:
        bed.context.steps.now(f"{count} guests, plain QEMU")
        forget(files)
        try:
            run = _plain_run(bed, files, count)
        except plain.PlainError as error:
            bed.report.absent("plain QEMU", str(error))
            return
        _tell(bed, "plain QEMU", None, count, run)


def _plain_run(bed: Bed, files: list[Path], count: int) -> Run:
    with contextlib.ExitStack() as stack:
        guests: list[plain.Guest] = []

        def held() -> int:
            return held_bytes([guest.pid for guest in guests], files)

        run, begin = Run(held()), time.perf_counter()

        def wait(guest: plain.Guest, word: str) -> None:
            while not guest.said(word, LOOK_S):
                run.look(begin, held())

        initrd = stack.enter_context(plain.initrd(DATA))
        for _ in range(count):
            guests.append(
                stack.enter_context(plain.Guest(bed.kernel, initrd, files, MEMORY_MB, bed.accel))
            )
            wait(guests[-1], "read")
        run.look(begin, held())
        run.read_bytes = run.seen[-1][1]
        for guest in guests:
            guest.go_on()
            wait(guest, "used")
        until = time.perf_counter() + IDLE_S
        while time.perf_counter() < until:
            time.sleep(LOOK_S)
            run.look(begin, held())
        return run
