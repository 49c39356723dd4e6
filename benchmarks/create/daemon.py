"""A daemon of the bench's own: temporary paths, cgroups and id ranges beside any other daemon's."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from types import TracebackType

from dsec_bench import cgroups, guard, leftovers

START_S = 60.0
STOP_S = 120.0
# Above the default ranges of a production daemon (2^28 up to 2^31 + 2^28), 4,096 for each of ours.
UID_RANGE_START = 0x90000000
UID_RANGES = 4096
NO_SWAP = 'swap = "off"'  # of [reclaim]
NO_VM = 'enabled = "no"'  # of [vm]


class DaemonError(Exception):
    """The daemon did not start, or ended; the message holds the end of its log."""


def zram(size_mb: int) -> str:
    """Return lines of `[reclaim]` that make swap of this size, in compressed memory. Pure."""
    return f'swap = "zram"\nswap_mb = {size_mb}'


def configuration(
    name: str, run: Path, state: Path, serial: int, reclaim: str = NO_SWAP, vm: str = NO_VM
) -> str:
    """Return the TOML text of daemon number `serial` of this bench, called `name`. Pure."""
    start = UID_RANGE_START + serial * (UID_RANGES << 16)
    return f"""\
node = "bench{serial}"
[paths]
runtime = "{run}"
state = "{state}"
[cgroup]
name = "{name}"
[metrics]
listen = "off"
[log]
format = "json"
level = "warning"
[pools]
uid_range_start = {start}
uid_range_count = {UID_RANGES}
[network]
pool4 = "10.{230 + serial}.0.0/16"
pool6 = "fd5d:ec:{serial + 1:x}::/64"
[reclaim]
{reclaim}
[vm]
{vm}
"""


class Daemon:
    """dsecd as a child process. `open` starts it, `kill` is SIGKILL, `close` leaves nothing.

    `reclaim` and `vm` have the lines of these tables of its configuration: no swap and no microVMs
    if not told otherwise.
    """

    def __init__(self, serial: int = 0, reclaim: str = NO_SWAP, vm: str = NO_VM) -> None:
        self.name = cgroups.own_group(f"-{serial}")
        self.run = leftovers.RUN / self.name
        self.state = Path()
        self._serial, self._tables = serial, (reclaim, vm)
        self._config = Path()
        self._process: subprocess.Popen[bytes] | None = None
        self._guard: subprocess.Popen[bytes] | None = None

    @property
    def endpoint(self) -> str:
        return f"unix:{self.run / 'dsecd.sock'}"

    @property
    def kept(self) -> Path:
        """Its state directory, below which its store is."""
        return self.state / "var"

    @property
    def config_file(self) -> Path:
        return self._config

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def prepare(self) -> None:
        """Make the paths and the configuration, but start nothing."""
        self.state = Path(mkdtemp(prefix=f"{self.name}-", dir=leftovers.TEMPORARY))
        self._config = self.state / "dsecd.toml"
        text = configuration(self.name, self.run, self.kept, self._serial, *self._tables)
        self._config.write_text(text)

    def start(self) -> None:
        """Start the daemon and wait until it accepts connections. Raises DaemonError."""
        log = (self.state / "dsecd.log").open("ab")
        with log:
            self._process = subprocess.Popen(
                self._command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C is for the bench, which then stops it in order
            )
        self._guard = guard.start(self.name, self._process.pid)
        deadline = time.monotonic() + START_S
        while not accepts(self.run / "dsecd.sock"):
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise DaemonError(f"dsecd did not start: {self.log_tail()}")
            time.sleep(0.005)

    def _command(self) -> list[str]:
        # should the bench be killed before the guard is there, the daemon ends too
        bound = ["setpriv", "--pdeathsig", "TERM"]
        return [*bound, sys.executable, "-m", "dsecd", "--config", str(self._config)]

    def log_tail(self) -> str:
        """Return the end of the daemon's log."""
        with contextlib.suppress(OSError):
            return (self.state / "dsecd.log").read_text(errors="replace").strip()[-500:]
        return ""

    def kill(self) -> None:
        """SIGKILL, and wait until the process is gone."""
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._end_guard()

    def _end_guard(self) -> None:
        """It ends by itself, with the daemon."""
        guarding, self._guard = self._guard, None
        if guarding is not None:
            guarding.wait()

    def close(self) -> None:
        """Stop the daemon with its sandboxes and remove all that was made for it."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._end_guard()
        self._remove_leftovers()

    def _remove_leftovers(self) -> None:
        """Also after a daemon that ended in order: then there is nothing, or a fault to report."""
        if not self._config.is_file():
            return
        tail = self.log_tail()
        try:
            left = leftovers.remove(self.name)
        except cgroups.CgroupError as error:
            print(f"dsec-bench: {self.name} is not cleaned up: {error}", file=sys.stderr)
            return
        if left:
            print(f"dsec-bench: {self.name} left {left}; its log: {tail}", file=sys.stderr)

    def __enter__(self) -> Daemon:
        self.prepare()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def accepts(path: Path) -> bool:
    """Return whether somebody listens on the unix socket `path`: the file is there before that."""
    with socket.socket(socket.AF_UNIX) as end, contextlib.suppress(OSError):
        end.connect(str(path))
        return True
    return False


def resident_bytes(pid: int) -> int:
    """Return the proportional set size of process `pid` (smaps_rollup, proc_pid_smaps(5))."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def own_resident_bytes() -> int:
    """Return the same of this process."""
    return resident_bytes(os.getpid())
