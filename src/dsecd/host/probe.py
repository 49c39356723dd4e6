"""What this host's kernel can do, found by doing it; every answer has a reason.

`probe()` starts one short-lived process in a mount namespace of its own; that process forks a child
for each trial, so that a trial may change itself for good (seccomp, Landlock), hang or crash, and
leaves nothing. The table is made once per daemon; `dsec check` prints it and tests quote it.
"""

from __future__ import annotations

import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from dsecd.host import syscalls
from libdsec.errors import DSecError, Internal

TRIAL_S = 10.0


@dataclass(frozen=True)
class Feature:
    """A row of the table. `reason` says why not, or how (`hybrid`, `ABI 7`), for one that works."""

    name: str
    available: bool
    reason: str
    needed_for: str


@dataclass(frozen=True)
class Trial:
    """One thing to try. `attempt(scratch directory)` returns a remark, or raises why not.

    `OSError` and `DSecError` are answers; anything else is a fault of the trial, shown as such.
    """

    name: str
    needed_for: str
    attempt: Callable[[Path], str]
    timeout_s: float | None = None  # TRIAL_S


# Without these no container sandbox can be made
REQUIRED = (
    "root", "cgroup", "clone_into_cgroup", "cgroup_kill", "user_namespaces", "network_namespaces",
    "erofs_file", "erofs_idmapped", "overlay_lowerdir", "overlay_idmapped", "tmpfs", "seccomp",
    "pidfd", "openat2",
)  # fmt: skip


def trials() -> tuple[Trial, ...]:
    """Return everything that is tried, in the order in which it is shown."""
    from dsecd.host import probe_mounts, probe_network, probe_process, probe_resources

    return (
        *probe_process.TRIALS,
        *probe_mounts.TRIALS,
        *probe_network.TRIALS,
        *probe_resources.TRIALS,
    )


@functools.cache
def probe() -> tuple[Feature, ...]:
    """Return the table of this host. Raises `Internal` when the probing process fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    command = [sys.executable, "-m", "dsecd.host.probe"]
    done = subprocess.run(command, env=environment, capture_output=True, timeout=120, check=False)
    if done.returncode:
        raise Internal(f"the probe failed: {done.stderr.decode('utf-8', 'replace')[-2000:]}")
    return tuple(Feature(**row) for row in json.loads(done.stdout))


def feature(name: str) -> Feature:
    """Return one row. Raises `KeyError` for a name that is not in the table."""
    return {row.name: row for row in probe()}[name]


def has(rows: Iterable[str]) -> bool:
    """Say whether all of `rows` are available here: what a mechanism needs."""
    return all(feature(row).available for row in rows)


def missing(table: tuple[Feature, ...] | None = None) -> tuple[Feature, ...]:
    """Return the required features that this host lacks; () when sandboxes can be made."""
    return tuple(r for r in table or probe() if r.name in REQUIRED and not r.available)


def run(trial: Trial, scratch: Path) -> Feature:
    """Try one feature in a child of this process."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setpgid(0, 0)
        os.write(writer, json.dumps(_answer(trial, scratch)).encode())
        os._exit(0)
    os.close(writer)
    try:
        available, reason = _collect(child, reader, trial.timeout_s or TRIAL_S)
    finally:
        os.close(reader)
    return Feature(trial.name, available, reason, trial.needed_for)


def _answer(trial: Trial, scratch: Path) -> tuple[bool, str]:
    try:
        return True, trial.attempt(scratch)
    except DSecError as error:
        return False, str(error.detail.get("reason") or error.message)
    except OSError as error:
        return False, error.strerror or str(error)
    except Exception as error:
        return False, f"the trial itself failed: {error!r}"


def _collect(child: int, reader: int, timeout_s: float) -> tuple[bool, str]:
    """Return the child's answer; its whole process group is gone afterwards."""
    pidfd, data = os.pidfd_open(child), b""
    try:
        if select.select([pidfd], [], [], timeout_s)[0]:
            os.set_blocking(reader, False)
            data = os.read(reader, 65536)
    except BlockingIOError:
        data = b""  # it died before it could answer
    finally:
        os.close(pidfd)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    if data:
        available, reason = json.loads(data)
        return bool(available), str(reason)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) != signal.SIGKILL:
        return False, f"the trial died of {signal.Signals(os.WTERMSIG(status)).name}"
    return False, f"no answer within {timeout_s:.0f} s"


def _isolate(scratch: Path) -> None:
    """Give this process mounts of its own, with a tmpfs to try on; as far as it is allowed."""
    try:
        syscalls.call("unshare", 0x00020000)
        syscalls.mount("", "/", "", 1 << 18 | 1 << 14)  # private, recursive
        syscalls.mount("dsec-probe", str(scratch), "tmpfs", 0, "size=64m")
    except OSError:
        return  # not root: the trials that need it will say so


def main() -> None:
    """Try everything and write the table as JSON; what `probe` starts."""
    with tempfile.TemporaryDirectory(prefix="dsec-probe-", ignore_cleanup_errors=True) as name:
        scratch = Path(name)
        _isolate(scratch)
        table = [asdict(run(trial, scratch)) for trial in trials()]
        with suppress(OSError):  # it was not mounted
            syscalls.umount(name)
    sys.stdout.write(json.dumps(table))


if __name__ == "__main__":
    main()
