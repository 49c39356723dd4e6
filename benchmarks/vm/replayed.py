"""Lives of agents (see `density.replay`) in machines: what these hold of the host's memory, with
DAMON and free page reporting in the guest and without both.

Beside what its Python holds, an agent has as much in files, as of a checkout and what is built of
it. It touches a part of each in a turn, and waits for its model between turns.
"""

from __future__ import annotations

import contextlib
import functools
from operator import attrgetter

from dsec_bench.create.image import python_root
from dsec_bench.create.sdk import Sdk
from dsec_bench.density import footprint, replay
from dsec_bench.density.footprint import Footprint
from dsec_bench.density.workload import Scale, draw
from dsec_bench.report import Row
from dsec_bench.stats import Round, Summary, interleave
from dsec_bench.vm.bed import MIB, Bed, Host

from libdsec.sandbox import Sandbox

TURNS = "turns of agents in machines"
LIVES = Scale(sandboxes=6, compression=15, burst_s=10, window_s=90)
QUICK_LIVES = Scale(sandboxes=2, compression=12, burst_s=2, window_s=80)
ROUNDS = 3
MIN_AGE_S = 4  # a minute, compressed as lives are
MEMORY_MB, DISK_MB = 512, 512
VM: dict[replay.Mode, dict[str, object]] = {
    "off": {"free_page_reporting": False},
    "on": {"damon_min_age_s": MIN_AGE_S},
}
AGENT = f"""\
{replay.WORK}
block = b"".join(os.urandom(1365) + bytes(2731) for _ in range(256))
held = bytearray(block) * int(sys.argv[1])
with open("/var/tmp/files", "w+b") as files:
    for _ in range(int(sys.argv[1])):
        files.write(block)
    files.flush()
    os.fsync(files.fileno())
    print("ready", flush=True)
    for line in sys.stdin:
        begin, end, steps = map(int, line.split())
        part = held[begin:end]
        files.seek(begin)
        files.read(end - begin)
        work(steps)
        held[begin:end] = part
        del part
        print("done", flush=True)
"""


def measure(bed: Bed) -> None:
    scale, rounds = (QUICK_LIVES, 1) if bed.quick else (LIVES, ROUNDS)
    bed.context.steps.expect(len(replay.MODES) * rounds * scale.sandboxes)
    found, steps_per_s = replay.Result(), 0.0
    with contextlib.ExitStack() as kept:
        root = python_root(kept)
        for number, mode in interleave(replay.MODES, rounds):
            bed.context.steps.now(f"lives of {scale.sandboxes} agents in machines, reclaim {mode}")
            before = footprint.host()
            with bed.host(root, **VM[mode]) as host:
                kind = replay.Kind(functools.partial(_machine, host), AGENT)
                steps_per_s = steps_per_s or replay.calibrate(host.sdk, kind)
                group = footprint.memory_group(host.daemon.name)
                look = functools.partial(footprint.read, group, before)
                lives = draw(scale, seed=number)
                run = replay.measure(
                    host.sdk, lives, steps_per_s, look, bed.context.steps.done, kind
                )
            found.runs[mode].append(run)
            _tell_run(bed, scale, number, mode, run)
    _tell(bed, found)


async def _machine(host: Host, _: Sdk) -> Sandbox:
    return await host.create(memory_limit_mb=MEMORY_MB, disk_limit_mb=DISK_MB)


def _charged(seen: Footprint) -> int:
    return seen.charged_bytes


def _tell_run(bed: Bed, scale: Scale, number: int, mode: str, run: replay.Run) -> None:
    bed.tell(
        "replay", mode=mode, seed=number, sandboxes=scale.sandboxes, turns=len(run.turns_ms),
        compression=scale.compression, window_s=scale.window_s,
        gib_s=run.integral(_charged) / (MIB << 10), peak_mib=run.peak(_charged) / MIB,
        cached_gib_s=run.integral(attrgetter("cached_bytes")) / (MIB << 10),
        turns_s=sum(run.turns_ms) / 1e3, makespan_s=run.makespan_s,
        t_s=[at for at, _ in run.seen], held_mib=[_charged(now) / MIB for _, now in run.seen],
    )  # fmt: skip


def _tell(bed: Bed, found: replay.Result) -> None:
    saving = found.saving(_charged)
    more = found.more(lambda run: sum(run.turns_ms))
    bed.tell("replay saving", saving=saving, more_turns=more)
    for mode, runs in found.runs.items():
        rounds = [Round(1e3 * len(run.turns_ms) / sum(run.turns_ms), run.turns_ms) for run in runs]
        lives = len(runs[0].lives_s)
        bed.report.row(Row(TURNS, f"reclaim {mode}", Summary.of(rounds), lives, bed.accel))
    bed.report.figure("damon_fpr_memory_time_saving", saving)
