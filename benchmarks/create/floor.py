"""The bare C loop with a sandbox's isolation, which no daemon can beat on this machine.

`dsec-floor` (floor.c) is built with the daemon's native programs, since it shares the spawner's
sources. It gets the daemon's own seccomp filters, masks and limits, and keeps its directories where
the bench's daemons keep theirs. It runs a fixed count, chosen from its last rate to fill the round.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

from dsec_bench import cgroups, leftovers
from dsec_bench.create.image import Root
from dsec_bench.create.sdk import COMMAND, STEPS
from dsec_bench.stats import Round

import dsecd
from dsecd.images.local import Local
from dsecd.policy import masks, seccomp

BINARY = Path(dsecd.__file__).parent / "bin" / "dsec-floor"
V1_LIMITS = {  # of every sandbox of the bench (sdk.arguments)
    "memory.limit_in_bytes": 256 << 20,
    "cpu.cfs_quota_us": 100_000,
    "pids.max": 1024,
}
FIRST_COUNT = 20  # per worker, before any rate is known


class FloorError(Exception):
    """The loop cannot run here, or failed; the message says how."""


def command(folder: Path, group: Path, layer: Local) -> list[str]:
    """Return the arguments that do not change between rounds."""
    argv = [str(BINARY), "-i", layer.image, "-d", str(folder / "loop"), "-g", str(group / "loop")]
    argv += ["-x", COMMAND[0], "-f", str(folder / "base-filter"), "-s", str(folder / "filter")]
    for blob in layer.devices:
        argv += ["-b", blob]
    chosen = masks.for_host()
    for mask in chosen.masked:
        argv += ["-m", mask]
    for path in chosen.read_only:
        argv += ["-r", path]
    return argv


def limits(group: str) -> list[str]:
    """Return the arguments that give the loop's sandboxes their v1 limits, as slots give ours."""
    argv = []
    for root in cgroups.hierarchies():
        for file, value in V1_LIMITS.items():
            if not cgroups.is_v2(root) and (root / group / file).exists():
                argv += ["-l", f"{root / group}={file}={value}"]
    return argv


def as_round(answer: dict[str, Any]) -> Round:
    """Return what `dsec-floor` printed as a round.

    It tells medians only: the latency is the sum of the medians of the three steps.
    """
    micros = dict(answer["p50_us"])
    own = {"command": "first command"}
    steps = {own.get(name, name): micros.pop(name) for name in ("create", "command", "destroy")}
    assert tuple(steps) == STEPS
    inner = {f"create: {name}": us for name, us in micros.items()}
    return Round(
        rate=answer["per_second"],
        latencies_ms=[sum(steps.values()) / 1e3],
        steps_ms={name: [us / 1e3] for name, us in {**steps, **inner}.items()},
        done=answer["operations"],
    )


class Floor:
    """The contender "bare C loop"."""

    name = "bare C loop"

    def __init__(self, root: Root) -> None:
        self._layer = root.local
        self._group = f"{cgroups.own_group()}/floor"
        self._folder = leftovers.RUN / cgroups.own_group()
        self._argv: list[str] = []
        self._per_worker = 0.0  # operations per second
        self._process: subprocess.Popen[str] | None = None

    def open(self) -> None:
        """Make directories, the filter, and the cgroup. Raises FloorError with the reason."""
        if not BINARY.exists():
            raise FloorError(f"{BINARY} is not built: run `python setup.py build_native --inplace`")
        v2 = next((path for path in cgroups.hierarchies() if cgroups.is_v2(path)), None)
        if v2 is None:
            raise FloorError("no cgroup v2 tree on this host")
        cgroups.make(self._group)
        self._folder.mkdir(mode=0o711)
        (self._folder / "base-filter").write_bytes(seccomp.base_filter())
        (self._folder / "filter").write_bytes(seccomp.command_filter())
        self._argv = command(self._folder, v2 / self._group, self._layer) + limits(self._group)

    def round(self, concurrency: int, seconds: float) -> Round:
        """Create → `true` → destroy in `concurrency` processes, for about `seconds`."""
        count = max(FIRST_COUNT, round(self._per_worker * seconds))
        argv = [*self._argv, "-n", str(concurrency), "-c", str(count)]
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # so that `close` reaches all of its workers
        )
        output, errors = self._process.communicate()
        if self._process.returncode != 0:
            return Round(0.0, [], 1, errors.strip()[-300:])
        result = as_round(json.loads(output))
        self._per_worker = result.rate / concurrency
        return result

    def close(self) -> None:
        """Kill what an interruption left running, and remove everything."""
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        cgroups.kill(self._group)
        cgroups.remove(self._group)
        leftovers.unmount_below(self._folder)
        shutil.rmtree(self._folder, ignore_errors=True)
